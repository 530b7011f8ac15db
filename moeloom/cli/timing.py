"""How long calls take: by the host's clock, or by events on a GPU, where the host only queues what runs later."""

from __future__ import annotations

import time
from collections.abc import Callable
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
        meter.settle()
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
        meter.settle()
        wanted = 1.5 * host + SHORTEST_REST if queued else 2 * self._rest
        self._rest = min(max(self._rest, wanted), LONGEST_REST)
        return Sample(begin.elapsed_time(end) * 1e-3, spent(meter, before), host, queued)

    def alone(self, run: Callable[[], object], cold: bool, meter: Meter) -> Sample:
        """See `Clock.alone`. An event between kernels keeps the next one from starting early."""
        assert isinstance(meter.watch, DeviceWatch)
        meter.watch.looks = False
        try:
            return replace(self.time(run, cold, meter), stages={})
        finally:
            meter.watch.looks = True


class DeviceWatch:
    """Times stages by events on the stream; `settle` then puts them into the totals, and into what is traced.

    looks: whether it does; if not, the totals are of the host's clock.
    """

    looks = True

    def __init__(self, meter: Meter, device: torch.device) -> None:
        self._meter, self._device = meter, device
        torch.cuda.synchronize(device)
        self._begin()

    def begin(self) -> torch.cuda.Event | None:
        """See `Watch.begin`. What a graph captures takes no time of its own."""
        if not self.looks or torch.cuda.is_current_stream_capturing():
            return None
        return self._record()

    def end(self, begun: torch.cuda.Event | None, name: str, chunk: int, seconds: float) -> None:
        """See `Watch.end`."""
        if begun is not None:
            self._open.append((name, chunk, seconds, begun, self._record()))

    def settle(self) -> None:
        """Wait for the GPU; from then on totals and trace are of its time. The next stages begin after this."""
        torch.cuda.synchronize(self._device)
        taken, stages, events = {}, self._meter.stages, self._meter.events or []
        for name, chunk, host, begin, end in self._open:
            seconds = begin.elapsed_time(end) * 1e-3
            stages[name] = replace(stages[name], seconds=stages[name].seconds + seconds - host)
            start = self._zero_host + self._zero.elapsed_time(begin) * 1e-3
            taken[name, chunk] = (start, start + seconds)
        for place, event in enumerate(events):
            if begin_end := taken.get((event.kind, event.chunk)):
                events[place] = replace(event, begin=begin_end[0], end=begin_end[1])
        self._begin()

    def _begin(self) -> None:
        self._open: list[tuple[str, int, float, torch.cuda.Event, torch.cuda.Event]] = []
        self._zero_host, self._zero = time.perf_counter(), self._record()

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def meter_of(runtime: Runtime) -> Meter:
    """What counts the Runtime's stages; on a GPU it times them there from now on."""
    meter, device = runtime.meter, runtime.backend.device
    if device.type != "cpu" and meter.watch is None:
        meter.watch = DeviceWatch(meter, device)
    return meter


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
