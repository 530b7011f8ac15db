"""`Placement`: where experts live, and which replica serves a token."""

from __future__ import annotations

import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moeloom.placement
from moeloom import Placement

Slots = list[list[int]]


def test_the_examples_of_the_docstrings_run() -> None:
    result = doctest.testmod(moeloom.placement)
    assert result.attempted >= 1 and result.failed == 0


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "sizes"),
    [(256, 3, [86, 85, 85]), (8, 4, [2, 2, 2, 2]), (2, 5, [1, 1, 0, 0, 0]), (7, 1, [7]), (1025, 2, [513, 512])],
)
def test_even_is_consecutive_and_the_first_ranks_take_the_remainder(
    num_experts: int, num_ranks: int, sizes: list[int]
) -> None:
    placement = Placement.even(num_experts, num_ranks)
    assert [placement.num_local(rank) for rank in range(num_ranks)] == sizes
    assert [expert for rank in placement.slots for expert in rank] == list(range(num_experts))
    assert (placement.num_ranks, placement.num_experts, placement.num_ids) == (num_ranks, num_experts, num_experts)


def test_from_slots_counts_the_experts() -> None:
    placement = Placement.from_slots([[2, 0], [], [1, 2, 2]], num_identity=3)
    assert placement.slots == ((2, 0), (), (1, 2, 2))
    assert (placement.num_experts, placement.num_ids, placement.num_ranks) == (3, 6, 3)
    assert [placement.num_local(rank) for rank in range(3)] == [2, 0, 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement.from_slots([[0, 2], [3]]), r"slots leave out experts \[1\]; each of 4 needs a slot"),
        (lambda: Placement(((0,), (1,)), 4), r"slots leave out experts \[2, 3\]"),
        (lambda: Placement(((0, 7), (1, -1)), 2), r"slots name experts \[-1, 7\]; allowed: 0\.\.1"),
        (lambda: Placement.even(4, 2, num_identity=-1), "num_identity is -1; it must be 0 or more"),
        (lambda: Placement.even(0, 2), "num_experts is 0, num_ranks is 2; both must be at least 1"),
        (lambda: Placement.even(2, 0), "num_experts is 2, num_ranks is 0"),
        (lambda: Placement.from_slots([[], []]), "num_experts is 0; it must be at least 1"),
        (lambda: Placement(((), ()), 0, 4), "num_experts is 0; it must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def homes_of(slots: Slots, expert: int) -> list[tuple[int, int]]:
    return [(rank, slot) for rank, held in enumerate(slots) for slot, one in enumerate(held) if one == expert]


@st.composite
def tables(draw: st.DrawFn) -> tuple[Slots, int]:
    """A table in which every expert has one to four homes, anywhere, and a number of identity experts."""
    num_experts, num_ranks = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    slots: Slots = [[] for _ in range(num_ranks)]
    for expert in range(num_experts):
        for _ in range(draw(st.integers(1, 4))):
            slots[draw(st.integers(0, num_ranks - 1))].append(expert)
    return [draw(st.permutations(held)) for held in slots], draw(st.integers(0, 2))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(tables(), st.data())
def test_locate_is_what_loops_say(table: tuple[Slots, int], draw: st.DataObject) -> None:
    slots, num_identity = table
    placement = Placement.from_slots(slots, num_identity=num_identity)
    row = st.lists(st.integers(-1, placement.num_ids - 1), min_size=3, max_size=3)
    ids = draw.draw(st.lists(row, max_size=8))
    sources = draw.draw(st.lists(st.integers(0, 5), min_size=len(ids), max_size=len(ids)))
    tokens = draw.draw(st.lists(st.integers(0, 1000), min_size=len(ids), max_size=len(ids)))
    topk_idx = torch.tensor(ids, dtype=torch.int64).reshape(-1, 3)
    rank, slot = placement.locate(
        topk_idx, torch.tensor(sources, dtype=torch.int64), torch.tensor(tokens, dtype=torch.int64)
    )
    wanted = []
    for experts, source, token in zip(ids, sources, tokens, strict=True):
        homes = [homes_of(slots, expert) for expert in experts]
        wanted.append([home[(source + token) % len(home)] if home else (-1, -1) for home in homes])
    assert torch.stack([rank, slot], dim=2).tolist() == [[list(pair) for pair in row] for row in wanted]
    assert rank.dtype == slot.dtype == torch.int64
    identity = [[expert >= placement.num_experts for expert in row] for row in ids]
    assert placement.is_identity(topk_idx).tolist() == identity


def test_one_source_for_all_tokens_is_the_same_source_for_each() -> None:
    placement = Placement.from_slots([[0, 1], [1, 0, 0]])
    ids, token = torch.tensor([[0, 1], [1, 0], [-1, 0]]), torch.arange(3)
    for one, each in zip(
        placement.locate(ids, 2, token), placement.locate(ids, torch.full((3,), 2), token), strict=True
    ):
        assert torch.equal(one, each)


def test_each_expert_of_a_token_has_one_home_and_neighbours_take_turns() -> None:
    placement = Placement.from_slots([[0, 1, 0], [1], [0]])  # 0 in three places, two of them on rank 0
    token = torch.arange(6)
    rank, slot = placement.locate(torch.tensor([[0, 1]] * 6), 1, token)
    assert list(zip(rank[:, 0].tolist(), slot[:, 0].tolist(), strict=True)) == [(0, 2), (2, 0), (0, 0)] * 2
    assert list(zip(rank[:, 1].tolist(), slot[:, 1].tolist(), strict=True)) == [(1, 0), (0, 1)] * 3


def test_no_tokens() -> None:
    rank, slot = Placement.even(4, 2).locate(torch.empty(0, 3, dtype=torch.int64), 0, torch.arange(0))
    assert rank.shape == slot.shape == (0, 3)


def test_fingerprints_tell_placements_apart() -> None:
    def made() -> list[Placement]:
        slots = ([[0, 1], [2, 3]], [[0, 1, 2], [3]], [[1, 0], [2, 3]], [[0, 1], [2, 3], []], [[0, 1], [2, 3, 0]])
        return [Placement.from_slots(table) for table in slots] + [Placement.even(4, 2, num_identity=1)]

    assert len({placement.fingerprint for placement in made()}) == 6
    assert [one.fingerprint for one in made()] == [one.fingerprint for one in made()]
    assert made()[0] == Placement.even(4, 2) and made()[0].fingerprint == Placement.even(4, 2).fingerprint
