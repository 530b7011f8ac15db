"""How long calls take: by the host's clock, or by events on a GPU, where the host only queues what runs later."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from moeloom.meter import Meter, StageStats
from moeloom.runtime import Runtime

FLUSH_BYTES = 256 << 20  # several times any cache
CYCLES_PER_SECOND = 2e9  # of a GPU; it rests a little longer if it is slower
SHORTEST_REST, LONGEST_REST = 0.5e-3, 20e-3


@dataclass(frozen=True)
class Sample:
    """One call on this rank.

    seconds: in all. stages: of each stage of it. host: until the call returned. queued: whether the GPU began after
    that; if not, its time contains waits for the host.
    """

    seconds: float
    stages: dict[str, float]
    host: float
    queued: bool = True


class Clock(Protocol):
    """Times calls. Collective: all ranks time the same calls, and begin each together."""

    def time(self, run: Callable[[], object], cold: bool, meter: Meter) -> Sample:
        """One call, its stages as `meter` counts them. cold: other memory is written before; if not, the same call
        comes before.
        """

    def alone(self, run: Callable[[], object], cold: bool, meter: Meter) -> Sample:
        """The same without its stages, where looking at them takes time."""


class HostClock:
    """For calls that are done when they return."""

    def __init__(self) -> None:
        self._flush = torch.ones(FLUSH_BYTES // 8)  # two of them are read and written

    def time(self, run: Callable[[], object], cold: bool, meter: Meter) -> Sample:
        """See `Clock.time`."""
        if cold:
            self._flush.mul_(-1)
        else:
            run()
        meet()
        before, start = dict(meter.stages), time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        return Sample(seconds, spent(meter, before), seconds)

    def alone(self, run: Callable[[], object], cold: bool, meter: Meter) -> Sample:
        """See `Clock.alone`. Nothing would be saved."""
        return self.time(run, cold, meter)


class DeviceClock:
    """For calls that launch kernels. The GPU rests until they are all queued, so that it never waits for the host; the
    ranks' GPUs then begin together.
    """

    def __init__(self, device: torch.device, together: Callable[[], object]) -> None:
        """together: launches what ends on the GPUs of all ranks at about the same time."""
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._together = together
        self._rest, self._number = 2e-3, 0

    def time(self, run: Callable[[], object], cold: bool, meter: Meter) -> Sample:
        """See `Clock.time`. The cache in question is the GPU's second-level one."""
        if not cold:
            run()
        settle(meter)
        meet()
        torch.cuda._sleep(int(self._rest * CYCLES_PER_SECOND))
        if cold:
            self._number = (self._number + 1) % 256
            self._flush.fill_(self._number)
        self._together()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        before, start = dict(meter.stages), time.perf_counter()
        run()
        host, queued = time.perf_counter() - start, not begin.query()
        end.record()
        settle(meter)
        wanted = 1.5 * host + SHORTEST_REST if queued else 2 * self._rest
        self._rest = min(max(self._rest, wanted), LONGEST_REST)
        return Sample(begin.elapsed_time(end) * 1e-3, spent(meter, before), host, queued)

    def alone(self, run: Callable[[], object], cold: bool, meter: Meter) -> Sample:
        """See `Clock.alone`. An event between kernels keeps the next one from starting early."""
        assert isinstance(meter, DeviceMeter)
        meter.looks = False
        try:
            return replace(self.time(run, cold, meter), stages={})
        finally:
            meter.looks = True


class DeviceMeter(Meter):
    """Stages timed by events on the stream; `settle` then puts them into the totals, and into what is traced.

    looks: whether it does; if not, the totals are of the host's clock.
    """

    looks = True

    def __init__(self, meter: Meter, rank: int, device: torch.device) -> None:
        super().__init__(meter._traffic, rank)
        self._device = device
        torch.cuda.synchronize(device)
        self._begin()

    @contextmanager
    def stage(self, name: str, chunk: int = 0) -> Iterator[None]:
        """See `Meter.stage`. What a graph captures takes no time of its own."""
        stream = torch.cuda.current_stream(self._device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        looks = self.looks and not torch.cuda.is_current_stream_capturing()
        before = self.stages.get(name, StageStats()).seconds
        if looks:
            begin.record(stream)
        with super().stage(name, chunk):
            yield
        if looks:
            end.record(stream)
            self._open.append((name, chunk, self.stages[name].seconds - before, begin, end))

    def settle(self) -> None:
        """Wait for the GPU; from then on totals and trace are of its time. The next stages begin after this."""
        torch.cuda.synchronize(self._device)
        taken = {}
        for name, chunk, host, begin, end in self._open:
            total, seconds = self.stages[name], begin.elapsed_time(end) * 1e-3
            self.stages[name] = replace(total, seconds=total.seconds + seconds - host)
            start = self._zero_host + self._zero.elapsed_time(begin) * 1e-3
            taken[name, chunk] = (start, start + seconds)
        for place, event in enumerate(self.events or ()):
            begin_end = taken.get((event.kind, event.chunk))
            if self.events is not None and begin_end:
                self.events[place] = replace(event, begin=begin_end[0], end=begin_end[1])
        self._begin()

    def _begin(self) -> None:
        self._open: list[tuple[str, int, float, torch.cuda.Event, torch.cuda.Event]] = []
        self._zero, self._zero_host = torch.cuda.Event(enable_timing=True), time.perf_counter()
        self._zero.record(torch.cuda.current_stream(self._device))


def meter_of(runtime: Runtime) -> Meter:
    """What counts the Runtime's stages. On a GPU it is exchanged for one that times them there; call it first."""
    if runtime.backend.device.type != "cpu":
        runtime._meter = DeviceMeter(runtime._meter, runtime.rank, runtime.backend.device)
    return runtime._meter


def settle(meter: Meter) -> None:
    """Wait until what was launched is done, and counted."""
    if isinstance(meter, DeviceMeter):
        meter.settle()


def spent(meter: Meter, before: dict[str, StageStats]) -> dict[str, float]:
    """Seconds of each stage since then."""
    return {
        name: (now - before.get(name, StageStats())).seconds
        for name, now in meter.stages.items()
        if now.calls > before.get(name, StageStats()).calls
    }


def meet() -> None:
    """Wait on the host for all ranks."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))
