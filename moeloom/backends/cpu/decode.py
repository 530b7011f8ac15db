"""The decode pipeline on CPUs: every shape fixed by max_tokens and the placement, no value ever read by the host.

All tokens of all ranks have a row in every table, routed to this rank or not, so that nothing has to be counted: the
layout is `fixed_layout`, sums go over all lanes with a mask, messages between nodes carry max_tokens rows. What is not
used is -1 or zero. An operation is two halves, send and receive, with a buffer of its own: two may be in flight.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import Work

from moeloom.backends.base import Handle, Pending, RowOrder
from moeloom.backends.cpu.buffers import SymmetricBuffer
from moeloom.backends.cpu.combine import add_identity
from moeloom.backends.cpu.dispatch import pack_routing, unpack_routing
from moeloom.backends.cpu.experts import Expert
from moeloom.backends.cpu.paths import carriers_of
from moeloom.config import Recipe
from moeloom.errors import CapacityError, MoeloomError
from moeloom.experts import Experts
from moeloom.layout import Layout, fixed_layout, hits, lanes
from moeloom.placement import Placement
from moeloom.regions import Region, TokenSpace, combine_lanes, dispatch_regions, routing_words
from moeloom.types import ExchangeName, Received, Routing

if TYPE_CHECKING:
    from moeloom.backends.cpu.backend import CpuBackend

BANKS = 2


@dataclass(eq=False)
class Decode:
    """What the decode pipeline keeps between calls: a buffer per operation in flight, and what to report later."""

    cpu: CpuBackend
    buffers: list[SymmetricBuffer] = field(init=False)
    in_flight: list[bool] = field(default_factory=lambda: [False] * BANKS)

    def __post_init__(self) -> None:
        self.buffers = [SymmetricBuffer(self.cpu.control) for _ in range(BANKS)]
        self._next = 0
        # written as a tensor, read as bytes: the host looks when it comes by again, it does not wait
        self._words = bytearray(16)
        self.overflow, self._bad_ids = torch.frombuffer(self._words, dtype=torch.int64).split(1)

    def check(self) -> None:
        """Raise what an earlier call has left to report, or if no buffer is free. Before the ranks agree."""
        self._raise_noted()
        if self.in_flight[self._next]:
            raise MoeloomError(f"{BANKS} operations are in flight already; wait for the older one first")

    def take(self, regions: Sequence[Region]) -> tuple[int, SymmetricBuffer]:
        """A buffer that no operation in flight uses, with room for regions; on all ranks the same, once they agreed."""
        buffer = self.buffers[self._next]
        buffer.ensure(regions)
        bank, self._next = self._next, (self._next + 1) % BANKS
        self.in_flight[bank] = True
        return bank, buffer

    def note_bad_ids(self, topk_idx: Tensor, num_ids: int) -> Tensor:
        """Ids out of range become -1, and are counted for `check`."""
        bad = (topk_idx < -1) | (topk_idx >= num_ids)
        self._bad_ids.add_(bad.sum())
        return torch.where(bad, -1, topk_idx)

    def _raise_noted(self) -> None:
        """Report what was wrong with an earlier call: ids out of range, or rows that did not fit (overflow='error')."""
        dropped, bad_ids = struct.unpack("qq", self._words)
        self._words[:] = bytes(16)
        if bad_ids:
            raise ValueError(
                f"rank {self.cpu.rank}: {bad_ids} values of topk_idx in an earlier dispatch were not allowed"
            )
        if dropped:
            raise CapacityError(
                f"rank {self.cpu.rank}: {dropped} rows of an earlier dispatch did not fit into its capacity; raise"
                " capacity, or pass overflow='drop'"
            )

    def close(self) -> None:
        """Give the buffers back."""
        for buffer in self.buffers:
            buffer.close()


@dataclass(frozen=True, eq=False)
class FixedPaths:
    """Where rows lie and belong, for `N` = ranks * max_tokens tokens in order of (source rank, source token).

    begins, far: of each source, where its rows begin, and whether that is beyond the node's buffer.
    place `[N]`: in the node's buffer, or behind it among the rows received directly (is_far `[N]`).
    slot, weights, ranks `[N, K]`: local slot or -1, fp32 weight, destination. destination `[T, K]`: of this rank's own;
    forwarded `[F, K]`: of those that it forwards.
    """

    space: TokenSpace
    begins: list[int]
    far: list[bool]
    destination: Tensor
    place: Tensor
    is_far: Tensor
    slot: Tensor
    weights: Tensor
    ranks: Tensor
    forwarded: Tensor


def begin_dispatch(
    cpu: CpuBackend, x: Tensor, routing: Routing, placement: Placement, rows: RowOrder, exchange: ExchangeName
) -> Pending:
    """The send half of dispatch; see `Backend.begin_dispatch`."""
    decode = cpu.decode
    with cpu.control.operation("dispatch"):
        if cpu.max_tokens is None:
            raise CapacityError("decode needs fixed shapes; construct the Runtime with max_tokens=...")
        decode.check()
        num_topk = routing.num_topk
        same = {"hidden": x.shape[1], "dtype": str(x.dtype), "top-k": num_topk, "exchange": exchange}
        cpu.control.agree({**same, "placement": placement.fingerprint, "pipeline": "decode"})
        space = _space(cpu, exchange)
        regions = dispatch_regions(space, x.shape[1], num_topk, x.dtype.itemsize)
        bank, buffer = decode.take(regions)
        topk_idx = decode.note_bad_ids(routing.topk_idx.long(), placement.num_ids)
        words = torch.full((space.max_tokens, routing_words(num_topk)), -1, dtype=torch.int32)
        words[: len(x)] = pack_routing(topk_idx, routing.topk_weights)
        payload = x.new_zeros(space.max_tokens, x.shape[1])
        payload[: len(x)] = x
        parts = [
            _send(cpu, words, buffer.view(regions, "routing", torch.int32), space, exchange),
            _send(cpu, payload, buffer.view(regions, "payload", x.dtype), space, exchange),
        ]
        number, meeting = cpu.control.number, cpu.control.announce()
        cpu.traffic.scale_up_bytes += payload.nbytes if len(cpu.local_ranks) > 1 else 0

    def receive() -> tuple[Received, Handle]:
        with cpu.control.resumed("dispatch", number):
            _arrive(cpu, [work for part in parts for work in part.works], meeting, exchange)
            paths = _paths(cpu, parts[0], topk_idx, placement, exchange, space)
            received, layout = _lay_out(cpu, placement, rows, paths, parts[1])
            if rows.overflow == "error":
                decode.overflow.add_(received.num_dropped)
            kept_x, owner = x if placement.num_identity else None, weakref.ref(cpu)
            handle = Handle(
                owner, number, len(x), routing, placement, exchange, rows, layout, kept_x, paths, pipeline="decode"
            )
            decode.in_flight[bank] = False
            return received, handle

    return Pending(receive)


def begin_combine(cpu: CpuBackend, rows: Tensor, handle: Handle, recipe: Recipe, weighted: bool) -> Pending:
    """The send half of combine; see `Backend.begin_combine`."""
    decode, paths, num_topk = cpu.decode, handle.paths, handle.routing.num_topk
    per_slot, num_ranks = recipe.reduction == "per_slot", cpu.topology.num_ranks
    per_node = handle.exchange == "hybrid" and not per_slot
    with cpu.control.operation("combine"):
        decode.check()
        wanted = {"handle of operation": handle.number, "hidden": rows.shape[1], "dtype": str(rows.dtype)}
        cpu.control.agree({**wanted, "reduction": recipe.reduction, "weighted": weighted, "pipeline": "decode"})
        writers = max(map(len, cpu.topology.nodes)) if per_node else num_ranks
        width = combine_lanes(recipe.reduction, num_topk, writers)
        # one row more, for what goes nowhere
        regions = (Region("returned", paths.space.rows * width + 1, rows.shape[1] * rows.element_size()),)
        bank, buffer = decode.take(regions)
        region = buffer.view(regions, "returned", rows.dtype)
        region = region.view(len(cpu.local_ranks), paths.space.rows * width + 1, rows.shape[1])
        values, lane = _contributions(cpu, rows, handle, per_slot, per_node, weighted)
        _put(cpu, region, paths, values, lane, width)
        number, meeting = cpu.control.number, cpu.control.announce()

    def receive() -> Tensor:
        with cpu.control.resumed("combine", number):
            cpu.control.await_others(meeting, "contributions of the node")
            own = region[cpu.local_index, :-1].view(paths.space.rows, width, rows.shape[1])
            back = _return(cpu, own, values, handle, per_node)
            y = _total(cpu, own, back, handle, recipe, weighted)
            decode.in_flight[bank] = False
            return y

    return Pending(receive)


def decode_experts(cpu: CpuBackend, received: Received, weights: Experts, recipe: Recipe) -> Tensor:
    """The experts stage on rows whose counts are not known: every expert computes a row for all that it may have.

    Costs num_local times the rows of the capacity; for few tokens reading the weights costs more.
    """
    hidden, num_local = received.rows.shape[-1], len(received.num_tokens_per_expert)
    rows, row_weights = received.rows.reshape(-1, hidden), received.topk_weights.reshape(-1)
    scales = None if received.scales is None else received.scales.view(-1, received.scales.shape[-1])
    depth = received.rows.shape[1] if received.order == "batched" else len(rows)
    out = torch.zeros(len(rows) + 1, hidden, dtype=recipe.dtype)  # one row more, for what is padding
    for slot in range(num_local if depth else 0):
        mine = torch.arange(depth)
        valid = mine < received.num_tokens_per_expert[slot]
        place = torch.where(valid, received.expert_start[slot] + mine, len(rows))
        source = place.clamp(max=len(rows) - 1)
        expert = Expert(weights, slot, recipe)
        taken = rows.view(torch.uint8)[source].view(rows.dtype) if rows.element_size() == 1 else rows[source]
        result = expert(taken, row_weights[source], None if scales is None else scales[source])
        out.index_copy_(0, place, torch.where(valid.unsqueeze(1), result, 0).to(out.dtype))
    return out[:-1].view(received.rows.shape)


@dataclass(eq=False)
class _Part:
    """One table on its way: the node's buffer, what arrives from other nodes directly, and the message."""

    region: Tensor
    arrived: Tensor
    works: list[Work]


def _space(cpu: CpuBackend, exchange: ExchangeName) -> TokenSpace:
    assert cpu.max_tokens is not None
    return TokenSpace(cpu.max_tokens, cpu.topology.max_forwarded_sources if exchange == "hybrid" else 0)


def _counts(cpu: CpuBackend, exchange: ExchangeName, rows: int) -> tuple[list[int], list[int]]:
    """Rows sent to and received from each rank: `rows` wherever there is a message at all."""
    ranks = range(cpu.topology.num_ranks)
    to = set(cpu.topology.carriers(cpu.rank, exchange)) - {-1}
    sources = [rank for rank in ranks if cpu.rank in cpu.topology.carriers(rank, exchange)]
    return [rows if rank in to else 0 for rank in ranks], [rows if rank in sources else 0 for rank in ranks]


def _send(cpu: CpuBackend, table: Tensor, region: Tensor, space: TokenSpace, exchange: ExchangeName) -> _Part:
    """Put this rank's table into its part of the buffer, and on the wire to other nodes."""
    begin = cpu.local_index * space.rows
    region[begin : begin + space.max_tokens] = table
    sent, received = _counts(cpu, exchange, space.max_tokens)
    count = sum(received)
    if exchange == "hybrid":
        arrived = region[begin + space.max_tokens : begin + space.max_tokens + count]
    else:
        arrived = table.new_empty(count, table.shape[1])
    works: list[Work] = []
    if cpu.wire is not None:
        message = table.repeat(sum(map(bool, sent)), 1)
        works = cpu.wire.begin(message, sent, received, arrived)
        cpu.traffic.scale_out_bytes += message.nbytes
    return _Part(region, arrived, works)


def _arrive(cpu: CpuBackend, works: list[Work], meeting: int, exchange: ExchangeName) -> None:
    """Wait for the messages; a forwarder then has something new to announce."""
    if works:
        assert cpu.wire is not None
        cpu.wire.finish(works, "rows between nodes")
    if exchange == "hybrid" and cpu.wire is not None:
        meeting = cpu.control.announce()
    cpu.control.await_others(meeting, "rows of the node")


def _paths(
    cpu: CpuBackend, part: _Part, own_idx: Tensor, placement: Placement, exchange: ExchangeName, space: TokenSpace
) -> FixedPaths:
    """Gather every token's routing and find out who serves it."""
    num_ranks, count = cpu.topology.num_ranks, space.max_tokens
    begins, far = _begins(cpu, space, exchange)
    place = (torch.tensor(begins).unsqueeze(1) + torch.arange(count)).view(-1)
    is_far = torch.tensor(far).repeat_interleave(count, output_size=num_ranks * count)
    token, topk_idx, weights = unpack_routing(_gather(part, place, is_far))
    source = torch.arange(num_ranks).repeat_interleave(count, output_size=num_ranks * count)
    ranks, slot = placement.locate(topk_idx, source, token)
    destination, _ = placement.locate(own_idx, cpu.rank, torch.arange(len(own_idx)))
    carried = [rank for rank in range(num_ranks) if exchange == "hybrid" and rank in cpu.forwarded_sources]
    forwarded = ranks.view(num_ranks, count, -1)[carried].view(len(carried) * count, ranks.shape[1])
    slot = torch.where(ranks == cpu.rank, slot, -1)
    return FixedPaths(space, begins, far, destination, place, is_far, slot, weights, ranks, forwarded)


def _begins(cpu: CpuBackend, space: TokenSpace, exchange: ExchangeName) -> tuple[list[int], list[bool]]:
    """Where each source's max_tokens rows begin, and whether that is beyond the node's buffer."""
    topology, node = cpu.topology, cpu.topology.node_of_rank[cpu.rank]
    begins, far, direct = [], [], len(cpu.local_ranks) * space.rows
    for source in range(topology.num_ranks):
        owner = source if source in cpu.local_ranks else topology.forwarder(source, node)
        begin = cpu.local_ranks.index(owner) * space.rows
        is_far = source not in cpu.local_ranks and exchange == "direct"
        if is_far:
            begin, direct = direct, direct + space.max_tokens
        elif source not in cpu.local_ranks:
            begin += space.max_tokens * (1 + topology.forwarded_sources(owner).index(source))
        begins.append(begin)
        far.append(is_far)
    return begins, far


def _gather(part: _Part, place: Tensor, is_far: Tensor) -> Tensor:
    """Rows of the node's buffer and of what arrived behind it."""
    near = part.region.index_select(0, torch.where(is_far, 0, place))
    if not len(part.arrived):
        return near
    beyond = part.arrived.index_select(0, torch.where(is_far, place - len(part.region), 0))
    return torch.where(is_far.unsqueeze(1), beyond, near)


def _lay_out(
    cpu: CpuBackend, placement: Placement, rows: RowOrder, paths: FixedPaths, part: _Part
) -> tuple[Received, Layout]:
    """Lay the payload out."""
    num_local, (num_tokens, num_topk) = placement.num_local(cpu.rank), paths.slot.shape
    most = num_tokens if rows.order == "batched" else num_tokens * num_topk + (rows.alignment - 1) * num_local
    capacity = -(-most // rows.alignment) * rows.alignment if rows.capacity is None else rows.capacity
    layout = fixed_layout(paths.slot, num_local, rows.order, rows.alignment, capacity)
    assert isinstance(layout.num_dropped, Tensor)
    padding = layout.pos_to_token < 0
    token, topk = layout.pos_to_token.clamp(min=0), layout.pos_to_topk.clamp(min=0)
    payload = _gather(part, paths.place[token], paths.is_far[token]).masked_fill_(padding.unsqueeze(1), 0)
    topk_idx = paths.slot[token, topk].masked_fill_(padding, -1)
    topk_weights = paths.weights[token, topk].masked_fill_(padding, 0.0)
    if rows.order == "batched":
        payload = payload.view(num_local, -1 if layout.num_rows else 0, payload.shape[1])
        topk_idx, topk_weights = topk_idx.view(payload.shape[:2]), topk_weights.view(payload.shape[:2])
    cpu.traffic.rows += layout.num_rows
    received = Received(
        rows=payload,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        expert_start=layout.expert_start,
        num_tokens_per_expert=layout.num_tokens_per_expert,
        num_dropped=layout.num_dropped,
        order=rows.order,
    )
    return received, layout


def masked_sum(rows: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum `rows [N, C, H]` over C where mask `[N, C]`, in fp32, from left to right: the bits of `summed_tiles`."""
    total = torch.zeros(rows.shape[0], rows.shape[2])
    started = torch.zeros(rows.shape[0], dtype=torch.bool)
    for lane in range(rows.shape[1]):
        part, here = rows[:, lane].float(), mask[:, lane]
        if weights is not None:
            part = part * weights[:, lane].unsqueeze(1)
        total = torch.where(here.unsqueeze(1), torch.where(started.unsqueeze(1), total + part, part), total)
        started = started | here
    return total


def _contributions(
    cpu: CpuBackend, rows: Tensor, handle: Handle, per_slot: bool, per_node: bool, weighted: bool
) -> tuple[Tensor, Tensor]:
    """What this rank adds to every token, `[N, C, H]`, and in which lanes, `[N, C]` (-1: nothing). C is K or 1."""
    paths, pos = handle.paths, handle.layout.token_topk_to_pos
    here = pos >= 0
    if not len(rows):
        rows = rows.new_zeros(1, rows.shape[1])
    values = rows.index_select(0, pos.clamp(min=0).view(-1)).view(*pos.shape, rows.shape[1])
    if per_slot:
        values = torch.where(here.unsqueeze(2), values, 0)  # dropped rows count as zeros
        return values, torch.where(paths.slot >= 0, lanes(paths.ranks >= 0), -1)
    total = masked_sum(values, here, paths.weights if weighted else None).to(rows.dtype)
    mask = hits(paths.ranks, cpu.topology.num_ranks)
    if per_node:
        mask = mask & _in_node(cpu)
    return total.unsqueeze(1), lanes(mask)[:, cpu.rank].unsqueeze(1)


def _in_node(cpu: CpuBackend) -> Tensor:
    return torch.tensor([rank in cpu.local_ranks for rank in range(cpu.topology.num_ranks)])


def _put(cpu: CpuBackend, region: Tensor, paths: FixedPaths, values: Tensor, lane: Tensor, width: int) -> None:
    """Write contributions beside the tokens that lie in the node's buffer; what goes nowhere goes to the last row."""
    max_tokens, rows = paths.space.max_tokens, paths.space.rows
    for source, (begin, is_far) in enumerate(zip(paths.begins, paths.far, strict=True)):
        if is_far:
            continue
        tokens = slice(source * max_tokens, (source + 1) * max_tokens)
        owner, first = divmod(begin, rows)
        row = first + torch.arange(max_tokens).unsqueeze(1)
        index = torch.where(lane[tokens] >= 0, row * width + lane[tokens], rows * width)
        region[owner].index_copy_(0, index.view(-1), values[tokens].reshape(-1, values.shape[2]))


def _return(cpu: CpuBackend, own: Tensor, values: Tensor, handle: Handle, per_node: bool) -> dict[int, Tensor]:
    """What other nodes have summed for this rank's tokens: `[T, C, H]` by the rank that sent it.

    own: `[token rows, lanes, H]`, this rank's part of the buffer.
    """
    paths, count = handle.paths, handle.paths.space.max_tokens
    if cpu.wire is None:
        return {}
    if per_node:
        mask = hits(paths.forwarded, cpu.topology.num_ranks) & _in_node(cpu)
        message = masked_sum(own[count : count + len(mask)], _filled(mask, own.shape[1])).to(own.dtype).unsqueeze(1)
    elif handle.exchange == "hybrid":
        message = own[count : count + len(paths.forwarded)]
    else:
        by_source = values.view(cpu.topology.num_ranks, count, *values.shape[1:])
        message = by_source[[source for source, is_far in enumerate(paths.far) if is_far]].flatten(0, 1)
    sent, received = _counts(cpu, handle.exchange, count)
    arrived = message.new_empty(sum(sent), *message.shape[1:])
    cpu.wire.exchange(message.contiguous(), received, sent, "sums between nodes", arrived)
    cpu.traffic.scale_out_bytes += message.nbytes
    senders = [rank for rank, number in enumerate(sent) if number]
    blocks = arrived.view(len(senders), count, *message.shape[1:])[:, : handle.num_tokens]
    return dict(zip(senders, blocks, strict=True))


def _total(
    cpu: CpuBackend, own: Tensor, back: dict[int, Tensor], handle: Handle, recipe: Recipe, weighted: bool
) -> Tensor:
    """Sum everything that has come for this rank's tokens, as the recipe says."""
    paths, topology, num_tokens = handle.paths, cpu.topology, handle.num_tokens
    own = own[:num_tokens]
    weights = None
    if recipe.reduction == "per_slot":
        mask, weights = paths.destination >= 0, handle.routing.topk_weights if weighted else None
        lane = lanes(mask)
        parts = _at(own, lane)
        carrier = carriers_of(cpu, paths.destination, handle.exchange)
        for sender, block in back.items():
            arrived = _at(block, lane) if handle.exchange == "hybrid" else block
            parts = torch.where((carrier == sender).unsqueeze(2), arrived, parts)
    elif handle.exchange == "hybrid":
        node = topology.node_of_rank[cpu.rank]
        node_of_rank = torch.tensor((*topology.node_of_rank, -1))  # the last entry serves destination -1
        local = hits(paths.destination, topology.num_ranks) & _in_node(cpu)
        sums = {node: masked_sum(own, _filled(local, own.shape[1])).to(own.dtype)}
        sums |= {topology.node_of_rank[sender]: block[:, 0] for sender, block in back.items()}
        mask = hits(node_of_rank[paths.destination], topology.num_nodes)
        parts = torch.stack([sums[number] for number in range(topology.num_nodes)], 1)
    else:
        mask = hits(paths.destination, topology.num_ranks)
        lane = lanes(mask)
        sums = {rank: _at(own, lane[:, rank : rank + 1])[:, 0] for rank in cpu.local_ranks}
        sums |= {sender: block[:, 0] for sender, block in back.items()}
        parts = torch.stack([sums[rank] for rank in range(topology.num_ranks)], 1)
    total = masked_sum(parts, mask, weights)
    if handle.x is not None:
        add_identity(total, handle.x.float(), handle, slice(0, num_tokens), recipe)
    return total.to(own.dtype)


def _at(rows: Tensor, lane: Tensor) -> Tensor:
    """`rows [T, C, H]` at lanes `[T, L]` (anything where -1): `[T, L, H]`."""
    return rows.gather(1, lane.clamp(min=0, max=max(rows.shape[1] - 1, 0)).unsqueeze(2).expand(-1, -1, rows.shape[2]))


def _filled(mask: Tensor, width: int) -> Tensor:
    """Which of the lanes hold something: the first as many as mask has trues."""
    return torch.arange(width) < mask.sum(1, keepdim=True)
