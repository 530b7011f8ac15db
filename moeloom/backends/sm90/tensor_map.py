"""Maps of tensors for the copy engine: boxes of a tensor are copied to shared memory, zeros where it ends."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from moeloom.backends.sm90.experts_parameters import TensorMap
from moeloom.errors import KernelError
from moeloom.jit.bindings import driver

ALIGNMENT = 16  # bytes, of addresses and strides
MAP_ALIGNMENT = 64

_BYTES, _FLOATS, _BF16 = 0, 7, 9  # CUtensorMapDataType
_SWIZZLE_128B, _PROMOTE_256B = 3, 3
_KINDS = {torch.uint8: _BYTES, torch.float8_e4m3fn: _BYTES, torch.float32: _FLOATS, torch.bfloat16: _BF16}


@functools.lru_cache(8192)
def tensor_map(
    address: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzled: bool,
) -> TensorMap:
    """A map of memory at an address, as a function of these numbers alone.

    sizes, box: in elements, the contiguous dimension first. strides: in bytes, of the other dimensions. swizzled: rows
    of 128 bytes are laid out in shared memory as products read them. Raises KernelError with the driver's word.
    """
    longs, words = ctypes.c_uint64 * len(sizes), ctypes.c_uint32 * len(sizes)
    memory = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + MAP_ALIGNMENT)
    start = -ctypes.addressof(memory) % MAP_ALIGNMENT
    status = _encode()(
        ctypes.addressof(memory) + start,
        _KINDS[dtype],
        len(sizes),
        address,
        longs(*sizes),
        longs(*strides),
        words(*box),
        words(*[1] * len(sizes)),
        0,
        _SWIZZLE_128B if swizzled else 0,
        _PROMOTE_256B,
        0,
    )
    if status:
        found = f"{dtype} at {address:#x}, sizes {sizes}, strides {strides} bytes, box {box}"
        raise KernelError(f"map of {found}: {driver().CUresult(status).name}")
    return TensorMap.from_buffer_copy(memory, start)


@functools.cache
def _encode() -> Callable[..., int]:
    """The driver's function: the bindings' own one encodes into memory that need not be aligned."""
    status, address, *_ = driver().cuGetProcAddress(b"cuTensorMapEncodeTiled", 12000, 0)
    if int(status) or not int(address):
        raise KernelError(f"cuTensorMapEncodeTiled: {status.name}")
    pointer, word = ctypes.c_void_p, ctypes.c_uint32
    arguments = (pointer, word, word, ctypes.c_uint64, pointer, pointer, pointer, pointer, word, word, word, word)
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(int(address))
