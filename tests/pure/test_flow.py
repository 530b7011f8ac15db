"""`expected_flow` against routings that are drawn and counted, and `expected_padded` against sums."""

from __future__ import annotations

import doctest
import math
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from torch import Tensor

import moeloom.plan.flow
from moeloom import FP32, Placement, Topology
from moeloom.plan.choices import Choices, Recorded, Skewed, Uniform
from moeloom.plan.flow import Flow, expected_flow, expected_padded
from moeloom.plan.problem import Domains, Problem
from moeloom.types import ExchangeName

ROUNDS = 6000
TILES = (16, 64, 128)


@dataclass(frozen=True)
class Shape:
    """Ranks, nodes, experts, choices of each token, tokens of each rank."""

    ranks: int
    nodes: int
    experts: int
    topk: int
    tokens: int = 3

    @property
    def problem(self) -> Problem:
        return Problem(self.tokens, 8, self.experts, self.topk, FP32)

    @property
    def domains(self) -> Domains:
        return Domains(self.ranks, self.nodes)

    def flow(self, exchange: ExchangeName, choices: Choices = Uniform()) -> Flow:  # noqa: B008 (frozen)
        return expected_flow(self.problem, self.domains, exchange, choices)


@dataclass
class Counts:
    """One rank's rows in each round, in which every rank routes one token: `[ROUNDS]` each."""

    pairs: Tensor
    tokens: Tensor
    out: dict[str, Tensor] = field(default_factory=dict)  # scale-out, by direction
    up: dict[str, Tensor] = field(default_factory=dict)
    handed_on: dict[str, Tensor] = field(default_factory=dict)
    pairs_out: dict[str, Tensor] = field(default_factory=dict)
    pairs_up: dict[str, Tensor] = field(default_factory=dict)
    peers: set[int] = field(default_factory=set)


def drawn(shape: Shape, choices: Choices) -> Tensor:
    """Expert ids `[ROUNDS, ranks, K]` of tokens that choose by this law."""
    generator = torch.Generator().manual_seed(hash((shape.ranks, shape.experts, shape.topk)) % 2**31)
    size = (ROUNDS, shape.ranks)
    if isinstance(choices, Recorded):
        return torch.tensor(choices.rows)[torch.randint(len(choices.rows), size, generator=generator)]
    weights = torch.ones(shape.experts)
    if isinstance(choices, Skewed):
        assert choices.order is not None
        weights = (torch.tensor(choices.order) + 1.0) ** -choices.exponent
    arrival = torch.empty(*size, shape.experts).exponential_(generator=generator) / weights
    return arrival.topk(min(shape.topk, shape.experts), largest=False).indices


def counted(shape: Shape, exchange: ExchangeName, ids: Tensor) -> list[Counts]:
    """Each rank's rows: one loop over sources and destinations."""
    topology, placement = Topology.split(shape.ranks, shape.nodes), Placement.even(shape.experts, shape.ranks)
    pairs = torch.zeros(ROUNDS, shape.ranks, shape.ranks)  # of each source on each destination
    for rank, experts in enumerate(placement.slots):
        for expert in experts:
            pairs[:, :, rank] += (ids == expert).sum(2)
    rows = (pairs > 0).float()
    counts = [Counts(pairs[:, :, rank].sum(1), rows[:, :, rank].sum(1)) for rank in range(shape.ranks)]
    for count in counts:
        for paths in (count.out, count.up, count.handed_on, count.pairs_out, count.pairs_up):
            paths.update(sent=torch.zeros(ROUNDS), received=torch.zeros(ROUNDS))

    def move(path: str, sender: int, receiver: int, moved: Tensor) -> None:
        getattr(counts[sender], path)["sent"] += moved
        getattr(counts[receiver], path)["received"] += moved

    for source in range(shape.ranks):
        for node, members in enumerate(topology.nodes):
            remote = node != topology.node_of_rank[source]
            forwarder = topology.forwarder(source, node)
            if remote and exchange == "hybrid":
                move("out", source, forwarder, rows[:, source, members].amax(1))
                counts[source].peers.add(forwarder)
            for rank in members:
                row, pair = rows[:, source, rank], pairs[:, source, rank]
                carrier = source if not remote else (forwarder if exchange == "hybrid" else rank)
                if remote:
                    move("pairs_out", source, carrier, pair)
                    counts[source].peers.add(carrier)
                    if exchange == "direct":
                        move("out", source, rank, row)
                if carrier != rank:
                    move("up", carrier, rank, row)
                    move("pairs_up", carrier, rank, pair)
                    if remote:
                        move("handed_on", carrier, rank, row)
    return counts


def assert_mean(expected: float, samples: Tensor, tokens: int, allowed: float = 0.01) -> None:
    """`samples` are of one token per rank."""
    mean = float(samples.double().mean()) * tokens
    error = float(samples.double().std()) * tokens / math.sqrt(len(samples))
    assert abs(expected - mean) <= 4 * error + allowed * mean + 1e-4, f"{expected} is not {mean} +- {error}"


def assert_counted(shape: Shape, exchange: ExchangeName, choices: Choices, rank: int | None) -> None:
    """The flow is what `rank` counts, or what all count on average."""
    flow = shape.flow(exchange, choices)
    counts = counted(shape, exchange, drawn(shape, choices))
    busiest = range(shape.ranks) if rank is None else [rank]

    def mean(samples: list[Tensor]) -> Tensor:
        return torch.stack(samples).mean(0)

    def busier(path: str) -> Tensor:
        both = [mean([getattr(counts[r], path)[way] for r in busiest]) for way in ("sent", "received")]
        return max(both, key=lambda samples: float(samples.mean()))

    assert_mean(flow.pairs, mean([counts[r].pairs for r in busiest]), shape.tokens)
    assert_mean(flow.tokens, mean([counts[r].tokens for r in busiest]), shape.tokens)
    assert_mean(flow.scale_out, busier("out"), shape.tokens)
    assert_mean(flow.scale_up, busier("up"), shape.tokens)
    assert_mean(flow.handed_on, mean([counts[r].handed_on["received"] for r in busiest]), shape.tokens)
    assert_mean(flow.pairs_out, busier("pairs_out"), shape.tokens)
    assert_mean(flow.pairs_up, busier("pairs_up"), shape.tokens)
    assert flow.peers == len(counts[busiest[0]].peers)


def test_the_examples_of_the_docstrings_run() -> None:
    result = doctest.testmod(moeloom.plan.flow)
    assert result.attempted >= 2 and result.failed == 0


# ---- rows on each path


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 1, 8, 2),
        Shape(4, 1, 8, 2),
        Shape(4, 2, 8, 2),
        Shape(4, 2, 4, 1, tokens=1),
        Shape(4, 4, 16, 4),
        Shape(6, 3, 12, 5, tokens=70),
        Shape(8, 2, 64, 8),
        Shape(8, 4, 32, 6),
        Shape(4, 2, 4, 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("exchange", ["direct", "hybrid"])
def test_equal_ranks(shape: Shape, exchange: ExchangeName) -> None:
    assert_counted(shape, exchange, Uniform(), None)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(4, 2, 9, 2),  # 3, 2, 2, 2 experts
        Shape(4, 2, 6, 3),  # 2, 2, 1, 1
        Shape(6, 2, 4, 2),  # fewer experts than ranks
        Shape(4, 2, 1, 1),
        Shape(4, 2, 1, 3),  # more choices than experts
        Shape(8, 4, 21, 4, tokens=70),
        Shape(3, 3, 4, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("exchange", ["direct", "hybrid"])
def test_experts_that_do_not_divide(shape: Shape, exchange: ExchangeName) -> None:
    """The first rank has the most."""
    assert_counted(shape, exchange, Uniform(), 0)


@pytest.mark.parametrize("exchange", ["direct", "hybrid"])
def test_popular_experts(exchange: ExchangeName) -> None:
    """The busiest is the rank that has them: experts 10 and 11 on rank 5 of 8."""
    order = tuple((expert - 10) % 16 for expert in range(16))
    assert_counted(Shape(8, 2, 16, 3), exchange, Skewed(1.0, order), 5)


@pytest.mark.parametrize("exchange", ["direct", "hybrid"])
def test_recorded_rows(exchange: ExchangeName) -> None:
    """Of expert 5 on rank 2 most; tokens without a choice, and one that names an expert twice."""
    rows = ((5, 4), (5, 0), (5, 5), (-1, -1), (3, -1), (4, 7), (1, 6), (5, 2))
    assert_counted(Shape(4, 2, 8, 2), exchange, Recorded(rows), 2)


@pytest.mark.parametrize("exchange", ["direct", "hybrid"])
def test_one_node_and_nodes_of_one_rank(exchange: ExchangeName) -> None:
    flow = Shape(4, 1, 8, 2).flow(exchange)
    assert (flow.scale_out, flow.pairs_out, flow.handed_on, flow.peers) == (0.0, 0.0, 0.0, 0.0)
    assert Shape(4, 4, 8, 2).flow(exchange) == Shape(4, 4, 8, 2).flow("direct")
    assert Shape(4, 4, 8, 2).flow(exchange).scale_up == 0.0


@pytest.mark.parametrize("exchange", ["direct", "hybrid"])
def test_rows_are_in_proportion_to_tokens(exchange: ExchangeName) -> None:
    three, none = Shape(4, 2, 9, 2).flow(exchange), Shape(4, 2, 9, 2, tokens=0).flow(exchange)
    thousand = Shape(4, 2, 9, 2, tokens=3000).flow(exchange)
    for name in ("pairs", "tokens", "scale_out", "scale_up", "handed_on", "pairs_out", "pairs_up"):
        assert getattr(thousand, name) == pytest.approx(1000 * getattr(three, name))
        assert getattr(none, name) == 0.0
    assert none.experts_hit == 0.0 and none.padded(64) == 0.0
    assert thousand.peers == three.peers


# ---- rows of each expert


@pytest.mark.parametrize(
    ("shape", "rank"),
    [
        (Shape(4, 2, 64, 1, tokens=2), None),
        (Shape(2, 1, 128, 4, tokens=30), None),
        (Shape(4, 1, 64, 2, tokens=60), None),
        (Shape(8, 2, 100, 3, tokens=40), 0),  # 13 experts on the first rank
        (Shape(4, 1, 33, 1, tokens=500), 0),
    ],
    ids=str,
)
def test_experts_hit_and_padded_rows(shape: Shape, rank: int | None) -> None:
    """Few of the experts per token, so that rows per expert are nearly Poisson."""
    ids = drawn(shape, Uniform())
    batches = ROUNDS // shape.tokens
    held = range(shape.experts) if rank is None else Placement.even(shape.experts, shape.ranks).slots[rank]
    share = shape.ranks if rank is None else 1
    batch = ids[: batches * shape.tokens].reshape(batches, -1)
    rows = torch.stack([(batch == expert).sum(1) for expert in held], 1).double()
    flow = shape.flow("direct")
    assert len(flow.rows_of_experts) == len(held) // share
    assert_mean(sum(flow.rows_of_experts), rows.sum(1) / share, 1)
    assert_mean(flow.experts_hit, (rows > 0).double().sum(1) / share, 1)
    for tile in TILES:
        assert_mean(flow.padded(tile), ((rows / tile).ceil() * tile).sum(1) / share, 1)
    assert flow.padded(1) == pytest.approx(flow.pairs)


def test_experts_hit_where_a_token_takes_a_large_share_of_them() -> None:
    """Poisson is then too low: of 8 tokens that choose 2 of 8 experts, 1 - 0.75^8 = 90 % of experts have one."""
    flow = Shape(8, 1, 8, 2, tokens=1).flow("direct")
    assert flow.experts_hit == pytest.approx(1 - math.exp(-2))  # 0.865
    assert flow.experts_hit == pytest.approx(1 - 0.75**8, rel=0.05)


@cache
def poisson(mean: float) -> list[float]:
    """Chances of 0, 1, .. rows, from the definition."""
    last = int(mean + 12 * math.sqrt(mean) + 60)
    return [math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) for n in range(last)]


def padded_exactly(mean: float, tile: int) -> float:
    return math.fsum(-(-n // tile) * tile * chance for n, chance in enumerate(poisson(mean)))


@pytest.mark.parametrize("tile", [2, 16, 64, 128])
def test_padded_is_the_sum_over_poisson(tile: int) -> None:
    switch = float(tile**2)
    for mean in (0.01, 0.5, 3.0, tile / 2, tile, 2.0 * tile + 50, 2.0 * tile + 51, 800.0, switch, switch * 1.01):
        assert expected_padded(mean, tile) == pytest.approx(padded_exactly(mean, tile), rel=1e-4)


@pytest.mark.parametrize("tile", [16, 64, 128, 256])
def test_padded_does_not_jump_between_its_two_formulas(tile: int) -> None:
    switch = float(tile**2)
    assert expected_padded(switch * (1 + 1e-9), tile) == pytest.approx(expected_padded(switch, tile), rel=1e-4)


def test_padded_of_many_rows_and_large_tiles() -> None:
    """exp(-mean) underflows here."""
    assert expected_padded(1000.0, 4096) == pytest.approx(4096, rel=1e-9)
    assert expected_padded(1e7, 128) == 1e7 + 63.5
    flow = replace(Shape(4, 2, 8, 2).flow("direct"), rows_of_experts=(0.0, 1e7, 1e7))
    assert flow.padded(128) == 2 * (1e7 + 63.5)


@pytest.mark.parametrize("exchange", ["direct", "hybrid"])
@pytest.mark.parametrize(("ranks", "nodes"), [(3, 2), (5, 2), (7, 3), (10, 4)])
def test_nodes_of_different_size(ranks: int, nodes: int, exchange: ExchangeName) -> None:
    """The links are those of whoever has most on them, which may be a rank of a smaller node."""
    shape = Shape(ranks, nodes, experts=10 * ranks, topk=4)
    counts = counted(shape, exchange, drawn(shape, Uniform()))
    flow = shape.flow(exchange)
    for path, expected in (("out", flow.scale_out), ("up", flow.scale_up), ("pairs_out", flow.pairs_out)):
        means = [float(samples.mean()) for count in counts for samples in getattr(count, path).values()]
        assert expected == pytest.approx(shape.tokens * max(means), rel=0.03), path
