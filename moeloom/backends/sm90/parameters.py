"""The structs that kernels take and keep, as in `kernels/{signals,dispatch,combine}.cuh`, and C++ that proves it."""

from __future__ import annotations

import ctypes
from typing import Any

ADDRESS, LONG, INT, WORD, FLOAT = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint32, ctypes.c_float


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of one kind, for `_fields_`."""
    return [(name, kind) for name in names.split()]


class DispatchSpace(ctypes.Structure):
    """Where dispatch's regions lie in a rank's symmetric memory, in bytes."""

    _fields_ = fields(LONG, "bank_bytes source_bytes shown counts pairs places arrived staging")


class DispatchParams(ctypes.Structure):
    """What dispatch takes, for one rank."""

    _fields_ = [
        *fields(ADDRESS, "x topk_idx topk_weights device_num_tokens expert_rank expert_slot peers state rows"),
        *fields(ADDRESS, "row_pair row_weight pair_row expert_start expert_rows tokens_of_rank problems"),
        ("space", DispatchSpace),
        *fields(LONG, "x_stride timeout_ns"),
        *fields(INT, "num_tokens max_tokens num_topk num_experts num_local num_ranks rank"),
        *fields(INT, "row_bytes capacity alignment batched ids_are_64"),
    ]


class CombineSpace(ctypes.Structure):
    """Where combine's regions lie in a rank's symmetric memory, in bytes."""

    _fields_ = fields(LONG, "bank_bytes sender_bytes begun sums slots")


class CombineParams(ctypes.Structure):
    """What combine takes, for one rank."""

    _fields_ = [
        *fields(ADDRESS, "rows pair_row row_weight topk_weights tokens_of_rank topk_idx expert_rank peers state y"),
        ("space", CombineSpace),
        ("timeout_ns", LONG),
        *fields(INT, "num_tokens max_tokens num_topk num_experts num_ranks rank row_bytes ids_are_64 parts"),
    ]


class Counter(ctypes.Structure):
    """A counter on a cache line of its own."""

    _fields_ = [("value", WORD), ("_line", WORD * 31)]


class State(ctypes.Structure):
    """What a rank's kernels keep between launches: one for dispatch and one for combine, zeros at first.

    failure, stop: addresses, 0 for none. failure: `[4]` words of the host, which get (aborted, phase, peer, epoch) when
    a wait gives up, the first last. stop: a word that a peer may set to the first epoch in which it takes no part.
    """

    _fields_ = [
        *fields(WORD, "epoch aborted phase peer"),
        *fields(ADDRESS, "failure stop"),
        ("wrong_ids", WORD),
        ("_line", WORD * 23),
        ("finished", Counter),
        ("tickets", Counter * 4),
    ]


_EQUAL = """
namespace moeloom {
template <long found, long expected>
struct Equal {
    static_assert(found == expected);
    static constexpr bool value = true;
};
}
"""


def proof(structs: tuple[type[ctypes.Structure], ...], numbers: dict[str, int]) -> str:
    """C++ that compiles only where each struct has these fields, in order and size, and each expression this value.

    Goes below the header's `#include`. What was found stands in the compiler's message: `Equal<found, expected>`.
    """
    expected = dict(numbers)
    for struct in structs:
        name = struct.__name__
        names = [field for field, *_ in struct._fields_ if not field.startswith("_")]
        # NVRTC 13.0 has no offsetof; but designators must stand in the order of the declaration
        ordered = ", ".join(f".{field} = {{}}" for field in names)
        expected[f"sizeof({name}{{{ordered}}})"] = ctypes.sizeof(struct)
        expected |= {f"sizeof({name}::{field})": getattr(struct, field).size for field in names}
    lines = [f"static_assert(Equal<(long)({found}), {value}>::value);" for found, value in expected.items()]
    return "\n".join([_EQUAL, "namespace moeloom {", *lines, "}\n"])
