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
from moeloom.backends.base import Traffic
from moeloom.cli import app as command
from moeloom.cli import bench as benchmark
from moeloom.cli import peers
from moeloom.cli.app import app, device_to_use
from moeloom.cli.bench import Bench, Measurement, Note, bench_rank, summarised, uniform_ids
from moeloom.cli.bench_report import KEY, compare, json_line, print_bench, read_lines
from moeloom.cli.bounds import Bound, Load, Peaks, bounds, busiest, loads
from moeloom.cli.timing import DeviceClock, DeviceMeter, HostClock, Sample
from moeloom.errors import MoeloomError
from moeloom.meter import Meter, StageStats
from moeloom.models import MODELS
from moeloom.placement import Placement
from moeloom.plan.plan import Plan
from moeloom.quantize import record_bytes
from moeloom.types import Routing

SMALL = ("--device", "cpu", "--model", "mixtral-8x7b", "--scale", "64", "--steps", "1", "--timeout", "30")
PEAKS = Peaks(flops=1e12, reading=4e9, copying=2e9, link=1e9, source="invented")
SHAPE = MODELS["mixtral-8x7b"].scaled(64)


def small(**options: object) -> Bench:
    same = {"model": "mixtral-8x7b", "scale": 64, "tokens": (5,), "ranks": 1, "recipe_name": "fp32", "device": "cpu"}
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
    settings = small(ranks=2, tokens=(4000,)).at(4000)
    ids = uniform_ids(settings, 0)
    assert ids.shape == (4000, 2) and (ids[:, 0] != ids[:, 1]).all()
    counts = torch.bincount(ids.flatten(), minlength=8)
    assert counts.sum() == 8000 and (counts > 850).all() and (counts < 1150).all()
    assert not torch.equal(ids, uniform_ids(settings, 1)) and torch.equal(ids, uniform_ids(settings, 0))


# ---- samples


def test_warm_comes_after_the_same_call_and_stages_are_its_own() -> None:
    clock, meter, calls = HostClock(), Meter(Traffic(), 0), []

    def run() -> None:
        calls.append(len(calls))
        was = meter.stages.get("dispatch", StageStats())
        meter.stages["dispatch"] = StageStats(calls=was.calls + 1, seconds=was.seconds + 10.0 ** len(calls))

    meter.stages["combine"] = StageStats(calls=3, seconds=5.0)
    cold = clock.time(run, True, meter)
    assert calls == [0] and cold.stages == {"dispatch": 10.0}
    warm = clock.time(run, False, meter)
    assert calls == [0, 1, 2] and warm.stages == {"dispatch": pytest.approx(1000.0)}
    assert 0 < warm.seconds == warm.host and warm.queued


class FakeGpu:
    """A GPU whose time is a number: kernels take theirs, one after the other, and do not wait for the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued: list[object] = []  # kernels as seconds, events as themselves
        self.now = self.wall = 0.0  # until when it is busy; what a clock on the wall shows
        self.host = 100.0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at: float | None = None

            def record(self, stream: object = None) -> None:
                gpu.queued.append(self)

            def query(self) -> bool:
                return self.at is not None

            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) * 1e3

        self.kernel = self.queued.append
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.finish())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: "stream")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.kernel(cycles / 2e9))
        monkeypatch.setattr("time.perf_counter", lambda: self.host)

    def finish(self) -> None:
        """Do all that is queued."""
        self._run(float("inf"))
        self.wall = max(self.wall, self.now)

    def _run(self, until: float) -> None:
        while self.queued and self.now <= until:
            one = self.queued.pop(0)
            if isinstance(one, float):
                self.now += one
            else:
                one.at = self.now

    def host_spends(self, seconds: float) -> None:
        """The GPU works meanwhile."""
        self.host += seconds
        self.wall += seconds
        self._run(self.wall)
        if not self.queued:
            self.now = max(self.now, self.wall)


def test_stages_on_a_gpu_are_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    traffic = Traffic()
    meter = DeviceMeter(Meter(traffic, 3), 3, torch.device("cpu"))
    gpu.now = 7.0  # its clock is not the host's, and it idles before the stages begin
    meter.settle()
    with meter.tracing() as events:
        for name, seconds in (("dispatch", 2e-3), ("experts", 5e-3), ("dispatch", 1e-3)):
            with meter.stage(name, chunk=int(seconds == 1e-3)):
                gpu.kernel(seconds)
                gpu.host += 1e-6
                traffic.rows += 4
        assert meter.stages["dispatch"].seconds == pytest.approx(2e-6)  # of the host, so far
        meter.settle()
    assert meter.stages["dispatch"] == StageStats(2, pytest.approx(3e-3), 0, 0, 8)
    assert meter.stages["experts"].seconds == pytest.approx(5e-3)
    times = [(event.kind, event.chunk, event.begin - 100.0, event.end - 100.0, event.rank) for event in events]
    assert times == [
        ("dispatch", 0, pytest.approx(0.0), pytest.approx(2e-3), 3),
        ("experts", 0, pytest.approx(2e-3), pytest.approx(7e-3), 3),
        ("dispatch", 1, pytest.approx(7e-3), pytest.approx(8e-3), 3),
    ]
    with pytest.raises(KeyError), meter.stage("combine"):
        raise KeyError
    meter.looks = False
    with meter.stage("experts"):
        gpu.kernel(1.0)
        gpu.host += 3e-6
    meter.settle()
    assert meter.stages["experts"].seconds == pytest.approx(5e-3 + 3e-6) and "combine" not in meter.stages


@pytest.mark.parametrize("cold", [True, False])
def test_calls_on_a_gpu_wait_until_all_is_queued(cold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, meter = FakeGpu(monkeypatch), None
    flush = SimpleNamespace(fill_=lambda number: gpu.kernel(1e-4))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: flush)
    clock = DeviceClock(torch.device("cpu"), together=lambda: gpu.kernel(1e-5))
    meter = DeviceMeter(Meter(Traffic(), 0), 0, torch.device("cpu"))
    calls = []

    def run(host: float = 5e-4) -> None:
        calls.append(gpu.now)
        for name, seconds in (("dispatch", 2e-3), ("combine", 3e-3)):
            with meter.stage(name):
                gpu.kernel(seconds)
            gpu.host_spends(host / 2)

    sample = clock.time(run, cold, meter)
    assert len(calls) == (1 if cold else 2)
    assert sample.seconds == pytest.approx(5e-3) and sample.host == pytest.approx(5e-4) and sample.queued
    assert sample.stages == {"dispatch": pytest.approx(2e-3), "combine": pytest.approx(3e-3)}
    assert clock.alone(run, cold, meter).stages == {} and meter.looks
    late = clock.time(lambda: run(host=8e-3), cold, meter)
    assert not late.queued and late.seconds > 5e-3, "the host was slower than the rest"
    for _ in range(3):
        late = clock.time(lambda: run(host=8e-3), cold, meter)
    assert late.queued and late.seconds == pytest.approx(5e-3), "it rests longer from then on"


def test_slowest_rank_median_of_rounds_that_were_queued() -> None:
    bench = small(ranks=2, tokens=(8,))

    def sample(ms: float, queued: bool = True) -> Sample:
        return Sample(ms * 1e-3, {"dispatch": ms * 1e-4, "experts": ms * 5e-4}, 2e-6, queued)

    one = [sample(1.0), sample(9.0), sample(3.0), sample(100.0)]
    other = [sample(2.0), sample(1.0), sample(4.0), sample(50.0, queued=False)]
    keys = [(stage, "moeloom", "cold") for stage in ("layer", "stages")]
    limits = {name: Bound(1e-3, "memory") for name in ("layer", "dispatch", "experts")}
    done = list(
        summarised(
            bench, bench.at(8), Plan("split"), [dict.fromkeys(keys, one), dict.fromkeys(keys, other)], (limits, PEAKS)
        )
    )
    assert [m.stage for m in done] == ["layer", "dispatch", "experts"]
    layer, dispatch, experts = done
    assert layer.us == pytest.approx(4000.0) and layer.fastest_us == pytest.approx(2000.0)  # of 2, 9, 4
    assert dispatch.us == pytest.approx(400.0) and experts.us == pytest.approx(2000.0)
    assert layer.rounds == 3 and not layer.waits and layer.share == pytest.approx(0.25)
    flops = 6 * 8 * 2 * SHAPE.hidden * SHAPE.intermediate
    assert layer.tflops == pytest.approx(flops / 4e-3 / 1e12) and dispatch.tflops is None
    late = [sample(1.0, queued=False)] * 3
    (first, *_) = summarised(bench, bench.at(8), Plan("split"), [dict.fromkeys(keys, late)] * 2, (limits, PEAKS))
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
    assert whole.us > train["backward"].us and whole.train
    flops = 18 * 5 * 2 * SHAPE.hidden * SHAPE.intermediate
    assert whole.tflops == pytest.approx(flops / whole.us / 1e6)


@pytest.mark.parametrize("what", ["result", "gradient of x"])
def test_wrong_results_are_not_timed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*arguments: object) -> object:
        list(arguments)[5][what][2, 3] += 1.0
        return judge(*arguments)

    judge = benchmark.judge
    monkeypatch.setattr(benchmark, "judge", spoiled)
    with pytest.raises(MoeloomError, match=f"{what} is wrong with 5 tokens: error .* allowed"):
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
            assert re.search(r"20 tokens, layer, cold: \S+ -> \S+ us, \S+ times as long", result.output)
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
    (tmp_path / "peers.py").write_text(ADAPTERS)
    monkeypatch.setattr(peers, "ADAPTERS", tmp_path / "peers.py")
    others, notes = peers.find(SimpleNamespace(device="cuda"), "experts")
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
    monkeypatch.setattr(peers, "ADAPTERS", tmp_path / "none.py")
    assert peers.find(SimpleNamespace(device="cuda"), "experts") == (None, [peers_left_out()])
    assert peers.find(SimpleNamespace(device="cpu"), "experts") == (None, [])


def peers_left_out() -> str:
    return "peers: not measured; their adapters are in the source, not in the package"


def test_peers_are_timed_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peers.py").write_text(ADAPTERS)
    monkeypatch.setattr(peers, "ADAPTERS", tmp_path / "peers.py")
    find = peers.find
    monkeypatch.setattr(peers, "find", lambda settings, experts: find(SimpleNamespace(device="cuda"), experts))
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
    settings = SimpleNamespace(device="cuda", **{name: getattr(small().at(5), name) for name in ("shape", "placement")})
    others, notes = peers.find(settings, None)
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
        (("--train", "--recipe", "fp8"), r"(--train|--backward) is set, but --recipe fp8 is forward only; .*"),
        (("--against", "gone.jsonl"), r"--against is 'gone.jsonl'; it must be a file that --json has written .*"),
        (("--json", "no/such/folder/x.jsonl"), r"--json is 'no/such/folder/x.jsonl', which cannot be written: .*"),
        (("--json", "x.jsonl", "--against", "./x.jsonl"), r"--json is 'x.jsonl', the file of --against, .*"),
        (("--timeout", "0"), r"--timeout is 0; .*"),
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
    assert device_to_use("auto", None, "auto", None) == device_to_use("auto", 1, "direct", "fp8") == "cuda"
    for asked in ((2, "auto", None), (None, "hybrid", None), (None, "auto", "fp32")):
        assert device_to_use("auto", *asked) == "cpu"
    assert device_to_use("cpu", None, "auto", "bf16") == "cpu"
    assert command.ranks_to_use("cuda", None, 4) == 2 and command.ranks_to_use("cpu", None, 4) == 4
    assert command.ranks_to_use("cuda", 3, 4) == 3
