"""Routing -> counts, prefix sums and every index map. The one place that decides where a row goes.

Names: `A_to_B` is indexed by A and holds B, -1 where there is none. `pos` is a row of the received tensor, `token` a
row of the tokens that reach this rank, ordered by (source rank, source token).

    two tokens, K = 2, slots of this rank [[1, 0], [0, -1]], order "expert":
    rows              0: token 0 for slot 0   1: token 1 for slot 0   2: token 0 for slot 1
    pos_to_token      0, 1, 0
    token_topk_to_pos [[2, 0], [1, -1]]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeloom.types import Order

ORDERS: tuple[Order, ...] = ("expert", "rank", "batched")


@dataclass(frozen=True, eq=False)
class Layout:
    """The rows of one rank. All tensors int64.

    num_rows: rows including padding. num_dropped: pairs beyond the capacity (of a
    `fixed_layout` a tensor `[]`).
    expert_start `[L + 1]`, num_tokens_per_expert `[L]`.
    pos_to_token, pos_to_topk `[num_rows]`; pos_to_topk is 0 for order "rank", whose rows serve all slots of a token.
    token_topk_to_pos `[M, K]` (order "rank": `[M, 1]`).
    """

    num_rows: int
    num_dropped: int | Tensor
    expert_start: Tensor
    num_tokens_per_expert: Tensor
    pos_to_token: Tensor
    pos_to_topk: Tensor
    token_topk_to_pos: Tensor


def hits(index: Tensor, num_columns: int) -> Tensor:
    """Which columns each token names at least once: `[N, K]` of -1..num_columns-1 -> bool `[N, num_columns]`."""
    table = torch.zeros(index.shape[0], num_columns + 1, dtype=torch.bool)
    table.scatter_(1, index + 1, True)  # column 0 takes the -1
    return table[:, 1:]


def lanes(mask: Tensor) -> Tensor:
    """The ordinal of each true entry within its row, -1 elsewhere: `[F, T, T] -> [-1, 0, 1]`."""
    return torch.where(mask, mask.cumsum(1) - 1, -1)


def pack_left(values: Tensor, mask: Tensor) -> Tensor:
    """Each row's values where mask is true, in order, moved to the left and followed by -1."""
    packed = torch.full((values.shape[0], values.shape[1] + 1), -1, dtype=values.dtype)
    packed.scatter_(1, lanes(mask) + 1, values)  # column 0 takes what is not wanted
    return packed[:, 1:]


def pairs_by(index: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """The (row, k) pairs of `index [N, K]` grouped by the column they name, by row and k within: flat indices,
    counts.
    """
    flat = index.reshape(-1)
    pairs = (flat >= 0).nonzero().squeeze(1)
    column, order = torch.sort(flat[pairs], stable=True)
    return pairs[order], torch.bincount(column, minlength=num_columns)


def align(count: Tensor, alignment: int) -> Tensor:
    """Counts rounded up to a multiple of `alignment`."""
    return (count + alignment - 1) // alignment * alignment


def check_order(order: str, alignment: int, capacity: int | None) -> None:
    """Raise `ValueError` unless these go together."""
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}; allowed: {', '.join(ORDERS)}")
    if alignment < 1:
        raise ValueError(f"alignment is {alignment}; it must be at least 1")
    if capacity is not None and capacity < 0:
        raise ValueError(f"capacity is {capacity}; it must be 0 or more, or None for as many rows as come")
    if order == "rank" and alignment != 1:
        raise ValueError(f"alignment is {alignment}; rows of order 'rank' belong to no single expert, so it must be 1")
    if order == "batched" and capacity is not None and capacity % alignment:
        raise ValueError(f"capacity is {capacity}; order 'batched' needs a multiple of alignment {alignment}")


def receive_layout(
    slot: Tensor, num_local: int, order: Order, alignment: int = 1, capacity: int | None = None
) -> Layout:
    """Where each (token, slot) pair's row goes on this rank.

    slot: `[M, K]` the local slot of each pair, -1 where it goes elsewhere; rows ordered by (source rank, source token).
    capacity: rows in all ("expert", "rank") or of each expert ("batched"); pairs beyond it are dropped. None: as many
    as there are ("batched": the fullest expert's).
    """
    if order == "rank":
        return _token_rows(slot, num_local, capacity)
    pairs, count = pairs_by(slot, num_local)
    expert = torch.repeat_interleave(count)
    within = torch.arange(len(pairs)) - (count.cumsum(0) - count)[expert]
    if order == "batched":
        depth = int(align(count.max(), alignment)) if capacity is None and num_local else capacity or 0
        expert_start = torch.arange(num_local + 1) * depth
        num_rows = num_local * depth
        fits = within < depth
    else:
        expert_start = torch.cat([torch.zeros(1, dtype=torch.int64), align(count, alignment).cumsum(0)])
        num_rows = int(expert_start[-1]) if capacity is None else capacity
        fits = expert_start[expert] + within < num_rows
        expert_start = expert_start.clamp(max=num_rows)
    pos = (expert_start[expert] + within)[fits]
    return _from_pairs(slot, num_rows, expert_start, pairs[fits], pos, expert[fits], len(pairs) - len(pos))


def _from_pairs(
    slot: Tensor, num_rows: int, expert_start: Tensor, pairs: Tensor, pos: Tensor, expert: Tensor, num_dropped: int
) -> Layout:
    """The maps of rows that serve one (token, slot) pair each."""
    num_topk = slot.shape[1]
    pos_to_pair = torch.full((num_rows,), -1, dtype=torch.int64)
    pos_to_pair[pos] = pairs
    token_topk_to_pos = torch.full((slot.numel(),), -1, dtype=torch.int64)
    token_topk_to_pos[pairs] = pos
    padding = pos_to_pair < 0
    return Layout(
        num_rows=num_rows,
        num_dropped=num_dropped,
        expert_start=expert_start,
        num_tokens_per_expert=torch.bincount(expert, minlength=len(expert_start) - 1),
        pos_to_token=(pos_to_pair // num_topk).masked_fill_(padding, -1),
        pos_to_topk=(pos_to_pair % num_topk).masked_fill_(padding, -1),
        token_topk_to_pos=token_topk_to_pos.view(slot.shape),
    )


def _token_rows(slot: Tensor, num_local: int, capacity: int | None) -> Layout:
    """The maps of rows that serve all slots of a token (order "rank")."""
    token = torch.arange(slot.shape[0])
    num_rows = len(token) if capacity is None else capacity
    fits = token < num_rows
    pos_to_token = torch.full((num_rows,), -1, dtype=torch.int64)
    pos_to_token[: int(fits.sum())] = token[fits]
    kept = slot[fits]
    return Layout(
        num_rows=num_rows,
        num_dropped=int((slot[~fits] >= 0).sum()),
        expert_start=torch.zeros(num_local + 1, dtype=torch.int64),
        num_tokens_per_expert=torch.bincount(kept[kept >= 0], minlength=num_local),
        pos_to_token=pos_to_token,
        pos_to_topk=torch.where(pos_to_token >= 0, 0, -1),
        token_topk_to_pos=torch.where(fits, token, -1).unsqueeze(1),
    )


def first_bad_id(topk_idx: Tensor, num_ids: int) -> tuple[int, int, int] | None:
    """Row, slot and value of the first id outside -1..num_ids-1, or None."""
    bad = ((topk_idx < -1) | (topk_idx >= num_ids)).nonzero()
    if not len(bad):
        return None
    row, k = bad[0].tolist()
    return row, k, int(topk_idx[row, k])


def fixed_layout(slot: Tensor, num_local: int, order: Order, alignment: int, capacity: int) -> Layout:
    """Like `receive_layout` for orders "expert" and "batched", with shapes that depend on no value: nothing is read.

    slot: `[N, K]`, -1 where a pair goes elsewhere or a token is padding. capacity: as in `receive_layout`.
    """
    num_topk, flat = slot.shape[1], slot.reshape(-1)
    expert, pairs = torch.sort(torch.where(flat < 0, num_local, flat), stable=True)
    count = torch.zeros(num_local + 1, dtype=torch.int64).scatter_add_(0, expert, torch.ones_like(expert))[:num_local]
    first = torch.cat([count.cumsum(0) - count, torch.zeros(1, dtype=torch.int64)])
    within = torch.arange(len(expert)) - first[expert]
    if order == "batched":
        expert_start = torch.arange(num_local + 1) * capacity
        num_rows, room = num_local * capacity, torch.full_like(count, capacity)
        fits = within < capacity
    else:
        expert_start = torch.cat([torch.zeros(1, dtype=torch.int64), align(count, alignment).cumsum(0)])
        num_rows, room = capacity, capacity - expert_start[:-1]
        fits = expert_start[expert] + within < capacity
        expert_start = expert_start.clamp(max=capacity)
    # what has no row goes to one behind the last
    pos = torch.where((expert < num_local) & fits, expert_start[expert] + within, num_rows)
    pos_to_pair = torch.full((num_rows + 1,), -1, dtype=torch.int64).scatter_(0, pos, pairs)[:num_rows]
    token_topk_to_pos = torch.empty_like(flat).scatter_(0, pairs, torch.where(pos < num_rows, pos, -1))
    kept = torch.minimum(count, room.clamp(min=0))
    padding = pos_to_pair < 0
    return Layout(
        num_rows=num_rows,
        num_dropped=count.sum() - kept.sum(),
        expert_start=expert_start,
        num_tokens_per_expert=kept,
        pos_to_token=torch.where(padding, -1, pos_to_pair // num_topk),
        pos_to_topk=torch.where(padding, -1, pos_to_pair % num_topk),
        token_topk_to_pos=token_topk_to_pos.view(slot.shape),
    )
