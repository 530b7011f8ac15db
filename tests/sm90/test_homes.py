"""Which slot serves a pair, as kernels take it: what `Placement.locate` says. Without a GPU."""

from __future__ import annotations

import random

import pytest
import torch

from moeloom import Placement
from moeloom.backends.sm90.homes import Homes, Ranks, Served

CPU = torch.device("cpu")
PLACEMENTS = {
    "even": Placement.even(8, 4),
    "uneven": Placement.even(10, 3),
    "in another order": Placement.from_slots([[5, 1], [4, 0, 2], [3]]),
    "a rank without experts": Placement.from_slots([[1, 0], [], [2]]),
    "identity experts": Placement.even(7, 2, num_identity=3),
    "replicas": Placement.from_slots([[0, 1, 2], [2, 3, 0], [2, 4, 5]]),
    "replicas on one rank": Placement.from_slots([[0, 0, 1], [2, 1, 0]]),
    "replicas and identity experts": Placement.from_slots([[0, 1], [1, 2], [3, 0]], num_identity=2),
}
each_placement = pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())
each_dtype = pytest.mark.parametrize("dtype", [torch.int32, torch.int64])


def drawn(placement: Placement, seed: int, tokens: int = 40, topk: int = 5) -> torch.Tensor:
    """Ids of all kinds that are allowed, some of them more than once in a token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, placement.num_ids, (tokens, topk), generator=generator)


def located(placement: Placement, rank: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    known = ids.masked_fill(ids >= placement.num_experts, -1)
    return placement.locate(known, rank, torch.arange(len(ids)))


@each_placement
@each_dtype
def test_the_slots_that_serve(placement: Placement, dtype: torch.dtype) -> None:
    for rank in range(placement.num_ranks):
        served = Served(placement, rank, CPU)
        assert served.num_local == max(map(len, placement.slots))
        assert len(served.expert_rank) == served.num_experts and served.expert_rank.dtype == torch.int32
        ids = drawn(placement, rank)
        found = served.ids(ids.to(dtype))
        ranks, slots = located(placement, rank, ids)
        here = found >= 0
        assert torch.equal(here, ranks >= 0)
        assert torch.equal(served.expert_rank[found[here].long()].long(), ranks[here])
        assert torch.equal(served.expert_slot[found[here].long()].long(), slots[here])


@each_placement
@each_dtype
def test_each_rank_gets_a_token_once(placement: Placement, dtype: torch.dtype) -> None:
    served = Served(placement, 1, CPU)
    ids = drawn(placement, 7)
    ranks, _ = located(placement, 1, ids)
    found = served.ranks.ids(served.ids(ids.to(dtype))).tolist()
    for got, row in zip(found, ranks.tolist(), strict=True):
        assert got == [rank if rank not in row[:k] else -1 for k, rank in enumerate(row)]
    assert served.ranks.num_local == 1 and served.ranks.expert_rank.tolist() == list(range(placement.num_ranks))


@each_placement
@each_dtype
def test_what_is_out_of_range_stays_so_and_is_named(placement: Placement, dtype: torch.dtype) -> None:
    """The kernel sees a number that it refuses, of which `given` makes the caller's."""
    served = Served(placement, 0, CPU)
    wrong = [-2, -77, placement.num_ids, placement.num_ids + 5, (1 << 31) - 1, -(1 << 31)]
    ids = torch.tensor([wrong], dtype=dtype)
    homes: list[tuple[Homes, torch.Tensor]] = [
        (served, served.ids(ids)),
        (served.ranks, served.ranks.ids(served.ids(ids))),
    ]
    for seen_by, found in homes:
        for given, seen in zip(wrong, found[0].tolist(), strict=True):
            assert seen < -1 or seen >= seen_by.num_experts, (given, seen)
            if abs(given) < 1 << 30:
                assert seen_by.given(seen) == given


@each_placement
def test_ids_beyond_32_bits_do_not_become_others(placement: Placement) -> None:
    served = Served(placement, 0, CPU)
    ids = torch.tensor([[(1 << 32) + 1, -(1 << 32) + 1, 1 << 40, 1]])
    slots = served.ids(ids)
    assert slots[0, 3] >= 0 and all(not 0 <= i < served.num_experts for i in slots[0, :3].tolist())
    ranks = served.ranks.ids(slots)
    assert ranks[0, 3] >= 0 and all(not 0 <= i < placement.num_ranks and i != -1 for i in ranks[0, :3].tolist())


def test_many_experts_are_not_slow() -> None:
    slots = list(range(4096)) + random.Random(1).sample(range(4096), 512)
    placement = Placement.from_slots([slots[r::8] for r in range(8)])
    served = Served(placement, 3, CPU)
    ids = drawn(placement, 3, tokens=100, topk=8)
    ranks, _ = located(placement, 3, ids)
    found = served.ids(ids)
    assert torch.equal(torch.where(found >= 0, served.expert_rank[found.clamp(min=0).long()].long(), -1), ranks)


def test_no_tokens() -> None:
    served = Served(PLACEMENTS["replicas"], 2, CPU)
    found = served.ids(torch.empty(0, 4, dtype=torch.int64))
    assert found.shape == (0, 4) and isinstance(served.ranks, Ranks) and served.ranks.ids(found).shape == (0, 4)
