"""`moeloom measure`: what this machine gives to ranks that all work at once, in the numbers that plans are made of.

The layer itself is run at a few sizes, on one node and on two declared ones; each number is the part of a stage's time
that the ones before it do not explain.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from rich.console import Console

from moeloom import machine_cache
from moeloom.config import BF16, FP8, FP32, Recipe
from moeloom.experts import Experts
from moeloom.launch import RankPool
from moeloom.meter import StageStats
from moeloom.placement import Placement
from moeloom.plan.choices import Uniform
from moeloom.plan.efficiency import Efficiency, Rates
from moeloom.plan.flow import expected_flow
from moeloom.plan.machine import Machine
from moeloom.plan.measured import Measured
from moeloom.plan.plan import PipelineName, Plan
from moeloom.plan.problem import Domains, Phase, Problem
from moeloom.plan.strategies import all_room
from moeloom.plan.work import STAGES, Work, layer_work
from moeloom.runtime import Runtime
from moeloom.topology import Topology
from moeloom.types import ExchangeName, Routing

HIDDEN, INTERMEDIATE, TOPK, EXPERTS_PER_RANK = 512, 256, 4, 8
FEW, MANY = 1, 512  # tokens of a call that is all waiting, and of one that is mostly work
ROOM = 64  # tokens of the decode pipeline's larger call: its rooms grow with tokens x ranks x experts
Around = Callable[[], AbstractContextManager[object]]
PIPELINES_MEASURED: tuple[PipelineName, ...] = ("split", "decode")
WIDE = 8
LEAST = 1e-9  # seconds; a difference of two medians may come out negative


def run_measure(console: Console, ranks: int, times: int) -> Measured:
    """`measure`, saying on the console what it does."""
    with console.status("measuring") as status:
        for event in measure(ranks, times):
            if isinstance(event, Measured):
                return event
            status.update(event)
    raise AssertionError("measure yields a machine last")


def table_of(measured: Measured) -> str:
    """The numbers for people, one per line."""
    machine = measured.machine
    lines = [f"{machine.name}: {measured.ranks} ranks at once on {measured.cores} cores; each gets"]
    lines += [f"  products {name:<5}{rate / 1e9:>18.1f} GFLOP/s" for name, rate in machine.flops.items()]
    for name, rate in (("memory", machine.memory_bandwidth), ("between nodes", machine.scale_out_bandwidth)):
        if rate is not None:
            lines.append(f"  {name:<14}{rate / 1e9:>18.2f} GB/s")
    for name, seconds in (("in a node", machine.scale_up_latency), ("between nodes", machine.scale_out_latency)):
        lines.append(f"  {'round ' + name:<20}{seconds * 1e6:>12.1f} us")
    for pipeline, efficiency in measured.efficiencies.items():
        for stage in STAGES:
            rates = efficiency.rates(stage)
            share = rates.compute if stage == "experts" else rates.memory
            of = "product" if stage == "experts" else "memory"
            fixed = (rates.expert_seconds if stage == "experts" else rates.fixed_seconds) * 1e6
            each = "an expert" if stage == "experts" else "a call"
            lines.append(f"  {pipeline:<7}{stage:<9}{share:>8.0%} of the {of} rate, {fixed:.0f} us {each}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Point:
    """One way of calling the layer that is timed."""

    pipeline: PipelineName
    exchange: ExchangeName
    nodes: int
    tokens: int

    def problem(self, ranks: int) -> Problem:
        """What it asks of each rank."""
        phase: Phase = "decode" if self.pipeline == "decode" else "prefill"
        return Problem(self.tokens, HIDDEN, EXPERTS_PER_RANK * ranks, TOPK, FP32, phase, INTERMEDIATE)

    def works(self, ranks: int) -> dict[str, Work]:
        """What each stage has to do."""
        problem, domains = self.problem(ranks), Domains(ranks, self.nodes)
        flow = expected_flow(problem, domains, self.exchange, Uniform())
        if self.pipeline == "decode":
            flow = all_room(problem, domains, flow)
        return dict(zip(STAGES, layer_work(problem, flow), strict=True))


def points(ranks: int) -> list[Point]:
    """What is timed: few and many tokens, each pipeline, within a node and between two."""
    found = []
    for pipeline, many in (("split", MANY), ("decode", ROOM)):
        for nodes, exchange in ((1, "direct"), (2, "direct"), (2, "hybrid"))[: 3 if ranks > 1 else 1]:
            found += [Point(pipeline, exchange, nodes, tokens) for tokens in (FEW, many)]  # type: ignore[arg-type]
    return found


@dataclass(frozen=True)
class Probes:
    """What was timed, in seconds or bytes per second: the slowest rank's."""

    stages: dict[Point, dict[str, float]]
    flops: dict[str, float]
    memory_bandwidth: float
    weight_bandwidth: float
    round_seconds: dict[int, float]


def measure(ranks: int, times: int = 9, around: Around = nullcontext) -> Iterator[str | Measured]:
    """Yields what it is doing; last, the machine. times: how often each point is timed. around: entered on each rank
    about its Runtimes, to measure what is not this machine's own.
    """
    with RankPool(ranks) as pool:
        yield "products, copies"
        local = pool.run(time_alone)
        yield "rounds and messages"
        rounds = {1: max(pool.run(time_rounds, 1, around))}
        if ranks > 1:
            rounds[2] = max(pool.run(time_rounds, 2, around))
        stages: dict[Point, dict[str, float]] = {}
        for point in points(ranks):
            yield f"{point.pipeline}, {point.exchange}, {point.nodes} node(s), {point.tokens} tokens"
            results = pool.run(time_layer, point, times * (1 + 2 * (point.tokens == FEW)), around)
            stages[point] = {stage: max(result[stage] for result in results) for stage in STAGES}
    flops = {name: min(result["flops"][name] for result in local) for name in local[0]["flops"]}
    bandwidth = min(result["bandwidth"] for result in local)
    weights = min(result["weights"] for result in local)
    yield solve(Probes(stages, flops, bandwidth, weights, rounds), ranks, machine_cache.cores())


def solve(probes: Probes, ranks: int, cores: int) -> Measured:
    """The numbers that explain the probes."""
    found = f"measured with {ranks} ranks on {cores} cores"
    machine = Machine(
        name="this CPU", flops=probes.flops, memory_bytes=None, memory_bandwidth=probes.memory_bandwidth,
        scale_up_bandwidth=probes.memory_bandwidth, scale_out_bandwidth=None,
        scale_up_latency=probes.round_seconds[1], scale_out_latency=probes.round_seconds.get(2, 1e-3),
        launch_seconds=0.0, ranks_per_domain=ranks, num_sms=None, nics_per_rank=1.0, l2_bytes=None,
        sources={
            **{f"flops.{name}": f"{found}: experts of 1024 rows" for name in probes.flops},
            "memory_bandwidth": f"{found}: gather of 2 KB rows, bytes read and written",
            "scale_up_bandwidth": "equal to the memory's: the ranks of a node share it",
            "scale_out_bandwidth": f"{found}: what dispatch reaches between two declared nodes",
            "scale_up_latency": f"{found}: a round of records within a node",
            "scale_out_latency": f"{found}: a round of records between two declared nodes",
            "launch_seconds": "a CPU launches nothing",
            "ranks_per_domain": "as many as were measured",
            "nics_per_rank": "declared nodes share the loopback",
        },
    )  # fmt: skip
    if ranks > 1:
        _, bandwidth = _move(probes, machine, ranks, "split", "dispatch")
        machine = replace(machine, scale_out_bandwidth=bandwidth)
    efficiencies: dict[PipelineName, Efficiency] = {}
    for pipeline in PIPELINES_MEASURED:
        stages = {"experts": _experts(probes, machine, ranks, pipeline)}
        for stage in ("dispatch", "combine"):
            rates, bandwidth = _move(probes, machine, ranks, pipeline, stage)
            share = bandwidth / (machine.scale_out_bandwidth or bandwidth)
            stages[stage] = replace(rates, scale_out=share)
        efficiencies[pipeline] = Efficiency(stages, exposed=1.0, fixed_shapes=pipeline == "decode", source=found)
    return Measured(machine, efficiencies, ranks, cores, datetime.date.today().isoformat())


def _experts(probes: Probes, machine: Machine, ranks: int, pipeline: PipelineName) -> Rates:
    """How fast weights are read, from wide experts; what beginning an expert costs, from few tokens; the share of the
    product rate, from many.
    """
    flops, bandwidth = machine.flops["fp32"], probes.memory_bandwidth
    small, few = _timed(probes, ranks, Point(pipeline, "direct", 1, FEW), "experts")
    large, many = _timed(probes, ranks, Point(pipeline, "direct", 1, _many(pipeline)), "experts")
    memory = _share(1.0, bandwidth / probes.weight_bandwidth)
    each = max(LEAST, small - few.flops / flops - few.memory_bytes / (bandwidth * memory)) / few.experts
    rest = large - each * many.experts - many.memory_bytes / (bandwidth * memory)
    return Rates(compute=_share(many.flops / flops, rest), memory=memory, expert_seconds=each)


def _move(probes: Probes, machine: Machine, ranks: int, pipeline: PipelineName, stage: str) -> tuple[Rates, float]:
    """dispatch or combine: what is fixed, from few tokens on one node; the share of the memory's rate, from many; the
    rounds and the bytes per second between nodes, from what two nodes add.
    """
    bandwidth = probes.memory_bandwidth
    small, few = _timed(probes, ranks, Point(pipeline, "direct", 1, FEW), stage)
    large, many = _timed(probes, ranks, Point(pipeline, "direct", 1, _many(pipeline)), stage)
    moving = large - small - (many.scale_up_bytes - few.scale_up_bytes) / bandwidth
    memory = _share((many.memory_bytes - few.memory_bytes) / bandwidth, moving)
    fixed = small - machine.scale_up_latency - few.memory_bytes / (bandwidth * memory) - few.scale_up_bytes / bandwidth
    rates = Rates(memory=memory, fixed_seconds=max(LEAST, fixed))
    if ranks == 1:
        return rates, bandwidth
    apart, alone = _timed(probes, ranks, Point(pipeline, "direct", 2, FEW), stage)
    larger, sent = _timed(probes, ranks, Point(pipeline, "direct", 2, _many(pipeline)), stage)
    inside = (sent.memory_bytes - alone.memory_bytes) / (bandwidth * memory)
    inside += (sent.scale_up_bytes - alone.scale_up_bytes) / bandwidth
    wire = max(larger - apart - inside, 0.03 * larger)  # a noisy difference must not make it endlessly fast
    rounds = max(0.0, apart - small) / machine.scale_out_latency
    return replace(rates, rounds=rounds), (sent.scale_out_bytes - alone.scale_out_bytes) / wire


def _timed(probes: Probes, ranks: int, point: Point, stage: str) -> tuple[float, Work]:
    """How long a stage took at a point, and what it had to do."""
    return probes.stages[point][stage], point.works(ranks)[stage]


def _many(pipeline: PipelineName) -> int:
    return ROOM if pipeline == "decode" else MANY


def _share(ideal: float, seconds: float) -> float:
    """ideal / seconds, kept where a noisy difference cannot take it."""
    return min(max(ideal / max(seconds, LEAST), 0.02), 2.0)


def time_layer(point: Point, times: int, around: Around = nullcontext) -> dict[str, float]:
    """On a rank: the median seconds of each stage of the layer; a first call is not counted."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    x, routing, experts = make_layer(rank, ranks, point.tokens)
    plan, topology = Plan(point.pipeline, point.exchange), Topology.split(ranks, point.nodes)
    taken: dict[str, list[float]] = {stage: [] for stage in STAGES}
    with around(), Runtime(topology=topology, max_tokens=point.tokens, backend="cpu") as rt:
        for _ in range(1 + times):
            before = rt.stats()
            rt.moe(x, routing, experts, plan=plan)
            for stage, stats in rt.stats().items():
                taken[stage].append((stats - before.get(stage, StageStats())).seconds)
    return {stage: median(values[1:]) for stage, values in taken.items()}


def make_layer(rank: int, ranks: int, tokens: int, recipe: Recipe = FP32) -> tuple[torch.Tensor, Routing, Experts]:
    """A rank's random tokens, uniform routing and experts."""
    generator = torch.Generator().manual_seed(rank)
    placement = Placement.even(EXPERTS_PER_RANK * ranks, ranks)
    shape = (EXPERTS_PER_RANK, 2 * INTERMEDIATE, HIDDEN)
    gate_up = (torch.randn(shape, generator=generator) * HIDDEN**-0.5).to(recipe.dtype)
    down = torch.randn(EXPERTS_PER_RANK, HIDDEN, INTERMEDIATE, generator=generator) * INTERMEDIATE**-0.5
    ids = torch.rand(tokens, EXPERTS_PER_RANK * ranks, generator=generator).topk(TOPK).indices
    x = torch.randn(tokens, HIDDEN, generator=generator).to(recipe.dtype)
    routing = Routing(ids, torch.rand(tokens, TOPK, generator=generator))
    return x, routing, Experts(gate_up, down.to(recipe.dtype), placement=placement)


def time_alone() -> dict[str, Any]:
    """On a rank, all at once: FLOP/s of large experts by recipe, bytes per second of gathering rows, and of reading the
    weights of wide experts that have one row.
    """
    flops = {}
    for recipe in (FP32, BF16, FP8):
        x, routing, experts = make_layer(0, 1, 1024, recipe)
        one = Routing(torch.zeros_like(routing.topk_idx[:, :1]), routing.topk_weights[:, :1])
        with Runtime("self", backend="cpu") as rt:
            taken = []
            for _ in range(6):
                before = rt.stats().get("experts", StageStats())
                rt.moe(x, one, experts, recipe=recipe)
                taken.append((rt.stats()["experts"] - before).seconds)
            flops[recipe.name] = 6 * len(x) * HIDDEN * INTERMEDIATE / median(taken[1:])
    rows, index = torch.randn(16384, HIDDEN), torch.randperm(16384)
    out = torch.empty_like(rows)
    seconds = _median_seconds(lambda: torch.index_select(rows, 0, index, out=out))
    return {"flops": flops, "bandwidth": 2 * rows.nbytes / seconds, "weights": _weight_bandwidth()}


def _weight_bandwidth() -> float:
    """More than a cache holds: WIDE times as wide as the experts of the other probes; what those take is taken off."""
    (small, few), (large, many) = (_one_row_each(width) for width in (INTERMEDIATE, WIDE * INTERMEDIATE))
    return (many - few) / max(large - small, LEAST)


def _one_row_each(width: int) -> tuple[float, int]:
    """Seconds of a layer whose experts have a row each, and the bytes of their weights."""
    experts = Experts(torch.randn(EXPERTS_PER_RANK, 2 * width, HIDDEN), torch.randn(EXPERTS_PER_RANK, HIDDEN, width))
    routing = Routing(torch.arange(EXPERTS_PER_RANK).unsqueeze(1), torch.ones(EXPERTS_PER_RANK, 1))
    x = torch.randn(EXPERTS_PER_RANK, HIDDEN)
    with Runtime("self", backend="cpu") as rt:
        seconds = _median_seconds(lambda: rt.moe(x, routing, experts))
    return seconds, experts.gate_up.nbytes + experts.down.nbytes


def time_rounds(nodes: int, around: Around = nullcontext) -> float:
    """On a rank: seconds of one round in which all ranks show each other a record."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    with around(), Runtime(topology=Topology.split(ranks, nodes), backend="cpu") as rt:
        return _median_seconds(lambda: rt.backend.gather("round", {}), 20)


def _median_seconds(call: Callable[[], Any], times: int = 5) -> float:
    call()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return median(taken)
