"""Launches on one device, and what kernels need of the tensors they get."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moeloom import jit
from moeloom.backends.sm90.spaces import VECTOR_BYTES


@functools.cache
def loaded(declared: jit.Declared, device: int) -> tuple[dict[str, jit.Kernel], int]:
    """A declaration's kernels on a device, by C++ expression, and that device's number of multiprocessors."""
    kernels = jit.load(jit.compile(declared.source), torch.device("cuda", device))
    return kernels, torch.cuda.get_device_properties(device).multi_processor_count


def launch(
    declared: jit.Declared,
    device: torch.device,
    args: Sequence[Any],
    grid: int | tuple[int, int, int] | None = None,
    kernel: str | None = None,
) -> None:
    """Launch on the device's current stream.

    args: tensors go as their addresses, structs by value, None as address 0. grid: in blocks; None: as many as stay on
    the device at once. kernel: which one, if the declaration has several.
    """
    kernels, processors = loaded(declared, device.index)
    if kernel is None:
        (kernel,) = kernels
    if grid is None:
        grid = processors * declared.blocks_per_sm
    values = tuple(_value(arg) for arg in args)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        kernels[kernel].launch(stream, grid, declared.threads, declared.shared_bytes, values)


def _value(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return arg.data_ptr()
    if isinstance(arg, ctypes.Structure):
        return bytes(arg)
    return 0 if arg is None else arg


def in_vectors(rows: Tensor) -> Tensor:
    """Rows `[N, columns]` that kernels can read by vectors: these, or a copy if they do not lie so."""
    stride = rows.stride(0) * rows.element_size()
    if rows.stride(1) == 1 and rows.data_ptr() % VECTOR_BYTES == 0 and (len(rows) < 2 or stride % VECTOR_BYTES == 0):
        return rows
    return torch.empty_like(rows, memory_format=torch.contiguous_format).copy_(rows)
