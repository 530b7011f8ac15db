"""A measured machine: shared by ranks, stored, and read back from whatever is in the cache."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeloom import BF16, FP8, FP32, machine_cache
from moeloom.backends.sm90.backend import Sm90Backend
from moeloom.checks import check_plan
from moeloom.plan.cpu import BUILT_IN
from moeloom.plan.efficiencies import GPU
from moeloom.plan.efficiency import Efficiency, Rates
from moeloom.plan.measured import Measured
from moeloom.plan.planner import choose
from moeloom.plan.problem import PHASES, Domains, Problem
from moeloom.plan.strategies import Setting
from moeloom.topology import Topology

FOUND = Measured(
    replace(BUILT_IN.machine, name="this one", scale_out_bandwidth=None, l2_bytes=1e6),
    {
        "split": Efficiency({"experts": Rates(compute=0.5, fixed_seconds=1e-4, expert_seconds=2e-5)}, exposed=0.5),
        "decode": Efficiency({"combine": Rates(message_seconds=1e-6, rounds=3.0)}, fixed_shapes=True),
    },
    ranks=2,
    cores=4,
    date="2026-01-31",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; gives the file of the machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "moeloom" / "machine.json"


# ---- as JSON


@pytest.mark.parametrize("measured", [FOUND, BUILT_IN, FOUND.for_ranks(8, 4)], ids=["found", "built in", "shared"])
def test_json_and_back(measured: Measured) -> None:
    text = json.dumps(measured.to_json())
    again = Measured.from_json(json.loads(text))
    assert again == measured and json.dumps(again.to_json()) == text


def changed(data: Any, path: tuple, value: Any) -> Any:
    """The data with something else in one place."""
    data = copy.deepcopy(data)
    inner = data
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("ranks",), 0, "ranks is 0, cores is 4; both must be at least 1"),
        (("cores",), -1, "ranks is 2, cores is -1; both must be at least 1"),
        (("ranks",), "many", "invalid literal"),
        (("cores",), None, "a measured machine lacks or has too much"),
        (("cores",), float("inf"), "a measured machine lacks or has too much"),
        (("machine",), None, "machine is None"),
        (("machine", "flops"), {"fp32": -1.0}, "flops.fp32 is -1.0"),
        (("efficiencies",), [], "lacks or has too much"),
        (("efficiencies", "split", "tile_rows"), 1.5, "tile_rows is 1.5; it must be a whole number"),
        (("efficiencies", "split", "stages"), {"experts": {"fixed_seconds": float("inf")}}, "fixed_seconds is inf"),
        (("efficiencies", "split"), 3, "lacks or has too much|efficiency"),
        (("efficiencies", "split", "speed"), 3, "efficiency has"),
        (("efficiencies", "split", "stages"), {"experts": {"speed": 1}}, "lacks or has too much"),
        (("efficiencies", "split", "stages"), {"experts": {"compute": 0}}, "compute is 0"),
        (("efficiencies", "split", "exposed"), "much", "lacks or has too much"),
        (("efficiencies", "split", "source"), ["a", "b"], r"source is \['a', 'b'\]; allowed: a text"),
        (("efficiencies", "split", "others"), 3, "others is 3; allowed: True, False"),
    ],
)
def test_data_of_another_form(path: tuple, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Measured.from_json(changed(FOUND.to_json(), path, value))


@pytest.mark.parametrize("name", ["machine", "efficiencies", "ranks", "cores", "date"])
def test_data_that_lacks_something(name: str) -> None:
    data = {key: value for key, value in FOUND.to_json().items() if key != name}
    with pytest.raises(ValueError, match=f"a measured machine lacks or has too much: KeyError.*{name}"):
        Measured.from_json(data)


# ---- shared


def test_ranks_with_a_core_each_get_what_was_measured() -> None:
    same = FOUND.for_ranks(2, 4)
    assert same.machine == FOUND.machine
    assert same.efficiencies == FOUND.efficiencies
    assert FOUND.for_ranks(1, 64).machine == FOUND.machine


def test_ranks_that_share_cores_get_less_and_wait_longer() -> None:
    shared = FOUND.for_ranks(12, 4)  # three for each core
    one, third = FOUND.machine, shared.machine
    for name in ("memory_bandwidth", "scale_up_bandwidth"):
        assert getattr(third, name) == pytest.approx(getattr(one, name) / 3)
    assert third.scale_out_bandwidth is None
    assert third.flops == pytest.approx({name: rate / 3 for name, rate in one.flops.items()})
    for name in ("scale_up_latency", "scale_out_latency", "launch_seconds"):
        assert getattr(third, name) == pytest.approx(3 * getattr(one, name))
    before, after = (each.efficiencies["split"].rates("experts") for each in (FOUND, shared))
    assert (after.compute, after.rounds) == (before.compute, before.rounds)
    assert after.fixed_seconds == pytest.approx(3 * before.fixed_seconds)
    assert after.expert_seconds == pytest.approx(3 * before.expert_seconds)
    assert (shared.ranks, shared.cores, shared.date) == (12, 4, FOUND.date)
    assert shared.machine.sources == FOUND.machine.sources


@pytest.mark.parametrize(
    ("ranks", "cores", "busy"), [(1, 2, False), (2, 2, True), (3, 2, True), (7, 8, False), (1, 1, True)]
)
def test_moving_takes_cores_where_none_is_idle(ranks: int, cores: int, busy: bool) -> None:
    shared = FOUND.for_ranks(ranks, cores)
    assert {e.moving_computes for e in shared.efficiencies.values()} == {busy}


def test_sharing_goes_there_and_back() -> None:
    crowded = FOUND.for_ranks(16, 4)
    again = crowded.for_ranks(2, 4)
    assert again.machine.flops == pytest.approx(FOUND.machine.flops)
    assert again.machine.scale_up_latency == pytest.approx(FOUND.machine.scale_up_latency)
    further = crowded.for_ranks(32, 4)
    assert further.machine.flops == pytest.approx(FOUND.for_ranks(32, 4).machine.flops)


# ---- the cache


def test_store_and_load(cache: Path) -> None:
    assert machine_cache.load() == BUILT_IN  # nothing there
    assert machine_cache.path() == cache == machine_cache.store(FOUND)
    assert machine_cache.load() == FOUND
    machine_cache.store(replace(FOUND, date="later"))
    assert machine_cache.load().date == "later"
    assert os.listdir(cache.parent) == ["machine.json"]


def test_nothing_stored_is_nothing_to_warn_of(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "moeloom"):
        assert machine_cache.load() == BUILT_IN
    assert not caplog.records


TEXT = json.dumps(FOUND.to_json())
CORRUPT: dict[str, bytes] = {
    "empty": b"",
    "half": TEXT[: len(TEXT) // 2].encode(),
    "not text": b"\xff\xfe\x00\x01",
    "another form": b"[1, 2]",
    "a number": b"5",
    "null": b"null",
    "no ranks": json.dumps(changed(FOUND.to_json(), ("ranks",), 0)).encode(),
    "endless ranks": json.dumps(changed(FOUND.to_json(), ("ranks",), float("inf"))).encode(),
    "another version": json.dumps({**FOUND.to_json(), "machine": {"name": "old"}}).encode(),
    "a rate that cannot be": json.dumps(changed(FOUND.to_json(), ("machine", "flops", "fp32"), -1.0)).encode(),
}


@pytest.mark.parametrize("kind", CORRUPT)
def test_a_corrupt_file_is_not_used(cache: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    cache.parent.mkdir()
    cache.write_bytes(CORRUPT[kind])
    with caplog.at_level(logging.WARNING, "moeloom"):
        assert machine_cache.load() == BUILT_IN
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{cache} is not used: " in record.getMessage() and "moeloom measure" in record.getMessage()
    machine_cache.store(FOUND)
    assert machine_cache.load() == FOUND


def test_a_folder_in_place_of_the_file(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "moeloom"):
        assert machine_cache.load() == BUILT_IN
    assert len(caplog.records) == 1
    with pytest.raises(OSError):
        machine_cache.store(FOUND)
    assert [name for name in os.listdir(cache.parent) if name != "machine.json"] == []  # no half file is left


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError):
        machine_cache.store(FOUND)
    assert machine_cache.load() == BUILT_IN


def test_an_interrupted_store_leaves_the_old_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_cache.store(FOUND)

    def half(data: Any, file: Any, **options: Any) -> None:
        file.write(TEXT[:100])
        file.flush()
        assert machine_cache.load() == FOUND  # a reader meanwhile sees the old one
        raise KeyboardInterrupt

    monkeypatch.setattr(machine_cache.json, "dump", half)
    with pytest.raises(KeyboardInterrupt):
        machine_cache.store(replace(FOUND, date="later"))
    assert machine_cache.load() == FOUND
    assert os.listdir(cache.parent) == ["machine.json"]


def leaves(data: Any, path: tuple = ()) -> Iterator[tuple]:
    """The places of all values."""
    for key, value in data.items() if isinstance(data, dict) else ():
        yield (*path, key)
        yield from leaves(value, (*path, key))


PLACES = [place for place in leaves(FOUND.to_json()) if place[-1] != "memory_bytes"]  # too little is no plan
ODD = (None, True, -1, 0, 0.0, 1.5, 1e30, "x", "", [], {}, [1], {"a": 1}, float("nan"), float("inf"), -float("inf"))


@settings(max_examples=600, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(place=st.sampled_from(PLACES), value=st.sampled_from(ODD))
def test_any_single_change_is_refused_or_of_use(cache: Path, place: tuple, value: Any) -> None:
    """Whatever is in the file, a Runtime can be constructed and plans."""
    cache.parent.mkdir(exist_ok=True)
    cache.write_text(json.dumps(changed(FOUND.to_json(), place, value)))
    measured = machine_cache.load().for_ranks(3, 2)
    setting = Setting(measured.machine, Domains(3, 2), measured.efficiencies)
    if "split" in measured.efficiencies:
        plan = choose(Problem(100, 64, 6, 2, FP32), setting)
        assert plan.seconds is not None and plan.seconds > 0 and plan.explain()


# ---- what the ranks of a Runtime do with it


def test_all_ranks_plan_with_the_first_ones_machine(cache: Path) -> None:
    machine_cache.store(FOUND)
    shown = [machine_cache.announcement(rank) for rank in range(3)]
    assert [record["machine"] is None for record in shown] == [False, True, True]
    shown = json.loads(json.dumps(shown))
    setting = machine_cache.setting(shown, Topology.split(3, 2))
    assert setting.domains == Domains(3, 2)
    assert setting.machine == FOUND.for_ranks(3, shown[0]["cores"]).machine


def test_the_fullest_host_counts() -> None:
    def record(host: str, cores: int) -> dict:
        return {"host": host, "cores": cores, "machine": FOUND.to_json()}

    hosts = [record("a", 64), *[record("b", 2)] * 4, *[record("c", 1)] * 2]
    setting = machine_cache.setting(hosts, Topology.split(7, 3))
    assert setting.machine == FOUND.for_ranks(4, 2).machine


H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
SM90: Any = Sm90Backend  # the class says what it has; an instance needs GPUs


def gpu_setting(monkeypatch: pytest.MonkeyPatch, gpu: str, num_ranks: int, backend: Any) -> Setting:
    """Of the ranks of a Runtime on these GPUs that were not measured."""
    monkeypatch.setattr(machine_cache, "gpu_name", lambda: gpu)
    shown = [machine_cache.announcement(rank, "sm90") for rank in range(num_ranks)]
    return machine_cache.setting(json.loads(json.dumps(shown)), Topology.split(num_ranks, 1), backend)


@pytest.mark.parametrize("gpu", [H100, H200])
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_a_runtime_on_gpus_plans_only_what_its_backend_has(
    cache: Path, monkeypatch: pytest.MonkeyPatch, gpu: str, num_ranks: int
) -> None:
    setting = gpu_setting(monkeypatch, gpu, num_ranks, SM90)
    assert setting.efficiencies == {name: GPU[name] for name in SM90.pipelines}
    chosen = set()
    for phase, tokens, recipe in product(PHASES, (0, 1, 8, 64, 512, 4096, 32_768, None), (BF16, FP8)):
        asked = Problem(tokens, 7168, 256, 8, recipe, phase, 2048)
        if phase == "train" and recipe is FP8:
            continue
        plan = choose(asked, setting)
        check_plan(plan, SM90)  # what `moe(plan=...)` would refuse
        assert {c.pipeline for c in plan.candidates if c.seconds is not None} <= set(SM90.pipelines)
        assert plan.exchange == "direct" and {c.chunks for c in plan.candidates} == {1}
        chosen.add(plan.pipeline)
    assert chosen == {"split", "decode"}


def test_a_plan_on_gpus_says_whose_measurements_it_stands_on(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Problem(64, 7168, 256, 8, FP8, "decode", 2048)
    text = choose(asked, gpu_setting(monkeypatch, H200, 2, SM90)).explain()
    assert "efficiency of split, decode: measured on moeloom itself, 2 x H200 (benchmarks/results/h200_layer" in text
    assert "others' kernels" not in text and "mega, direct              cannot: this backend has no mega" in text

    lines = choose(asked, gpu_setting(monkeypatch, H200, 2, None)).explain().splitlines()
    assert any(line.startswith("  efficiency of split, decode: measured on moeloom itself, ") for line in lines)
    assert any(line.startswith("  efficiency of mega: others' kernels, as moeloom's is not built") for line in lines)
    of_others = [line for line in lines if line.endswith("; as others' kernels")]
    assert len(of_others) == 1 and of_others[0].startswith("  mega, direct ")


def test_on_a_cpu_one_line_is_enough(cache: Path) -> None:
    plan = choose(Problem(64, 64, 6, 2, FP32), Setting(BUILT_IN.machine, Domains(2), BUILT_IN.efficiencies))
    (line,) = [line for line in plan.explain().splitlines() if "efficiency of" in line]
    assert line.startswith("  efficiency of split, decode: built in: ")
