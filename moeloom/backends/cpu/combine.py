"""combine on CPUs: sum what is here, write it into the token's row at its source, sum what has come there.

Each contribution to a token has a lane of its own beside the token's row, derived from the routing by both sides. In
the hybrid exchange the token's row is the one at the forwarder, which sends on what it finds there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeloom.backends.base import Handle, Traffic
from moeloom.backends.cpu.paths import carriers_of, send_rows
from moeloom.backends.cpu.rows import scatter_rows, summed_tiles
from moeloom.config import Recipe
from moeloom.layout import hits, lanes, pack_left, pairs_by
from moeloom.regions import combine_lanes, combine_regions

if TYPE_CHECKING:
    from moeloom.backends.cpu.backend import CpuBackend

Tiles = Iterator[tuple[slice, Tensor]]


def combine(cpu: CpuBackend, rows: Tensor, handle: Handle, recipe: Recipe, weighted: bool, identity: bool) -> Tensor:
    """See `Backend.combine`. rows: `[num_rows, H]`, as dispatch laid them out."""
    with cpu.control.operation("combine"):
        wanted = {"handle of operation": handle.number, "hidden": rows.shape[1], "dtype": str(rows.dtype)}
        cpu.control.agree({**wanted, "reduction": recipe.reduction, "weighted": weighted})
        if recipe.reduction == "per_slot":
            tiles = _sum_slots(cpu, rows, handle, weighted)
        elif handle.exchange == "hybrid":
            tiles = _sum_nodes(cpu, rows, handle, weighted)
        else:
            tiles = _sum_ranks(cpu, rows, handle, weighted)
        y = rows.new_empty(handle.num_tokens, rows.shape[1])
        for tile, total in tiles:
            if identity and handle.x is not None:
                add_identity(total, handle.x[tile].float(), handle, tile, recipe)
            y[tile] = total
        return y


@dataclass(frozen=True, eq=False)
class Returned:
    """Rows of contributions: `width` lanes beside each token row of the node's symmetric buffer.

    rows: `[token rows * width, H]`. own, forwarded: the token rows of this rank's tokens and of those it forwards.
    part: the token rows of this rank's part.
    """

    rows: Tensor
    width: int
    own: Tensor
    forwarded: Tensor
    part: range
    traffic: Traffic

    @classmethod
    def make(cls, cpu: CpuBackend, rows: Tensor, handle: Handle, width: int) -> Returned:
        """The node's region for one combine. Collective."""
        space, paths = handle.paths.space, handle.paths
        regions = combine_regions(space, rows.shape[1], width, rows.dtype.itemsize)
        cpu.buffer.ensure(regions)
        part = range(cpu.local_index * space.rows, (cpu.local_index + 1) * space.rows)
        own = part.start + torch.arange(handle.num_tokens)
        forwarded = part.start + space.max_tokens + torch.arange(len(paths.forwarded))
        return cls(cpu.buffer.view(regions, "returned", rows.dtype), width, own, forwarded, part, cpu.traffic)

    def put(self, tiles: Tiles, row: Tensor, lane: Tensor) -> Tensor:
        """Write each sum into its lane. Those of tokens from beyond the node (direct) are returned, in order."""
        place = row * self.width + lane
        near = row * self.width < len(self.rows)
        elsewhere = near & ((row < self.part.start) | (row >= self.part.stop))
        self.traffic.scale_up_bytes += int(elsewhere.sum()) * self.rows.shape[1] * self.rows.element_size()
        far = self.rows.new_empty(int((~near).sum()), self.rows.shape[1])
        begin = 0
        for tile, total in tiles:
            rounded, here = total.to(self.rows.dtype), near[tile]
            if here.all():
                scatter_rows(self.rows, place[tile], rounded)
                continue
            scatter_rows(self.rows, place[tile][here], rounded[here])
            leaving = rounded[~here]
            far[begin : begin + len(leaving)] = leaving
            begin += len(leaving)
        return far

    def index(self, row: Tensor, mask: Tensor) -> Tensor:
        """The lanes of each row that hold something, `[N, width]`; mask has a true for each contribution."""
        lane = torch.arange(self.width)
        return torch.where(lane < mask.sum(1, keepdim=True), row.unsqueeze(1) * self.width + lane, -1)


def _sum_ranks(cpu: CpuBackend, rows: Tensor, handle: Handle, weighted: bool) -> Tiles:
    """One row per (token, rank), summed in rank order at the source."""
    paths, messages, num_ranks = handle.paths, handle.paths.messages, cpu.topology.num_ranks
    returned = Returned.make(cpu, rows, handle, combine_lanes("per_rank", handle.routing.num_topk, num_ranks))
    lane = lanes(hits(paths.ranks, num_ranks))[:, cpu.rank]
    far = returned.put(_local_sums(rows, handle, weighted), paths.row, lane)
    cpu.control.meet("contributions of the node")
    mask = hits(paths.destination, num_ranks)
    if cpu.wire is not None:
        arrived = rows.new_empty(len(messages.tokens), rows.shape[1])
        send_rows(cpu, far, messages.received_from, messages.sent_to, arrived)
        lane = lanes(mask)[messages.tokens, torch.repeat_interleave(torch.tensor(messages.sent_to))]
        scatter_rows(returned.rows, returned.own[messages.tokens] * returned.width + lane, arrived)
    return summed_tiles(returned.rows, returned.index(returned.own, mask))


def _sum_nodes(cpu: CpuBackend, rows: Tensor, handle: Handle, weighted: bool) -> Tiles:
    """One row per (token, rank), summed in rank order at the forwarder; of these one per (token, node), in node
    order.
    """
    paths, messages, topology = handle.paths, handle.paths.messages, cpu.topology
    num_ranks, num_tokens = topology.num_ranks, handle.num_tokens
    in_node = torch.tensor([rank in cpu.local_ranks for rank in range(num_ranks)])
    width = combine_lanes("per_rank", handle.routing.num_topk, max(map(len, topology.nodes)))
    returned = Returned.make(cpu, rows, handle, width)
    lane = lanes(hits(paths.ranks, num_ranks) & in_node)[:, cpu.rank]
    returned.put(_local_sums(rows, handle, weighted), paths.row, lane)
    cpu.control.meet("contributions of the node")

    mask = hits(torch.cat([paths.destination, paths.forwarded]), num_ranks) & in_node
    num_summed, num_arriving = len(mask), len(messages.tokens)
    sums = rows.new_empty(num_summed + num_arriving, rows.shape[1])
    for tile, total in summed_tiles(returned.rows, returned.index(torch.cat([returned.own, returned.forwarded]), mask)):
        sums[tile] = total
    if cpu.wire is not None:
        leaving, arrived = sums[num_tokens:num_summed], sums[num_summed:]
        send_rows(cpu, leaving, messages.received_from, messages.sent_to, arrived)

    # where each (token, node) sum lies: this node's at the token itself, the others' as they arrived
    node_of_rank = torch.tensor((*topology.node_of_rank, -1))  # the last entry serves destination -1
    place = torch.empty(num_tokens, topology.num_nodes, dtype=torch.int64)
    place[:, topology.node_of_rank[cpu.rank]] = torch.arange(num_tokens)
    sender = torch.repeat_interleave(torch.tensor(messages.sent_to))
    place[messages.tokens, node_of_rank[sender]] = num_summed + torch.arange(num_arriving)
    nodes = hits(node_of_rank[paths.destination], topology.num_nodes)
    return summed_tiles(sums, pack_left(place, nodes))


def _sum_slots(cpu: CpuBackend, rows: Tensor, handle: Handle, weighted: bool) -> Tiles:
    """Every row travels; one sum in slot order at the source, where the weights are known too."""
    paths, messages, num_topk = handle.paths, handle.paths.messages, handle.routing.num_topk
    returned = Returned.make(cpu, rows, handle, combine_lanes("per_slot", num_topk, cpu.topology.num_ranks))
    token, topk = (paths.slot >= 0).nonzero().unbind(1)
    pos = handle.layout.token_topk_to_pos[token, topk].unsqueeze(1)  # -1 where dropped: counts as zeros
    far = returned.put(summed_tiles(rows, pos), paths.row[token], lanes(paths.ranks >= 0)[token, topk])
    cpu.control.meet("contributions of the node")
    mask = paths.destination >= 0
    if cpu.wire is not None:
        if handle.exchange == "hybrid":
            in_node = torch.tensor([*(rank in cpu.local_ranks for rank in range(cpu.topology.num_ranks)), False])
            token, topk = in_node[paths.forwarded].nonzero().unbind(1)
            lane = lanes(paths.forwarded >= 0)[token, topk]
            far = returned.rows.index_select(0, returned.forwarded[token] * returned.width + lane)
            source = torch.repeat_interleave(torch.tensor(messages.received_from))[token]
        else:
            source = paths.source[token][paths.row[token] * returned.width >= len(returned.rows)]
        pairs, count = pairs_by(carriers_of(cpu, paths.destination, handle.exchange), cpu.topology.num_ranks)
        arrived = rows.new_empty(len(pairs), rows.shape[1])
        sent = torch.bincount(source, minlength=cpu.topology.num_ranks)
        send_rows(cpu, far, sent.tolist(), count.tolist(), arrived)
        lane = lanes(mask).reshape(-1)[pairs]
        scatter_rows(returned.rows, returned.own[pairs // num_topk] * returned.width + lane, arrived)
    weights = pack_left(handle.routing.topk_weights, mask) if weighted else None
    return summed_tiles(returned.rows, returned.index(returned.own, mask), weights)


def _local_sums(rows: Tensor, handle: Handle, weighted: bool) -> Tiles:
    """The sum of each token's rows on this rank, in slot order; zeros if all of them were dropped."""
    pos = handle.layout.token_topk_to_pos
    kept = pos >= 0
    weights = pack_left(handle.paths.weights, kept) if weighted else None
    return summed_tiles(rows, pack_left(pos, kept), weights)


def add_identity(total: Tensor, x: Tensor, handle: Handle, tile: slice, recipe: Recipe) -> None:
    """Add the identity experts' term, last: their rows (rounded like any expert's) summed in slot order."""
    topk_idx, weights = handle.routing.topk_idx[tile], handle.routing.topk_weights[tile]
    identity = handle.placement.is_identity(topk_idx)
    term = torch.zeros_like(total)
    for k in range(topk_idx.shape[1]):
        row = (x * weights[:, k].unsqueeze(1)).to(recipe.dtype).float()
        term = torch.where(identity[:, k].unsqueeze(1), term + row, term)
    if recipe.reduction == "per_rank":
        term = term.to(recipe.dtype).float()
    total.copy_(torch.where(identity.any(1, keepdim=True), total + term, total))  # elsewhere -0.0 stays -0.0
