"""`moeloom plan` and `moeloom run --trace`: rows, JSON, files, errors."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from moeloom.cli.app import app
from moeloom.cli.plan import CPU, Output, Query, Row, parse_range, plan_rows, show_plans
from moeloom.config import RECIPES
from moeloom.models import find_model
from moeloom.plan.choices import Recorded, Skewed
from moeloom.plan.efficiencies import GPU
from moeloom.plan.machines import MACHINES
from moeloom.plan.plan import Plan
from moeloom.plan.planner import choose
from moeloom.plan.problem import Domains, Problem
from moeloom.plan.strategies import Setting

RECORDED = Path(__file__).parent / "assets/routing_qwen3moe_stdlib.safetensors"


def invoke(*options: str) -> Result:
    return CliRunner().invoke(app, ["plan", *options])


def table(text: str) -> list[list[str]]:
    """The cells of the rows below the head."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line] for line in lines[1:]]


@pytest.mark.parametrize("machine", ["h200", "gb200", "a100", "h20", CPU])
def test_rows_of_machines(machine: str) -> None:
    result = invoke("--machine", machine, "--nodes", "2", "--gpus-per-node", "4", "--tokens", "1..64")
    assert result.exit_code == 0, result.output
    rows = table(result.stdout)
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "16", "32", "64"]
    assert len({len(row) for row in rows}) == 1 and max(map(len, result.stdout.splitlines())) <= 120
    query = Query(machine=machine, nodes=2, gpus_per_node=4, tokens=(64,))
    (row,) = plan_rows(query)
    _, pipeline, exchange, chunks, seconds, _, share, _, second, slower = rows[-1]
    assert (pipeline, exchange, int(chunks)) == (row.plan.pipeline, row.plan.exchange, row.plan.chunks)
    value, unit = seconds.split()
    assert float(value) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit] == pytest.approx(row.plan.seconds, rel=0.006)
    assert float(share.strip("%")) == pytest.approx(100 * row.plan.roofline[0] / row.plan.seconds, abs=0.51)
    by_time = sorted(row.possible, key=lambda candidate: candidate.seconds)
    assert by_time[0] is row.best and by_time[1].name.removesuffix(" chunks") == second
    assert float(slower.strip("+%")) == pytest.approx(100 * (by_time[1].seconds / by_time[0].seconds - 1), abs=0.06)


def test_says_what_the_numbers_stand_on() -> None:
    text = " ".join(invoke("--tokens", "64").stdout.split())
    assert all(efficiency.source in text for efficiency in GPU.values()) and "Assumed" not in text
    text = invoke("--machine", "h100-pcie", "--nodes", "2", "--tokens", "64,128").stdout
    assert "Assumed, as h100-pcie does not say: scale_out_bandwidth 12.5 GB/s." in text
    assert "Assumed" not in invoke("--machine", "h100-pcie", "--tokens", "64,128").stdout, "needs no link between nodes"
    assert "16 GPUs share 8 experts: some have none" in invoke(
        "--model", "mixtral-8x7b", "--nodes", "2", "--tokens", "64,128"
    ).stdout.replace("\n", " ")


@pytest.mark.parametrize("machine", ["h100", "h200"])
def test_says_which_numbers_are_moelooms_own(machine: str) -> None:
    """`split` and `decode` were measured; `mega` is planned as others' kernels until it is built, and marked so."""
    lines = invoke("--machine", machine, "--tokens", "64", "--recipe", "fp8").stdout.splitlines()
    assert any(
        line.startswith("  efficiency of split, decode: measured on moeloom itself, 2 x H200 (") for line in lines
    )
    assert any(
        line.startswith("  efficiency of mega: others' kernels, as moeloom's is not built yet: ") for line in lines
    )
    explained = {
        line[2:].split(",")[0]: line for line in lines if re.match(r"[ *] (split|mega|decode), direct +\d", line)
    }
    assert set(explained) == {"split", "mega", "decode"}
    assert [name for name, line in explained.items() if line.endswith("; as others' kernels")] == ["mega"]


def test_plan_is_that_of_the_planner() -> None:
    """The command asks `choose` for the model's layer: every option arrives."""
    shape = find_model("deepseek-v3")
    options = ("--machine", "h800", "--nodes", "3", "--gpus-per-node", "4", "--recipe", "fp8", "--routing", "skewed")
    (row,) = json.loads(invoke(*options, "--tokens", "777", "--phase", "prefill", "--json").stdout)
    problem = Problem(
        777, shape.hidden, shape.num_experts, shape.num_topk, RECIPES["fp8"], "prefill", shape.intermediate
    )
    wanted = choose(problem, Setting(MACHINES["h800"], Domains(12, 3), GPU, Skewed()))
    assert row["seconds"] == wanted.seconds and Plan.from_json(row["plan"]).explain() == wanted.explain()


def test_json_is_alone_and_comes_back() -> None:
    result = invoke("--nodes", "4", "--tokens", "1..4096", "--json", "--sweep", "--recipe", "fp8")
    assert result.exit_code == 0 and result.stderr == ""
    rows = json.loads(result.stdout)
    assert [(row["nodes"], row["tokens"]) for row in rows] == [
        (nodes, 1 << power) for nodes in (1, 2, 4) for power in range(13)
    ]
    query = Query(nodes=4, sweep=True, tokens=parse_range("1..4096"), recipe_name="fp8")
    for row, expected in zip(rows, plan_rows(query), strict=True):
        plan = Plan.from_json(row["plan"])
        assert plan == expected.plan and plan.candidates == expected.plan.candidates
        assert row["name"] == str(plan) and row["seconds"] == plan.seconds and row["bound"] == plan.chosen.bound
        assert row["runner_up_ratio"] >= 1.0 and 0 < row["share_of_roofline"] <= 1.0
        assert max(row["limits"].values()) <= plan.roofline[0] * (1 + 1e-9)
        assert row["gpus"] == 8 * row["nodes"] and row["memory_bytes"] > 0


def test_sweep_is_grouped() -> None:
    rows = table(invoke("--nodes", "6", "--tokens", "8,64", "--sweep").stdout)
    assert [row[0] for row in rows] == ["1", "", "2", "", "4", "", "6", ""]
    assert [row[1] for row in rows] == ["8", "64"] * 4
    assert Query(nodes=6).node_counts == [6] and Query(nodes=1, sweep=True).node_counts == [1]


def test_explain() -> None:
    one = invoke("--tokens", "256")
    assert one.stdout.count("least predicted time") == 1, "a single row is explained"
    assert "least predicted time" not in invoke("--tokens", "256,512").stdout
    text = invoke("--tokens", "256,512", "--explain").stdout
    assert text.count("least predicted time") == 2
    for row in plan_rows(Query(tokens=(256, 512))):
        assert row.plan.explain() in text


def test_thousands_of_gpus_are_fast() -> None:
    for routing in ("uniform", "skewed"):
        query = Query(nodes=512, gpus_per_node=8, tokens=(1, 128, 8192), routing=routing, recipe_name="fp8")
        for _ in range(3):
            start = time.perf_counter()
            rows = list(plan_rows(query))
            seconds = (time.perf_counter() - start) / len(rows)
            if seconds < 2.0:
                break
        assert rows[0].gpus == 4096 and seconds < 2.0, f"{seconds:.1f} s a row"


def test_recorded_routing(tmp_path: Path) -> None:
    path = str(tmp_path / "r.safetensors")
    ids = torch.tensor([[0, 1, 2], [0, 1, 767], [-1, 0, 5]])  # longcat: 512 experts, 256 identities
    save_file({"topk_idx": ids, "topk_weights": torch.ones(3, 3)}, path)
    query = Query(model="longcat-flash", routing=path, tokens=(64,))
    assert query.choices == Recorded(((0, 1, 2), (0, 1, -1), (-1, 0, 5)))
    assert query.problem(64).num_topk == 3
    result = invoke("--routing", str(RECORDED), "--model", "qwen3-30b-a3b", "--tokens", "64")
    assert result.exit_code == 0 and "as recorded, " in result.stdout and "top-4" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--machine", "h300"), r"--machine is 'h300'; allowed: h100, h200, .*, cpu \(this one\)"),
        (("--model", "deepsek"), r"--model is 'deepsek', which is no known model; close: deepseek-v3, .*"),
        (("--machine", "a100", "--recipe", "fp8"), r"--recipe is fp8, which a100 does not compute; allowed: .*"),
        (("--phase", "train", "--recipe", "fp8"), r"--phase is train, but --recipe fp8 has no gradient; .*"),
        (("--tokens", "many"), r"--tokens is 'many'; give .*"),
        (("--tokens", "8..2"), r"--tokens is '8\.\.2'; numbers must rise .*"),
        (("--tokens", "4..x"), r"--tokens is '4\.\.x'; give .*"),
        (("--tokens", "0"), r"--tokens is '0'; .*"),
        (("--tokens", "-3"), r"--tokens is '-3'; .*"),
        (("--tokens", "1.."), r"--tokens is '1\.\.'; .*"),
        (("--nodes", "100000"), r"--nodes is 100000: 800000 GPUs; allowed: up to 65536"),
        (("--routing", "skew"), r"--routing is 'skew'; allowed: uniform, skewed, .*"),
        (("--plot", "x.txt"), r"--plot is 'x.txt'; the file must end in .*"),
        (("--plot", "/no such folder/x.png"), r"--plot is .*, which cannot be written: .*"),
        (("--trace", "x.json"), r"--trace is 'x.json': of one plan; give one number of --tokens, and no --sweep"),
        (("--trace", "x.txt", "--tokens", "8"), r"--trace is 'x.txt'; the file must end in \.json, .*"),
    ],
)
def test_wrong_options_are_one_line(options: tuple[str, ...], message: str) -> None:
    result = invoke(*options)
    assert result.exit_code == 2 and result.stdout == ""
    assert re.fullmatch(f"error: {message}\n", result.stderr), result.stderr


def test_missing_matplotlib_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for command in (["plan", "--plot"], ["run", "--trace"]):
        result = CliRunner().invoke(app, [*command, str(tmp_path / "x.png")])
        assert result.exit_code == 2 and result.stderr.endswith("which is missing: pip install 'moeloom[plot]'\n")
        assert result.stderr.count("\n") == 1


def test_what_fits_nowhere() -> None:
    result = invoke("--tokens", "1000000000,64")
    assert result.exit_code == 0 and "1000000000 tokens, 1 node(s): no plan: needs " in result.stdout
    assert [row[1] == "none" for row in table(result.stdout)] == [True, False]
    result = invoke("--tokens", "1000000000", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)[0]["plan"] is None


def test_unwritable_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moeloom.cli.plan.save_trace", full)
    result = invoke("--tokens", "8", "--trace", str(tmp_path / "x.json"))
    assert result.exit_code == 1 and re.fullmatch(r"error: OSError: .*No space left on device\n", result.stderr)


def test_files(tmp_path: Path) -> None:
    plot, trace = tmp_path / "p.png", tmp_path / "t.json"
    options = ("--tokens", "4096", "--nodes", "4", "--recipe", "fp8", "--phase", "prefill")
    result = invoke(*options, "--plot", str(plot), "--trace", str(trace), "--json")
    assert result.exit_code == 0 and plot.stat().st_size > 20_000
    plan = Plan.from_json(json.loads(result.stdout)[0]["plan"])
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert sorted(span["name"] for span in spans) == sorted(task.name for task in plan.chosen.graph.tasks)
    assert max(span["ts"] + span["dur"] for span in spans) == pytest.approx(plan.seconds * 1e6)


@pytest.mark.parametrize(("width", "columns"), [(120, 11), (80, 8)])
def test_fits_a_terminal(width: int, columns: int) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=width, color_system=None, highlight=False)
    query = Query(nodes=4, sweep=width == 120, tokens=parse_range("1..8192"), recipe_name="fp8")
    assert show_plans(console, query, Output())
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) <= width and "…" not in written.getvalue()
    assert all(line.strip("│ ").split()[0].isdecimal() for line in lines if " us " in line or " ms " in line), "folded"


def test_parse_range() -> None:
    assert parse_range("1..8192") == tuple(1 << power for power in range(14))
    assert parse_range("3..20,100, 4") == (3, 4, 8, 16, 20, 100)
    assert parse_range("7") == parse_range("7..7") == (7,)


def test_row_without_plan() -> None:
    row = Row(8, 1, 8, None, {})
    assert (row.best, row.runner_up, row.slower, row.share) == (None, None, None, None)


def run(*options: str) -> Result:
    return CliRunner().invoke(app, ["run", "--scale", "16", "--ranks", "2", "--no-check", *options])


def test_run_traces_every_rank_beside_the_prediction(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    result = run("--tokens", "64", "--steps", "2", "--chunks", "2", "--trace", str(path))
    assert result.exit_code == 0, result.output
    assert "plan: split, direct, 2 chunks (--chunks 2)" in result.output
    assert re.search(r"^predicted \S+ \Ss, bound by \S+; measured \S+ \Ss: [\d.]+ x as long$", result.output, re.M)
    data = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in data if event["name"] == "process_name"}
    assert sorted(names.values()) == ["predicted", "rank 0", "rank 1"]
    spans = defaultdict(list)
    for event in data:
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0
            spans[names[event["pid"]]].append(event)
    for name, events in spans.items():
        each = [f"{kind} {chunk}" for kind in ("combine", "dispatch", "experts") for chunk in (0, 1)]
        assert sorted(event["name"] for event in events) == each, f"{name}: one step, all of it"
        assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    assert min(event["ts"] for event in data if event["ph"] == "X") == 0
    assert max(event["ts"] for event in data if event["ph"] == "X") < 60e6, "clocks of ranks differ"


def test_run_draws_and_asks_the_planner(tmp_path: Path) -> None:
    path = tmp_path / "t.png"
    result = run("--tokens", "64", "--steps", "1", "--nodes", "2", "--exchange", "hybrid", "--trace", str(path))
    assert result.exit_code == 0 and "hybrid (--exchange hybrid)" in result.output
    assert path.stat().st_size > 10_000


def test_run_without_a_prediction() -> None:
    result = run("--tokens", "64", "--steps", "1", "--chunks", "3")
    assert result.exit_code == 0, result.output
    assert "no prediction: 3 chunks; the planner looks at 1, 2, 4, 8" in result.output
    result = run("--chunks", "-1")
    assert (
        result.exit_code == 2
        and result.stderr == "error: --chunks is -1; allowed: 1 and more, or 0 to ask the planner\n"
    )
