"""`moeloom bench`: bounds, what becomes of samples, files, regressions, options. On CPUs, mostly in this process."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from moeloom import BF16, FP8, FP32
from moeloom.cli import app as command
from moeloom.cli import bench as benchmark
from moeloom.cli import other_systems
from moeloom.cli.app import app, device_to_use
from moeloom.cli.bench import Bench, Measurement, Note, Timed, bench_rank, summarised, uniform_ids
from moeloom.cli.bench_report import KEY, compare, json_line, print_bench, read_lines
from moeloom.cli.bounds import Bound, Load, Peaks, bounds, busiest, loads
from moeloom.cli.stages import Stages
from moeloom.cli.timing import Sample
from moeloom.errors import CapabilityError, MoeloomError
from moeloom.models import MODELS
from moeloom.placement import Placement
from moeloom.plan.plan import Plan
from moeloom.quantize import record_bytes
from moeloom.types import Routing

MODEL = "mixtral-8x7b"
SMALL = ("--device", "cpu", "--model", MODEL, "--scale", "64", "--steps", "1", "--timeout", "30")
PEAKS = Peaks(flops=1e12, reading=4e9, copying=2e9, link=1e9, source="invented")
SHAPE = MODELS[MODEL].scaled(64)


def small(**options: object) -> Bench:
    same = {"models": (MODEL,), "scale": 64, "tokens": (5,), "ranks": 1, "recipe_name": "fp32", "device": "cpu"}
    return Bench(**{**same, "steps": 2, **options})


def measured(bench: Bench) -> list[Measurement]:
    return [event for event in bench_rank(bench) if isinstance(event, Measurement)]


def invoke(*options: str) -> Result:
    return CliRunner().invoke(app, ["bench", *SMALL, *options])


@pytest.fixture(scope="module")
def found() -> list[Measurement]:
    return measured(small(tokens=(5, 64)))


# ---- bounds


def test_loads_count_what_a_loop_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    placement = Placement.from_slots([[0, 4, 2], [1], [3, 5]])
    ids = [torch.rand(count, 6, generator=generator).topk(3).indices for count in (7, 0, 1)]
    home = {expert: rank for rank, slots in enumerate(placement.slots) for expert in slots}
    pairs = [
        (source, token, int(e)) for source in range(3) for token in range(len(ids[source])) for e in ids[source][token]
    ]
    rows = {(source, token, home[expert]) for source, token, expert in pairs}
    for rank, load in enumerate(loads(ids, placement)):
        sent = sum(source == rank != to for source, _, to in rows)
        got = sum(source != rank == to for source, _, to in rows)
        assert load == Load(
            tokens=len(ids[rank]),
            pairs=sum(home[expert] == rank for *_, expert in pairs),
            experts_hit=len({expert for *_, expert in pairs if home[expert] == rank}),
            rows_moved=max(sent, got),
        )


def test_bounds_by_hand() -> None:
    hidden, elements = SHAPE.hidden, SHAPE.hidden * SHAPE.intermediate
    few = bounds(SHAPE, BF16, PEAKS, Load(tokens=10, pairs=20, experts_hit=3, rows_moved=0))
    assert few["layer"] == few["experts"] == Bound(pytest.approx(3 * 3 * elements * 2 / 4e9), "memory")
    assert few["backward"].seconds == pytest.approx(2 * 3 * 3 * elements * 2 / 2e9)
    assert few["layer and backward"].seconds == pytest.approx(few["layer"].seconds + few["backward"].seconds)
    assert few["dispatch"].seconds == few["combine"].seconds == pytest.approx(30 * hidden * 2 / 2e9)
    many = bounds(SHAPE, BF16, PEAKS, Load(tokens=10**6, pairs=10**7, experts_hit=3, rows_moved=10**6 * 8))
    assert many["layer"] == Bound(pytest.approx(6e7 * elements / 1e12), "compute")
    assert many["backward"] == Bound(pytest.approx(12e7 * elements / 1e12), "compute")
    assert many["combine"] == Bound(pytest.approx(8e6 * hidden * 2 / 1e9), "link")
    quantised = bounds(SHAPE, FP8, PEAKS, Load(tokens=10, pairs=20, experts_hit=3, rows_moved=0))
    record = record_bytes(hidden)
    assert quantised["quantise"].seconds == pytest.approx(10 * (2 * hidden + record) / 2e9)
    assert quantised["dispatch"].seconds == pytest.approx((10 * 2 * hidden + 20 * record) / 2e9)
    assert quantised["experts"].seconds == pytest.approx(3 * 3 * elements * (1 + 4 / 128**2) / 4e9)


def test_the_busiest_rank_bounds_each_stage() -> None:
    one, other = (
        Load(tokens=9, pairs=9, experts_hit=1, rows_moved=0),
        Load(tokens=1, pairs=1, experts_hit=2, rows_moved=0),
    )
    limits = busiest(SHAPE, FP32, PEAKS, [one, other])
    assert limits["experts"] == bounds(SHAPE, FP32, PEAKS, other)["experts"]
    assert limits["dispatch"] == bounds(SHAPE, FP32, PEAKS, one)["dispatch"]


def test_ids_are_distinct_uniform_and_of_each_rank() -> None:
    settings = small(ranks=2, tokens=(4000,)).at(MODEL, 4000)
    ids = uniform_ids(settings, 0)
    assert ids.shape == (4000, 2) and (ids[:, 0] != ids[:, 1]).all()
    counts = torch.bincount(ids.flatten(), minlength=8)
    assert counts.sum() == 8000 and (counts > 850).all() and (counts < 1150).all()
    assert not torch.equal(ids, uniform_ids(settings, 1)) and torch.equal(ids, uniform_ids(settings, 0))


# ---- samples


def test_slowest_rank_median_of_rounds_that_were_queued() -> None:
    bench = small(ranks=2, tokens=(8,))

    def sample(ms: float, queued: bool = True) -> Sample:
        return Sample(ms * 1e-3, {"dispatch": ms * 1e-4, "experts": ms * 5e-4}, 2e-6, queued)

    one = [sample(1.0), sample(9.0), sample(3.0), sample(100.0)]
    other = [sample(2.0), sample(1.0), sample(4.0), sample(50.0, queued=False)]
    keys = [(stage, "moeloom", "cold") for stage in ("layer", "stages")]
    limits = {name: Bound(1e-3, "memory") for name in ("layer", "dispatch", "experts")}
    everyone = [dict.fromkeys(keys, one), dict.fromkeys(keys, other)]
    timed, settings = Timed(Plan("split"), everyone, [], []), bench.at(MODEL, 8)
    done = list(summarised(bench, settings, timed, (limits, PEAKS)))
    assert [m.stage for m in done] == ["layer", "dispatch", "experts"]
    layer, dispatch, experts = done
    assert layer.us == pytest.approx(4000.0) and layer.fastest_us == pytest.approx(2000.0)  # of 2, 9, 4
    assert dispatch.us == pytest.approx(400.0) and experts.us == pytest.approx(2000.0)
    assert layer.rounds == 3 and not layer.waits and layer.share == pytest.approx(0.25)
    flops = 6 * 8 * 2 * SHAPE.hidden * SHAPE.intermediate
    assert layer.tflops == pytest.approx(flops / 4e-3 / 1e12) and dispatch.tflops is None
    timed = Timed(Plan("split"), [dict.fromkeys(keys, [sample(1.0, queued=False)] * 3)] * 2, [], [])
    (first, *_) = summarised(bench, settings, timed, (limits, PEAKS))
    assert first.waits and first.rounds == 3


# ---- runs


def test_layer_and_stages_are_measured(found: list[Measurement]) -> None:
    for tokens in (5, 64):
        for cache in ("cold", "warm"):
            here = {m.stage: m for m in found if (m.tokens, m.cache) == (tokens, cache)}
            assert list(here) == ["layer", "dispatch", "experts", "combine"]
            assert all(0 < m.bound_us < m.us and m.share == pytest.approx(m.bound_us / m.us) for m in here.values())
    assert {(m.recipe, m.ranks, m.plan, m.by) for m in found} == {("fp32/per_rank", 1, "split, direct", "moeloom")}


def test_fp8_and_decode_and_training() -> None:
    fp8 = measured(small(recipe_name="fp8", pipeline="decode"))
    assert {m.stage for m in fp8} == {"layer", "quantise", "dispatch", "experts", "combine"}
    assert {m.plan for m in fp8} == {"decode, direct"} and {m.asked for m in fp8} == {"decode"}
    train = {m.stage: m for m in measured(small(recipe_name="bf16", train=True)) if m.cache == "cold"}
    assert set(train) == {"layer and backward", "dispatch", "experts", "combine", "backward"}
    whole = train["layer and backward"]
    assert whole.train and whole.bound_us > train["backward"].bound_us > train["experts"].bound_us  # times are noisy
    flops = 18 * 5 * 2 * SHAPE.hidden * SHAPE.intermediate
    assert whole.tflops == pytest.approx(flops / whole.us / 1e6)


def test_a_training_step_has_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(benchmark.Case, "check", lambda case: seen.append((case.layer(), case.leaves)))
    measured(small(train=True, steps=1))
    ((_, leaves),) = seen
    assert len(leaves) == 4 and all(bool(leaf.grad.any()) for leaf in leaves), "x, router weights, both of the experts'"


@pytest.mark.parametrize(("recipe", "pipeline"), [("fp32", "split"), ("fp8", "split"), ("bf16", "decode")])
def test_stages_by_themselves(recipe: str, pipeline: str) -> None:
    found = measured(small(ranks=1, recipe_name=recipe, pipeline=pipeline, stages=True))
    here = {m.stage: m for m in found if m.cache == "cold"}
    names = ["dispatch", "experts", "combine"]
    assert list(here) == ["layer", *names, *["quantise"] * (recipe == "fp8"), *(f"{name}, alone" for name in names)]
    for name in names:
        alone, within = here[f"{name}, alone"], here[name]
        assert 0 < alone.bound_us < alone.us and (alone.tflops is None) == (name != "experts")
        record, plain = record_bytes(SHAPE.hidden), 2 * SHAPE.hidden
        if name == "dispatch" and recipe == "fp8":  # 5 rows read, 10 written, at the same rate
            assert alone.bound_us / within.bound_us == pytest.approx(15 * record / (5 * plain + 10 * record))
        else:
            assert alone.bound_us == within.bound_us


def test_stages_by_themselves_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    combine = Stages.combine

    def other(stages: Stages) -> None:
        combine(stages)
        stages.y = stages.y + 1

    monkeypatch.setattr(Stages, "combine", other)
    with pytest.raises(MoeloomError, match=f"{MODEL}, 5 tokens: stages by themselves give other bits"):
        measured(small(stages=True))


def test_several_models_and_room_for_more_tokens() -> None:
    options = ("--model", f"{MODEL},gpt-oss-20b", "--tokens", "2,3", "--ranks", "1", "--max-tokens", "40", "--stages")
    result = invoke(*options, "--pipeline", "decode")
    assert result.exit_code == 0, result.output
    titles = [line for line in result.stdout.splitlines() if "at 1/64 width: hidden" in line]
    assert [title.split()[0] for title in titles] == [MODEL, "gpt-oss-20b"]
    assert result.stdout.count("layer (decode)") == 4 and result.stdout.count("  combine, alone") == 4
    for said in ("Runtimes were made for 40 tokens per rank.", "alone: the stage by itself", "machine, per rank"):
        assert result.stdout.count(said) == 1, result.stdout
    found = measured(small(models=("gpt-oss-20b", MODEL), max_tokens=9, steps=1))
    assert [m.model for m in found] == ["gpt-oss-20b"] * 8 + [MODEL] * 8 and {m.max_tokens for m in found} == {9}


def test_ranks_that_share_gpus_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "peaks_here", lambda bench: PEAKS)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for ranks, said in ((3, "3 ranks share 2 GPU(s): times are not those of a GPU each"), (2, "")):
        events = bench_rank(small(device="cuda", ranks=ranks, recipe_name="bf16"))
        first = [next(events) for _ in range(2)]
        assert (first[1].text if isinstance(first[1], Note) else "") == said


@pytest.mark.parametrize("what", ["result", "gradient of x"])
def test_wrong_results_are_not_timed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*arguments: object) -> object:
        list(arguments)[5][what][2, 3] += 1.0
        return judge(*arguments)

    judge = benchmark.judge
    monkeypatch.setattr(benchmark, "judge", spoiled)
    with pytest.raises(MoeloomError, match=f"{MODEL}, 5 tokens: {what} is wrong: error .* allowed"):
        measured(small(train=True))


def test_two_ranks_one_command(tmp_path: Path) -> None:
    """Table, JSON, and a later run that is compared with it."""
    kept = tmp_path / "kept.jsonl"
    kept.write_text("of before\n")
    result = invoke("--tokens", "4,20", "--json", str(kept))
    assert result.exit_code == 0, result.output
    assert result.output.isascii() and max(map(len, result.output.splitlines())) <= 100
    assert re.search(r"^\| +4 \| layer \(split\) +\| +[\d.]+ \| +[\d.]+ \|", result.output, re.MULTILINE), result.output
    assert "mixtral-8x7b at 1/64 width" in result.output and result.output.count("|   experts") == 2
    lines = read_lines("--against", str(kept))
    assert len(lines) == 2 * 4 * 2 and {line["ranks"] for line in lines} == {2}
    for factor, code in ((100.0, 0), (0.01, 1)):
        changed = tmp_path / f"{code}.jsonl"
        changed.write_text("".join(json.dumps(line | {"us": line["us"] * factor}) + "\n" for line in lines))
        result = invoke("--tokens", "20", "--against", str(changed))
        assert result.exit_code == code, result.output
        if code:
            assert "8 of 8 measurements take 15 % longer" in result.output
            assert re.search(rf"{MODEL}, 20 tokens, layer, cold: \S+ -> \S+ us, \S+ times as long", result.output)
        else:
            assert "no regression: 8 measurements compared" in result.output
    changed.write_text("".join(json.dumps(line | {"machine": "another"}) + "\n" for line in lines))
    result = invoke("--tokens", "20", "--against", str(changed))
    assert result.exit_code == 1 and "nothing to compare" in result.output


# ---- files


def test_json_lines_are_read_back(found: list[Measurement], tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    path.write_text("\n".join(map(json_line, found)))
    lines = read_lines("--against", str(path))
    assert lines == [dataclasses.asdict(one) for one in found]
    assert len({tuple(line[name] for name in KEY) for line in lines}) == len(lines)
    for text, message in (
        ("", "there is no measurement in it"),
        ("no json", "it must be a file that --json has written"),
        ("[1]", "line 1 is no measurement of --json"),
        (json.dumps(lines[0]) + "\n" + json.dumps(lines[1] | {"us": "many"}), "line 2 is no measurement"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(message)):
            read_lines("--against", str(path))


def test_regressions_are_ours_and_above_noise(found: list[Measurement]) -> None:
    one = dataclasses.replace(found[0], us=100.0)
    small_one = dataclasses.replace(found[1], us=3.0)
    peer = dataclasses.replace(found[2], us=100.0, by="another")
    earlier = [m.to_json() for m in (one, small_one, peer)]
    slower = [dataclasses.replace(one, us=116.0), dataclasses.replace(small_one, us=3.9)]
    slower.append(dataclasses.replace(peer, us=500.0))
    compared, lines = compare(slower, earlier)
    assert compared == 2 and len(lines) == 1 and "100 -> 116 us, 1.16 times as long" in lines[0]
    assert compare([dataclasses.replace(one, us=114.0)], earlier) == (1, [])
    assert len(compare([dataclasses.replace(small_one, us=4.1)], earlier)[1]) == 1
    assert compare([dataclasses.replace(one, tokens=77)], earlier) == (0, [])
    # what the planner takes may change: as long as it was asked the same, the times are compared
    assert len(compare([dataclasses.replace(one, us=200.0, plan="decode, direct")], earlier)[1]) == 1
    assert compare([dataclasses.replace(one, us=200.0, asked="split")], earlier) == (0, [])


def test_table_of_a_gpu_at_100_columns(found: list[Measurement]) -> None:
    """Graph, peer, waits and host times have their places."""
    here = [dataclasses.replace(m, device="cuda", host_us=123456.0, us=87654.3) for m in found]
    layer = next(m for m in here if m.stage == "layer" and m.cache == "cold")
    here += [
        dataclasses.replace(layer, stage="layer, replayed", waits=True),
        dataclasses.replace(layer, by="deep_gemm", plan="", bound_us=None, bound_by=None, share=None),
    ]
    written = io.StringIO()
    console = Console(file=written, width=100, highlight=False)
    print_bench(console, small(tokens=(5, 64)), here, ["deep_ep: not measured: No module named 'deep_ep'"])
    text = written.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    assert re.search(r"layer, replayed +\| +87654\* \|", text) and re.search(r"\| layer, deep_gemm +\| +87654 \|", text)
    assert "deep_ep: not measured" in text and "host us" in text and "second-level cache" in text
    for row in (line for line in text.splitlines() if line.startswith("|") and "layer" in line):
        assert "…" not in row


def test_table_on_a_narrow_terminal(found: list[Measurement]) -> None:
    """Columns that do not fit are left out, and it is said where they are; a long name is folded."""
    here = [dataclasses.replace(m, device="cuda", host_us=123456.0, us=87654.3, bound_us=123.4) for m in found]
    layer = next(m for m in here if m.stage == "layer" and m.cache == "cold")
    here += [
        dataclasses.replace(layer, stage="layer, replayed", waits=True),
        dataclasses.replace(layer, stage="layer and backward", plan="split, direct, 4 chunks"),
        dataclasses.replace(layer, stage="dispatch", by="deep_gemm", plan="", bound_us=None, bound_by=None),
    ]
    for width in (80, 100):
        written = io.StringIO()
        console = Console(file=written, width=width, force_terminal=True, color_system=None, legacy_windows=False)
        print_bench(console, small(tokens=(5, 64)), here, [])
        text = written.getvalue()
        assert max(map(len, text.splitlines())) <= width and "…" not in text
        assert re.search(r"layer, replayed +│ +87654\* │", text) and "*: the GPU had to wait" in text
        assert ("warm us" in text and "host us" in text) == (width == 100)
        assert ("shown from 100 columns on" in " ".join(text.split())) == (width == 80)


# ---- peers


ADAPTERS = '''
from __future__ import annotations
from dataclasses import dataclass

@dataclass(frozen=True)
class Peer:
    name: str
    stage: str
    run: object

class Good:
    name = "good"
    remark = "x comes quantised"
    def __init__(self, settings, experts): self.experts = experts
    def calls(self, x, routing, y): return [Peer("good", "layer", lambda: (x, y, self.experts))]

class Late:
    name, remark = "late", "no"
    def __init__(self, settings, experts): pass
    def calls(self, x, routing, y): raise ValueError("its result differs from ours by 0.5")

def no(settings, experts): raise RuntimeError("no such GPU")

def importable(name, settings):
    if name == "gone":
        import a_module_that_is_not_there

ADAPTERS = {"good": Good, "gone": Good, "bad": no, "late": Late}
'''  # fmt: skip


def test_peers_that_fail_are_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapters.py").write_text(ADAPTERS)
    monkeypatch.setattr(other_systems, "ADAPTERS", tmp_path / "adapters.py")
    others, notes = other_systems.find(SimpleNamespace(device="cuda"), "experts")
    assert notes.pop() == "late: no"
    assert notes == [
        "good: x comes quantised",
        "gone: not measured: No module named 'a_module_that_is_not_there'",
        "bad: not measured: RuntimeError: no such GPU",
    ]
    x, routing = torch.randn(3, 2), Routing(torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1))
    calls, notes = others.at(x, routing, -x)
    assert [(one.name, one.stage, one.run()[2]) for one in calls] == [("good", "layer", "experts")]
    assert notes == ["late: not measured with 3 tokens: its result differs from ours by 0.5"]
    monkeypatch.setattr(other_systems, "ADAPTERS", tmp_path / "none.py")
    assert other_systems.find(SimpleNamespace(device="cuda"), "experts") == (None, [peers_left_out()])
    assert other_systems.find(SimpleNamespace(device="cpu"), "experts") == (None, [])


def peers_left_out() -> str:
    return "peers: not measured; their adapters are in the source, not in the package"


def test_peers_are_timed_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapters.py").write_text(ADAPTERS)
    monkeypatch.setattr(other_systems, "ADAPTERS", tmp_path / "adapters.py")
    find = other_systems.find
    monkeypatch.setattr(benchmark, "find", lambda settings, experts: find(SimpleNamespace(device="cuda"), experts))
    events = list(bench_rank(small()))
    said = [event.text for event in events if isinstance(event, Note)]
    assert "gone: not measured: No module named 'a_module_that_is_not_there'" in said
    assert "late: not measured with 5 tokens: its result differs from ours by 0.5" in said
    other = [event for event in events if isinstance(event, Measurement) and event.by != "moeloom"]
    assert [(one.by, one.stage, one.cache) for one in other] == [("good", "layer", "cold"), ("good", "layer", "warm")]
    ours = next(event for event in events if isinstance(event, Measurement))
    assert all(one.bound_us == ours.bound_us and 0 < one.us < ours.us for one in other)
    quiet = list(bench_rank(small(peers=False)))
    assert not [event for event in quiet if isinstance(event, Note)] and len(quiet) < len(events)


def test_adapters_of_this_checkout_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They import without the systems they are for, and name each one."""
    for name in ("deep_gemm", "deep_ep"):
        monkeypatch.setitem(sys.modules, name, None)
    here = small().at(MODEL, 5)
    settings = SimpleNamespace(device="cuda", shape=here.shape, placement=here.placement)
    others, notes = other_systems.find(settings, None)
    assert others is None and len(notes) == 2
    for note, name in zip(notes, ("deep_gemm", "deep_ep"), strict=True):
        assert note.startswith(f"{name}: not measured: ")


# ---- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "mixtral"), r"--model is 'mixtral', which is no known model; close: .*"),
        (("--tokens", "0"), r"--tokens is 0; every number must be at least 1"),
        (("--tokens", "8,8"), r"--tokens is 8,8; name each number once"),
        (("--tokens", "many"), r"--tokens is 'many'; give numbers: 1,64,4096"),
        (("--train", "--pipeline", "decode"), r"--train is set, but --pipeline decode has no gradient; .*"),
        (("--train", "--recipe", "fp8"), r"--train is set, but --recipe fp8 is forward only; .*"),
        (("--against", "gone.jsonl"), r"--against is 'gone.jsonl'; it must be a file that --json has written .*"),
        (("--json", "no/such/folder/x.jsonl"), r"--json is 'no/such/folder/x.jsonl', which cannot be written: .*"),
        (("--json", "x.jsonl", "--against", "./x.jsonl"), r"--json is 'x.jsonl', the file of --against, .*"),
        (("--timeout", "0"), r"--timeout is 0; .*"),
        (("--model", f"{MODEL},{MODEL}"), rf"--model is {MODEL},{MODEL}; name each model once"),
        (("--model", f"{MODEL},"), r"--model is '', which is no known model; .*"),
        (("--tokens", "4,8", "--max-tokens", "7"), r"--max-tokens is 7; allowed with --tokens 4,8: no fewer than .*"),
        (("--train", "--stages"), r"--stages is set, but with --train stages are timed within the step only; .*"),
    ],
)
def test_wrong_options_are_one_line(options: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", *options])
    assert result.exit_code == 2 and result.stdout == ""
    assert re.fullmatch(f"error: {message}\n", result.stderr), result.stderr


def test_device_fits_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "gpus_with_kernels", lambda: [])
    assert device_to_use("auto", None, "auto", None) == "cpu"
    with pytest.raises(ValueError, match="--device is 'cuda', but torch sees no H100 or H200"):
        device_to_use("cuda", None, "auto", None)
    monkeypatch.setattr(command, "gpus_with_kernels", lambda: [0, 1])
    monkeypatch.setattr(command, "driver", lambda: None)
    monkeypatch.setattr(command, "nvrtc", lambda: None)
    assert device_to_use("auto", None, "auto", None) == device_to_use("auto", 1, "direct", "fp8") == "cuda"
    for asked in ((2, "auto", None), (None, "hybrid", None), (None, "auto", "fp32")):
        assert device_to_use("auto", *asked) == "cpu"
    assert device_to_use("cpu", None, "auto", "bf16") == "cpu"
    assert command.ranks_to_use("cuda", None, 4) == 2 and command.ranks_to_use("cpu", None, 4) == 4
    assert command.ranks_to_use("cuda", 3, 4) == 3


def test_gpus_that_kernels_cannot_run_on_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an H100 where the extra is not installed; and one whose driver is in a bad state."""

    def missing() -> None:
        raise CapabilityError("kernels are compiled by NVRTC 13, found: No module named 'cuda'; pip install")

    def broken() -> list[int]:
        raise RuntimeError("CUDA error: unknown error\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(command, "gpus_with_kernels", lambda: [0])
    monkeypatch.setattr(command, "nvrtc", missing)
    for name in ("bench", "run"):
        result = CliRunner().invoke(app, [name])
        wanted = "error: --device is 'auto', and there are GPUs, but kernels are compiled by NVRTC 13, found: No module"
        assert result.exit_code == 2 and result.stderr.startswith(wanted) and result.stderr.count("\n") == 1
        assert result.stderr.endswith("; or --device cpu\n")
    monkeypatch.setattr(command, "gpus_with_kernels", broken)
    for name in ("bench", "run", "measure"):
        result = CliRunner().invoke(app, [name])
        assert result.exit_code == 1 and result.stderr.startswith("error: RuntimeError: CUDA error: unknown error")
        assert result.stderr.count("\n") == 1


def test_help_is_whole_at_80_columns() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"})
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and not any(line.endswith("...") for line in lines if "COMMAND" not in line)
    for name in ("run", "bench", "plan", "measure", "doctor"):
        assert re.search(rf"^  {name} +[A-Z].*\.$", result.stdout, re.MULTILINE), name
