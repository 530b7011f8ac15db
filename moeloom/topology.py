"""Ranks -> scale-up and scale-out domains. Data only: who shares memory with whom, who forwards for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from moeloom.types import ExchangeName


@dataclass(frozen=True)
class Topology:
    """The nodes of a group of ranks.

    nodes: for each node its ranks, ascending; nodes ordered by their first rank. Ranks of one node load and store each
    other's memory (scale-up), ranks of different nodes exchange messages (scale-out).
    nics: for each rank the network device nearest to it, if known. Kept as data; the CPU backend does not use it.

    >>> Topology.split(4, 2).nodes
    ((0, 1), (2, 3))
    >>> Topology.split(4, 2).forwarder(source=1, node=1)
    3
    """

    nodes: tuple[tuple[int, ...], ...]
    nics: tuple[str | None, ...] | None = None

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.nodes for rank in node)
        if not ranks or ranks != list(range(len(ranks))) or any(not node for node in self.nodes):
            raise ValueError(f"nodes is {self.nodes}; it must hold every rank 0..R-1 exactly once, no node empty")
        if any(list(node) != sorted(node) for node in self.nodes):
            raise ValueError(f"nodes is {self.nodes}; the ranks of a node must ascend")
        if [node[0] for node in self.nodes] != sorted(node[0] for node in self.nodes):
            raise ValueError(f"nodes is {self.nodes}; nodes must be ordered by their first rank")
        if self.nics is not None and len(self.nics) != len(ranks):
            raise ValueError(f"nics has {len(self.nics)} entries; one for each of {len(ranks)} ranks is needed")

    @classmethod
    def split(cls, num_ranks: int, num_nodes: int) -> Topology:
        """`num_ranks` consecutive ranks over `num_nodes` nodes, the first nodes one larger if it does not divide."""
        if num_ranks < 1 or not 1 <= num_nodes <= num_ranks:
            raise ValueError(f"num_nodes is {num_nodes}; allowed with {num_ranks} ranks: 1..{max(num_ranks, 1)}")
        share, extra = divmod(num_ranks, num_nodes)
        nodes, start = [], 0
        for node in range(num_nodes):
            size = share + (node < extra)
            nodes.append(tuple(range(start, start + size)))
            start += size
        return cls(tuple(nodes))

    @classmethod
    def from_names(cls, names: Sequence[str]) -> Topology:
        """Ranks with the same node name (host, or declared) share a node."""
        by_name: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            by_name.setdefault(name, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in by_name.values()))

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return len(self.nodes)

    @cached_property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return sum(len(node) for node in self.nodes)

    @cached_property
    def node_of_rank(self) -> tuple[int, ...]:
        """For each rank its node."""
        owner = {rank: node for node, ranks in enumerate(self.nodes) for rank in ranks}
        return tuple(owner[rank] for rank in range(self.num_ranks))

    def local_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks on this rank's node, itself included."""
        return self.nodes[self.node_of_rank[rank]]

    def local_index(self, rank: int) -> int:
        """The place of a rank within its node: its rail."""
        return self.local_ranks(rank).index(rank)

    def forwarder(self, source: int, node: int) -> int:
        """The rank of `node` that receives what `source` sends there in the hybrid exchange: the one on its own rail.

        Nodes may differ in size; a rail that a node lacks wraps around.
        """
        ranks = self.nodes[node]
        return ranks[self.local_index(source) % len(ranks)]

    def forwarded_sources(self, rank: int) -> tuple[int, ...]:
        """The ranks of other nodes that this rank forwards for, ascending."""
        node = self.node_of_rank[rank]
        return tuple(
            source
            for source in range(self.num_ranks)
            if self.node_of_rank[source] != node and self.forwarder(source, node) == rank
        )

    @cached_property
    def max_forwarded_sources(self) -> int:
        """The most sources that any rank forwards for (0 on one node)."""
        return max(len(self.forwarded_sources(rank)) for rank in range(self.num_ranks))

    def carriers(self, rank: int, exchange: ExchangeName) -> tuple[int, ...]:
        """For each destination rank, the rank to which `rank` sends a message for it; -1 within its own node.

        direct: the destination itself. hybrid: the forwarder on the destination's node.
        """
        own = self.node_of_rank[rank]
        return tuple(
            -1 if node == own else (destination if exchange == "direct" else self.forwarder(rank, node))
            for destination, node in enumerate(self.node_of_rank)
        )

    def __str__(self) -> str:
        sizes = sorted({len(node) for node in self.nodes})
        per_node = "-".join(str(size) for size in sizes)
        return f"{self.num_ranks} ranks on {self.num_nodes} node(s), {per_node} per node"
