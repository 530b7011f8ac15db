"""Tasks that take time on a resource, and what each waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class Task:
    """A piece of work that occupies one resource for some time.

    kind: of work, the same for all chunks ("dispatch"). chunk: which part of the batch. waits_for: places in the graph
    of the tasks that must have ended.
    """

    kind: str
    resource: str
    seconds: float
    chunk: int = 0
    waits_for: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind} {self.chunk}"


@dataclass(frozen=True)
class TaskGraph:
    """Tasks in an order in which one alone could do them: each waits only for earlier ones, so nothing can deadlock.

    >>> TaskGraph((Task("load", "link", 1.0), Task("use", "cores", 2.0, waits_for=(0,)))).critical_seconds
    3.0
    """

    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        for place, task in enumerate(self.tasks):
            if not task.seconds >= 0:
                raise ValueError(f"task {task.name} takes {task.seconds} s; it must be 0 or more")
            late = [other for other in task.waits_for if not 0 <= other < place]
            if late:
                raise ValueError(f"task {place} ({task.name}) waits for {late}; allowed: earlier tasks, 0..{place - 1}")

    @property
    def resources(self) -> tuple[str, ...]:
        """What the tasks run on, by first use."""
        return tuple(dict.fromkeys(task.resource for task in self.tasks))

    @cached_property
    def seconds_to_end(self) -> tuple[float, ...]:
        """For each task the longest chain of work from its begin to the end of the graph, in seconds."""
        after = [0.0] * len(self.tasks)
        for place in reversed(range(len(self.tasks))):
            task = self.tasks[place]
            after[place] += task.seconds
            for other in task.waits_for:
                after[other] = max(after[other], after[place])
        return tuple(after)

    @property
    def critical_seconds(self) -> float:
        """The longest chain: no number of resources makes it faster."""
        return max(self.seconds_to_end, default=0.0)

    @property
    def serial_seconds(self) -> float:
        """One task after the other."""
        return sum(task.seconds for task in self.tasks)

    def work(self, resource: str) -> float:
        """Seconds of work on one resource: it cannot end earlier."""
        return sum(task.seconds for task in self.tasks if task.resource == resource)

    def with_seconds(self, seconds: Sequence[float]) -> TaskGraph:
        """The same graph with other times, for example measured ones."""
        return TaskGraph(tuple(replace(task, seconds=s) for task, s in zip(self.tasks, seconds, strict=True)))
