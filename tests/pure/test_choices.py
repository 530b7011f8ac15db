"""`Choices`: chances against every set there is, and against routings drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise, permutations

import pytest
import torch
from torch import Tensor

from moeloom.plan.choices import Choices, Recorded, Skewed, Uniform
from moeloom.plan.problem import bounds

Group = tuple[int, int]


def groups_of(ends: Sequence[int]) -> list[Group]:
    return list(pairwise([0, *ends]))


def reached_by(ids: Sequence[int], group: Group) -> bool:
    return any(group[0] <= expert < group[1] for expert in ids)


def ends_of(num_experts: int, generator: random.Random) -> list[int]:
    """Groups of any sizes, empty ones too, that cover all experts."""
    return sorted([num_experts, *(generator.randint(0, num_experts) for _ in range(3))])


def shares(ids: Tensor, ends: Sequence[int]) -> list[float]:
    """Of drawn `ids [N, K]`, for each group the share of rows that reach it."""
    return [float(((ids >= begin) & (ids < end)).any(1).double().mean()) for begin, end in groups_of(ends)]


def assert_drawn(choices: Choices, ids: Tensor, num_experts: int, ends: Sequence[int]) -> None:
    """Within four and a half standard errors of the sample (there are hundreds of numbers)."""
    num_topk = ids.shape[1]
    rows = len(ids)
    each = range(1, num_experts + 1)
    expected = [*choices.chances(num_experts, num_topk), *choices.reached(ends, num_experts, num_topk)]
    for chance, share in zip(expected, [*shares(ids, each), *shares(ids, ends)], strict=True):
        assert abs(chance - share) <= 4.5 * (max(chance * (1 - chance), 0.0) / rows) ** 0.5 + 1e-5


# ---- uniform


@pytest.mark.parametrize("num_experts", [1, 2, 3, 5, 8, 10])
def test_uniform_is_the_count_over_all_sets(num_experts: int) -> None:
    generator = random.Random(num_experts)
    for num_topk in range(1, num_experts + 1):
        sets = list(combinations(range(num_experts), num_topk))
        for ends in (ends_of(num_experts, generator), bounds(num_experts, 4), list(range(1, num_experts + 1))):
            expected = [sum(reached_by(ids, group) for ids in sets) / len(sets) for group in groups_of(ends)]
            assert Uniform().reached(ends, num_experts, num_topk) == pytest.approx(expected, abs=1e-12)
        each = [sum(expert in ids for ids in sets) / len(sets) for expert in range(num_experts)]
        assert Uniform().chances(num_experts, num_topk) == pytest.approx(each, abs=1e-12)


@pytest.mark.parametrize(("num_experts", "num_topk"), [(16, 2), (64, 6), (256, 8)])
def test_uniform_is_drawn_without_replacement(num_experts: int, num_topk: int) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    ids = torch.rand(20_000, num_experts, generator=generator).topk(num_topk).indices
    assert_drawn(Uniform(), ids, num_experts, bounds(num_experts, 5))


# ---- skewed


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.2, 3.0])
@pytest.mark.parametrize(("num_experts", "num_topk"), [(4, 1), (4, 3), (6, 2), (7, 4)])
def test_skewed_is_the_sum_over_all_orders_of_drawing(num_experts: int, num_topk: int, exponent: float) -> None:
    """The first with chance w / sum of w, the next the same among those that are left."""
    generator = random.Random(num_topk)
    order = list(range(num_experts))
    generator.shuffle(order)
    weights = [(place + 1) ** -exponent for place in order]
    chance_of = {}
    for drawn in permutations(range(num_experts), num_topk):
        chance, left = 1.0, sum(weights)
        for expert in drawn:
            chance, left = chance * weights[expert] / left, left - weights[expert]
        chance_of[drawn] = chance
    choices = Skewed(exponent, tuple(order))
    each = [sum(chance for drawn, chance in chance_of.items() if e in drawn) for e in range(num_experts)]
    assert choices.chances(num_experts, num_topk) == pytest.approx(each, abs=1e-5)
    for ends in (ends_of(num_experts, generator), bounds(num_experts, 2), bounds(num_experts, 9)):
        expected = [sum(c for drawn, c in chance_of.items() if reached_by(drawn, group)) for group in groups_of(ends)]
        assert choices.reached(ends, num_experts, num_topk) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("num_experts", "num_topk", "exponent"),
    [(8, 2, 0.5), (8, 6, 1.0), (16, 1, 1.2), (32, 4, 0.8), (64, 8, 1.0), (128, 8, 1.2), (256, 8, 0.5), (256, 1, 1.0)],
)
def test_skewed_is_drawn_without_replacement(num_experts: int, num_topk: int, exponent: float) -> None:
    """Those with the largest log weight + Gumbel noise are drawn without replacement."""
    generator = torch.Generator().manual_seed(num_experts + num_topk)
    order = torch.randperm(num_experts, generator=generator)
    noise = -torch.empty(20_000, num_experts).exponential_(generator=generator).log()
    ids = (noise - exponent * (order + 1).log()).topk(num_topk).indices
    assert_drawn(Skewed(exponent, tuple(order.tolist())), ids, num_experts, bounds(num_experts, 4))


@pytest.mark.parametrize(("num_experts", "num_topk"), [(5, 1), (64, 8), (32, 31), (48, 24), (256, 8)])
def test_skewed_by_nothing_is_uniform(num_experts: int, num_topk: int) -> None:
    for parts in (1, 3, num_experts):
        ends = bounds(num_experts, parts)
        uniform = Uniform().reached(ends, num_experts, num_topk)
        assert Skewed(0.0).reached(ends, num_experts, num_topk) == pytest.approx(uniform, abs=1e-5)


def test_skewed_places() -> None:
    """The place decides, not the id; without an order each place is taken once, and the popular ones are apart."""
    chances = Skewed(1.0, (2, 0, 3, 1)).chances(4, 2)
    assert chances[1] > chances[3] > chances[0] > chances[2]
    shuffled = Skewed(1.0).chances(64, 8)
    in_order = Skewed(1.0, tuple(range(64))).chances(64, 8)
    assert sorted(shuffled, reverse=True) == pytest.approx(in_order, abs=1e-9)
    assert sum(shuffled) == pytest.approx(8, abs=1e-4)
    popular = sorted(range(64), key=lambda e: -shuffled[e])[:8]
    assert len({expert // 16 for expert in popular}) > 2


# ---- recorded


def test_recorded_is_counted() -> None:
    generator = random.Random(3)
    rows = tuple(tuple(generator.randint(-1, 9) for _ in range(3)) for _ in range(200))
    choices = Recorded(rows)
    assert any(len(set(row)) < 3 for row in rows)
    flat = [expert for row in rows for expert in row]
    assert choices.chances(10, 3) == [flat.count(expert) / 200 for expert in range(10)]
    for ends in (bounds(10, 4), bounds(10, 12), [0, 0, 7, 10]):
        expected = [sum(reached_by(row, group) for row in rows) / 200 for group in groups_of(ends)]
        assert choices.reached(ends, 10, 3) == expected


def test_recorded_by_hand() -> None:
    choices = Recorded(((0, 0), (-1, 3), (-1, -1), (1, 2)))
    assert choices.chances(4, 2) == [0.5, 0.25, 0.25, 0.25]  # the first token names expert 0 twice
    assert choices.reached([2, 4], 4, 2) == [0.5, 0.5]


# ---- all


@pytest.mark.parametrize("choices", [Uniform(), Skewed(1.0)])
@pytest.mark.parametrize("num_topk", [4, 5, 100])
def test_with_as_many_choices_as_experts_all_are_reached(choices: Choices, num_topk: int) -> None:
    assert list(choices.chances(4, num_topk)) == [1.0] * 4
    assert choices.reached([2, 2, 4], 4, num_topk) == [1.0, 0.0, 1.0]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="rows is empty; a recorded routing needs at least one token"):
        Recorded(())
    for ask in (Recorded(((0, 4),)).chances, lambda *shape: Recorded(((0, 4),)).reached([4], *shape)):
        with pytest.raises(ValueError, match=r"rows name expert 4; allowed: 0\.\.3, or -1 for none"):
            ask(4, 2)
    for ask in (Skewed(1.0, (0, 1)).chances, lambda *shape: Skewed(1.0, (0, 1)).reached([4], *shape)):
        with pytest.raises(ValueError, match="order has 2 places; one for each of 4 experts is needed"):
            ask(4, 2)


def test_they_say_what_they_are() -> None:
    said = [str(choices) for choices in (Uniform(), Skewed(0.5), Recorded(((0,), (1,))))]
    assert said == ["uniform", "skewed, exponent 0.5", "as recorded, 2 tokens"]
