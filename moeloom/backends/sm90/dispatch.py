"""dispatch on SM90: one launch brings each token's row to the ranks of its experts and lays out what arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeloom.backends.base import RowOrder
from moeloom.backends.sm90.member import Member, declared, launch
from moeloom.backends.sm90.parameters import DispatchParams, DispatchSpace, State, proof
from moeloom.backends.sm90.spaces import LIMITS, VECTOR_BYTES, Sizes, between
from moeloom.layout import check_order

THREADS = 640
SHARED_BYTES = 161_024  # of a block
MAX_ALIGNMENT = 1 << 16  # so that no row number overflows
MAX_CAPACITY = (1 << 31) - 1 - LIMITS["MAX_LOCAL"] * MAX_ALIGNMENT

_NUMBERS = {**LIMITS, "DISPATCH_THREADS": THREADS, "sizeof(DispatchShared)": SHARED_BYTES}
KERNELS = declared("dispatch", THREADS, SHARED_BYTES, proof((DispatchSpace, DispatchParams, State), _NUMBERS))


@dataclass(frozen=True, eq=False)
class Tokens:
    """What a rank sends, all on its device.

    x: `[T, row elements]` of any dtype, a row's `row_bytes` contiguous. topk_idx: `[T, K]` int32 or int64, -1 where not
    routed. topk_weights: `[T, K]` fp32. num_tokens: `[1]` int32, or None if all T count; with it, T is max_tokens, and
    rows beyond it are neither sent nor summed.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    num_tokens: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Arrived:
    """What dispatch leaves on a rank, all on its device; what is padding in `rows` is not written.

    rows: `[capacity, row_bytes]` uint8 by (local expert, source rank, source token, slot).
    row_pair: `[capacity]` int32, (source * max_tokens + token) * K + slot, or -1 for padding.
    row_weight: `[capacity]` fp32, 0 for padding.
    pair_row: `[ranks, max_tokens, K]` int32, the row of each pair of a token that a source has sent; -1 if it is not
    for here, -2 if it had no room.
    expert_start `[L + 1]`, expert_rows `[L]`, tokens_of_rank `[ranks]`: int32.
    """

    rows: Tensor
    row_pair: Tensor
    row_weight: Tensor
    pair_row: Tensor
    expert_start: Tensor
    expert_rows: Tensor
    tokens_of_rank: Tensor

    @classmethod
    def empty(cls, sizes: Sizes, order: RowOrder, device: torch.device) -> Arrived:
        """Memory for a dispatch."""
        capacity = num_rows(sizes, order)

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            rows=new(capacity, sizes.row_bytes, dtype=torch.uint8),
            row_pair=new(capacity),
            row_weight=new(capacity, dtype=torch.float32),
            pair_row=new(sizes.num_ranks, sizes.max_tokens, sizes.num_topk),
            expert_start=new(sizes.num_local + 1),
            expert_rows=new(sizes.num_local),
            tokens_of_rank=new(sizes.num_ranks),
        )


def num_rows(sizes: Sizes, order: RowOrder) -> int:
    """Rows of what arrives. Raises ValueError for an order that the kernel does not have."""
    check_order(order.order, order.alignment, order.capacity)
    if order.order == "rank" or order.capacity is None:
        found = f"order is {order.order!r}, capacity {order.capacity}"
        raise ValueError(f"{found}; allowed: 'expert' or 'batched' with a capacity, as no count is read")
    between("alignment", order.alignment, 1, MAX_ALIGNMENT)
    rows = order.capacity * (sizes.num_local if order.order == "batched" else 1)
    between("rows for capacity", rows, 0, MAX_CAPACITY)
    return rows


def dispatch(
    members: Sequence[Member],
    tokens: Sequence[Tokens],
    order: RowOrder,
    out: Sequence[Arrived] | None = None,
    sms: int | None = None,
) -> list[Arrived]:
    """Launch on the current stream for one member, or for several on one GPU; nothing is read, so it can be captured.

    Every rank of the exchange must launch. tokens, out: one for each member; out: as `Arrived.empty` makes it. sms:
    multiprocessors to use, None: all.
    """
    if out is None:
        out = [Arrived.empty(member.sizes, order, member.peers.device) for member in members]
    every = zip(members, tokens, out, strict=True)
    params = [_params(member, sent, order, into) for member, sent, into in every]
    launch(KERNELS, params, members[0].peers.device, sms)
    return list(out)


def check_tokens(sizes: Sizes, tokens: Tokens) -> None:
    """Raise ValueError unless the kernel can read these."""
    x, ids, weights, count = tokens.x, tokens.topk_idx, tokens.topk_weights, tokens.num_tokens
    between("tokens of x", len(x), 0, sizes.max_tokens)
    if x.dim() != 2 or x.shape[1] * x.element_size() != sizes.row_bytes or (len(x) and x.stride(1) != 1):
        raise ValueError(f"x is {list(x.shape)} {x.dtype}; allowed: contiguous rows of {sizes.row_bytes} bytes")
    stride = x.stride(0) * x.element_size()
    if len(x) and (x.data_ptr() % VECTOR_BYTES or (len(x) > 1 and stride % VECTOR_BYTES)):
        raise ValueError(f"x has rows {stride} bytes apart, at {x.data_ptr():#x}; allowed: multiples of {VECTOR_BYTES}")
    check_ids(sizes, ids)
    if weights.dtype != torch.float32:
        raise ValueError(f"topk_weights has dtype {weights.dtype}; allowed: torch.float32")
    for name, table in (("topk_idx", ids), ("topk_weights", weights)):
        if list(table.shape) != [len(x), sizes.num_topk] or not table.is_contiguous():
            raise ValueError(f"{name} is {list(table.shape)}; allowed: contiguous {[len(x), sizes.num_topk]}")
    if count is not None and (count.numel() != 1 or count.dtype != torch.int32 or len(x) != sizes.max_tokens):
        found = f"num_tokens is {list(count.shape)} {count.dtype} for {len(x)} tokens"
        raise ValueError(f"{found}; allowed: one torch.int32 for x of max_tokens {sizes.max_tokens}")


def check_ids(sizes: Sizes, ids: Tensor) -> None:
    """Raise ValueError unless the kernels can read these."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_idx has dtype {ids.dtype}; allowed: torch.int32, torch.int64")
    if ids.dim() != 2 or ids.shape[1] != sizes.num_topk or len(ids) > sizes.max_tokens or not ids.is_contiguous():
        wanted = f"contiguous [up to {sizes.max_tokens}, {sizes.num_topk}]"
        raise ValueError(f"topk_idx is {list(ids.shape)}; allowed: {wanted}")


def _params(member: Member, tokens: Tokens, order: RowOrder, out: Arrived) -> DispatchParams:
    sizes = member.sizes
    check_tokens(sizes, tokens)
    capacity = num_rows(sizes, order)
    if list(out.rows.shape) != [capacity, sizes.row_bytes]:
        raise ValueError(f"out.rows is {list(out.rows.shape)}; allowed: {[capacity, sizes.row_bytes]}")
    return DispatchParams(
        **member.params(tokens.topk_idx),
        x=tokens.x.data_ptr(),
        topk_weights=tokens.topk_weights.data_ptr(),
        device_num_tokens=0 if tokens.num_tokens is None else tokens.num_tokens.data_ptr(),
        expert_slot=member.expert_slot.data_ptr(),
        state=member.dispatch_state.data_ptr(),
        rows=out.rows.data_ptr(),
        row_pair=out.row_pair.data_ptr(),
        row_weight=out.row_weight.data_ptr(),
        pair_row=out.pair_row.data_ptr(),
        expert_start=out.expert_start.data_ptr(),
        expert_rows=out.expert_rows.data_ptr(),
        tokens_of_rank=out.tokens_of_rank.data_ptr(),
        problems=member.problems.data_ptr(),
        space=sizes.dispatch_space,
        x_stride=tokens.x.stride(0) * tokens.x.element_size(),
        num_local=sizes.num_local,
        row_bytes=sizes.row_bytes,
        capacity=capacity,
        alignment=order.alignment,
        batched=order.order == "batched",
    )
