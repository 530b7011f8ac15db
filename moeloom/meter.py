"""How long each stage took and what it put on the links."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from moeloom.backends.base import Traffic


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
    """Totals per stage over a Runtime's life."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self.stages: dict[str, StageStats] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what happens inside as one call of stage `name`."""
        before, start = replace(self._traffic), time.perf_counter()
        yield
        seconds, now, total = time.perf_counter() - start, self._traffic, self.stages.get(name, StageStats())
        self.stages[name] = StageStats(
            total.calls + 1,
            total.seconds + seconds,
            total.scale_up_bytes + now.scale_up_bytes - before.scale_up_bytes,
            total.scale_out_bytes + now.scale_out_bytes - before.scale_out_bytes,
            total.rows + now.rows - before.rows,
        )
