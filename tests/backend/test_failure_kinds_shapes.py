"""Kinds of faults known from other systems: token counts, empty experts and odd numbers that once broke something."""

from __future__ import annotations

import pytest
import torch

from moeloom import Placement, Plan, Routing, Runtime, Topology
from tests.support.failure import Layer, layer_of, works
from tests.support.pool import Ranks, group_of

FOUR = (0, 1, 2, 3)
EXCHANGES = ("direct", "hybrid")


def over(members: tuple[int, ...], nodes: int) -> Runtime | None:
    group = group_of(members)
    return group and Runtime(group, topology=Topology.split(len(members), nodes), timeout=30.0)


def is_right(rt: Runtime, mine: Layer) -> bool:
    """Whether a layer gives the right bits with both exchanges."""
    return all(torch.equal(mine.but(plan=Plan(exchange=exchange)).run(rt), mine.y) for exchange in EXCHANGES)


def with_tokens(nodes: int, counts: list[list[int]]) -> list[bool] | None:
    rt = over(FOUR, nodes)
    if rt is None:
        return None
    with rt:
        return [is_right(rt, layer_of(rt, tokens=tokens[rt.rank])) for tokens in counts]


@pytest.mark.parametrize("nodes", [1, 2])
def test_unequal_token_counts(ranks: Ranks, nodes: int) -> None:
    counts = [[0, 0, 0, 0], [0, 5, 0, 3], [5, 0, 0, 0], [0, 1, 257, 17], [4096, 1, 1, 1], [1, 1, 1, 1], [64, 17, 64, 0]]
    assert ranks.run(with_tokens, nodes, counts)[:4] == [[True] * len(counts)] * 4


def test_sweep_of_token_counts(ranks: Ranks) -> None:
    """Powers of two, and one more or less: the sizes of tiles, steps and chunks."""
    sizes = sorted({max(0, (1 << power) + offset) for power in range(11) for offset in (-1, 0, 1)})
    counts = [[size] * 4 for size in sizes]
    assert ranks.run(with_tokens, 2, counts)[:4] == [[True] * len(counts)] * 4


def to_one_expert(expert: int, rounds: int) -> bool | None:
    """Every token to one expert: three of four ranks get no row."""
    rt = over(FOUR, 2)
    if rt is None:
        return None
    with rt:
        mine = layer_of(rt, tokens=30)
        mine = mine.but(topk_idx=torch.full_like(mine.topk_idx, expert))
        return all(is_right(rt, mine) for _ in range(rounds))


@pytest.mark.parametrize("expert", [0, 3, 7])
def test_all_tokens_to_one_expert(ranks: Ranks, expert: int) -> None:
    assert ranks.run(to_one_expert, expert, 20)[:4] == [True] * 4


def without_expert() -> list[bool] | None:
    """Each expert in turn gets no token."""
    rt = over(FOUR, 2)
    if rt is None:
        return None
    with rt:
        mine = layer_of(rt, tokens=60)
        missing = [mine.but(topk_idx=torch.where(mine.topk_idx == expert, -1, mine.topk_idx)) for expert in range(8)]
        return [is_right(rt, one) for one in missing]


def test_any_expert_may_be_without_tokens(ranks: Ranks) -> None:
    assert ranks.run(without_expert)[:4] == [[True] * 8] * 4


def many_choices(topk: int, num_experts: int) -> bool | None:
    """A token goes to more experts than a rank holds, and perhaps to some twice."""
    rt = over(FOUR, 2)
    if rt is None:
        return None
    with rt:
        topk_idx = (torch.arange(6 * topk).view(6, topk) + rt.rank) % num_experts
        weights = torch.ones(6, topk)
        x = torch.arange(6 * 8.0).view(6, 8)
        right = []
        for exchange in EXCHANGES:
            received, handle = rt.dispatch(x, Routing(topk_idx, weights), num_experts, plan=Plan(exchange=exchange))
            right.append(torch.equal(rt.combine(received.rows, handle, weighted=True), topk * x))
        return all(right)


@pytest.mark.parametrize(("topk", "num_experts"), [(33, 40), (16, 896), (40, 8)])
def test_many_choices(ranks: Ranks, topk: int, num_experts: int) -> None:
    assert ranks.run(many_choices, topk, num_experts)[:4] == [True] * 4


def on_ranks(members: tuple[int, ...], nodes: int) -> bool | None:
    rt = over(members, nodes)
    if rt is None:
        return None
    with rt:
        return works(rt, tokens=40) and is_right(rt, layer_of(rt, tokens=7))


@pytest.mark.parametrize(("num_ranks", "nodes"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (5, 1), (5, 2), (6, 4)])
def test_any_number_of_ranks(ranks: Ranks, num_ranks: int, nodes: int) -> None:
    assert ranks.run(on_ranks, tuple(range(num_ranks)), nodes)[:num_ranks] == [True] * num_ranks


def uneven(num_experts: int, num_ranks: int) -> tuple[int, list[int]] | None:
    """How many experts this rank has, and how many rows each got when every rank has chosen every expert once."""
    rt = over(tuple(range(num_ranks)), 1)
    if rt is None:
        return None
    with rt:
        topk_idx = torch.arange(num_experts).view(-1, 1)
        x = torch.ones(num_experts, 4)
        received, handle = rt.dispatch(x, Routing(topk_idx, torch.ones(num_experts, 1)), num_experts)
        assert torch.equal(rt.combine(received.rows, handle, weighted=True), x)
        return len(received.num_tokens_per_expert), received.num_tokens_per_expert.tolist()


@pytest.mark.parametrize(("num_experts", "shares"), [(256, [86, 85, 85]), (10, [3, 3, 2, 2]), (2, [1, 1, 0])])
def test_experts_that_do_not_divide(ranks: Ranks, num_experts: int, shares: list[int]) -> None:
    outcomes = ranks.run(uneven, num_experts, len(shares))[: len(shares)]
    assert outcomes == [(share, [len(shares)] * share) for share in shares]


def test_identity_ids_have_their_own_range() -> None:
    """Ids behind the experts need no slot and index no table; one further is an error."""
    placement = Placement.even(4, 1, num_identity=2)
    with Runtime() as rt:
        x = torch.arange(8.0).view(2, 4)
        routing = Routing(torch.tensor([[4, -1], [5, 5]]), torch.ones(2, 2))
        received, handle = rt.dispatch(x, routing, placement)
        assert len(received.rows) == 0
        y = rt.combine(received.rows, handle, weighted=True)
        assert torch.equal(y, x * torch.tensor([[1.0], [2.0]]))
        with pytest.raises(ValueError, match=r"topk_idx\[0, 0\] is 6; allowed: 0..5"):
            rt.dispatch(x, Routing(torch.full((2, 1), 6), torch.ones(2, 1)), placement)
