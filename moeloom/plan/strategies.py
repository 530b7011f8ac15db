"""All the ways to run a problem, which of them can run, and what each takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from moeloom.plan.choices import Choices, Uniform
from moeloom.plan.comm_sms import Links, num_comm_sms
from moeloom.plan.cost import StageTime, fused_time, overlapped, stage_time, unknown_rates
from moeloom.plan.efficiency import RESOURCES, Efficiency
from moeloom.plan.flow import Flow, expected_flow
from moeloom.plan.machine import Machine
from moeloom.plan.plan import EXCHANGES, PIPELINES, Candidate, PipelineName
from moeloom.plan.problem import Domains, Problem
from moeloom.plan.work import Work, layer_memory, layer_work
from moeloom.schedule.chunk_graph import Stage, in_flight, layer_graph
from moeloom.schedule.simulate import best_order, simulate
from moeloom.types import ExchangeName

CHUNKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Setting:
    """Where a problem runs.

    efficiencies: what each pipeline that the backend has reaches of the machine. choices: how tokens choose experts.
    chunked: the backend lets parts of a batch overlap.
    """

    machine: Machine
    domains: Domains
    efficiencies: Mapping[PipelineName, Efficiency]
    choices: Choices = Uniform()  # noqa: RUF009 (frozen)
    chunked: bool = True


def candidates(problem: Problem, setting: Setting) -> tuple[Candidate, ...]:
    """Every pipeline x exchange x number of chunks, the impossible ones with the reason."""
    found = []
    for pipeline in PIPELINES:
        for exchange in EXCHANGES:
            refusal = why_not(problem, setting, pipeline, exchange)
            if refusal:
                found.append(Candidate(pipeline, exchange, note=refusal))
                continue
            for chunks in _chunks(problem, setting, pipeline, exchange):
                found.append(_fits(estimate(problem, setting, pipeline, exchange, chunks), setting.machine))
    return tuple(found)


def why_not(problem: Problem, setting: Setting, pipeline: PipelineName, exchange: ExchangeName) -> str:
    """Why a candidate cannot run; empty if it can. The only place that says what is legal."""
    if pipeline not in setting.efficiencies:
        return f"this backend has no {pipeline} pipeline"
    if exchange == "hybrid" and setting.domains.num_nodes == 1:
        return "one node: nothing to forward"
    if pipeline == "decode":
        if problem.phase != "decode":
            return f"fixed shapes and no gradient: for phase decode, not {problem.phase}"
        if problem.num_tokens is None:
            return "fixed shapes follow from the number of tokens, which is not known"
    if problem.phase == "train" and problem.recipe.quantized:
        return f"recipe {problem.recipe.name} has no gradient"
    return ""


def estimate(
    problem: Problem, setting: Setting, pipeline: PipelineName, exchange: ExchangeName, chunks: int = 1
) -> Candidate:
    """What a candidate that can run is expected to take."""
    efficiency = setting.efficiencies[pipeline]
    part = replace(problem, num_tokens=-(-problem.tokens // chunks))
    flow = expected_flow(part, setting.domains, exchange, setting.choices)
    if efficiency.fixed_shapes:
        flow = all_room(part, setting.domains, flow)
    works = layer_work(part, flow, efficiency.tile_rows)
    times, tasks = _tasks(works, setting, problem.recipe.name, pipeline, exchange)
    # stages that overlap still share the memory
    shared = [sum(getattr(time, name) for time in times) for name in RESOURCES]
    if efficiency.moving_computes and chunks > 1:  # a core that moves rows does not multiply meanwhile
        shared.append(sum(_core_seconds(time, efficiency) for time in times))
    seconds = max(simulate(best_order(layer_graph(tasks, chunks))).seconds, chunks * max(shared))
    return Candidate(
        pipeline,
        exchange,
        chunks,
        seconds,
        stages=tuple(_times(time, chunks) for time in times),
        tasks=tuple(tasks),
        scale_up_bytes=chunks * sum(work.scale_up_bytes for work in works),
        scale_out_bytes=chunks * sum(work.scale_out_bytes for work in works),
        memory_bytes=layer_memory(
            problem, _scaled(flow, chunks), setting.domains.num_ranks, min(1.0, in_flight(tasks) / chunks)
        ),
        num_comm_sms=comm_sms(problem, setting, exchange),
        note=_note(problem, setting, efficiency),
    )


def _note(problem: Problem, setting: Setting, efficiency: Efficiency) -> str:
    """What a reader must know about an estimate."""
    domains = setting.domains
    unknown = unknown_rates(setting.machine, problem.recipe.name, domains.num_nodes, domains.num_ranks)
    notes = ["as others' kernels" * efficiency.others, f"assumed: {', '.join(unknown)}" if unknown else ""]
    return "; ".join(filter(None, notes))


def comm_sms(problem: Problem, setting: Setting, exchange: ExchangeName) -> int:
    """SMs that keep up with the links; 0 where there are none, or nothing to move. Not charged to the experts: what
    kernels reach beside communication is measured as their efficiency.
    """
    machine, domains = setting.machine, setting.domains
    if machine.num_sms is None or domains.num_ranks == 1:
        return 0
    links = Links(machine.scale_up_bandwidth, machine.scale_out_bandwidth)
    topk = min(problem.num_topk, problem.num_experts)
    return num_comm_sms(problem.num_experts, topk, domains, links, exchange, machine.num_sms)


def roofline(problem: Problem, setting: Setting) -> tuple[float, str]:
    """Seconds below which nothing can be on this machine, and the resource that says so: no waits, perfect overlap,
    no padding, the exchange with the fewest bytes on its slowest link.
    """
    ideal = Efficiency()
    limits = []
    for exchange in EXCHANGES[: 1 + (setting.domains.num_nodes > 1)]:
        flow = expected_flow(problem, setting.domains, exchange, setting.choices)
        works = layer_work(problem, flow)
        time = fused_time(works, setting.machine, problem.recipe.name, ideal)
        limits.append(max((getattr(time, name), name) for name in RESOURCES))
    return min(limits)


def _chunks(problem: Problem, setting: Setting, pipeline: PipelineName, exchange: ExchangeName) -> Collection[int]:
    """Numbers of chunks worth a look: chunks overlap links with compute across kernels, so there must be a link."""
    if pipeline == "decode" or setting.domains.num_ranks == 1 or not setting.chunked:
        return (1,)
    if pipeline == "mega" and exchange == "direct":  # all overlap is inside the kernel
        return (1,)
    return [chunks for chunks in CHUNKS if chunks == 1 or problem.tokens >= 2 * chunks]


def _tasks(
    works: tuple[Work, Work, Work], setting: Setting, recipe_name: str, pipeline: PipelineName, exchange: ExchangeName
) -> tuple[list[StageTime], list[Stage]]:
    """The stages of one chunk, what each takes, and the resource it occupies in the graph."""
    efficiency, machine = setting.efficiencies[pipeline], setting.machine
    there, experts, back = works
    apart = exchange == "hybrid" and (pipeline == "mega" or efficiency.exchange_apart)

    def time(work: Work) -> StageTime:
        return stage_time(work, machine, recipe_name, efficiency)

    ends: list[list[tuple[str, str, StageTime]]] = [[], []]
    if apart:
        sent = [Work(w.stage, scale_out_bytes=w.scale_out_bytes, scale_out_hops=1, messages=w.messages) for w in works]
        there, back = (replace(w, scale_out_bytes=0.0, scale_out_hops=0, messages=0.0) for w in (there, back))
        ends = [[("exchange", "scale_out", time(sent[0]))], [("exchange back", "scale_out", time(sent[2]))]]
    if pipeline == "mega":
        inside = [("mega", "compute", fused_time((there, experts, back), machine, recipe_name, efficiency))]
    else:
        link = "scale_up" if apart else "links"
        inside = [
            ("dispatch", link, time(there)),
            ("experts", "compute", time(experts)),
            ("combine", link, time(back)),
        ]
    parts = [*ends[0], *inside, *ends[1]]
    return [replace(t, stage=kind) for kind, _, t in parts], [Stage(kind, where, t.seconds) for kind, where, t in parts]


def _core_seconds(time: StageTime, efficiency: Efficiency) -> float:
    """Of a stage's time, what keeps a CPU rank's core busy: all but the wire."""
    return overlapped((time.compute, time.memory, time.scale_up), efficiency) + time.latency


def all_room(problem: Problem, domains: Domains, flow: Flow) -> Flow:
    """The flow of fixed shapes: every expert's room is moved and computed, for every token of all ranks."""
    room = float(problem.tokens * domains.num_ranks)
    local = len(flow.rows_of_experts)
    return replace(flow, pairs=room * local, rows_of_experts=(room,) * local)


def _scaled(flow: Flow, chunks: int) -> Flow:
    """The flow of the whole batch from that of a chunk."""
    return replace(flow, pairs=flow.pairs * chunks, tokens=flow.tokens * chunks)


def _times(time: StageTime, chunks: int) -> StageTime:
    """A stage over all chunks."""
    names = (*RESOURCES, "latency", "seconds")
    return replace(time, **{name: chunks * getattr(time, name) for name in names})


def _fits(candidate: Candidate, machine: Machine) -> Candidate:
    """The candidate, or that it does not fit into memory."""
    if machine.memory_bytes is None or candidate.memory_bytes <= machine.memory_bytes:
        return candidate
    need, have = candidate.memory_bytes / 1e9, machine.memory_bytes / 1e9
    return replace(
        candidate, seconds=None, note=f"needs {need:.1f} GB beside the weights; {machine.name} has {have:.1f}"
    )
