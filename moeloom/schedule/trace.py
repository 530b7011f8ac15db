"""What ran when, on which rank and resource: for drawings and for trace viewers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moeloom.schedule.timeline import Timeline


@dataclass(frozen=True)
class Event:
    """One task that ran, or would run. begin, end: seconds on a clock that all events of a trace share.

    rank: of whom; -1 for a prediction, which is for every rank.
    """

    kind: str
    chunk: int
    resource: str
    begin: float
    end: float
    rank: int = -1

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind} {self.chunk}"


def events(timeline: Timeline, rank: int = -1) -> list[Event]:
    """The events of a simulated or measured timeline."""
    return [
        Event(task.kind, task.chunk, task.resource, span.begin, span.end, rank)
        for task, span in zip(timeline.graph.tasks, timeline.spans, strict=True)
    ]


def to_perfetto(trace: Iterable[Event]) -> dict[str, Any]:
    """The trace in the JSON form of trace viewers (Perfetto, chrome://tracing): a process per rank, a thread per
    resource, times in microseconds from the first begin.
    """
    trace = sorted(trace, key=lambda event: (event.rank, event.begin))
    start = min((event.begin for event in trace), default=0.0)
    ranks = list(dict.fromkeys(event.rank for event in trace))
    rows = list(dict.fromkeys((event.rank, event.resource) for event in trace))
    named: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": ranks.index(rank), "args": {"name": rank_name(rank)}}
        for rank in ranks
    ]
    named += [
        {"ph": "M", "name": "thread_name", "pid": ranks.index(rank), "tid": tid, "args": {"name": resource}}
        for tid, (rank, resource) in enumerate(rows)
    ]
    spans: list[dict[str, Any]] = [
        {
            "ph": "X",
            "name": event.name,
            "cat": event.kind,
            "pid": ranks.index(event.rank),
            "tid": rows.index((event.rank, event.resource)),
            "ts": (event.begin - start) * 1e6,
            "dur": (event.end - event.begin) * 1e6,
        }
        for event in trace
    ]
    return {"traceEvents": named + spans, "displayTimeUnit": "ms"}


def rank_name(rank: int) -> str:
    """What a rank's row is called."""
    return "predicted" if rank < 0 else f"rank {rank}"
