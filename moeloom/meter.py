"""How long each stage took and what it put on the links."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from moeloom.backends.base import Traffic
from moeloom.schedule.trace import Event


@dataclass(frozen=True)
class StageStats:
    """Totals of one stage on this rank."""

    calls: int = 0
    seconds: float = 0.0
    scale_up_bytes: int = 0
    scale_out_bytes: int = 0
    rows: int = 0

    def __sub__(self, earlier: StageStats) -> StageStats:
        return StageStats(*(getattr(self, name) - getattr(earlier, name) for name in self.__dataclass_fields__))


class Meter:
    """Totals per stage over a Runtime's life. `events`: what ran when, while it is a list."""

    def __init__(self, traffic: Traffic, rank: int) -> None:
        self._traffic, self._rank = traffic, rank
        self.stages: dict[str, StageStats] = {}
        self.events: list[Event] | None = None

    @contextmanager
    def stage(self, name: str, chunk: int = 0) -> Iterator[None]:
        """Count what happens inside as one call of stage `name`. Stage "experts" moves nothing: while it computes,
        traffic is another thread's.
        """
        before, start = replace(self._traffic), time.perf_counter()
        yield
        end, now, total = time.perf_counter(), self._traffic, self.stages.get(name, StageStats())
        moved = Traffic() if name == "experts" else now
        before = moved if name == "experts" else before
        self.stages[name] = StageStats(
            total.calls + 1,
            total.seconds + end - start,
            total.scale_up_bytes + moved.scale_up_bytes - before.scale_up_bytes,
            total.scale_out_bytes + moved.scale_out_bytes - before.scale_out_bytes,
            total.rows + moved.rows - before.rows,
        )
        if self.events is not None:
            resource = "compute" if name == "experts" else "links"
            self.events.append(Event(name, chunk, resource, start, end, self._rank))

    @contextmanager
    def tracing(self) -> Iterator[list[Event]]:
        """While it is open, `events` is the list it gives."""
        events: list[Event] = []
        self.events = events
        try:
            yield events
        finally:
            self.events = None
