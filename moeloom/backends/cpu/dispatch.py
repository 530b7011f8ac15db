"""dispatch on CPUs: show the routing, derive every position from it locally, then gather the rows."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeloom.backends.base import Handle, RowOrder
from moeloom.backends.cpu.paths import Messages, Paths, blocks, outgoing, spread
from moeloom.backends.cpu.rows import gather_rows
from moeloom.errors import CapacityError
from moeloom.layout import Layout, receive_layout
from moeloom.placement import Placement
from moeloom.regions import TokenSpace, dispatch_regions, next_step, routing_words
from moeloom.types import ExchangeName, Received, Routing

if TYPE_CHECKING:
    from moeloom.backends.cpu.backend import CpuBackend


def dispatch(
    cpu: CpuBackend, x: Tensor, routing: Routing | Handle, placement: Placement, rows: RowOrder, exchange: ExchangeName
) -> tuple[Received, Handle]:
    """See `Backend.dispatch`."""
    with cpu.control.operation("dispatch"):
        if isinstance(routing, Handle):
            cpu.control.agree({**_payload(x), "handle of operation": routing.number})
            handle = routing
        else:
            must_fit = rows.capacity is not None and rows.overflow == "error"
            paths = _exchange_routing(cpu, x, routing, placement, exchange, must_fit)
            layout = receive_layout(
                paths.slot, placement.num_local(cpu.rank), rows.order, rows.alignment, rows.capacity
            )
            if must_fit:
                _agree_that_rows_fit(cpu, layout, rows)
            kept_x = x if placement.num_identity else None
            number, owner = cpu.control.number, weakref.ref(cpu)
            handle = Handle(owner, number, len(x), routing, placement, exchange, rows, layout, kept_x, paths)
        return _received(_move(cpu, x, handle), handle), handle


def _exchange_routing(
    cpu: CpuBackend, x: Tensor, routing: Routing, placement: Placement, exchange: ExchangeName, must_fit: bool
) -> Paths:
    """Bring the routing of every token to the ranks that get a row of it."""
    num_tokens, num_topk = routing.topk_idx.shape
    topk_idx = routing.topk_idx.long()
    destination, _ = placement.locate(topk_idx, cpu.rank, torch.arange(num_tokens))
    tokens, sent_to = outgoing(cpu, destination, exchange)
    same = {**_payload(x), "top-k": num_topk, "placement": placement.fingerprint, "exchange": exchange}
    same["capacity with overflow='error'"] = must_fit  # which takes a round more
    shown = cpu.control.agree(same, {"tokens": num_tokens, "sent_to": sent_to})
    tokens_of_rank = [record["tokens"] for record in shown]
    sent = [record["sent_to"] for record in shown]
    messages = Messages(exchange, tokens, sent_to, [counts[cpu.rank] for counts in sent])
    num_sources = cpu.topology.max_forwarded_sources if exchange == "hybrid" else 0
    space = TokenSpace(cpu.max_tokens or next_step(max(tokens_of_rank)), num_sources)

    regions = dispatch_regions(space, x.shape[1], num_topk, x.dtype.itemsize)
    cpu.buffer.ensure(regions)
    region = cpu.buffer.view(regions, "routing", torch.int32)
    places = spread(cpu, pack_routing(topk_idx, routing.topk_weights), region, space, messages)
    table = blocks(cpu, space, tokens_of_rank, sent, exchange)
    count = table[:, 1]
    source = torch.repeat_interleave(count)
    row = torch.arange(len(source)) + (table[:, 0] - (count.cumsum(0) - count))[source]
    token, topk_idx, weights = unpack_routing(
        gather_rows(places, row, places[0].new_empty(len(row), routing_words(num_topk)))
    )
    ranks, slot = placement.locate(topk_idx, source, token)
    slot = torch.where(ranks == cpu.rank, slot, -1)
    here = (slot >= 0).any(1).nonzero().squeeze(1)
    mine = torch.tensor([exchange == "hybrid" and source in cpu.forwarded_sources for source in range(len(shown))])
    return Paths(
        space=space,
        messages=messages,
        num_tokens=num_tokens,
        destination=destination,
        forwarded=ranks[mine[source]],
        row=row[here],
        source=source[here],
        slot=slot[here],
        weights=weights[here],
        ranks=ranks[here],
    )


def _move(cpu: CpuBackend, x: Tensor, handle: Handle) -> Tensor:
    """Bring the payload over a known routing: `[num_rows, H]`."""
    paths, layout = handle.paths, handle.layout
    regions = dispatch_regions(paths.space, x.shape[1], handle.routing.num_topk, x.dtype.itemsize)
    cpu.buffer.ensure(regions)
    places = spread(cpu, x, cpu.buffer.view(regions, "payload", x.dtype), paths.space, paths.messages)
    # the extra row serves pos_to_token -1: a padding row comes from nowhere
    row_of_token = torch.cat([paths.row, torch.tensor([-1])])
    cpu.traffic.rows += layout.num_rows
    return gather_rows(places, row_of_token[layout.pos_to_token], x.new_empty(layout.num_rows, x.shape[1]))


def _received(rows: Tensor, handle: Handle) -> Received:
    """The public view of the rows."""
    paths, layout, order = handle.paths, handle.layout, handle.rows.order
    token, topk = layout.pos_to_token, layout.pos_to_topk
    padding = token < 0
    if padding.all():
        shape = (len(token), handle.routing.num_topk) if order == "rank" else (len(token),)
        topk_idx, topk_weights = torch.full(shape, -1), torch.zeros(shape)
    elif order == "rank":
        topk_idx = paths.slot[token].masked_fill_(padding.unsqueeze(1), -1)
        topk_weights = paths.weights[token].masked_fill_(topk_idx < 0, 0.0)
    else:
        topk_idx = paths.slot[token, topk].masked_fill_(padding, -1)
        topk_weights = paths.weights[token, topk].masked_fill_(padding, 0.0)
    if order == "batched":
        shape = (len(layout.num_tokens_per_expert), -1) if layout.num_rows else (len(layout.num_tokens_per_expert), 0)
        rows = rows.view(*shape, rows.shape[1])
        topk_idx, topk_weights = topk_idx.view(shape), topk_weights.view(shape)
    return Received(
        rows=rows,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        expert_start=layout.expert_start,
        num_tokens_per_expert=layout.num_tokens_per_expert,
        num_dropped=torch.tensor(layout.num_dropped),
        order=order,
    )


def _agree_that_rows_fit(cpu: CpuBackend, layout: Layout, rows: RowOrder) -> None:
    """One more round: only this rank knows whether its rows fit."""
    error = None
    if layout.num_dropped:
        per = "each expert" if rows.order == "batched" else "each rank"
        error = CapacityError(
            f"rank {cpu.rank}: {layout.num_dropped} rows do not fit into capacity {rows.capacity} (rows for {per});"
            " raise capacity, or pass overflow='drop'"
        )
    cpu.control.agree({}, error=error)


def _payload(x: Tensor) -> dict:
    """What must be equal on all ranks for rows to travel."""
    if x.dtype == torch.uint8:
        return {"dtype": "torch.float8_e4m3fn with scales", "bytes of a row": x.shape[1]}
    return {"dtype": str(x.dtype), "hidden": x.shape[1]}


def pack_routing(topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
    """A token's routing as int32 words: its row, its ids, the bits of its weights."""
    token = torch.arange(len(topk_idx), dtype=torch.int32).unsqueeze(1)
    return torch.cat([token, topk_idx.int(), topk_weights.contiguous().view(torch.int32)], dim=1)


def unpack_routing(words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row, ids (int64) and weights (fp32) from `pack_routing`'s words."""
    num_topk = words.shape[1] // 2
    weights = words[:, 1 + num_topk :].contiguous().view(torch.float32)
    return words[:, 0].long(), words[:, 1 : 1 + num_topk].long(), weights
