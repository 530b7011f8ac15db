"""Ranks that do not do the same: other operations, other handles, other construction. All are told, and go on."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist

from moeloom import Placement, Routing, Runtime, Topology
from tests.support.failure import FOUR, Attempt, attempt, layer_of, over_four, the_same, works
from tests.support.pool import Ranks, group_of

SOON = 5.0  # much less than the deadline of a test that uses it

on_nodes = pytest.mark.parametrize("nodes", [1, 2])


def combine_differently(rt: Runtime, how: str) -> None:
    """Two handles; rank 0 does something else than the others."""
    mine = layer_of(rt)
    flows = [rt.dispatch(mine.x, mine.routing, 8) for _ in range(2)]
    received, handle = flows[rt.rank == 0 and how == "handle"]
    if rt.rank == 0 and how == "operation":
        rt.dispatch(mine.x, mine.routing, 8)
    elif rt.rank == 0 and how == "payload":
        rt.dispatch(mine.x, handle)
    else:
        rt.combine(received.rows, handle, weighted=rt.rank == 0 or how != "weighted")


MISMATCHES = {
    "operation": ("MoeloomError", "operation #{}: rank 0 called dispatch, rank 1 called combine"),
    "payload": ("MoeloomError", "operation #{}: rank 0 called dispatch, rank 1 called combine"),
    "handle": ("ValueError", "handle of operation differs between ranks: rank 0 has {1}, rank 1 has {0}"),
    "weighted": ("ValueError", "combine #{}: weighted differs between ranks: rank 0 has True, rank 1 has False"),
}


def mismatch(nodes: int) -> list[tuple[Attempt, bool]] | None:
    rt = over_four(nodes)
    if rt is None:
        return None
    with rt:
        return [(attempt(combine_differently, rt, how), works(rt)) for how in MISMATCHES]


@on_nodes
def test_mismatched_operations(ranks: Ranks, nodes: int) -> None:
    results = ranks.run(mismatch, nodes)[:4]
    for number, (how, (error, text)) in enumerate(MISMATCHES.items()):
        attempts, usable = zip(*(result[number] for result in results), strict=True)
        told = the_same(list(attempts))
        first = 5 * number + 1  # two dispatches, the mismatch, then dispatch and combine of the correct call
        numbers = (first, first + 1) if how == "handle" else (first + 2,)
        assert told.error == error and text.format(*numbers) in told.text, told
        assert all(usable), how


def construct_differently(arguments: list[dict]) -> tuple[Attempt, bool] | None:
    group = group_of(FOUR)
    if group is None:
        return None
    told = attempt(lambda: Runtime(group, timeout=20.0, **arguments[dist.get_rank()]))
    with Runtime(group) as rt:
        return told, works(rt)


def on_ranks(name: str, values: tuple) -> list[dict]:
    """One argument, with its value on each rank."""
    return [{} if value is None else {name: value} for value in values]


@pytest.mark.parametrize(
    ("name", "values", "error", "text"),
    [
        (
            "max_tokens",
            (256, 256, 64, 256),
            "ValueError",
            "max_tokens differs between ranks: rank 0 has 256, rank 2 has 64",
        ),
        (
            "topology",
            tuple(Topology.split(4, nodes) for nodes in (2, 1, 2, 2)),
            "ValueError",
            "topology differs between",
        ),
        ("max_tokens", (None, None, 0, None), "ValueError", "rank 2: max_tokens is 0; it must be at least 1"),
        (
            "backend",
            (None, None, None, "tpu"),
            "CapabilityError",
            "rank 3: backend 'tpu' is not in this version; allowed",
        ),
        (
            "topology",
            (None, Topology.split(3, 1), None, None),
            "ValueError",
            "rank 1: topology is for 3 ranks; the group",
        ),
    ],
)
def test_different_construction(ranks: Ranks, name: str, values: tuple, error: str, text: str) -> None:
    attempts, usable = zip(*ranks.run(construct_differently, on_ranks(name, values))[:4], strict=True)
    told = the_same(list(attempts))
    assert told.error == error and text in told.text, told
    assert max(each.seconds for each in attempts) < SOON
    assert all(usable)


def different_placements(nodes: int) -> tuple[Attempt, bool] | None:
    rt = over_four(nodes)
    if rt is None:
        return None
    with rt:
        mine = layer_of(rt)
        placement = Placement.from_slots([[0], [1], [2], [3]] if rt.rank != 2 else [[1], [0], [2], [3]])
        routing = Routing(mine.topk_idx.clamp(max=3), mine.topk_weights)
        return attempt(lambda: rt.dispatch(mine.x, routing, placement)), works(rt)


def test_different_placements(ranks: Ranks) -> None:
    attempts, usable = zip(*ranks.run(different_placements, 2)[:4], strict=True)
    told = the_same(list(attempts))
    assert told.error == "ValueError" and re.search("placement differs .* rank 0 has .* rank 2 has", told.text), told
    assert all(usable)
