"""FP8 (E4M3) quantisation, and decoding of MXFP4: how numbers are made of small values and a scale per group.

A scale is what values are multiplied with: number = value * scale. The arithmetic is said to the bit, in fp32 with IEEE
divisions, so that every backend makes the same bits of the same numbers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from moeloom.errors import CapabilityError
from moeloom.types import Quantized, Received

GROUP = 128  # values that share a scale, along the last dimension; for weights 128 rows of them
E4M3_MAX = 448.0
SMALLEST_AMAX = 2.0**-116  # amax / 448 and 448 / amax are normal fp32 numbers down to here
RECORD_ALIGNMENT = 16  # rows are copied in units of it
MXFP4_GROUP = 32

_NAN, _NEGATIVE_NAN = 0x7F, 0xFF
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def num_groups(size: int) -> int:
    """Scales for that many values; the last group may be shorter."""
    return -(-size // GROUP)


def quantize(x: Tensor) -> Quantized:
    """`x [..., H]`, any floating point dtype and strides -> E4M3 values `[..., H]`, fp32 scales `[..., ceil(H/128)]`.

    For each group of 128 along H: amax = max(|x|, 2^-116) ignoring NaN, scale = amax / 448, value = x * (448 / amax)
    rounded to nearest even and limited to +-448. Zeros keep their sign. NaN stays in its own element. A group with an
    infinity has an infinite scale: all of it is NaN when dequantised, and nothing beside it.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise CapabilityError("x requires a gradient, but fp8 is forward only; call under torch.no_grad()")
    x = x.float()
    return _saturate(x, _group_amax(x))


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """fp32 numbers `[..., H]` of E4M3 values `[..., H]` and scales `[..., ceil(H/128)]`."""
    return _times_groups(_widen(values), scales)


def quantize_blocks(weight: Tensor) -> Quantized:
    """`weight [N, K]` -> E4M3 values `[N, K]`, fp32 scales `[ceil(N/128), ceil(K/128)]`: one for 128 x 128 values."""
    weight = weight.detach().float()
    amax = _group_amax(weight)
    rows = functional.pad(amax, (0, 0, 0, -len(amax) % GROUP))
    blocks = rows.view(num_groups(len(amax)), GROUP, amax.shape[1]).amax(1)
    values, _ = _saturate(weight, _rows_of_blocks(blocks, len(amax)))
    return Quantized(values, blocks / torch.full_like(blocks, E4M3_MAX))


def dequantize_blocks(values: Tensor, scales: Tensor) -> Tensor:
    """fp32 `[N, K]` of E4M3 values `[N, K]` and scales `[ceil(N/128), ceil(K/128)]`."""
    return dequantize(values, _rows_of_blocks(scales, len(values)))


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """fp32 numbers `[..., 32 * G]` of MXFP4: blocks uint8 `[..., G, 16]`, scales uint8 `[..., G]`.

    A byte holds two E2M1 values, the lower half first. A scale is an E8M0 exponent: 2^(scale - 127), 255 is NaN. Its
    fp32 bits are put together, not computed.
    """
    byte = torch.arange(256, device=blocks.device)
    half = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=blocks.device)
    pairs = torch.stack([half[byte & 15], half[byte >> 4]], 1)
    numbers = pairs[blocks.long()].flatten(-2)
    return numbers.mul_(decode_e8m0(scales).unsqueeze(-1)).flatten(-2)


def decode_e8m0(scales: Tensor) -> Tensor:
    """fp32 powers of two `2^(scale - 127)` of uint8 exponents; 255 is NaN."""
    bits = scales.to(torch.int32) << 23
    bits = bits.masked_fill(scales == 0, 1 << 22)  # 2^-127 is subnormal
    return bits.masked_fill_(scales == 255, 0x7FC00000).view(torch.float32)


def record_bytes(hidden: int) -> int:
    """Bytes of a quantised row as it travels: values, scales at the next multiple of 4, and a multiple of 16 in all."""
    return -(-(scales_begin(hidden) + 4 * num_groups(hidden)) // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


def pack_records(rows: Quantized) -> Tensor:
    """Quantised rows `[T, H]` as uint8 records `[T, record_bytes(H)]`; unused bytes are 0."""
    num_rows, hidden = rows.values.shape
    records = torch.zeros(num_rows, record_bytes(hidden), dtype=torch.uint8, device=rows.values.device)
    unpacked = unpack_records(records, hidden)
    unpacked.values.copy_(rows.values)
    unpacked.scales.copy_(rows.scales)
    return records


def unpack_records(records: Tensor, hidden: int) -> Quantized:
    """Values and scales of records `[..., record_bytes(H)]`, as views."""
    begin = scales_begin(hidden)
    scales = records[..., begin : begin + 4 * num_groups(hidden)]
    return Quantized(records[..., :hidden].view(torch.float8_e4m3fn), scales.view(torch.float32))


def unpack_received(received: Received, hidden: int) -> Received:
    """What a dispatch of records has brought, as values and scales."""
    rows = unpack_records(received.rows, hidden)
    return replace(received, rows=rows.values, scales=rows.scales)


def scales_begin(hidden: int) -> int:
    """Byte of a record where the scales are."""
    return -(-hidden // 4) * 4


def _rows_of_blocks(blocks: Tensor, num_rows: int) -> Tensor:
    """The groups of each row from those of 128 rows together."""
    return blocks.repeat_interleave(GROUP, 0)[:num_rows]


def _group_amax(x: Tensor) -> Tensor:
    """`[..., H]` fp32 -> `[..., ceil(H/128)]`, at least 2^-116."""
    # max does not skip NaN; looking first whether there is any would make the host wait
    return _group_max(x.abs().nan_to_num_(nan=0.0, posinf=torch.inf)).clamp_(min=SMALLEST_AMAX)


def _group_max(x: Tensor) -> Tensor:
    whole = x.shape[-1] // GROUP * GROUP
    parts = [x[..., :whole].unflatten(-1, (-1, GROUP)).amax(-1)] if whole else []
    if whole < x.shape[-1]:
        parts.append(x[..., whole:].amax(-1, keepdim=True))
    return torch.cat(parts, -1)


def _saturate(x: Tensor, amax: Tensor) -> Quantized:
    """Values of fp32 x and its groups' amax; and the scales. (torch divides a number by a tensor by its reciprocal.)"""
    limit = torch.full_like(amax, E4M3_MAX)
    scaled = _times_groups(x.clone(), limit / amax).clamp_(-E4M3_MAX, E4M3_MAX)
    values = scaled.to(torch.float8_e4m3fn)
    # the sign of a NaN differs between processors
    bits = values.view(torch.uint8)
    bits.masked_fill_(bits == _NEGATIVE_NAN, _NAN)
    return Quantized(values, amax / limit)


def _times_groups(x: Tensor, factors: Tensor) -> Tensor:
    """x `[..., H]` times its groups' factors `[..., ceil(H/128)]`, in place."""
    whole = x.shape[-1] // GROUP * GROUP
    if whole:
        x[..., :whole].unflatten(-1, (-1, GROUP)).mul_(factors[..., : whole // GROUP].unsqueeze(-1))
    if whole < x.shape[-1]:
        x[..., whole:].mul_(factors[..., -1:])
    return x


def _widen(values: Tensor) -> Tensor:
    """E4M3 -> fp32, exactly: by way of fp16, whose exponent has one bit more, ten times faster than torch's cast."""
    bits = values.view(torch.int8)
    wide = bits.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-16385).view(torch.float16).float().mul_(256.0)
    return wide.masked_fill_(bits.bitwise_and(_NAN) == _NAN, torch.nan)
