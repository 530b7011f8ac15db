"""FP8 quantisation on SM90: rows to the records that travel, and weights in blocks. The bits of `moeloom.quantize`."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from moeloom import jit
from moeloom.backends.sm90.launch import launch
from moeloom.backends.sm90.parameters import ADDRESS, INT, LONG, fields, proof
from moeloom.backends.sm90.spaces import VECTOR_BYTES
from moeloom.errors import CapabilityError
from moeloom.experts import Experts, GateUpOrder
from moeloom.quantize import GROUP, num_groups, record_bytes
from moeloom.types import Quantized

THREADS = 256
VECTOR = 8  # numbers that a lane takes

_NUMBERS = {torch.bfloat16: "moeloom::u16", torch.float32: "float"}


class QuantizeParams(ctypes.Structure):
    """What quantising rows takes."""

    _fields_ = [
        *fields(ADDRESS, "x records device_num_tokens"),
        *fields(LONG, "x_stride record_stride"),
        *fields(INT, "num_rows hidden record_bytes"),
    ]


class BlocksParams(ctypes.Structure):
    """What quantising weights takes."""

    _fields_ = [
        *fields(ADDRESS, "weight values scales"),
        *fields(LONG, "weight_slot weight_matrix weight_row values_slot values_matrix values_row"),
        *fields(INT, "num_matrices num_rows num_columns"),
    ]


_ROWS, _BLOCKS = (
    {dtype: f"moeloom::{kernel}<{number}>" for dtype, number in _NUMBERS.items()}
    for kernel in ("quantize_rows", "quantize_blocks")
)
_PROOF = proof((QuantizeParams, BlocksParams), {"QUANTIZE_THREADS": THREADS, "SCALE_GROUP": GROUP})
_SOURCE = jit.Source("quantize", f'#include "quantize.cuh"\n{_PROOF}', (*_ROWS.values(), *_BLOCKS.values()))
KERNELS = (jit.Declared(_SOURCE, THREADS, blocks_per_sm=2),)


def quantize_rows(x: Tensor, *, num_tokens: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`pack_records(quantize(x))` on the current stream: uint8 `[T, record_bytes(H)]`.

    x: `[T, H]` bf16 or fp32, H a multiple of 8, rows any multiple of 16 bytes apart. num_tokens: int32 on the device;
    records beyond it are not written. out: rows may be any multiple of 16 bytes apart. Raises ValueError.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise CapabilityError("x requires a gradient, but fp8 is forward only; call under torch.no_grad()")
    _check_numbers("x", x, 2)
    rows, hidden = x.shape
    size = record_bytes(hidden)
    if num_tokens is not None and (
        num_tokens.numel() != 1 or num_tokens.dtype != torch.int32 or num_tokens.device != x.device
    ):
        raise ValueError(f"num_tokens is {_described(num_tokens)}; allowed: one torch.int32 on {x.device}")
    if out is None:
        out = torch.empty(rows, size, dtype=torch.uint8, device=x.device)
    if list(out.shape) != [rows, size] or out.dtype != torch.uint8 or out.device != x.device or out.stride(1) != 1:
        raise ValueError(
            f"out is {_described(out)}; allowed: torch.uint8 {[rows, size]} on {x.device}, rows contiguous"
        )
    _check_aligned("out", out)
    params = QuantizeParams(
        x=x.data_ptr(),
        records=out.data_ptr(),
        device_num_tokens=0 if num_tokens is None else num_tokens.data_ptr(),
        x_stride=x.stride(0) * x.element_size(),
        record_stride=out.stride(0),
        num_rows=rows,
        hidden=hidden,
        record_bytes=size,
    )
    warps = rows * -(-hidden // (VECTOR * GROUP))
    if warps:
        launch(KERNELS[0], x.device, (params,), -(-warps // (THREADS // 32)), _ROWS[x.dtype])
    return out


def quantize_blocks(weight: Tensor, *, gate_up_order: GateUpOrder | None = None) -> Quantized:
    """`moeloom.quantize.quantize_blocks` of each slot of `weight [L, N, K]`, on the current stream.

    weight: bf16 or fp32, K a multiple of 8, rows any multiple of 16 bytes apart. gate_up_order: None for one matrix;
    else N is 2I, and gate and up have blocks of their own, each counted from its first row, as in `Experts.scales`.

    Returns values like weight, contiguous; scales fp32 `[L, ceil(N/128), ceil(K/128)]`, or `[L, 2 * ceil(I/128), ...]`.
    Raises ValueError.
    """
    weight = weight.detach()
    _check_numbers("weight", weight, 3)
    slots, rows, columns = weight.shape
    matrices = 1 if gate_up_order is None else 2
    if rows % matrices:
        raise ValueError(f"weight has {rows} rows; allowed with gate_up_order {gate_up_order!r}: an even number")
    rows //= matrices
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = weight.new_empty(slots, matrices * num_groups(rows), num_groups(columns), dtype=torch.float32)
    # rows between one of gate and the next, and from gate to up
    next_row, next_matrix = (2, 1) if gate_up_order == "interleaved" else (1, rows)
    row_bytes = weight.stride(1) * weight.element_size()
    params = BlocksParams(
        weight=weight.data_ptr(),
        values=values.data_ptr(),
        scales=scales.data_ptr(),
        weight_slot=weight.stride(0) * weight.element_size(),
        weight_matrix=next_matrix * row_bytes,
        weight_row=next_row * row_bytes,
        values_slot=values.stride(0),
        values_matrix=next_matrix * columns,
        values_row=next_row * columns,
        num_matrices=matrices,
        num_rows=rows,
        num_columns=columns,
    )
    if scales.numel():
        launch(KERNELS[0], weight.device, (params,), scales.numel(), _BLOCKS[weight.dtype])
    return Quantized(values, scales)


def quantize_experts(experts: Experts) -> Experts:
    """`experts.quantized()` on the current stream: the same values and scales, contiguous. Raises ValueError."""
    if experts.scales is not None:
        return experts
    gate_up = quantize_blocks(experts.gate_up, gate_up_order=experts.gate_up_order)
    down = quantize_blocks(experts.down)
    return replace(experts, gate_up=gate_up.values, down=down.values, scales=(gate_up.scales, down.scales))


def _check_numbers(name: str, numbers: Tensor, dimensions: int) -> None:
    """Raise ValueError unless a kernel can read these, eight at a time."""
    if numbers.dtype not in _NUMBERS or not numbers.is_cuda or numbers.dim() != dimensions:
        allowed = f"torch.bfloat16 or torch.float32 with {dimensions} dimensions, on a GPU"
        raise ValueError(f"{name} is {_described(numbers)}; allowed: {allowed}")
    if numbers.shape[-1] % VECTOR or not numbers.shape[-1]:
        raise ValueError(f"{name} has rows of {numbers.shape[-1]}; allowed: multiples of {VECTOR}")
    if numbers.numel() and numbers.stride(-1) != 1:
        raise ValueError(f"{name} has strides {numbers.stride()}; allowed: 1 at last, as rows are read by vectors")
    _check_aligned(name, numbers)


def _check_aligned(name: str, rows: Tensor) -> None:
    """Raise ValueError unless every row begins at a multiple of `VECTOR_BYTES`."""
    steps = [
        stride * rows.element_size()
        for stride, size in zip(rows.stride()[:-1], rows.shape[:-1], strict=True)
        if size > 1
    ]
    if rows.numel() and (rows.data_ptr() % VECTOR_BYTES or any(step % VECTOR_BYTES for step in steps)):
        raise ValueError(
            f"{name} is at {rows.data_ptr()}, with rows {steps} bytes apart; allowed: multiples of {VECTOR_BYTES}"
        )


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
