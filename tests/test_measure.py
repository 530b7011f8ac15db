"""`moeloom measure`: the numbers explain the probes, are kept, and are planned with."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from moeloom import FP8, machine_cache
from moeloom.backends.sm90.probe import WAYS, Launches, Link, LinkRate
from moeloom.cli import app as command
from moeloom.cli import measure as measuring
from moeloom.cli.app import app
from moeloom.cli.measure import Point, Probes, points, solve, table_of
from moeloom.cli.measure_gpu import GpuFound, GpuProbes, best_way, print_gpu
from moeloom.cli.measure_gpu import solve as solve_gpu
from moeloom.plan.choices import Uniform
from moeloom.plan.cost import stage_time
from moeloom.plan.cpu import BUILT_IN
from moeloom.plan.efficiencies import GPU
from moeloom.plan.efficiency import Efficiency, Rates
from moeloom.plan.flow import expected_flow
from moeloom.plan.machines import MACHINES, machine_of_gpu
from moeloom.plan.measured import Measured
from moeloom.plan.problem import Domains, Problem
from moeloom.plan.work import STAGES, layer_work

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


# ---- GPUs, as far as it needs none


def link_of(peaks: dict[str, float]) -> Link:
    """Each way grows with its SMs up to 395 GB/s one way, 360 both ways."""
    rates = {
        way: tuple(LinkRate(sms, min(395e9, sms * peak), min(360e9, sms * peak)) for sms in (1, 2, 4, 8, 16, 32, 132))
        for way, peak in peaks.items()
    }
    return Link((0, 1), rates, LinkRate(0, 395e9, 372e9), 1.1e-6)


SEEN = GpuProbes(
    gpu="NVIDIA H200", gpus=2, num_sms=132, memory_bytes=150_100_000_000, l2_bytes=60 << 20,
    flops={"fp32": 50e12, "bf16": 800e12, "fp8": 1400e12}, memory_read=4.4e12, memory_copy=4.2e12, l2_read=6e12,
    launches=Launches(3e-6, 1.5e-6, 0.9e-6, 9e-6), link=link_of(dict(zip(WAYS, (43e9, 24e9, 20e9, 9e9), strict=True))),
)  # fmt: skip


def test_a_gpu_is_what_was_measured_and_the_rest_is_known() -> None:
    found = solve_gpu(SEEN)
    machine, known = found.machine, MACHINES["h200"]
    assert (machine.name, machine.num_sms, machine.ranks_per_domain) == ("NVIDIA H200", 132, 2)
    assert machine.flops == SEEN.flops and machine.memory_bandwidth == 4.2e12 and machine.launch_seconds == 3e-6
    assert machine.scale_up_bandwidth == 360e9 and machine.scale_up_latency == 1.1e-6
    assert "2 x NVIDIA H200: stores by 16 SMs, both ways" in machine.sources["scale_up_bandwidth"]
    for name in ("scale_out_bandwidth", "scale_out_latency", "nics_per_rank"):
        assert (getattr(machine, name), machine.sources[name]) == (getattr(known, name), known.sources[name])
    assert set(machine.sources) == machine.numbers
    assert Measured.from_json(json.loads(json.dumps(GpuFound(found, SEEN).to_json()))) == found


def test_one_gpu_and_an_unknown_one() -> None:
    alone = solve_gpu(replace(SEEN, gpus=1, link=None)).machine
    assert (alone.scale_up_bandwidth, alone.ranks_per_domain) == (450e9, 1)
    assert alone.sources["memory_bandwidth"].startswith("measured on NVIDIA H200: ")
    other = solve_gpu(replace(SEEN, gpu="NVIDIA GH200 480GB", gpus=1, link=None))
    assert other.machine.scale_up_bandwidth is None is other.machine.scale_out_bandwidth
    assert other.machine.scale_out_latency == MACHINES["h200"].scale_out_latency
    assert other.machine.sources["scale_out_latency"].startswith("as of H200")
    assert other.efficiencies == GPU
    assert machine_of_gpu("NVIDIA GH200 480GB") is None is machine_of_gpu("NVIDIA H20 NVL")


@pytest.mark.parametrize("pipeline", GPU)
def test_what_implementations_reach_does_not_change_with_what_it_is_a_share_of(pipeline: str) -> None:
    """Efficiencies were fitted as shares of what vendors promise; of what was measured, they give the same seconds."""
    found, known = solve_gpu(SEEN), MACHINES["h200"]
    problem, domains = Problem(4096, 7168, 256, 8, FP8, "prefill", 2048), Domains(8, 1)
    flow = expected_flow(problem, domains, "direct", Uniform())
    for work in layer_work(problem, flow, GPU[pipeline].tile_rows):
        before = stage_time(work, known, "fp8", GPU[pipeline])
        after = stage_time(work, found.machine, "fp8", found.efficiencies[pipeline])
        for name in ("compute", "memory", "scale_up", "scale_out"):
            assert getattr(after, name) == pytest.approx(getattr(before, name)), (work.stage, name)


def test_the_best_way_takes_no_more_sms_than_it_needs() -> None:
    assert best_way(link_of({"loads": 9e9, "stores": 43e9})) == ("stores", LinkRate(16, 395e9, 360e9))
    assert best_way(link_of({"loads": 2e9, "bulk stores": 2.5e9}))[0] == "bulk stores"


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("probes", [SEEN, replace(SEEN, gpu="NVIDIA GH200 480GB", gpus=1, link=None)])
def test_the_tables_of_a_gpu(terminal: bool, probes: GpuProbes) -> None:
    out = io.StringIO()
    options = {"force_terminal": True, "color_system": None, "legacy_windows": False} if terminal else {}
    print_gpu(Console(file=out, width=80, highlight=False, **options), GpuFound(solve_gpu(probes), probes))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and "\u2026" not in text and text.isascii() is not terminal
    assert "1400 TFLOP/s" in text and "4.4 TB/s" in text and probes.gpu in text
    if probes.link:
        assert text.startswith("2 x NVIDIA H200, 132 SMs, 150 GB, second-level cache 60 MiB\n")
        assert "71%" in text and "link, stores by 16 SMs, both ways" in text and "372 GB/s" in text
        row = next(line for line in text.splitlines() if line.strip("|\u2502 ").startswith("8 "))
        assert (
            row.strip("|\u2502 ").split()
            == "8 \u2502 344 | 344 \u2502 192 | 192 \u2502 160 | 160 \u2502 72 | 72".replace(
                "\u2502", "\u2502" if terminal else "|"
            ).split()
        )
    else:
        assert "%" not in text and "link" not in text


def test_cpu_and_gpu_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine_cache, "gpu_name", lambda: "NVIDIA H200")
    assert machine_cache.load("sm90") == Measured(MACHINES["h200"], GPU, 1, 1)
    found = solve_gpu(SEEN)
    machine_cache.store(found, "sm90")
    assert machine_cache.load("sm90") == found and machine_cache.load() == BUILT_IN
    machine_cache.store(TRUE)
    assert machine_cache.load("sm90") == found and machine_cache.load() == TRUE
    assert machine_cache.announcement(0, "sm90")["machine"] == found.to_json()
    assert found.for_ranks(8, 2) == replace(found, ranks=8, cores=2)  # every rank has a GPU of its own
    monkeypatch.setattr(machine_cache, "gpu_name", lambda: "NVIDIA H100 80GB HBM3")
    with caplog.at_level(logging.WARNING, "moeloom"):
        assert machine_cache.load("sm90").machine == MACHINES["h100"]
    assert "it is of NVIDIA H200, not of NVIDIA H100 80GB HBM3" in caplog.text


def test_cpus_are_measured_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(measuring, "INTERMEDIATE", 32)
    seconds, num_bytes = measuring._one_row_each(16)
    assert seconds > 0 and num_bytes == 8 * 3 * 16 * 512 * 4
    stages = measuring.time_layer(Point("split", "direct", 1, 2), 1)
    assert set(stages) == set(STAGES) and measuring.time_rounds(1) > 0
    assert measuring.time_alone()["flops"]["fp8"] > 0


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "gpus_with_kernels", lambda: [])
    assert command.backend_to_measure("auto", None) == "cpu" == command.backend_to_measure("cpu", 2)
    refused = CliRunner().invoke(app, ["measure", "--backend", "sm90"])
    assert refused.exit_code == 2 and "error: --backend is 'sm90', but torch sees no H100 or H200" in refused.stderr
    monkeypatch.setattr(command, "gpus_with_kernels", lambda: [0])
    assert command.backend_to_measure("auto", None) == "sm90" and command.backend_to_measure("auto", 2) == "cpu"
    refused = CliRunner().invoke(app, ["measure", "--backend", "sm90", "--ranks", "3"])
    assert refused.exit_code == 2 and "--ranks is 3; leave it out" in refused.stderr
