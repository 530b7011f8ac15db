"""Where rows lie and how they travel, as one rank sees it.

Within a node a rank copies its rows into its part of the symmetric buffer once, whoever needs them, and each receiver
gathers what it needs from there. Between nodes rows are sent: to their receiver (direct), or once per node to the
forwarder there, into whose part of the symmetric buffer they go (hybrid); from then on they are that node's own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeloom.layout import hits
from moeloom.regions import TokenSpace
from moeloom.types import ExchangeName

if TYPE_CHECKING:
    from moeloom.backends.cpu.backend import CpuBackend


@dataclass(frozen=True, eq=False)
class Messages:
    """The tokens that this rank sends to ranks of other nodes, grouped by receiver, and how many come from each
    rank.
    """

    exchange: ExchangeName
    tokens: Tensor
    sent_to: list[int]
    received_from: list[int]


@dataclass(frozen=True, eq=False)
class Paths:
    """How the rows of one dispatch travel.

    space: token rows in each rank's part of the symmetric buffer.
    num_tokens: of this rank. destination: `[T, K]` the rank of each of its pairs, -1 where none.
    forwarded: `[F, K]` in hybrid, destinations of the tokens that this rank forwards, by (source rank, source token).

    `M` tokens have rows on this rank, ordered by (source rank, source token):
    row `[M]` (where each lies: in the node's buffer, or behind it among the rows received directly), source `[M]`,
    slot, weights, ranks `[M, K]` (local slot or -1, fp32 weight, destination of each pair).
    """

    space: TokenSpace
    messages: Messages
    num_tokens: int
    destination: Tensor
    forwarded: Tensor
    row: Tensor
    source: Tensor
    slot: Tensor
    weights: Tensor
    ranks: Tensor


def outgoing(cpu: CpuBackend, destination: Tensor, exchange: ExchangeName) -> tuple[Tensor, list[int]]:
    """The tokens to send, grouped by the rank they are sent to, and how many go to each rank."""
    needed = hits(carriers_of(cpu, destination, exchange), cpu.topology.num_ranks)
    return needed.t().nonzero()[:, 1], needed.sum(0).tolist()


def carriers_of(cpu: CpuBackend, destination: Tensor, exchange: ExchangeName) -> Tensor:
    """The rank to which a pair of this rank is sent, -1 if it stays within the node (or goes nowhere)."""
    table = torch.tensor((*cpu.topology.carriers(cpu.rank, exchange), -1))  # the last entry serves destination -1
    return table[destination]


def spread(cpu: CpuBackend, rows: Tensor, region: Tensor, space: TokenSpace, messages: Messages) -> list[Tensor]:
    """Put this rank's rows where their receivers find them; returns the places that `Paths.row` counts through.

    region: `[local ranks * space.rows, ...]`, the node's part of the symmetric buffer.
    """
    if cpu.topology.num_ranks == 1:
        return [rows]
    begin = cpu.local_index * space.rows
    region[begin : begin + len(rows)] = rows
    places = [region]
    if cpu.wire is not None:
        count = sum(messages.received_from)
        if messages.exchange == "hybrid":
            arrived = region[begin + space.max_tokens : begin + space.max_tokens + count]
        else:
            arrived = rows.new_empty(count, rows.shape[1])
            places.append(arrived)
        send_rows(cpu, rows.index_select(0, messages.tokens), messages.sent_to, messages.received_from, arrived)
    cpu.traffic.scale_up_bytes += rows.nbytes if len(cpu.local_ranks) > 1 else 0
    cpu.control.meet("rows of the node")
    return places


def send_rows(cpu: CpuBackend, rows: Tensor, sent: list[int], received: list[int], out: Tensor) -> None:
    """Exchange rows with the ranks of other nodes."""
    assert cpu.wire is not None
    cpu.wire.exchange(rows, sent, received, "rows between nodes", out)
    cpu.traffic.scale_out_bytes += rows.nbytes


def blocks(
    cpu: CpuBackend, space: TokenSpace, tokens_of_rank: list[int], sent: list[list[int]], exchange: str
) -> Tensor:
    """For each source rank, where its rows begin among the places of `spread`, and how many there are: `[R, 2]`."""
    topology = cpu.topology
    if topology.num_ranks == 1:
        return torch.tensor([[0, tokens_of_rank[0]]])
    table = []
    direct = len(cpu.local_ranks) * space.rows
    forwarded = {rank: cpu.local_ranks.index(rank) * space.rows + space.max_tokens for rank in cpu.local_ranks}
    for source in range(topology.num_ranks):
        if source in cpu.local_ranks:
            table.append((cpu.local_ranks.index(source) * space.rows, tokens_of_rank[source]))
        elif exchange == "direct":
            table.append((direct, sent[source][cpu.rank]))
            direct += sent[source][cpu.rank]
        else:
            forwarder = topology.forwarder(source, topology.node_of_rank[cpu.rank])
            table.append((forwarded[forwarder], sent[source][forwarder]))
            forwarded[forwarder] += sent[source][forwarder]
    return torch.tensor(table)
