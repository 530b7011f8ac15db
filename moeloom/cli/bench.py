"""What `moeloom bench` does on each rank: time layer and stages for each number of tokens, peers beside them."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import moeloom
from moeloom.cli import peers
from moeloom.cli.bounds import (
    BACKWARD_PRODUCTS,
    PRODUCTS,
    Bound,
    Peaks,
    busiest,
    loads,
    machine_name,
    peaks_of_cpu,
    peaks_of_gpu,
)
from moeloom.cli.check import judge
from moeloom.cli.run import DeviceName, RecipeName, Settings, Step, make_tokens, normal_rows
from moeloom.cli.timing import Clock, DeviceClock, HostClock, Sample, meter_of
from moeloom.cli.weights import local_experts, one_expert, random_for
from moeloom.errors import MoeloomError
from moeloom.experts import Experts
from moeloom.meter import Meter
from moeloom.plan.plan import Plan
from moeloom.runtime import Runtime
from moeloom.types import Routing

PipelineChoice = Literal["auto", "split", "decode"]
WARM_UP = 2
CHECKED_TOKENS = 4  # of each rank; a whole batch would need all weights in fp64
OWN = "moeloom"
Samples = dict[tuple[str, str, str], list[Sample]]  # by stage, by whom, and "cold" or "warm"
LAYER, REPLAY, TRAINING = "layer", "layer, replayed", "layer and backward"
STAGES = "stages"  # the layer again, for the times of its stages only


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One benchmark, the same on all ranks. Raises ValueError, naming the option, for what cannot be run.

    tokens: per rank, a case for each. pipeline: "auto" asks the planner. train: forward and backward. steps: timed
    rounds of each case. peers: time other systems beside, where they are installed.
    """

    model: str
    scale: int
    tokens: tuple[int, ...]
    ranks: int
    recipe_name: RecipeName
    device: DeviceName
    pipeline: PipelineChoice = "auto"
    train: bool = False
    steps: int = 9
    seed: int = 0
    timeout: float = 60.0
    peers: bool = True

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1:
            raise ValueError(f"--tokens is {','.join(map(str, self.tokens))}; every number must be at least 1")
        if len(set(self.tokens)) < len(self.tokens):
            raise ValueError(f"--tokens is {','.join(map(str, self.tokens))}; name each number once")
        if self.train and self.pipeline == "decode":
            raise ValueError("--train is set, but --pipeline decode has no gradient; use split or auto")
        settings = self.at(self.tokens[0])  # raises
        if self.train and settings.recipe.quantized:
            raise ValueError(f"--train is set, but --recipe {self.recipe_name} is forward only; use fp32 or bf16")
        if settings.num_topk > settings.shape.num_experts:
            raise ValueError(f"--model {self.model} has fewer experts than a token chooses")

    def at(self, tokens: int) -> Settings:
        """The run of one case."""
        return Settings(
            model=self.model, scale=self.scale, tokens=(tokens,) * self.ranks, nodes=None, device=self.device,
            recipe_name=self.recipe_name, seed=self.seed, timeout=self.timeout, backward=self.train,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One stage (or the layer) of one case: the slowest rank's median, in microseconds.

    by: moeloom or a peer. asked: --pipeline; plan: what ran. cache: "cold" or "warm" before the call. host_us: what the
    host took to queue it, None where that is the same. waits: whether the GPU had to wait for the host meanwhile.
    bound_us: what the busiest rank cannot be faster than, for the reason bound_by; share: bound_us / us.
    tflops: 10^12 operations per second of the mean rank, counting 6 H I per (token, expert) pair, or 18 in training.
    """

    machine: str
    device: str
    versions: dict[str, str]
    date: str
    model: str
    hidden: int
    intermediate: int
    experts: int
    topk: int
    recipe: str
    ranks: int
    train: bool
    asked: str
    plan: str
    tokens: int
    stage: str
    by: str
    cache: str
    rounds: int
    us: float
    fastest_us: float
    host_us: float | None
    waits: bool
    bound_us: float | None
    bound_by: str | None
    share: float | None
    tflops: float | None
    peaks: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Note:
    """A line about the run."""

    text: str


@dataclass(frozen=True, eq=False)
class Variant:
    """One call that is timed. stage: of the whole call; or STAGES, if only what is inside it counts."""

    stage: str
    run: Callable[[], object]
    by: str = OWN


@dataclass(eq=False)
class Case:
    """One number of tokens on one rank: tensors, and the calls that are timed."""

    settings: Settings
    runtime: Runtime
    experts: Experts
    plan: Plan
    routing: Routing
    train: bool
    x: Tensor = field(init=False)
    d_y: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        rank = self.runtime.rank
        self.x = make_tokens(self.settings, rank)
        if self.train:
            self.d_y = normal_rows(self.settings, "gradient", rank)
            for tensor in (self.x, *self.experts.tensors().values()):
                tensor.requires_grad_()

    def layer(self) -> Tensor:
        """The forward; in training the backward too."""
        leaves = [self.x, *self.experts.tensors().values()] if self.train else []
        for leaf in leaves:
            leaf.grad = None
        y = self.runtime.moe(self.x, self.routing, self.experts, recipe=self.settings.recipe, plan=self.plan)
        if self.d_y is not None:
            y.backward(self.d_y)
        return y.detach()

    def check(self) -> None:
        """Raise MoeloomError unless the first tokens are right, by the rule."""
        settings, some = self.settings, slice(0, CHECKED_TOKENS)
        results = {"result": self.layer()[some]}
        if self.x.grad is not None:
            results["gradient of x"] = self.x.grad[some]
        routing = Routing(self.routing.topk_idx[some], self.routing.topk_weights[some])
        d_y = None if self.d_y is None else self.d_y[some]
        expert = functools.partial(one_expert, settings)
        shape, x = settings.shape, self.x.detach()[some]
        for name, verdict in judge(shape, settings.recipe, expert, x, routing, results, d_y).items():
            if not verdict.passed:
                raise MoeloomError(
                    f"{name} is wrong with {settings.tokens[0]} tokens: error {verdict.error:.1e}, allowed"
                    f" {verdict.allowed:.1e}; `moeloom run` names the row"
                )

    def variants(self, others: peers.Peers | None) -> tuple[list[Variant], list[str]]:
        """All that is timed, a decode pipeline on a GPU also as a graph; and what is to be said of peers."""
        found = [Variant(TRAINING if self.train else LAYER, self.layer), Variant(STAGES, self.layer)]
        if self.settings.recipe.quantized:
            found.append(Variant("quantise", lambda: self.runtime.backend.records(self.x)))
        if self.plan.pipeline == "decode" and self.settings.device == "cuda":
            found.append(Variant(REPLAY, self._captured().replay))
        calls, notes = others.at(self.x, self.routing, self.layer()) if others else ([], [])
        return found + [Variant(one.stage, one.run, one.name) for one in calls], notes

    def together(self) -> None:
        """A dispatch of one row to the next rank: each GPU waits until all others have come to it."""
        backend, placement = self.runtime.backend, self.settings.placement
        backend.dispatch(*self._one_row, placement, backend.layer_rows, "direct")

    @cached_property
    def _one_row(self) -> tuple[Tensor, Routing]:
        placement, device = self.settings.placement, self.x.device
        slots = placement.slots[(self.runtime.rank + 1) % placement.num_ranks]
        ids = torch.full((1, 1), slots[0] if slots else 0, dtype=torch.int32, device=device)
        row = torch.ones(1, 64, dtype=torch.bfloat16, device=device)
        return row, Routing(ids, torch.ones(1, 1, device=device))

    def _captured(self) -> torch.cuda.CUDAGraph:
        eager = self.layer()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = self.layer()
        graph.replay()
        if not torch.equal(y, eager):
            raise MoeloomError(f"a replayed graph gives other bits, with {self.settings.tokens[0]} tokens")
        return graph


def bench_rank(bench: Bench) -> Iterator[Step | Note | Measurement]:
    """The benchmark on one rank of the default group. What it yields on rank 0 is for people; others' is nothing."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    first = bench.at(bench.tokens[0])
    yield Step("making weights", 0, 1)
    peaks = peaks_here(bench) if rank == 0 else None
    experts = local_experts(first, rank)
    others, notes = peers.find(first, experts) if bench.peers and not bench.train else (None, [])
    for note in notes if rank == 0 else ():
        yield Note(note)
    for number, tokens in enumerate(bench.tokens):
        yield Step(f"{tokens} tokens", number, len(bench.tokens))
        settings = bench.at(tokens)
        ids = [uniform_ids(settings, source) for source in range(bench.ranks)]
        with ExitStack() as stack:
            runtime = stack.enter_context(
                Runtime(max_tokens=tokens, backend=settings.backend, timeout=settings.timeout)
            )
            if not bench.train:
                stack.enter_context(torch.no_grad())
            meter = meter_of(runtime)
            plan = choose_plan(bench, settings, runtime)
            case = Case(settings, runtime, experts, plan, routing_of(settings, ids[rank], rank), bench.train)
            case.check()
            case.together()
            clock = HostClock() if bench.device == "cpu" else DeviceClock(case.x.device, case.together)
            variants, notes = case.variants(others)
            everyone = gather(rounds(variants, clock, meter, bench.steps))
            del case, clock, variants
        if rank == 0 and peaks is not None:
            yield from map(Note, notes)
            limits = busiest(settings.shape, settings.recipe, peaks, loads(ids, settings.placement))
            yield from summarised(bench, settings, plan, everyone, (limits, peaks))


def rounds(variants: Sequence[Variant], clock: Clock, meter: Meter, steps: int) -> Samples:
    """Each variant's samples, interleaved, so that what drifts drifts for all."""
    found: Samples = {}
    for number in range(WARM_UP + steps):
        for variant in variants:
            take = clock.time if variant.stage == STAGES else clock.alone
            for cache in ("cold", "warm"):
                sample = take(variant.run, cache == "cold", meter)
                if number >= WARM_UP:
                    found.setdefault((variant.stage, variant.by, cache), []).append(sample)
    return found


def summarised(
    bench: Bench,
    settings: Settings,
    plan: Plan,
    everyone: Sequence[Samples],
    limits: tuple[dict[str, Bound], Peaks],
) -> Iterator[Measurement]:
    """All ranks' samples as measurements."""
    shape, tokens, (bound_of, peaks) = settings.shape, settings.tokens[0], limits
    same: dict[str, Any] = {
        "machine": machine_name(bench.device), "device": bench.device, "versions": versions(),
        "date": datetime.date.today().isoformat(), "model": shape.name, "hidden": shape.expert_hidden,
        "intermediate": shape.intermediate, "experts": shape.num_experts, "topk": settings.num_topk,
        "recipe": str(settings.recipe), "ranks": bench.ranks, "train": bench.train, "asked": bench.pipeline,
        "tokens": tokens, "peaks": asdict(peaks),
    }  # fmt: skip
    products = tokens * settings.num_topk * shape.expert_hidden * shape.intermediate
    flops = {LAYER: PRODUCTS, REPLAY: PRODUCTS, "experts": PRODUCTS, "backward": BACKWARD_PRODUCTS}
    flops[TRAINING] = PRODUCTS + BACKWARD_PRODUCTS
    for (stage, by, cache), of_first in everyone[0].items():
        times = [[rank[stage, by, cache][number] for rank in everyone] for number in range(len(of_first))]
        good = [ranks for ranks in times if all(sample.queued for sample in ranks)]
        used = good or times
        for name in of_first[0].stages if stage == STAGES else (stage,):
            seconds = [max(s.seconds if name == stage else s.stages[name] for s in ranks) for ranks in used]
            middle, bound = median(seconds), bound_of.get(LAYER if name == REPLAY else name)
            host = median(max(sample.host for sample in ranks) for ranks in used)
            yield Measurement(
                **same, plan=str(plan) if by == OWN else "", stage=name, by=by, cache=cache, rounds=len(used),
                us=middle * 1e6, fastest_us=min(seconds) * 1e6,
                host_us=host * 1e6 if bench.device == "cuda" and name == stage else None, waits=not good,
                bound_us=bound.seconds * 1e6 if bound else None, bound_by=bound.by if bound else None,
                share=bound.seconds / middle if bound else None,
                tflops=flops[name] * products / middle / 1e12 if name in flops else None,
            )  # fmt: skip


def gather(own: Any) -> list[Any]:
    """Every rank's, on rank 0."""
    if not dist.is_initialized():
        return [own]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(own, everyone if dist.get_rank() == 0 else None, dst=0)
    return everyone


def choose_plan(bench: Bench, settings: Settings, runtime: Runtime) -> Plan:
    """What was asked for, or what the planner takes of the pipelines that there are."""
    if bench.pipeline != "auto":
        return Plan(bench.pipeline)
    shape = settings.shape
    plan = runtime.plan(
        num_tokens=runtime.max_tokens, hidden=shape.expert_hidden, num_experts=shape.num_experts,
        num_topk=settings.num_topk, intermediate=shape.intermediate, recipe=settings.recipe,
        phase="train" if bench.train else "decode",
    )  # fmt: skip
    known = [c for c in plan.candidates if c.seconds is not None and c.pipeline in runtime.backend.pipelines]
    best = min(known, key=lambda candidate: candidate.seconds or 0.0)
    return replace(plan, pipeline=best.pipeline, exchange=best.exchange, chunks=best.chunks)


def uniform_ids(settings: Settings, rank: int) -> Tensor:
    """`[T, K]` int64, on the CPU: distinct experts, all as likely, whatever the model's router prefers."""
    random = random_for(settings.seed, "uniform ids", rank)
    scores = torch.rand(settings.tokens[rank], settings.shape.num_experts, generator=random)
    return scores.topk(settings.num_topk).indices


def routing_of(settings: Settings, ids: Tensor, rank: int) -> Routing:
    """With weights that sum to 1, on the device."""
    weights = torch.rand(ids.shape, generator=random_for(settings.seed, "weights", rank)) + 0.1
    weights /= weights.sum(1, keepdim=True)
    return Routing(ids.int().to(settings.device), weights.to(settings.device))


def peaks_here(bench: Bench) -> Peaks:
    """Of this rank's machine."""
    recipe = bench.at(1).recipe
    if bench.device == "cpu":
        return peaks_of_cpu(recipe, bench.ranks)
    return peaks_of_gpu(recipe, torch.device("cuda", torch.cuda.current_device()))


def versions() -> dict[str, str]:
    """Of what ran."""
    found = {"moeloom": moeloom.__version__, "torch": torch.__version__}
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})
