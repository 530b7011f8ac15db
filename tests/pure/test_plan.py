"""A plan as data: what it may be, what makes two equal, how it is stored, what it says."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from moeloom import BF16, Plan
from moeloom.plan.cost import StageTime
from moeloom.plan.efficiencies import GPU
from moeloom.plan.machines import MACHINES
from moeloom.plan.plan import Candidate
from moeloom.plan.planner import choose
from moeloom.plan.problem import Domains, Problem
from moeloom.plan.strategies import Setting
from moeloom.schedule.chunk_graph import Stage
from moeloom.schedule.simulate import simulate


def made(num_tokens: int | None = 4096, nodes: int = 2, **changes: Any) -> Plan:
    """By the planner; most of its candidates can run."""
    setting = Setting(replace(MACHINES["h100"], **changes), Domains(8 * nodes, nodes), GPU)
    return choose(Problem(num_tokens, 7168, 256, 8, BF16, intermediate=2048), setting)


# ---- what it may be


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline": "relay"}, "pipeline is 'relay'; allowed: split, mega, decode"),
        ({"exchange": "relay"}, "exchange is 'relay'; allowed: direct, hybrid"),
        ({"chunks": 0}, "chunks is 0; it must be an integer of at least 1"),
        ({"chunks": -3}, "chunks is -3; it must be"),
        ({"chunks": 2.0}, r"chunks is 2\.0; it must be an integer"),
        ({"chunks": "2"}, "chunks is '2'; it must be an integer"),
        ({"chunks": None}, "chunks is None; it must be an integer"),
        ({"pipeline": "decode", "chunks": 2}, "chunks is 2; the decode pipeline has fixed shapes and takes 1"),
    ],
)
def test_plans_that_cannot_be(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**arguments)
    with pytest.raises(ValueError, match=message):
        Plan.from_json(arguments)


def test_defaults() -> None:
    plan = Plan()
    assert (plan.pipeline, plan.exchange, plan.chunks) == ("split", "direct", 1)
    assert (plan.chosen, plan.seconds) == (None, None)
    assert plan.explain() == "plan: split, direct (given by the caller)"


def test_names() -> None:
    assert str(Plan()) == "split, direct"
    assert str(Plan("mega", "hybrid", 4)) == "mega, hybrid, 4 chunks"
    for candidate in made().candidates:
        assert candidate.name == str(Plan(candidate.pipeline, candidate.exchange, candidate.chunks))


# ---- equality


def test_plans_are_equal_if_they_run_the_same() -> None:
    plan = made()
    bare = Plan(plan.pipeline, plan.exchange, plan.chunks)
    assert plan == bare and hash(plan) == hash(bare) and plan.candidates and not bare.candidates
    others = [Plan("split", "direct"), Plan("split", "hybrid"), Plan("split", "direct", 2), Plan("mega", "direct")]
    assert len({*others, *(replace(other, reason="mine") for other in others)}) == 4
    assert Plan() != "split, direct" and Plan() is not None


# ---- as JSON


@pytest.mark.parametrize(
    "plan", [Plan(), Plan("mega", "hybrid", 3), made(), made(None), made(memory_bytes=2e9)], ids=str
)
def test_json_and_back(plan: Plan) -> None:
    text = json.dumps(plan.to_json())
    again = Plan.from_json(json.loads(text))
    for field in fields(Plan):
        assert getattr(again, field.name) == getattr(plan, field.name), field.name
    assert again.explain() == plan.explain()
    assert json.dumps(again.to_json()) == text
    assert [type(c) for c in again.candidates] == [Candidate] * len(plan.candidates)
    if again.chosen:
        assert simulate(again.chosen.graph).seconds > 0
        assert all(isinstance(part, StageTime) for part in again.chosen.stages)
        assert all(isinstance(task, Stage) for task in again.chosen.tasks)


WRONG: list[tuple[Any, str]] = [
    ([], "plan has list; allowed: "),
    ("split", "plan has str; allowed: "),
    (None, "plan has NoneType; allowed: "),
    ({"speed": 1}, r"plan has \['speed'\]; allowed: \['candidates', 'chunks', "),
    ({"candidates": 3}, "the plan's data does not fit this version"),
    ({"candidates": [3]}, "does not fit this version"),
    ({"candidates": [{"pipeline": "split"}]}, "does not fit this version: .*exchange"),
    ({"candidates": [{"pipeline": "split", "exchange": "direct", "speed": 1}]}, "does not fit this version: .*speed"),
    ({"candidates": [{"pipeline": "split", "exchange": "direct", "stages": [{}]}]}, "does not fit this version"),
    ({"candidates": [{"pipeline": "split", "exchange": "direct", "tasks": 1}]}, "does not fit this version"),
    ({"context": 3}, "does not fit this version"),
    ({"roofline": 3}, "does not fit this version"),
    ({"roofline": [1.0]}, "does not fit this version"),
    ({"roofline": ["fast", "memory"]}, "could not convert"),
    ({"pipeline": ["split"]}, r"pipeline is \['split'\]; allowed"),
]


@pytest.mark.parametrize(("data", "message"), WRONG)
def test_data_of_another_form(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(data)


def test_changing_the_data_does_not_change_the_plan() -> None:
    plan = made()
    before = json.dumps(plan.to_json())
    data = plan.to_json()
    data["pipeline"] = "decode"
    data["candidates"][0]["seconds"] = 0.0
    assert json.dumps(plan.to_json()) == before


# ---- what it says


def line_of(lines: list[str], name: str) -> str:
    """The one of a candidate: its name is followed by at least one space."""
    found = [line for line in lines if line[2:].startswith(f"{name} ") and line[:1] in " *"]
    assert len(found) == 1, (name, lines)
    return found[0]


@pytest.mark.parametrize("plan", [made(), made(8), made(None, 1), made(memory_bytes=2e9)], ids=str)
def test_explain_shows_every_candidate(plan: Plan) -> None:
    lines = plan.explain().splitlines()
    assert lines[0] == f"plan: {plan} ({plan.reason})"
    assert all(any(line == f"  {context}" for line in lines) for context in plan.context)
    assert all(len(line) <= 160 for line in lines)
    assert sum(line.startswith("* ") for line in lines) == 1
    for candidate in plan.candidates:
        line = line_of(lines, f"{candidate.name:<26}".rstrip())
        assert line.startswith("* ") == (candidate is plan.chosen)
        if candidate.seconds is None:
            assert f"cannot: {candidate.note}" in line
        else:
            assert "MB" in line and ("bound by" in line) == (candidate is plan.chosen)
            assert candidate is plan.chosen or f"{candidate.seconds / plan.seconds:.2f} x as long" in line


def test_explain_says_how_far_the_limit_is() -> None:
    plan = made()
    assert plan.roofline and plan.seconds
    share = plan.roofline[0] / plan.seconds
    line = next(line for line in plan.explain().splitlines() if line.startswith("  roofline: "))
    assert 0 < share <= 1 and line.endswith(f"{share:.0%} of it")


def test_explain_by_hand() -> None:
    stage = StageTime("experts", 3e-3, 1e-3, 0.0, 0.0, 5e-6, 4e-3)
    chosen = Candidate("split", "direct", 1, 4.005e-3, (stage,), memory_bytes=2.5e6)
    slower = replace(chosen, chunks=2, seconds=12.0144e-3)
    refused = Candidate("mega", "direct", note="this backend has no mega pipeline")
    plan = Plan(candidates=(chosen, slower, refused), reason="because", context=("first",), roofline=(2e-3, "scale_up"))
    assert plan.explain().splitlines() == [
        "plan: split, direct (because)",
        "  first",
        "  roofline: 2000.0 us by scale-up; predicted 4005.0 us, 50% of it",
        "  candidate                        time    compute     memory   scale-up  scale-out      waits     memory",
        "* split, direct               4005.0 us  3000.0 us  1000.0 us     0.0 us     0.0 us     5.0 us     2.5 MB"
        "  bound by compute",
        "  split, direct, 2 chunks      12.01 ms  3000.0 us  1000.0 us     0.0 us     0.0 us     5.0 us     2.5 MB"
        "  3.00 x as long, compute",
        "  mega, direct              cannot: this backend has no mega pipeline",
    ]


def test_long_lines_are_broken() -> None:
    note = "assumed: " + ", ".join(f"rate number {number}" for number in range(30))
    plan = Plan(candidates=(Candidate("split", "direct", 1, 1.0, note=note),), context=("word " * 60,))
    lines = plan.explain().splitlines()
    assert max(map(len, lines)) <= 160
    assert " ".join(note.split()) in " ".join(" ".join(lines).split())


def test_a_candidate_adds_up_its_stages() -> None:
    first = StageTime("dispatch", 0.0, 1.0, 2.0, 4.0, 8.0, 12.0)
    second = StageTime("experts", 64.0, 16.0, 0.0, 0.0, 32.0, 96.0)
    candidate = Candidate("split", "direct", stages=(first, second))
    assert [candidate.on(name) for name in ("compute", "memory", "scale_up", "scale_out", "latency")] == [
        64.0, 17.0, 2.0, 4.0, 40.0,
    ]  # fmt: skip
    assert candidate.bound == "compute" and (first.bound, second.bound) == ("latency", "compute")


def test_a_plan_is_plain_data() -> None:
    json.dumps(asdict(made()))  # no enums, no tensors
