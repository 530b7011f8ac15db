"""Where the tokens of a layer go: expected numbers of rows on each path, for the rank that has most of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

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

    With r_i, n_a the chances that a token reaches rank i and node a, T tokens on each of R ranks and m ranks a node:
    pairs = T R sum of the chances of the rank's experts; tokens = T R r_i.
    scale-out, sending from node a: direct T sum r over other nodes' ranks, hybrid T sum n over other nodes;
    receiving: direct T (R - m) r_i, hybrid T (N - 1) n_a (a forwarder has one source on each other node).
    scale-up: T (m - 1) r_i for its own node's tokens, and in hybrid the T (R - m) r_i of other nodes, of which the
    share that does not arrive at its own forwarder, 1 - 1/m, is handed on within the node.
    Where nodes differ in size, m is that of the busiest rank's node; ranks of a smaller one may send and receive more.
    """
    tokens, ranks = problem.tokens, domains.num_ranks
    ends = domains.expert_bounds(problem.num_experts)
    node_ends = domains.rank_bounds
    shape = (problem.num_experts, problem.num_topk)
    chances = choices.chances(*shape)
    to_rank = choices.reached(ends, *shape)
    to_node = choices.reached([ends[rank - 1] for rank in node_ends], *shape)
    begins = [0, *ends]
    loads = [math.fsum(chances[begin:end]) for begin, end in zip(begins, ends, strict=False)]
    busiest = max(range(ranks), key=lambda rank: (loads[rank], -rank))
    node = next(number for number, end in enumerate(node_ends) if busiest < end)
    per_node = node_ends[node] - (node_ends[node - 1] if node else 0)
    nodes, other_ranks = domains.num_nodes, ranks - per_node

    own_node = math.fsum(to_rank[node_ends[node] - per_node : node_ends[node]])
    remote_ranks, remote_nodes = math.fsum(to_rank) - own_node, math.fsum(to_node) - to_node[node]
    here = to_rank[busiest]
    if exchange == "direct":
        out, into, handed_on = remote_ranks, other_ranks * here, 0.0
        peers = float(other_ranks)
    else:
        out, into = remote_nodes, (nodes - 1) * to_node[node]
        handed_on = other_ranks * here * (1 - 1 / per_node)
        peers = float(nodes - 1)
    local_out, local_in = own_node - here, (per_node - 1) * here
    total, own = math.fsum(loads), math.fsum(loads[node_ends[node] - per_node : node_ends[node]])
    load = loads[busiest]
    pairs_in, pairs_handed_on = other_ranks * load, 0.0
    if exchange == "hybrid":
        pairs_in, pairs_handed_on = (nodes - 1) * own, pairs_in * (1 - 1 / per_node)
    return Flow(
        pairs=tokens * ranks * load,
        tokens=tokens * ranks * here,
        rows_of_experts=tuple(tokens * ranks * chance for chance in chances[begins[busiest] : ends[busiest]]),
        scale_out=tokens * max(out, into) if nodes > 1 else 0.0,
        scale_up=tokens * (max(local_out, local_in) + handed_on),
        handed_on=tokens * handed_on,
        pairs_out=tokens * max(total - own, pairs_in) if nodes > 1 else 0.0,
        pairs_up=tokens * (max(own - load, (per_node - 1) * load) + pairs_handed_on),
        peers=peers,
    )
