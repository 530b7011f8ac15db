"""How `moeloom bench` and the benchmarks of kernels time: on the host, and on a GPU that is played here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu_clock import GpuClock
from moeloom import Runtime
from moeloom.backends.base import Traffic
from moeloom.cli.timing import DeviceClock, DeviceWatch, HostClock, meter_of
from moeloom.meter import Meter, StageStats


def watched(meter: Meter) -> Meter:
    meter.watch = DeviceWatch(meter, torch.device("cpu"))
    return meter


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
    meter = watched(Meter(traffic, 3))
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
    meter.watch.looks = False
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
    meter = watched(Meter(Traffic(), 0))
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
    assert clock.alone(run, cold, meter).stages == {} and meter.watch.looks
    late = clock.time(lambda: run(host=8e-3), cold, meter)
    assert not late.queued and late.seconds > 5e-3, "the host was slower than the rest"
    for _ in range(3):
        late = clock.time(lambda: run(host=8e-3), cold, meter)
    assert late.queued and late.seconds == pytest.approx(5e-3), "it rests longer from then on"


def test_the_meter_of_a_runtime_is_watched_where_it_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime("self", backend="cpu") as rt:
        assert meter_of(rt) is rt.meter and rt.meter.watch is None
        rt.meter.settle()  # nothing to wait for
        FakeGpu(monkeypatch)
        on_gpu = SimpleNamespace(meter=rt.meter, backend=SimpleNamespace(device=torch.device("meta")))
        watch = meter_of(on_gpu).watch
        assert isinstance(watch, DeviceWatch) and meter_of(on_gpu).watch is watch


def test_kernels_are_timed_cold_and_behind_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, flushed = FakeGpu(monkeypatch), []
    flush = SimpleNamespace(fill_=lambda number: flushed.append(gpu.kernel(1e-4)), device="cpu")
    monkeypatch.setattr(torch, "empty", lambda *_, **__: flush)
    clock, calls = GpuClock("cpu", rounds=5), []

    def slow_at_first() -> None:
        calls.append(len(flushed))
        gpu.kernel(1.0 if len(calls) <= 3 else 1e-3 * len(calls))
        gpu.host_spends(1e-4)

    assert clock.microseconds(slow_at_first, lambda: gpu.kernel(2e-3)) == [pytest.approx(6e3), pytest.approx(2e3)]
    assert calls == [1 + 2 * number for number in range(clock.count)], "each is preceded by a flush of its own"
    assert len(clock.rounds(slow_at_first)) == clock.count == 8
