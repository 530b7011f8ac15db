"""combine on SM90: one launch brings each token's rows back to the token's rank, in a sum per rank or one by one.

bf16 or fp32 rows. The bits are those of the CPU backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeloom.backends.sm90.dispatch import Arrived, Tokens, check_ids
from moeloom.backends.sm90.member import Member, declared, launch
from moeloom.backends.sm90.parameters import CombineParams, CombineSpace, State, proof
from moeloom.backends.sm90.spaces import LIMITS, MAX_PARTS, VECTOR_BYTES, between
from moeloom.types import ReductionName

THREADS = 512
SHARED_BYTES = 198_928  # of a block
ELEMENTS = {torch.bfloat16: "Bf16", torch.float32: "Fp32"}
REDUCTIONS: dict[ReductionName, str] = {"per_rank": "false", "per_slot": "true"}

_NUMBERS = {
    "MAX_RANKS": LIMITS["MAX_RANKS"],
    "MAX_PARTS": MAX_PARTS,
    "COMBINE_THREADS": THREADS,
    "sizeof(CombineShared)": SHARED_BYTES,
}
_PROOF = proof((CombineSpace, CombineParams, State), _NUMBERS)
_VARIANTS = {
    (dtype, reduction): declared("combine", THREADS, SHARED_BYTES, _PROOF, f"<moeloom::{element}, {slots}>")
    for dtype, element in ELEMENTS.items()
    for reduction, slots in REDUCTIONS.items()
}
KERNELS = tuple(kernel for variant in _VARIANTS.values() for kernel in variant)

# to a dispatch, and what it left on the same rank; x and rows are not looked at. topk_idx must be as dispatch has seen
# it: ranks wait for what it says, and words for which nobody waits would be taken for those of a later launch
Sent = tuple[Tokens, Arrived]


def combine(
    members: Sequence[Member],
    sent: Sequence[Sent],
    rows: Sequence[Tensor],
    *,
    weighted: bool,
    parts: int | None = None,
    out: Sequence[Tensor] | None = None,
    reduction: ReductionName = "per_rank",
    sms: int | None = None,
) -> list[Tensor]:
    """Launch on the current stream for one member, or for several on one GPU: `[T, width]` of each, as rows have it.

    Every rank of the exchange must launch, with as wide rows. rows: `[rows of the dispatch, width]` bf16 or fp32 of
    each member, a multiple of 16 bytes, up to `Sizes.sum_bytes`; padding is not read. weighted: rows are yet to be
    multiplied with their router weights. parts: of a token's row, worked on apart, equal on all ranks; None: what suits
    the numbers of tokens, which the kernel knows. reduction: as `Recipe` has it; per_slot over several ranks needs
    `Sizes.slots_travel`. sms: multiprocessors to use. Nothing is read, so it can be captured.
    """
    if parts is not None:
        between("parts", parts, 1, MAX_PARTS)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; allowed: {', '.join(REDUCTIONS)}")
    if out is None:
        out = [row.new_empty(len(tokens.topk_idx), row.shape[1]) for row, (tokens, _) in zip(rows, sent, strict=True)]
    params = []
    for member, (tokens, arrived), row, y in zip(members, sent, rows, out, strict=True):
        _check(member, tokens, arrived, (row, y), weighted, reduction)
        _check_width(rows[0], row)
        params.append(_params(member, (tokens, arrived), row, y, weighted, reduction, parts or 0))
    launch(_VARIANTS[rows[0].dtype, reduction], params, members[0].peers.device, sms)
    return list(out)


def _check_width(first: Tensor, row: Tensor) -> None:
    if (row.shape[1], row.dtype) != (first.shape[1], first.dtype):
        found = f"rows are {row.shape[1]} {row.dtype}"
        raise ValueError(f"{found}; allowed: {first.shape[1]} {first.dtype}, as the first member's")


def _check(
    member: Member,
    tokens: Tokens,
    arrived: Arrived,
    tables: tuple[Tensor, Tensor],
    weighted: bool,
    reduction: ReductionName,
) -> None:
    sizes = member.sizes
    check_ids(sizes, tokens.topk_idx)
    rows, out = tables
    if rows.dtype not in ELEMENTS:
        raise ValueError(f"rows have dtype {rows.dtype}; allowed: {', '.join(map(str, ELEMENTS))}")
    wide = rows.shape[-1] * rows.element_size()
    if wide % VECTOR_BYTES or not 0 < wide <= sizes.sum_bytes:
        limit = f"multiples of {VECTOR_BYTES}, up to {sizes.sum_bytes}"
        raise ValueError(f"rows of rank {member.rank} have {wide} bytes; allowed: {limit}")
    for name, table, count in (("rows", rows, len(arrived.row_pair)), ("out", out, len(tokens.topk_idx))):
        wanted = [count, rows.shape[-1]]
        if list(table.shape) != wanted or table.dtype != rows.dtype or not table.is_contiguous():
            found = f"{name} of rank {member.rank} is {list(table.shape)} {table.dtype}"
            raise ValueError(f"{found}; allowed: contiguous {wanted} {rows.dtype}")
        if table.data_ptr() % VECTOR_BYTES:
            raise ValueError(f"{name} of rank {member.rank} begins at a byte that is no multiple of {VECTOR_BYTES}")
    if reduction == "per_slot" and sizes.num_ranks > 1 and not sizes.slots_travel:
        raise ValueError("reduction is 'per_slot'; allowed without Sizes.slots_travel: per_rank")
    weights = tokens.topk_weights
    if (
        weighted
        and reduction == "per_slot"
        and (weights.shape != tokens.topk_idx.shape or weights.dtype != torch.float32 or not weights.is_contiguous())
    ):
        found = f"topk_weights is {list(weights.shape)} {weights.dtype}"
        raise ValueError(f"{found}; allowed: contiguous {list(tokens.topk_idx.shape)} torch.float32")


def _params(
    member: Member, sent: Sent, rows: Tensor, y: Tensor, weighted: bool, reduction: ReductionName, parts: int
) -> CombineParams:
    sizes, (tokens, arrived) = member.sizes, sent
    by_slot = reduction == "per_slot"
    return CombineParams(
        **member.params(tokens.topk_idx),
        rows=rows.data_ptr(),
        pair_row=arrived.pair_row.data_ptr(),
        row_weight=arrived.row_weight.data_ptr() if weighted and not by_slot else 0,
        topk_weights=tokens.topk_weights.data_ptr() if weighted and by_slot else 0,
        tokens_of_rank=arrived.tokens_of_rank.data_ptr(),
        state=member.combine_state.data_ptr(),
        y=y.data_ptr(),
        space=sizes.combine_space,
        row_bytes=rows.shape[1] * rows.element_size(),
        parts=parts,
    )
