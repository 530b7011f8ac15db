"""`Runtime.plan`: without agreement a function of its arguments, with it one plan for all ranks."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from moeloom import FP8, FP32, Plan, Routing, Runtime, machine_cache
from moeloom.plan.cpu import BUILT_IN
from tests.support.failure import HIDDEN, LOCAL_EXPERTS, TOPK, Attempt, attempt, layer_of, over_four, the_same, works
from tests.support.pool import Ranks

on_nodes = pytest.mark.parametrize("nodes", [1, 2])
SHAPE = {"hidden": HIDDEN, "num_experts": 4 * LOCAL_EXPERTS, "num_topk": TOPK, "intermediate": HIDDEN, "recipe": FP32}
SOON = 5.0


def context_of(plan: Plan) -> str:
    """The line about the problem."""
    return next(line for line in plan.context if line.startswith("problem: "))


# ---- what is agreed


def agree_on(nodes: int, tokens: list[int | None]) -> tuple[Plan, Plan, bool] | None:
    """Each rank has its own number of tokens."""
    rt = over_four(nodes)
    if rt is None:
        return None
    with rt:
        agreed = rt.plan(**SHAPE, num_tokens=tokens[rt.rank], agree=True)
        most = None if None in tokens else max(token or 0 for token in tokens)
        return agreed, rt.plan(**SHAPE, num_tokens=most), works(rt)


@on_nodes
@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        ([5, 5, 5, 5], "5 tokens"),
        ([1, 700, 3, 0], "700 tokens"),
        ([0, 0, 0, 0], "0 tokens"),
        ([1, None, 3, 4096], "any number of tokens"),
    ],
)
def test_the_largest_number_of_tokens_counts(ranks: Ranks, nodes: int, tokens: list[int | None], shown: str) -> None:
    found = ranks.run(agree_on, nodes, tokens)[:4]
    for agreed, alone, usable in found:
        assert context_of(agreed).startswith(f"problem: {shown} per rank")
        assert agreed.explain() == alone.explain() == found[0][0].explain()
        assert agreed.seconds == agreed.chosen.seconds and f"4 ranks on {nodes} node(s)" in agreed.explain()
        assert usable


def agree_differently(nodes: int, changes: list[dict[str, Any]]) -> tuple[Attempt, bool] | None:
    """Each rank changes the problem in its own way."""
    rt = over_four(nodes)
    if rt is None:
        return None
    with rt:
        if changes[rt.rank] == changes[0]:
            time.sleep(0.1)
        told = attempt(lambda: rt.plan(**{**SHAPE, "num_tokens": 5, **changes[rt.rank]}, agree=True))
        return told, works(rt) and rt.plan(**SHAPE, agree=True) == rt.plan(**SHAPE)


@on_nodes
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden": 9}, "hidden 9"),
        ({"num_experts": 9}, "9 experts"),
        ({"num_topk": 1}, "top-1"),
        ({"intermediate": 9}, "intermediate 9"),
        ({"intermediate": None}, "hidden 8, 8 experts"),
        ({"recipe": FP8}, "recipe fp8/per_rank"),
        ({"recipe": FP32.with_reduction("per_slot")}, "recipe fp32/per_slot"),
        ({"phase": "decode"}, "decode"),
    ],
)
def test_different_problems_are_the_same_error_everywhere(ranks: Ranks, nodes: int, change: dict, text: str) -> None:
    attempts, usable = zip(*ranks.run(agree_differently, nodes, [{}, {}, change, change])[:4], strict=True)
    told = the_same(list(attempts))
    assert told.error == "ValueError"
    assert told.text.startswith("plan: the problem differs between ranks: rank 0 has any number of tokens per rank")
    assert f"rank 2 has any number of tokens per rank, hidden {change.get('hidden', 8)}" in told.text
    assert text in told.text.split("rank 2 has")[1]
    assert all(usable) and max(each.seconds for each in attempts) < SOON


@on_nodes
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_tokens": -1}, "rank 1: num_tokens is -1; it must be 0 or more"),
        ({"phase": "serve"}, "rank 1: phase is 'serve'; allowed: train, prefill, decode"),
        ({"hidden": 0}, "rank 1: hidden is 0; it must be at least 1"),
    ],
)
def test_a_wrong_problem_on_one_rank_is_heard_by_all(ranks: Ranks, nodes: int, change: dict, text: str) -> None:
    attempts, usable = zip(*ranks.run(agree_differently, nodes, [{}, change, {}, {}])[:4], strict=True)
    told = the_same(list(attempts))
    assert told.error == "ValueError" and told.text.startswith(text), told
    assert all(usable) and max(each.seconds for each in attempts) < SOON


def other_call(nodes: int) -> tuple[Attempt, bool] | None:
    """Rank 1 runs the layer where the others plan."""
    rt = over_four(nodes)
    if rt is None:
        return None
    with rt:
        call = layer_of(rt).run if rt.rank == 1 else lambda rt: rt.plan(**SHAPE, agree=True)
        return attempt(call, rt), works(rt)


@on_nodes
def test_agreeing_is_a_collective_like_others(ranks: Ranks, nodes: int) -> None:
    attempts, usable = zip(*ranks.run(other_call, nodes)[:4], strict=True)
    told = the_same(list(attempts))
    assert "rank 0 called plan, rank 1 called dispatch" in told.text, told
    assert all(usable)


def no_plan(nodes: int) -> tuple[Attempt, Attempt, bool] | None:
    rt = over_four(nodes)
    if rt is None:
        return None
    with rt:
        wish = {**SHAPE, "recipe": FP8, "phase": "train"}
        return attempt(lambda: rt.plan(**wish)), attempt(lambda: rt.plan(**wish, agree=True)), works(rt)


def test_what_cannot_be_planned_is_said_everywhere(ranks: Ranks) -> None:
    found = ranks.run(no_plan, 2)[:4]
    told = the_same([each for alone, agreed, _ in found for each in (alone, agreed)])
    assert told.error == "CapabilityError" and "recipe fp8 has no gradient" in told.text
    assert all(usable for *_, usable in found)


def alone() -> list[str]:
    with Runtime("self") as rt:
        one = rt.plan(**SHAPE, num_tokens=7, agree=True)
        return [one.explain(), rt.plan(**SHAPE, num_tokens=7).explain()]


def test_one_rank_agrees_with_itself() -> None:
    first, second = alone()
    assert first == second and "1 ranks on 1 node(s)" in first


# ---- measurements


def learn(nodes: int, plans: list[Plan], calls: int) -> list[str] | None:
    """Explanations before and after runs of some plans; rank 2 takes its time in each."""
    rt = over_four(nodes, max_tokens=8)
    if rt is None:
        return None
    with rt:
        mine = layer_of(rt)
        wish = {**SHAPE, "num_tokens": 8}
        texts = [rt.plan(**wish).explain()]
        for plan in plans:
            for _ in range(calls):
                mine.but(plan=plan).run(rt)
        texts.append(rt.plan(**wish).explain())  # nothing is agreed on yet
        texts.append(rt.plan(**wish, agree=True).explain())
        texts.append(rt.plan(**wish).explain())  # known from now on
        texts.append(rt.plan(**{**wish, "num_tokens": 4000}).explain())
        texts.append(rt.plan(**wish, agree=True).explain())  # nothing new
        return texts


@on_nodes
def test_corrections_are_equal_on_all_ranks(ranks: Ranks, nodes: int) -> None:
    plans = [Plan(), Plan(chunks=2), *([Plan(exchange="hybrid")] if nodes > 1 else [])]
    found = ranks.run(learn, nodes, plans, 3)[:4]
    assert all(texts == found[0] for texts in found)
    before, unlearned, learned, later, other_size, again = found[0]
    assert before == unlearned != learned == later == again
    assert "as measured" not in before + other_size
    lines = " ".join(learned.split())
    assert lines.count("as measured") >= len(plans)


def slow_rank(nodes: int) -> tuple[list[float], str] | None:
    """What each rank measured of a layer in which rank 2 is slow, and the plan that follows."""
    rt = over_four(nodes, max_tokens=8)
    if rt is None:
        return None

    def slow(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return up

    with rt:
        mine = layer_of(rt, tokens=8)
        if rt.rank == 2:
            mine = mine.but(experts=replace(mine.experts, activation=slow))
        rt.moe(mine.x, Routing(mine.topk_idx, mine.topk_weights), mine.experts, plan=Plan())
        wish = {**SHAPE, "num_tokens": 8}
        rt.plan(**wish, agree=True)
        return [rt.plan(**wish).seconds or 0.0], rt.plan(**wish).explain()


@on_nodes
def test_the_slowest_rank_counts(ranks: Ranks, nodes: int) -> None:
    found = ranks.run(slow_rank, nodes)[:4]
    assert all(each == found[0] for each in found)
    assert "x 4.00 as measured" in found[0][1] or found[0][0][0] >= 0.02


# ---- the machine


def with_machine(nodes: int, folders: list[str]) -> tuple[str, str, bool] | None:
    """Each rank has its own cache, and a machine in some."""
    previous = os.environ.get("XDG_CACHE_HOME")
    rank = int(torch.distributed.get_rank())
    os.environ["XDG_CACHE_HOME"] = folders[rank]
    try:
        rt = over_four(nodes)
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if previous is not None:
            os.environ["XDG_CACHE_HOME"] = previous
    if rt is None:
        return None
    with rt:
        return (
            rt.plan(**SHAPE, num_tokens=64).explain(),
            rt.plan(**SHAPE, num_tokens=64, agree=True).explain(),
            works(rt),
        )


@on_nodes
@pytest.mark.parametrize("owner", [0, 2])
def test_all_ranks_plan_with_the_first_ones_machine(
    ranks: Ranks, nodes: int, owner: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [str(tmp_path / str(rank)) for rank in range(6)]
    monkeypatch.setenv("XDG_CACHE_HOME", folders[owner])
    machine_cache.store(replace(BUILT_IN, machine=replace(BUILT_IN.machine, name="measured here")))
    found = ranks.run(with_machine, nodes, folders)[:4]
    for plain, agreed, usable in found:
        assert plain == agreed == found[0][0] and usable
        assert ("machine: measured here" in plain) == (owner == 0)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_corrupt_machine_does_not_keep_a_runtime_from_starting(ranks: Ranks, tmp_path: Any, text: str) -> None:
    folder = tmp_path / "moeloom"
    folder.mkdir()
    (folder / "machine.json").write_text(text)
    for plain, _, usable in ranks.run(with_machine, 1, [str(tmp_path)] * 6)[:4]:
        assert "machine: a CPU that was not measured" in plain and usable
