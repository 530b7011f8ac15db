"""When each task ran: what a simulation predicts and an execution measures."""

from __future__ import annotations

from dataclasses import dataclass

from moeloom.schedule.tasks import Task, TaskGraph


@dataclass(frozen=True)
class Span:
    """From when to when a task ran, in seconds since the begin of the first one."""

    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A graph and a span for each of its tasks."""

    graph: TaskGraph
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """From the first begin to the last end."""
        return max((span.end for span in self.spans), default=0.0)

    def on(self, resource: str) -> list[tuple[Task, Span]]:
        """What a resource does, in its order."""
        mine = [(task, span) for task, span in zip(self.graph.tasks, self.spans, strict=True)]
        return sorted((pair for pair in mine if pair[0].resource == resource), key=lambda pair: pair[1].begin)

    def busy(self, resource: str) -> float:
        """Seconds during which a resource works."""
        return sum(span.end - span.begin for _, span in self.on(resource))
