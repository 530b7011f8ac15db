"""What would happen: when the tasks of a graph run, and in which order they should."""

from __future__ import annotations

from dataclasses import replace

from moeloom.schedule.tasks import TaskGraph
from moeloom.schedule.timeline import Span, Timeline


def simulate(graph: TaskGraph) -> Timeline:
    """Each resource does its tasks one at a time in the order of the graph, each as soon as it can.

    >>> from moeloom.schedule.tasks import Task
    >>> simulate(TaskGraph((Task("a", "link", 2.0), Task("b", "cores", 1.0), Task("c", "cores", 1.0, 0, (0,))))).seconds
    3.0
    """
    free_at = dict.fromkeys(graph.resources, 0.0)
    spans: list[Span] = []
    for task in graph.tasks:
        begin = max([free_at[task.resource], *(spans[other].end for other in task.waits_for)])
        spans.append(Span(begin, begin + task.seconds))
        free_at[task.resource] = begin + task.seconds
    return Timeline(graph, tuple(spans))


def list_schedule(graph: TaskGraph) -> TaskGraph:
    """The same tasks in the order of list scheduling.

    Whenever a resource is free it begins the ready task with the most work behind it (longest path to the end; of
    equals, the earlier task). Never are all resources idle, so it takes at most twice as long as the best order with
    two resources (Graham 1966), n times with n. Deterministic, so equal on all ranks.
    """
    tasks = graph.tasks
    free_at = dict.fromkeys(graph.resources, 0.0)
    ends: dict[int, float] = {}  # in the order of the result
    waiting = set(range(len(tasks)))
    while waiting:
        candidates = []
        for place in waiting:
            if all(other in ends for other in tasks[place].waits_for):
                ready = max((ends[other] for other in tasks[place].waits_for), default=0.0)
                begin = max(ready, free_at[tasks[place].resource])
                candidates.append((begin, -graph.seconds_to_end[place], place))
        begin, _, place = min(candidates)
        ends[place] = free_at[tasks[place].resource] = begin + tasks[place].seconds
        waiting.remove(place)
    new = {place: number for number, place in enumerate(ends)}
    return TaskGraph(
        tuple(replace(tasks[place], waits_for=tuple(sorted(new[o] for o in tasks[place].waits_for))) for place in ends)
    )


def best_order(graph: TaskGraph) -> TaskGraph:
    """The graph as it is, or list-scheduled where that ends earlier."""
    other = list_schedule(graph)
    return other if simulate(other).seconds < simulate(graph).seconds else graph
