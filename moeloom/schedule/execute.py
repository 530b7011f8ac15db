"""Running a task graph for real: a thread for each resource, each doing its tasks in the order of the graph."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from moeloom.schedule.tasks import TaskGraph
from moeloom.schedule.timeline import Span, Timeline

Action = Callable[[], None]


def execute(graph: TaskGraph, actions: Sequence[Action], caller: str) -> Timeline:
    """Run `actions[i]` for task i: those of resource `caller` here, those of each other resource in its own thread.

    A task begins when those it waits for have ended. The first exception is raised here, once every thread has ended
    the task it was in; nothing begins after it. Returns the measured timeline.
    """
    run = _Run(graph, actions)
    threads = [
        threading.Thread(target=run.work, args=(resource,), name=f"moeloom-{resource}")
        for resource in graph.resources
        if resource != caller
    ]
    for thread in threads:
        thread.start()
    run.work(caller)
    run.wait_for_all()
    for thread in threads:
        thread.join()
    if run.error is not None:
        raise run.error
    return Timeline(graph, tuple(span for span in run.spans if span is not None))


class _Run:
    """What the threads share."""

    def __init__(self, graph: TaskGraph, actions: Sequence[Action]) -> None:
        self.graph, self.actions = graph, actions
        self.error: BaseException | None = None
        self.spans: list[Span | None] = [None] * len(graph.tasks)
        self._working = set(graph.resources)
        self._changed = threading.Condition()
        self._start = time.perf_counter()

    def work(self, resource: str) -> None:
        """Do a resource's tasks, in the order of the graph: the same on every rank, as collectives need."""
        try:
            for place, task in enumerate(self.graph.tasks):
                if task.resource != resource:
                    continue
                if not self._ready(place):
                    return
                begin = time.perf_counter() - self._start
                self.actions[place]()
                self._end(place, Span(begin, time.perf_counter() - self._start))
        except BaseException as error:
            self._fail(error)
        finally:
            with self._changed:
                self._working.discard(resource)
                self._changed.notify_all()

    def wait_for_all(self) -> None:
        """Until no thread works any more. An interrupt meanwhile is an error like others; in `Thread.join` it would
        lose the thread.
        """
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._working)
        except BaseException as error:
            self._fail(error)
            self.wait_for_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def _ready(self, place: int) -> bool:
        """Wait until the task can begin; whether it still should."""
        needed = self.graph.tasks[place].waits_for
        with self._changed:
            self._changed.wait_for(lambda: self.error or all(self.spans[other] is not None for other in needed))
            return self.error is None

    def _end(self, place: int, span: Span) -> None:
        with self._changed:
            self.spans[place] = span
            self._changed.notify_all()
