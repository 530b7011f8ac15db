"""combine on SM90: one launch sums each token's rows where they are, brings the sums to the token's rank, sums there.

Reduction `per_rank` in bf16. The bits are those of the CPU backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeloom.backends.sm90.dispatch import Arrived, Tokens, check_tokens
from moeloom.backends.sm90.member import Member, declared, launch
from moeloom.backends.sm90.parameters import CombineParams, CombineSpace, State, proof
from moeloom.backends.sm90.spaces import LIMITS, MAX_PARTS, between, default_parts

THREADS = 512
SHARED_BYTES = 198_896  # of a block

_NUMBERS = {"MAX_RANKS": LIMITS["MAX_RANKS"], "COMBINE_THREADS": THREADS, "sizeof(CombineShared)": SHARED_BYTES}
KERNELS = declared("combine", THREADS, SHARED_BYTES, proof((CombineSpace, CombineParams, State), _NUMBERS))

Sent = tuple[Tokens, Arrived]  # to a dispatch, and what it left on the same rank


def combine(
    members: Sequence[Member],
    sent: Sequence[Sent],
    rows: Sequence[Tensor],
    *,
    weighted: bool,
    parts: int | None = None,
    out: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Launch on the current stream for one member, or for several on one GPU: `[T, H]` bf16 of each.

    Every rank of the exchange must launch. rows: `[rows of the dispatch, H]` bf16 of each member, padding not read.
    weighted: rows are yet to be multiplied with their router weights. parts: of a token's row, worked on apart; equal
    on all ranks (`spaces.default_parts` of the most tokens of any rank). Nothing is read, so it can be captured.
    """
    if out is None:
        out = [row.new_empty(len(tokens.x), row.shape[1]) for row, (tokens, _) in zip(rows, sent, strict=True)]
    parts = default_parts(members[0].sizes.max_tokens) if parts is None else parts
    between("parts", parts, 1, MAX_PARTS)
    params = []
    for member, (tokens, arrived), row, y in zip(members, sent, rows, out, strict=True):
        check_tokens(member.sizes, tokens)
        _check_rows(member, "rows", row, len(arrived.rows))
        _check_rows(member, "out", y, len(tokens.x))
        params.append(_params(member, tokens, arrived, row, weighted, parts, y))
    launch(KERNELS, params, members[0].peers.device)
    return list(out)


def _check_rows(member: Member, name: str, rows: Tensor, count: int) -> None:
    wanted = [count, member.sizes.sum_bytes // 2]
    if list(rows.shape) != wanted or rows.dtype != torch.bfloat16 or not rows.is_contiguous():
        found = f"{name} of rank {member.rank} is {list(rows.shape)} {rows.dtype}"
        raise ValueError(f"{found}; allowed: contiguous {wanted} torch.bfloat16")


def _params(
    member: Member, tokens: Tokens, arrived: Arrived, rows: Tensor, weighted: bool, parts: int, y: Tensor
) -> CombineParams:
    sizes = member.sizes
    return CombineParams(
        rows=rows.data_ptr(),
        pair_row=arrived.pair_row.data_ptr(),
        row_weight=arrived.row_weight.data_ptr() if weighted else 0,
        tokens_of_rank=arrived.tokens_of_rank.data_ptr(),
        topk_idx=tokens.topk_idx.data_ptr(),
        expert_rank=member.expert_rank.data_ptr(),
        peers=member.peers.data_ptr(),
        state=member.combine_state.data_ptr(),
        y=y.data_ptr(),
        space=sizes.combine_space,
        timeout_ns=member.timeout_ns,
        max_tokens=sizes.max_tokens,
        num_topk=sizes.num_topk,
        num_experts=sizes.num_experts,
        num_ranks=sizes.num_ranks,
        rank=member.rank,
        row_bytes=sizes.sum_bytes,
        parts=parts,
        ids_are_64=tokens.topk_idx.dtype == torch.int64,
    )
