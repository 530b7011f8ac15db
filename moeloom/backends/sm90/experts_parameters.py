"""The structs that the kernels of experts take, as in `kernels/{tma,tiles,experts}.cuh`."""

from __future__ import annotations

import ctypes
from typing import Any

_ADDRESS, _LONG, _INT, _FLOAT, _BYTE = (
    ctypes.c_uint64,
    ctypes.c_int64,
    ctypes.c_int32,
    ctypes.c_float,
    ctypes.c_uint8,
)


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class TensorMap(ctypes.Structure):
    """A tensor as the copy engine sees it; the driver makes it."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


class Operands(ctypes.Structure):
    """What a product of all experts is made of."""

    _fields_ = [
        *_fields(TensorMap, "rows few_rows scales few_scales weights"),
        ("weight_scale", _ADDRESS),
        *_fields(_LONG, "scale_slot scale_block"),
        ("scale_begin", _INT * 2),
        *_fields(_INT, "scale_last steps swap_halves"),
        ("_aligned", _BYTE * 20),
    ]


class Tiles(ctypes.Structure):
    """The tiles of all experts."""

    _fields_ = [*_fields(_ADDRESS, "expert_start expert_rows ticket"), *_fields(_INT, "num_slots columns")]


class Bias(ctypes.Structure):
    """What is added to a product, `begin` and `step` in elements for each half of its columns."""

    _fields_ = [("values", _ADDRESS), ("slot", _LONG), ("begin", _INT * 2), *_fields(_INT, "step is_bf16")]


class ExpertsParams(ctypes.Structure):
    """What a product takes, with what follows it."""

    _fields_ = [
        ("operands", Operands),
        ("tiles", Tiles),
        *_fields(_ADDRESS, "row_weight out other_ticket"),
        ("out_pitch", _LONG),
        ("bias", Bias),
        *_fields(_INT, "out_columns scales_begin"),
        *_fields(_FLOAT, "clamp slope up_offset"),
        *_fields(_INT, "weigh_rows weigh_out"),
        ("_aligned", _BYTE * 4),
    ]
