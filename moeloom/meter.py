"""How long each stage took and what it put on the links."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

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


class Watch(Protocol):
    """Sees stages begin and end: where a stage only queues work, the host's clock does not say how long that takes."""

    def begin(self) -> Any:
        """A stage begins. What this gives is handed to `end`."""

    def end(self, begun: Any, name: str, chunk: int, seconds: float) -> None:
        """It has ended, and is in the totals with `seconds` of the host."""

    def settle(self) -> None:
        """Wait for all work, and put its own times into the totals and the events."""


class Meter:
    """Totals per stage over a Runtime's life.

    events: what ran when, while it is a list. watch: who else looks at stages; it may be set between them.
    """

    def __init__(self, traffic: Traffic, rank: int) -> None:
        self._traffic, self._rank = traffic, rank
        self.stages: dict[str, StageStats] = {}
        self.events: list[Event] | None = None
        self.watch: Watch | None = None

    @contextmanager
    def stage(self, name: str, chunk: int = 0) -> Iterator[None]:
        """Count what happens inside as one call of stage `name`. Stage "experts" moves nothing: while it computes,
        traffic is another thread's.
        """
        watch = self.watch
        begun = watch.begin() if watch else None
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
        if watch:
            watch.end(begun, name, chunk, end - start)

    def settle(self) -> None:
        """Wait until what was launched is done and counted."""
        if self.watch:
            self.watch.settle()

    @contextmanager
    def tracing(self) -> Iterator[list[Event]]:
        """While it is open, `events` is the list it gives."""
        events: list[Event] = []
        self.events = events
        try:
            yield events
        finally:
            self.events = None
