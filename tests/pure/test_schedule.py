"""Tasks in order: what a graph allows, what a simulation says, and what a real execution does."""

from __future__ import annotations

import json
import signal
import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeloom.schedule.chunk_graph import Stage, in_flight, layer_graph, two_batch_graph
from moeloom.schedule.execute import execute
from moeloom.schedule.simulate import best_order, list_schedule, simulate
from moeloom.schedule.tasks import Task, TaskGraph
from moeloom.schedule.timeline import Span, Timeline
from moeloom.schedule.trace import Event, events, to_perfetto

EPS = 1e-9
THREE = ("dispatch", "links"), ("experts", "compute"), ("combine", "links")
FIVE = (
    ("exchange", "scale_out"), ("dispatch", "scale_up"), ("experts", "compute"), ("combine", "scale_up"),
    ("exchange back", "scale_out"),
)  # fmt: skip
whole_seconds = st.integers(0, 9).map(float)  # their sums are exact


def stages(kinds: tuple[tuple[str, str], ...], *seconds: float) -> list[Stage]:
    return [Stage(kind, resource, s) for (kind, resource), s in zip(kinds, seconds, strict=True)]


def a(resource: str, seconds: float, *waits_for: int) -> Task:
    return Task(f"on {resource}", resource, seconds, waits_for=waits_for)


@st.composite
def graphs(draw: st.DrawFn, resources: int = 4) -> TaskGraph:
    """Any graph of up to 14 tasks; short times, and often equal ones."""
    tasks: list[Task] = []
    for place in range(draw(st.integers(1, 14))):
        before = draw(st.sets(st.integers(0, place - 1), max_size=3)) if place else set()
        tasks.append(a(f"r{draw(st.integers(0, resources - 1))}", draw(whole_seconds), *sorted(before)))
    return TaskGraph(tuple(tasks))


def check_valid(timeline: Timeline) -> None:
    """Every task has its time, after those it waits for, and never two on one resource."""
    graph, spans = timeline.graph, timeline.spans
    assert len(spans) == len(graph.tasks)
    for task, span in zip(graph.tasks, spans, strict=True):
        assert span.begin >= 0 and span.end - span.begin == pytest.approx(task.seconds)
        assert all(spans[other].end <= span.begin + EPS for other in task.waits_for)
    for resource in graph.resources:
        for (_, first), (_, second) in pairwise(timeline.on(resource)):
            assert first.end <= second.begin + EPS


# ---- graphs


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ((a("x", -1.0),), r"task on x 0 takes -1\.0 s; it must be 0 or more"),
        ((a("x", float("nan")),), r"takes nan s; it must be 0 or more"),
        ((a("x", 1.0, 0),), r"task 0 \(on x 0\) waits for \[0\]; allowed: earlier tasks"),
        ((a("x", 1.0), a("x", 1.0, 0, 2), a("x", 1.0)), r"task 1 \(on x 0\) waits for \[2\]; allowed: .*0\.\.0"),
        ((a("x", 1.0), a("x", 1.0, -1)), r"waits for \[-1\]"),
    ],
)
def test_graphs_that_cannot_be(tasks: tuple[Task, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskGraph(tasks)


def test_sums_of_a_graph() -> None:
    graph = TaskGraph((a("x", 1.0), a("y", 2.0, 0), a("x", 4.0, 0), a("y", 8.0, 1)))
    assert graph.resources == ("x", "y")
    assert graph.seconds_to_end == (11.0, 10.0, 4.0, 8.0)
    assert (graph.critical_seconds, graph.serial_seconds) == (11.0, 15.0)
    assert (graph.work("x"), graph.work("y"), graph.work("z")) == (5.0, 10.0, 0.0)
    other = graph.with_seconds([4.0, 3.0, 2.0, 1.0])
    assert [task.seconds for task in other.tasks] == [4.0, 3.0, 2.0, 1.0]
    assert [task.waits_for for task in other.tasks] == [task.waits_for for task in graph.tasks]
    with pytest.raises(ValueError):
        graph.with_seconds([1.0])
    empty = TaskGraph(())
    assert (empty.resources, empty.critical_seconds, empty.serial_seconds, simulate(empty).seconds) == ((), 0.0, 0, 0.0)


# ---- simulation


@pytest.mark.parametrize(
    ("tasks", "spans"),
    [
        ((a("x", 1.0), a("x", 2.0)), [(0, 1), (1, 3)]),  # one at a time
        ((a("x", 1.0), a("y", 2.0)), [(0, 1), (0, 2)]),  # side by side
        ((a("x", 1.0), a("y", 2.0, 0)), [(0, 1), (1, 3)]),  # waits
        # in the order of the graph, though the third could have begun at 0
        ((a("x", 5.0), a("y", 1.0, 0), a("y", 1.0)), [(0, 5), (5, 6), (6, 7)]),
        ((a("x", 1.0), a("y", 3.0), a("x", 1.0, 0, 1), a("y", 0.0, 2)), [(0, 1), (0, 3), (3, 4), (4, 4)]),
    ],
)
def test_simulated_by_hand(tasks: tuple[Task, ...], spans: list[tuple[float, float]]) -> None:
    timeline = simulate(TaskGraph(tasks))
    assert [(span.begin, span.end) for span in timeline.spans] == spans
    assert timeline.seconds == max(end for _, end in spans)


def test_a_timeline_by_resource() -> None:
    timeline = simulate(TaskGraph((a("x", 5.0), a("y", 1.0, 0), a("x", 2.0))))
    assert [(task.seconds, span.begin) for task, span in timeline.on("x")] == [(5.0, 0.0), (2.0, 5.0)]
    assert (timeline.busy("x"), timeline.busy("y"), timeline.busy("z")) == (7.0, 1.0, 0.0)


@settings(max_examples=300, deadline=None)
@given(graph=graphs())
def test_any_simulation_is_valid_and_between_its_limits(graph: TaskGraph) -> None:
    timeline = simulate(graph)
    check_valid(timeline)
    longest = max(graph.critical_seconds, *(graph.work(resource) for resource in graph.resources))
    assert longest <= timeline.seconds <= graph.serial_seconds


# ---- list scheduling


def test_list_scheduling_takes_the_longest_path_first() -> None:
    short, long, after = a("x", 1.0), a("x", 1.0), a("y", 5.0, 1)
    graph = TaskGraph((short, long, after))
    assert simulate(graph).seconds == 7.0
    better = list_schedule(graph)
    assert [task.waits_for for task in better.tasks] == [(), (0,), ()]
    assert simulate(better).seconds == 6.0


@settings(max_examples=500, deadline=None)
@given(graph=graphs())
def test_any_list_schedule(graph: TaskGraph) -> None:
    ordered = list_schedule(graph)
    assert ordered == list_schedule(graph)
    timeline = simulate(ordered)
    check_valid(timeline)

    def with_waits(one: TaskGraph) -> list:
        """Each task with what it waits for, not by place."""
        names = [(task.resource, task.seconds) for task in one.tasks]
        return sorted((name, sorted(names[o] for o in t.waits_for)) for name, t in zip(names, one.tasks, strict=True))

    assert with_waits(ordered) == with_waits(graph)
    longest = max(graph.critical_seconds, *(graph.work(resource) for resource in graph.resources))
    assert longest <= timeline.seconds <= longest * max(1, len(graph.resources))  # never all idle
    moments = sorted({0.0, *(time for span in timeline.spans for time in (span.begin, span.end))})
    for begin, end in pairwise(moments):  # at any moment somebody works
        assert any(span.begin <= begin and end <= span.end for span in timeline.spans)


@settings(max_examples=300, deadline=None)
@given(graph=graphs(resources=2))
def test_list_scheduling_of_links_and_compute_is_at_most_twice_the_best(graph: TaskGraph) -> None:
    longest = max(graph.critical_seconds, *(graph.work(resource) for resource in graph.resources))
    assert simulate(list_schedule(graph)).seconds <= 2 * longest


# ---- chunks


def names(graph: TaskGraph, *resources: str) -> list[str]:
    return [task.name for task in graph.tasks if not resources or task.resource in resources]


@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), (9.0, 0.0, 1.0), (0.0, 9.0, 0.0)])
def test_order_of_a_layer_does_not_depend_on_times(seconds: tuple[float, ...]) -> None:
    assert names(layer_graph(stages(THREE, *seconds))) == ["dispatch 0", "experts 0", "combine 0"]
    graph = layer_graph(stages(THREE, *seconds), 4)
    assert names(graph, "links") == [
        "dispatch 0", "dispatch 1", "combine 0", "dispatch 2", "combine 1", "dispatch 3", "combine 2", "combine 3",
    ]  # fmt: skip
    assert names(graph, "compute") == [f"experts {chunk}" for chunk in range(4)]
    assert names(layer_graph(stages(FIVE, *seconds, 1.0, 2.0), 3), "scale_out") == [
        "exchange 0", "exchange 1", "exchange 2", "exchange back 0", "exchange back 1", "exchange back 2",
    ]  # fmt: skip


def test_no_chunks() -> None:
    with pytest.raises(ValueError, match="chunks is 0; allowed: 1 and more"):
        layer_graph(stages(THREE, 1.0, 1.0, 1.0), 0)


@settings(max_examples=300, deadline=None)
@given(
    kinds=st.sampled_from([THREE, FIVE, (("mega", "compute"),), (("exchange", "scale_out"), ("mega", "compute"))]),
    times=st.lists(whole_seconds, min_size=5, max_size=5),
    chunks=st.integers(1, 9),
)
def test_any_layer_keeps_a_chunk_for_each_resource_in_flight(kinds: tuple, times: list[float], chunks: int) -> None:
    graph = layer_graph(stages(kinds, *times[: len(kinds)]), chunks)
    assert sorted((t.kind, t.chunk) for t in graph.tasks) == sorted((k, c) for k, _ in kinds for c in range(chunks))
    timeline = simulate(graph)
    check_valid(timeline)
    of_chunk = [[s for t, s in zip(graph.tasks, timeline.spans, strict=True) if t.chunk == c] for c in range(chunks)]
    held = [(min(s.begin for s in spans), max(s.end for s in spans)) for spans in of_chunk]
    for spans in of_chunk:  # a chunk goes through its stages one after the other
        assert all(first.end <= second.begin for first, second in pairwise(spans))
    for (_, end), (begin, _) in zip(held, held[in_flight(stages(kinds, *times[: len(kinds)])) :], strict=False):
        assert end <= begin


@settings(max_examples=300, deadline=None)
@given(there=whole_seconds, experts=whole_seconds, back=whole_seconds, chunks=st.integers(1, 9))
def test_time_of_a_layer_is_its_busiest_resource_and_the_ends(
    there: float, experts: float, back: float, chunks: int
) -> None:
    seconds = simulate(layer_graph(stages(THREE, there, experts, back), chunks)).seconds
    links = there + back
    if chunks == 1:
        wanted = links + experts
    elif experts >= links:  # the first dispatch and the last combine show
        wanted = chunks * experts + links
    else:  # the links wait for the first and for the last experts
        wanted = chunks * links + max(0.0, experts - there) + max(0.0, experts - back)
    assert seconds == wanted


@settings(max_examples=200, deadline=None)
@given(times=st.lists(whole_seconds, min_size=5, max_size=5), chunks=st.integers(2, 9))
def test_time_of_five_stages(times: list[float], chunks: int) -> None:
    out, there, _, back, home = times
    others = out + there + back + home
    experts = others + 1.0
    compute_bound = simulate(layer_graph(stages(FIVE, out, there, experts, back, home), chunks))
    assert compute_bound.seconds == chunks * experts + others
    slow = there + 1.0 + back  # between nodes, each way: as long as everything inside the node
    wire_bound = simulate(best_order(layer_graph(stages(FIVE, slow, there, 1.0, back, slow), chunks)))
    assert wire_bound.busy("scale_out") == 2 * chunks * slow
    assert wire_bound.seconds <= 2 * chunks * slow + there + back  # however many chunks, the wire waits once at most


def test_shared_experts_fill_the_wait_for_the_last_combine() -> None:
    layer = stages(THREE, 2.0, 3.0, 4.0)
    for shared, wanted in ((0.0, 9.0), (4.0, 9.0), (6.0, 11.0)):
        graph = layer_graph(layer, beside=[Stage("shared", "compute", shared)])
        assert names(graph)[-1] == "shared 0" and graph.tasks[-1].waits_for == ()
        assert simulate(graph).seconds == wanted


def test_two_micro_batches_hide_each_others_links() -> None:
    layer = [Stage("attention", "compute", 1.0), *stages(THREE, 1.0, 1.0, 1.0)]
    for depth in (1, 2, 5):
        graph = two_batch_graph([layer] * depth)
        check_valid(simulate(graph))
        assert simulate(graph).seconds == 4.0 * depth + 1.0  # one after the other: 8 each
        assert simulate(two_batch_graph([layer] * depth, 1)).seconds == 4.0 * depth
        assert len(graph.tasks) == 8 * depth
    with_shared = [*stages(THREE, 4.0, 1.0, 4.0), Stage("shared", "compute", 1.0)]
    assert simulate(two_batch_graph([with_shared])).seconds < 2 * simulate(two_batch_graph([with_shared], 1)).seconds
    with pytest.raises(ValueError, match="micro_batches is 0; allowed: 1 and more"):
        two_batch_graph([layer], 0)


@settings(max_examples=100, deadline=None)
@given(times=st.lists(whole_seconds, min_size=4, max_size=4), depth=st.integers(1, 3), batches=st.integers(1, 3))
def test_any_micro_batches(times: list[float], depth: int, batches: int) -> None:
    layer = [Stage("attention", "compute", times[0]), *stages(THREE, *times[1:])]
    graph = two_batch_graph([layer] * depth, batches)
    check_valid(simulate(graph))
    work = batches * depth * max(times[0] + times[2], times[1] + times[3])
    assert max(work, depth * sum(times)) <= simulate(graph).seconds <= batches * depth * sum(times)
    for batch in range(batches):
        mine = [task.kind for task in graph.tasks if task.chunk == batch]
        assert mine == [stage.kind for stage in layer] * depth


# ---- execution


def moeloom_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("moeloom-")]


def sleeping(graph: TaskGraph, unit: float) -> Timeline:
    """Executed, a second of each task as `unit` seconds of sleep."""
    return execute(graph, [lambda s=task.seconds: time.sleep(unit * s) for task in graph.tasks], "links")


def test_execution_overlaps_as_simulated() -> None:
    graph, unit = layer_graph(stages(THREE, 1.0, 2.0, 1.0), 4), 0.03
    start = time.perf_counter()
    timeline = sleeping(graph, unit)
    seconds = time.perf_counter() - start
    assert timeline.graph is graph and len(timeline.spans) == len(graph.tasks)
    for task, span in zip(graph.tasks, timeline.spans, strict=True):
        assert span.end - span.begin >= 0.9 * unit * task.seconds
        assert all(timeline.spans[other].end <= span.begin for other in task.waits_for)
    for resource in graph.resources:
        assert [task.name for task, _ in timeline.on(resource)] == names(graph, resource)
    simulated = simulate(graph).seconds  # 10; one after the other it is 16
    assert 0.9 * unit * simulated <= timeline.seconds <= seconds < 0.95 * unit * graph.serial_seconds
    assert not moeloom_threads()


@settings(max_examples=60, deadline=None)
@given(graph=graphs())
def test_any_execution_is_in_order(graph: TaskGraph) -> None:
    done: list[int] = []
    where: dict[str, set[str]] = {}

    def act(place: int) -> None:
        assert all(other in done for other in graph.tasks[place].waits_for)
        where.setdefault(graph.tasks[place].resource, set()).add(threading.current_thread().name)
        done.append(place)

    timeline = execute(graph, [lambda p=place: act(p) for place in range(len(graph.tasks))], "r0")
    assert sorted(done) == list(range(len(graph.tasks))) and len(timeline.spans) == len(done)
    for resource in graph.resources:
        mine = [place for place in done if graph.tasks[place].resource == resource]
        assert mine == sorted(mine)
        here = threading.current_thread().name
        assert where[resource] == ({here} if resource == "r0" else {f"moeloom-{resource}"})
    assert not moeloom_threads()


@pytest.mark.parametrize("resource", ["links", "compute"])
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_an_error_ends_the_execution(resource: str, error: BaseException) -> None:
    graph = layer_graph(stages(THREE, 1.0, 1.0, 1.0), 4)
    failing = [place for place, task in enumerate(graph.tasks) if task.resource == resource][2]
    begun: list[tuple[int, float]] = []
    failed_at: list[float] = []

    def act(place: int) -> None:
        begun.append((place, time.perf_counter()))
        time.sleep(0.02)
        if place == failing:
            failed_at.append(time.perf_counter())
            raise error

    with pytest.raises(type(error)) as caught:
        execute(graph, [lambda p=place: act(p) for place in range(len(graph.tasks))], "links")
    assert caught.value is error
    assert not moeloom_threads()
    # the other thread may be between its look at the error and its action
    assert max(when for _, when in begun) < failed_at[0] + 0.015
    assert len(begun) < len(graph.tasks)


def test_of_two_errors_the_first_is_raised() -> None:
    graph = TaskGraph((a("links", 1.0), a("compute", 1.0), a("links", 1.0, 0, 1)))
    first, second = ValueError("first"), ValueError("second")

    def act(seconds: float, error: Exception) -> None:
        time.sleep(seconds)
        raise error

    for slow, fast, wanted in ((0.05, 0.0, second), (0.0, 0.05, first)):
        with pytest.raises(ValueError) as caught:
            execute(graph, [lambda s=slow: act(s, first), lambda f=fast: act(f, second), lambda: None], "links")
        assert caught.value is wanted and not moeloom_threads()


def test_a_caller_interrupted_while_it_waits_for_the_last_task() -> None:
    """Its own tasks are done, and it is in `join`: the thread still ends before the interrupt is raised."""
    graph = TaskGraph((a("links", 1.0), a("compute", 1.0), a("compute", 1.0, 1)))
    ran, caller = [], threading.get_ident()

    def long() -> None:
        time.sleep(0.1)
        signal.pthread_kill(caller, signal.SIGINT)
        time.sleep(0.1)
        ran.append("first")

    with pytest.raises(KeyboardInterrupt):
        execute(graph, [lambda: None, long, lambda: ran.append("second")], "links")
    assert ran == ["first"] and not moeloom_threads()


def test_nothing_to_execute() -> None:
    assert execute(TaskGraph(()), [], "links").seconds == 0.0
    only_elsewhere = execute(TaskGraph((a("compute", 1.0),)), [lambda: None], "links")
    assert len(only_elsewhere.spans) == 1


# ---- traces


def test_events_of_a_timeline() -> None:
    timeline = simulate(layer_graph(stages(THREE, 1.0, 2.0, 1.0), 2))
    found = events(timeline, rank=3)
    assert [event.name for event in found] == names(timeline.graph)
    assert found[1] == Event("experts", 0, "compute", 1.0, 3.0, 3)
    assert {event.rank for event in events(timeline)} == {-1}


def test_perfetto_form() -> None:
    trace = [
        Event("experts", 1, "compute", 10.5, 10.75, 1),
        Event("dispatch", 0, "links", 10.0, 10.25, 0),
        Event("dispatch", 0, "links", 0.0 + 10.0, 10.5, -1),
        Event("combine", 0, "links", 10.25, 11.0, 0),
    ]
    data = json.loads(json.dumps(to_perfetto(trace)))
    assert set(data) == {"traceEvents", "displayTimeUnit"}
    entries = data["traceEvents"]
    spans = [entry for entry in entries if entry["ph"] == "X"]
    processes = {e["pid"]: e["args"]["name"] for e in entries if e["ph"] == "M" and e["name"] == "process_name"}
    threads = {e["tid"]: (e["pid"], e["args"]["name"]) for e in entries if e["name"] == "thread_name"}
    assert len(entries) == len(spans) + len(processes) + len(threads)
    assert sorted(processes.values()) == ["predicted", "rank 0", "rank 1"]
    shown = {(processes[e["pid"]], threads[e["tid"]][1], e["name"], e["cat"], e["ts"], e["dur"]) for e in spans}
    assert shown == {
        ("predicted", "links", "dispatch 0", "dispatch", 0.0, 0.5e6),
        ("rank 0", "links", "dispatch 0", "dispatch", 0.0, 0.25e6),
        ("rank 0", "links", "combine 0", "combine", 0.25e6, 0.75e6),
        ("rank 1", "compute", "experts 1", "experts", 0.5e6, 0.25e6),
    }
    assert all(threads[e["tid"]][0] == e["pid"] for e in spans)
    assert to_perfetto([])["traceEvents"] == []


def test_a_span_is_plain() -> None:
    assert Span(1.0, 2.0) == Span(1.0, 2.0) and Span(1.0, 2.0).end == 2.0
