"""The task graph of one layer, or of several micro-batches: chunks x stages over the resources of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeloom.schedule.simulate import list_schedule
from moeloom.schedule.tasks import Task, TaskGraph


@dataclass(frozen=True)
class Stage:
    """One stage: a kind of work, what it runs on, how long it takes for one chunk."""

    kind: str
    resource: str
    seconds: float


def in_flight(stages: Sequence[Stage]) -> int:
    """Chunks that hold buffers at once: one for each resource, so that none waits for another chunk's return."""
    return len({stage.resource for stage in stages})


def layer_graph(stages: Sequence[Stage], chunks: int = 1, beside: Sequence[Stage] = ()) -> TaskGraph:
    """`chunks` equal chunks through the same stages, software-pipelined.

    stages: of one chunk, in order, for example dispatch, experts, combine. beside: work of the whole layer that waits
    for nothing of it, for example shared experts; done last on its resource, which fills the wait for the last combine.
    The order does not depend on the times: dispatch 0, dispatch 1, combine 0, dispatch 2, combine 1, ...: a chunk sets
    out before the one that is `in_flight` ahead comes back, and takes over that one's buffers. With two resources no
    order is better; with more, `best_order` may know one.
    """
    if chunks < 1:
        raise ValueError(f"chunks is {chunks}; allowed: 1 and more")
    # every stage in the half after the first use of the compute resource belongs to the way back
    turn = next((place for place, stage in enumerate(stages) if stage.resource == "compute"), len(stages))
    out, back = stages[: turn + 1], stages[turn + 1 :]
    ahead = in_flight(stages)
    tasks: list[Task] = []
    ends: dict[int, tuple[int, ...]] = {}

    def add(chunk: int, part: Sequence[Stage]) -> None:
        for stage in part:
            tasks.append(Task(stage.kind, stage.resource, stage.seconds, chunk, ends.get(chunk, ())))
            ends[chunk] = (len(tasks) - 1,)

    for step in range(chunks + ahead - 1):
        if step < chunks:
            ends[step] = ends.get(step - ahead, ())
            add(step, out)
        if step >= ahead - 1:
            add(step - ahead + 1, back)
    tasks += [Task(stage.kind, stage.resource, stage.seconds) for stage in beside]
    return TaskGraph(tuple(tasks))


def two_batch_graph(layers: Sequence[Sequence[Stage]], micro_batches: int = 2) -> TaskGraph:
    """Consecutive layers over independent micro-batches, list-scheduled: while one is on the links, another computes.

    layers: for each layer its stages in order, for example attention, dispatch, experts, combine, with the times of one
    micro-batch. Each micro-batch goes through all layers; micro-batches wait for each other's resources only.
    """
    if micro_batches < 1:
        raise ValueError(f"micro_batches is {micro_batches}; allowed: 1 and more")
    tasks: list[Task] = []
    for batch in range(micro_batches):
        before: tuple[int, ...] = ()
        for stages in layers:
            for stage in stages:
                tasks.append(Task(stage.kind, stage.resource, stage.seconds, batch, before))
                before = (len(tasks) - 1,)
    return list_schedule(TaskGraph(tuple(tasks)))
