"""`Machine` and the table of known ones: checked, sourced, and what vendors publish."""

from __future__ import annotations

import doctest
import json
import math
from dataclasses import replace
from typing import Any

import pytest

import moeloom.plan.machines
from moeloom.plan.machine import MAY_BE_NONE, MUST_BE_KNOWN, Machine
from moeloom.plan.machines import MACHINES, machine

NAMES = ("h100", "h200", "h800", "h20", "a100", "b200", "gb200", "h100-pcie")


def test_the_examples_of_the_docstrings_run() -> None:
    result = doctest.testmod(moeloom.plan.machines)
    assert result.attempted >= 1 and result.failed == 0


def test_the_table_has_these_machines_and_says_so() -> None:
    assert tuple(MACHINES) == NAMES
    assert all(machine(name).name == name for name in NAMES)
    with pytest.raises(
        ValueError, match="machine is 'h300'; known: h100, h200, h800, h20, a100, b200, gb200, h100-pcie"
    ):
        machine("h300")


@pytest.mark.parametrize("name", NAMES)
def test_each_number_has_a_source(name: str) -> None:
    found = machine(name)
    assert set(found.sources) == found.numbers
    assert all(source.strip() for source in found.sources.values())


@pytest.mark.parametrize("name", NAMES)
def test_json_brings_the_same_machine_back(name: str) -> None:
    found = machine(name)
    data = found.to_json()
    assert Machine.from_json(json.loads(json.dumps(data))) == found
    data["flops"]["fp32"] = 1.0
    assert found.flops["fp32"] != 1.0


def changed(**values: Any) -> Machine:
    return replace(machine("h200"), **values)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("memory_bytes", 0, r"memory_bytes is 0; it must be a finite number above 0, or None if not known"),
        ("memory_bandwidth", -1.0, "memory_bandwidth is -1.0; it must be a finite number above 0, or None"),
        ("scale_up_bandwidth", math.nan, "scale_up_bandwidth is nan; "),
        ("scale_out_bandwidth", math.inf, "scale_out_bandwidth is inf; "),
        ("scale_out_bandwidth", "50e9", "scale_out_bandwidth is '50e9'; "),
        ("scale_up_latency", -1e-6, "scale_up_latency is -1e-06; it must be a finite number of 0 or more$"),
        ("scale_out_latency", None, "scale_out_latency is None; it must be a finite number of 0 or more$"),
        ("launch_seconds", math.nan, "launch_seconds is nan; "),
        ("ranks_per_domain", 0, "ranks_per_domain is 0; it must be a whole number above 0$"),
        ("ranks_per_domain", 7.5, "ranks_per_domain is 7.5; it must be a whole number above 0$"),
        ("num_sms", -1, "num_sms is -1; it must be a whole number above 0, or None if not known"),
        ("num_sms", True, "num_sms is True; "),
        ("nics_per_rank", -0.5, "nics_per_rank is -0.5; it must be a finite number of 0 or more, or None"),
        ("l2_bytes", 0.0, "l2_bytes is 0.0; "),
        ("flops", {"fp8": 0.0}, "flops.fp8 is 0.0; it must be a finite number above 0$"),
        ("flops", {"bf16": None}, "flops.bf16 is None; it must be a finite number above 0$"),
        ("name", "", "name is ''; a machine needs one"),
        ("sources", {"speed": "hearsay"}, "sources has speed; allowed: flops.bf16, flops.fp32, flops.fp8, l2_bytes, "),
    ],
)
def test_numbers_that_cannot_be_are_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(**{field: value, **({"sources": {}} if field == "flops" else {})})


def test_what_may_be_unknown_or_zero() -> None:
    unknown = changed(**dict.fromkeys(MAY_BE_NONE))
    assert Machine.from_json(json.loads(json.dumps(unknown.to_json()))) == unknown
    at_once = changed(scale_up_latency=0.0, scale_out_latency=0, launch_seconds=0.0, nics_per_rank=0)
    assert at_once.launch_seconds == 0
    assert not set(MAY_BE_NONE) & set(MUST_BE_KNOWN)


def test_a_machine_of_other_data_is_refused() -> None:
    data = machine("h200").to_json()
    without = {name: value for name, value in data.items() if name != "l2_bytes"}
    for bad in (without, data | {"color": "green"}):
        with pytest.raises(ValueError, match=r"machine has \[.*\]; it must have \['flops', "):
            Machine.from_json(bad)
    with pytest.raises(ValueError, match="flops is 3; it must be a mapping"):
        Machine.from_json(data | {"flops": 3})
    with pytest.raises(ValueError, match="machine is 3; it must be a mapping"):
        Machine.from_json(3)  # type: ignore[arg-type]


# TFLOP/s dense (fp32 without tensor cores, bf16, fp8), GB, TB/s, GB/s per direction up and out, ranks, SMs
PUBLISHED = {
    "h100": (67, 989, 1979, 80, 3.35, 450, 50, 8, 132),
    "h200": (67, 989, 1979, 141, 4.8, 450, 50, 8, 132),
    "h800": (67, 989, 1979, 80, 3.35, 200, 50, 8, 132),
    "h20": (44, 148, 296, 96, 4.0, 450, 25, 8, 78),
    "a100": (19.5, 312, None, 80, 2.039, 300, 25, 8, 108),
    "b200": (75, 2250, 4500, 180, 8.0, 900, 50, 8, 148),
    "gb200": (80, 2500, 5000, 186, 8.0, 900, 50, 72, 152),
    "h100-pcie": (51, 756, 1513, 80, 2.0, 63, None, 8, 114),
}


@pytest.mark.parametrize("name", NAMES)
def test_published_values(name: str) -> None:
    found = machine(name)

    def scaled(value: float | None, unit: float) -> float | None:
        return None if value is None else pytest.approx(value * unit, rel=1e-12)

    fp32, bf16, fp8, memory, rate, up, out, ranks, sms = PUBLISHED[name]
    assert found.flops.get("fp32") == scaled(fp32, 1e12)
    assert found.flops.get("bf16") == scaled(bf16, 1e12)
    assert found.flops.get("fp8") == scaled(fp8, 1e12)
    assert found.memory_bytes == scaled(memory, 1e9)
    assert found.memory_bandwidth == scaled(rate, 1e12)
    assert found.scale_up_bandwidth == scaled(up, 1e9)
    assert found.scale_out_bandwidth == scaled(out, 1e9)
    assert (found.ranks_per_domain, found.num_sms) == (ranks, sms)


def test_known_relations() -> None:
    h100, h200, h800, h20 = (machine(name) for name in ("h100", "h200", "h800", "h20"))
    assert h200.flops == h100.flops == h800.flops
    assert (h200.memory_bandwidth or 0) / (h100.memory_bandwidth or 1) == pytest.approx(1.43, abs=0.01)
    assert h800.memory_bandwidth == h100.memory_bandwidth and h800.scale_up_bandwidth == 200e9
    assert h20.flops["fp8"] / h100.flops["fp8"] == pytest.approx(0.15, abs=0.001)
    assert (h20.memory_bandwidth or 0) > (h100.memory_bandwidth or 0)
    assert h200.l2_bytes == 62914560  # what CUDA says on one
    assert "fp8" not in machine("a100").flops
    for found in MACHINES.values():
        if "fp8" in found.flops:  # dense: fp8 is twice bf16 (datasheets round)
            assert found.flops["fp8"] / found.flops["bf16"] == pytest.approx(2, rel=2e-3)
        if found.scale_out_bandwidth is not None:
            assert found.scale_up_bandwidth is not None and found.scale_up_bandwidth > found.scale_out_bandwidth
        assert found.scale_up_latency < found.scale_out_latency


@pytest.mark.parametrize(("name", "gigahertz"), [("h100", 1.98), ("a100", 1.41), ("b200", 1.965), ("gb200", 2.062)])
def test_fp32_peaks_follow_from_lanes_and_clock(name: str, gigahertz: float) -> None:
    lanes = 64 if name == "a100" else 128  # per SM; 2 FLOP per lane and clock
    found = machine(name)
    assert found.flops["fp32"] == pytest.approx((found.num_sms or 0) * lanes * 2 * gigahertz * 1e9, rel=0.01)
