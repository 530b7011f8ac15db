"""Where the tokens of a layer go: expected numbers of rows on each path, for the rank that has most of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from moeloom.plan.choices import Choices
from moeloom.plan.problem import Domains, Problem
from moeloom.types import ExchangeName


@dataclass(frozen=True)
class Flow:
    """Expected rows of one layer, on the busiest rank.

    pairs: (token, expert) pairs of its experts. tokens: those with at least one pair here, which is one row each.
    rows_of_experts: for each of its experts the expected number of rows. scale_out, scale_up: rows on its link between
    and within nodes, in the busier direction. handed_on: of scale_up, those it forwards for other nodes (hybrid).
    pairs_out, pairs_up: the same with a row for each pair. peers: ranks of other nodes that it sends to.
    """

    pairs: float
    tokens: float
    rows_of_experts: tuple[float, ...]
    scale_out: float
    scale_up: float
    handed_on: float
    pairs_out: float
    pairs_up: float
    peers: float

    @property
    def experts_hit(self) -> float:
        """Experts of this rank with at least one row; rows per expert are nearly Poisson: 1 - exp(-mean) each."""
        return sum(-math.expm1(-rows) for rows in self.rows_of_experts)

    def padded(self, tile_rows: int) -> float:
        """Rows computed if each expert's are rounded up to a multiple of `tile_rows`."""
        known: dict[float, float] = {}
        for rows in self.rows_of_experts:
            if rows not in known:
                known[rows] = expected_padded(rows, tile_rows)
        return sum(known[rows] for rows in self.rows_of_experts)


@lru_cache(maxsize=4096)
def expected_padded(mean: float, tile: int) -> float:
    """E[ceil(n / tile) * tile] for a Poisson n of this mean.

    Summed over ten standard deviations to both sides, or mean + (tile - 1) / 2 where one is more than a tile: n mod
    tile is then even, and the two differ by less than 1e-4.

    >>> expected_padded(0.0, 64)
    0.0
    >>> round(expected_padded(1.0, 64), 3)  # 64 unless there is no row
    40.456
    >>> expected_padded(10_000.0, 64)
    10031.5
    """
    if tile == 1 or mean == 0.0:
        return mean
    if mean > tile**2:
        return mean + (tile - 1) / 2
    spread = 10.0 * math.sqrt(mean) + 20.0
    n, last, total = max(0, math.floor(mean - spread)), math.ceil(mean + spread), 0.0
    chance = math.exp(n * math.log(mean) - mean - math.lgamma(n + 1))
    while n <= last:
        total += -(-n // tile) * tile * chance
        n += 1
        chance *= mean / n
    return total


def expected_flow(problem: Problem, domains: Domains, exchange: ExchangeName, choices: Choices) -> Flow:
    """Expected rows, each token's counted once per rank (within a node) and once per node or rank (between nodes).

    With r_i the chance that a token reaches rank i and T tokens on each of R ranks: pairs = T R sum of the chances of
    the rank's experts; tokens = T R r_i, of the rank with most pairs. The links are those of the node that has most on
    them: see `_links`.
    """
    tokens, ranks = problem.tokens, domains.num_ranks
    ends, node_ends = domains.expert_bounds(problem.num_experts), domains.rank_bounds
    shape = (problem.num_experts, problem.num_topk)
    chances = choices.chances(*shape)
    to_rank = choices.reached(ends, *shape)
    to_node = choices.reached([ends[rank - 1] for rank in node_ends], *shape)
    begins = [0, *ends]
    loads = [math.fsum(chances[begin:end]) for begin, end in zip(begins, ends, strict=False)]
    node_loads = [math.fsum(loads[begin:end]) for begin, end in zip([0, *node_ends], node_ends, strict=False)]
    rows, pairs = _links(to_rank, to_node, node_ends, exchange), _links(loads, node_loads, node_ends, exchange)
    busiest = max(range(ranks), key=lambda rank: (loads[rank], -rank))
    largest = node_ends[0]  # the first nodes are not smaller than the others
    return Flow(
        pairs=tokens * ranks * loads[busiest],
        tokens=tokens * ranks * to_rank[busiest],
        rows_of_experts=tuple(tokens * ranks * chance for chance in chances[begins[busiest] : ends[busiest]]),
        scale_out=tokens * rows.scale_out,
        scale_up=tokens * rows.scale_up,
        handed_on=tokens * rows.handed_on,
        pairs_out=tokens * pairs.scale_out,
        pairs_up=tokens * pairs.scale_up,
        peers=float(ranks - largest if exchange == "direct" else domains.num_nodes - 1),
    )


class _Links(NamedTuple):
    """Rows per token of each rank, on one rank's links."""

    scale_out: float
    scale_up: float
    handed_on: float


def _links(per_rank: Sequence[float], per_node: Sequence[float], ends: Sequence[int], exchange: ExchangeName) -> _Links:
    """The most that any rank has on each link, of R ranks on N nodes; ends: the ranks after each node's last one.

    For a node of m ranks, r its most reached rank's chance, n the node's, s the ranks of other nodes that one of its
    ranks forwards for (N - 1 if all nodes are equal):
    scale-out, sending: direct the sum over other nodes' ranks, hybrid the sum over other nodes; receiving: direct
    (R - m) r, hybrid s n. scale-up: (m - 1) r of its own node's tokens, and in hybrid what is handed on: received, of
    the (R - m) r of other nodes the share 1 - 1/m that does not arrive at its own forwarder; sent, s times the others.
    """
    ranks, sizes = len(per_rank), [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    total, total_nodes = math.fsum(per_rank), math.fsum(per_node)
    size_counts = Counter(sizes)
    out = up = handed = 0.0
    for node, (end, m) in enumerate(zip(ends, sizes, strict=True)):
        mine = per_rank[end - m : end]
        own, most, others, on = math.fsum(mine), max(mine), ranks - m, 0.0
        if exchange == "direct":
            sent, received = total - own, others * most
        else:
            sources = sum(-(-size // m) * count for size, count in size_counts.items()) - 1
            sent, received = total_nodes - per_node[node], sources * per_node[node]
            on = max(others * most * (1 - 1 / m), sources * (own - min(mine)))
        out, up, handed = max(out, sent, received), max(up, (m - 1) * most + on), max(handed, on)
    return _Links(out if len(ends) > 1 else 0.0, up, handed if len(ends) > 1 else 0.0)
