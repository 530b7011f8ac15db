"""`moeloom measure`: the numbers explain the probes, are kept, and are planned with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moeloom import machine_cache
from moeloom.cli.app import app
from moeloom.cli.measure import Point, Probes, points, solve, table_of
from moeloom.plan.cost import stage_time
from moeloom.plan.cpu import BUILT_IN
from moeloom.plan.efficiency import Efficiency, Rates
from moeloom.plan.measured import Measured
from moeloom.plan.work import STAGES

RANKS = 4
MOVES = Rates(memory=0.4, fixed_seconds=1e-3, rounds=3.0)
TRUE = Measured(
    replace(
        BUILT_IN.machine, flops={"fp32": 50e9, "bf16": 45e9, "fp8": 30e9}, memory_bandwidth=10e9,
        scale_up_bandwidth=10e9, scale_out_bandwidth=0.5e9, scale_up_latency=2e-5, scale_out_latency=4e-4,
    ),
    {
        "split": Efficiency(
            {
                "dispatch": MOVES, "combine": replace(MOVES, memory=0.2, scale_out=0.5),
                "experts": Rates(compute=0.9, memory=0.6, expert_seconds=2e-4),
            },
            exposed=1.0,
        ),
        "decode": Efficiency(
            {
                "dispatch": replace(MOVES, memory=0.3), "combine": replace(MOVES, scale_out=0.25, rounds=2.0),
                "experts": Rates(compute=0.8, memory=0.6, expert_seconds=1e-4),
            },
            exposed=1.0, fixed_shapes=True,
        ),
    },
    RANKS, 2,
)  # fmt: skip


def times_of(measured: Measured) -> dict[Point, dict[str, float]]:
    """What each stage takes at each point, by the model."""
    found: dict[Point, dict[str, float]] = {}
    for point in points(RANKS):
        works, efficiency = point.works(RANKS), measured.efficiencies[point.pipeline]
        found[point] = {s: stage_time(works[s], measured.machine, "fp32", efficiency).seconds for s in STAGES}
    return found


def probes_of(measured: Measured) -> Probes:
    machine = measured.machine
    bandwidth = machine.memory_bandwidth or 0.0
    rounds = {1: machine.scale_up_latency, 2: machine.scale_out_latency}
    return Probes(times_of(measured), dict(machine.flops), bandwidth, 0.6 * bandwidth, rounds)


def test_numbers_explain_the_probes() -> None:
    """Times made by a known machine are those of the machine that is found; so is most of the machine."""
    probes = probes_of(TRUE)
    found = solve(probes, RANKS, 2)
    assert (found.ranks, found.cores) == (RANKS, 2) and found.machine.memory_bandwidth == 10e9
    assert found.machine.scale_out_bandwidth == pytest.approx(0.5e9, rel=0.01)
    for pipeline, efficiency in TRUE.efficiencies.items():
        for stage in STAGES:
            got, wanted = found.efficiencies[pipeline].rates(stage), efficiency.rates(stage)
            for name in ("compute",) if stage == "experts" else ("memory", "scale_out", "fixed_seconds", "rounds"):
                assert getattr(got, name) == pytest.approx(getattr(wanted, name), rel=0.05), (pipeline, stage, name)
    for point, times in times_of(found).items():
        if point.exchange == "direct":
            assert times == pytest.approx(probes.stages[point], rel=0.05), point


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_noise_makes_no_impossible_numbers(factor: float) -> None:
    """Even where larger problems seem to take no longer."""
    probes = probes_of(TRUE)
    shortest = min(min(times.values()) for times in probes.stages.values())
    flat = {point: dict.fromkeys(STAGES, shortest * factor) for point in probes.stages}
    found = solve(replace(probes, stages=flat), RANKS, 2)
    assert Measured.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_measure_is_kept_and_planned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["measure", "--ranks", "2", "--times", "3", "--json"])
    assert result.exit_code == 0, result.output
    found = Measured.from_json(json.loads(result.stdout))
    assert found == machine_cache.load() != BUILT_IN and found.ranks == 2
    assert all(found.machine.sources[f"flops.{name}"] for name in found.machine.flops)
    table = table_of(found)
    assert "2 ranks at once" in table and "GFLOP/s" in table and max(map(len, table.splitlines())) <= 80
    plan = ["plan", "--machine", "cpu", "--gpus-per-node", "2", "--tokens", "64", "--recipe", "fp32", "--json"]
    planned = CliRunner().invoke(app, plan)
    assert planned.exit_code == 0 and "this CPU" in planned.stdout


def test_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["measure", "--ranks", "1", "--times", "3", "--no-keep"])
    assert result.exit_code == 0, result.output
    assert machine_cache.load() == BUILT_IN


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result = CliRunner().invoke(app, ["measure", "--ranks", "1", "--times", "3"])
    assert result.exit_code == 1 and "error: " in result.stderr and "Traceback" not in result.output
