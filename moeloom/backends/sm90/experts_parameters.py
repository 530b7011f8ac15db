"""The structs that the kernels of experts take, as in `kernels/{tma,tiles,experts}.cuh`."""

from __future__ import annotations

import ctypes

from moeloom.backends.sm90.parameters import ADDRESS, FLOAT, INT, LONG, fields


class TensorMap(ctypes.Structure):
    """A tensor as the copy engine sees it; the driver makes it."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


class Operands(ctypes.Structure):
    """What a product of all experts is made of."""

    _fields_ = [
        *fields(TensorMap, "rows few_rows scales few_scales weights"),
        ("weight_scale", ADDRESS),
        *fields(LONG, "scale_slot scale_block"),
        ("scale_begin", INT * 2),
        *fields(INT, "scale_last steps swap_halves"),
        ("_aligned", ctypes.c_uint8 * 20),
    ]


class Tiles(ctypes.Structure):
    """The tiles of all experts."""

    _fields_ = [*fields(ADDRESS, "expert_start expert_rows ticket"), *fields(INT, "num_slots columns")]


class Bias(ctypes.Structure):
    """What is added to a product, `begin` and `step` in elements for each half of its columns."""

    _fields_ = [("values", ADDRESS), ("slot", LONG), ("begin", INT * 2), *fields(INT, "step is_bf16")]


class ExpertsParams(ctypes.Structure):
    """What a product takes, with what follows it."""

    _fields_ = [
        ("operands", Operands),
        ("tiles", Tiles),
        *fields(ADDRESS, "row_weight out other_ticket"),
        ("out_pitch", LONG),
        ("bias", Bias),
        *fields(INT, "out_columns scales_begin"),
        *fields(FLOAT, "clamp slope up_offset"),
        *fields(INT, "weigh_rows weigh_out"),
        ("_aligned", ctypes.c_uint8 * 4),
    ]
