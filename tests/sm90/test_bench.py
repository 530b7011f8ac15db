"""`moeloom bench` and `moeloom run` on GPUs: what they measure there, and that they check it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from moeloom.backends.base import Traffic
from moeloom.cli.app import app
from moeloom.cli.bench_report import read_lines
from moeloom.cli.execute import execute
from moeloom.cli.run import Settings
from moeloom.cli.timing import DeviceClock, DeviceWatch
from moeloom.meter import Meter

pytestmark = pytest.mark.gpu

SHAPE = ("--model", "mixtral-8x7b", "--scale", "16")  # hidden 256, intermediate 896, 8 experts, top-2


def invoke(command: str, *options: str) -> Result:
    ranks = str(min(2, torch.cuda.device_count()))
    return CliRunner().invoke(app, [command, "--device", "cuda", "--ranks", ranks, *SHAPE, *options])


@pytest.mark.parametrize("options", [(), ("--recipe", "fp8", "--tokens", "33,0"), ("--backward",)], ids=str)
def test_run_checks_itself(options: tuple[str, ...], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        options = tuple(option.replace("33,0", "33") for option in options)
    trace = tmp_path / "trace.json"
    result = invoke("run", "--steps", "2", "--chunks", "1", "--trace", str(trace), *options)
    assert result.exit_code == 0, result.output
    assert "check passed" in result.output and "on GPUs of 1 node" in result.output
    assert ("fp8" if "fp8" in options else "bf16") + "/per_rank" in result.output
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"dispatch 0", "experts 0", "combine 0"} <= names


def test_a_wrong_result_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = min(2, torch.cuda.device_count())
    settings = Settings(
        model="mixtral-8x7b", scale=16, tokens=(40,) * ranks, recipe_name="fp8", device="cuda", steps=1, corrupt=True
    )
    assert execute(settings) == 1
    out, _ = capfd.readouterr()
    assert f"first wrong row: rank {ranks - 1}, token 20;" in out


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_decode_is_measured_eager_and_replayed(recipe: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    options = ("--tokens", "1,64", "--recipe", recipe, "--pipeline", "decode", "--steps", "3", "--no-peers")
    result = invoke("bench", *options, "--json", str(kept))
    assert result.exit_code == 0, result.output
    lines = read_lines("--against", str(kept))
    stages = {"layer", "layer, replayed", "dispatch", "experts", "combine"} | {"quantise"} * (recipe == "fp8")
    assert {line["stage"] for line in lines} == stages and len(lines) == 2 * 2 * len(stages)
    for line in lines:
        assert not line["waits"] and 0 < line["us"] < 20_000, line
        assert line["share"] <= 1.05, line
        assert (line["host_us"] is None) == (line["stage"] in ("dispatch", "experts", "combine"))
    (tmp_path / "faster.jsonl").write_text("".join(json.dumps(one | {"us": one["us"] / 50}) + "\n" for one in lines))
    result = invoke("bench", *options, "--against", str(tmp_path / "faster.jsonl"))
    assert result.exit_code == 1 and "times as long" in result.output


def test_stages_by_themselves(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    options = ("--tokens", "300", "--max-tokens", "512", "--pipeline", "split", "--steps", "3", "--no-peers")
    result = invoke("bench", *options, "--recipe", "fp8", "--stages", "--json", str(kept))
    assert result.exit_code == 0, result.output
    times = {line["stage"]: line["us"] for line in read_lines("--against", str(kept)) if line["cache"] == "cold"}
    assert set(times) == {
        "layer", "quantise", "dispatch", "experts", "combine", "dispatch, alone", "experts, alone", "combine, alone"
    }  # fmt: skip
    assert all(0 < us < 20_000 for us in times.values()), times
    assert "Runtimes were made for 512 tokens per rank." in result.output


def test_training_is_measured(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    result = invoke("bench", "--tokens", "512", "--train", "--pipeline", "split", "--steps", "3", "--json", str(kept))
    assert result.exit_code == 0, result.output
    times = {line["stage"]: line["us"] for line in read_lines("--against", str(kept)) if line["cache"] == "cold"}
    assert set(times) == {"layer and backward", "dispatch", "experts", "combine", "backward"}
    assert times["layer and backward"] > 0.8 * sum(
        times[name] for name in ("dispatch", "experts", "combine", "backward")
    )


def test_clock_is_of_the_gpu() -> None:
    """A kernel that rests for about a millisecond takes that long, and its stage as long, and the host much less."""
    device = torch.device("cuda", torch.cuda.current_device())
    meter = Meter(Traffic(), 0)
    meter.watch = DeviceWatch(meter, device)
    clock = DeviceClock(device, together=lambda: None)

    def run() -> None:
        with meter.stage("experts"):
            torch.cuda._sleep(2_000_000)

    alone = [clock.alone(run, True, meter).seconds for _ in range(5)]
    sample = clock.time(run, True, meter)
    assert sample.queued and sample.host < 0.5e-3
    assert 0.5e-3 < min(alone) and max(alone) < 4e-3
    assert sample.stages["experts"] == pytest.approx(sample.seconds, rel=0.02)
