"""What `moeloom bench` does on each rank: time layer and stages of each model and number of tokens, peers beside."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import moeloom
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
from moeloom.cli.other_systems import OtherSystems, find
from moeloom.cli.run import DeviceName, RecipeName, Settings, Step, make_tokens, normal_rows
from moeloom.cli.stages import Stages
from moeloom.cli.timing import Clock, DeviceClock, HostClock, Sample, meter_of
from moeloom.cli.weights import local_experts, one_expert, random_for
from moeloom.config import RECIPES
from moeloom.errors import MoeloomError
from moeloom.experts import Experts
from moeloom.meter import Meter
from moeloom.models import MODELS
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
ALONE = ", alone"  # behind the name of a stage that is called by itself
# operations per (token, expert) pair and H I
FLOPS = {
    LAYER: PRODUCTS, REPLAY: PRODUCTS, "experts": PRODUCTS, "backward": BACKWARD_PRODUCTS,
    TRAINING: PRODUCTS + BACKWARD_PRODUCTS,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One benchmark, the same on all ranks. Raises ValueError, naming the option, for what cannot be run.

    models, tokens: a case for each model and number of tokens per rank. max_tokens: what Runtimes are made for; None:
    each case's tokens. pipeline: "auto" asks the planner. train: forward and backward. stages: time them by themselves
    too. steps: timed rounds of each case. peers: time other systems beside, where they are installed.
    """

    models: tuple[str, ...]
    scale: int
    tokens: tuple[int, ...]
    ranks: int
    recipe_name: RecipeName
    device: DeviceName
    max_tokens: int | None = None
    pipeline: PipelineChoice = "auto"
    train: bool = False
    stages: bool = False
    steps: int = 9
    seed: int = 0
    timeout: float = 60.0
    peers: bool = True

    def __post_init__(self) -> None:
        tokens, models = ",".join(map(str, self.tokens)), ",".join(self.models)
        if not self.tokens or min(self.tokens) < 1:
            raise ValueError(f"--tokens is {tokens}; every number must be at least 1")
        if len(set(self.tokens)) < len(self.tokens):
            raise ValueError(f"--tokens is {tokens}; name each number once")
        if self.max_tokens is not None and self.max_tokens < max(self.tokens):
            raise ValueError(f"--max-tokens is {self.max_tokens}; allowed with --tokens {tokens}: no fewer than these")
        if self.train and self.pipeline == "decode":
            raise ValueError("--train is set, but --pipeline decode has no gradient; use split or auto")
        if self.train and self.stages:
            raise ValueError("--stages is set, but with --train stages are timed within the step only; leave one out")
        if self.train and RECIPES[self.recipe_name].quantized:
            raise ValueError(f"--train is set, but --recipe {self.recipe_name} is forward only; use fp32 or bf16")
        if len(set(self.models)) < len(self.models):
            raise ValueError(f"--model is {models}; name each model once")
        for model in self.models:
            self.at(model, self.tokens[0])  # raises
            if MODELS[model].num_topk > MODELS[model].num_experts:
                raise ValueError(f"--model {model} has fewer experts than a token chooses")

    def at(self, model: str, tokens: int) -> Settings:
        """The run of one case."""
        return Settings(
            model=model, scale=self.scale, tokens=(tokens,) * self.ranks, nodes=None, device=self.device,
            recipe_name=self.recipe_name, seed=self.seed, timeout=self.timeout, backward=self.train,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One stage (or the layer) of one case: the slowest rank's median, in microseconds.

    model: the preset, narrowed by --scale to these sizes. by: moeloom or a peer. asked: --pipeline; plan: what ran.
    cache: "cold" or "warm" before the call. host_us: what the host took to queue it, None where that is the same.
    waits: whether the GPU had to wait for the host meanwhile. bound_us: what the busiest rank cannot be faster than,
    for the reason bound_by; share: bound_us / us. tflops: 10^12 operations per second of the mean rank, counting 6 H I
    per (token, expert) pair, or 18 in training.
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
    max_tokens: int
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
    bench: Bench
    x: Tensor = field(init=False)
    d_y: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        rank = self.runtime.rank
        self.x = make_tokens(self.settings, rank)
        if self.bench.train:
            self.d_y = normal_rows(self.settings, "gradient", rank)
            for tensor in self.leaves:
                tensor.requires_grad_()

    @property
    def title(self) -> str:
        """For errors."""
        return f"{self.settings.model}, {self.settings.tokens[0]} tokens"

    @property
    def leaves(self) -> list[Tensor]:
        """What gets a gradient in training."""
        return [self.x, self.routing.topk_weights, *self.experts.tensors().values()]

    def layer(self) -> Tensor:
        """The forward; in training the backward too."""
        for leaf in self.leaves:
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
                    f"{self.title}: {name} is wrong: error {verdict.error:.1e}, allowed"
                    f" {verdict.allowed:.1e}; `moeloom run` names the row"
                )

    def variants(self, others: OtherSystems | None) -> tuple[list[Variant], list[str]]:
        """All that is timed, a decode pipeline on a GPU also as a graph; and what is to be said of peers."""
        found = [Variant(TRAINING if self.bench.train else LAYER, self.layer), Variant(STAGES, self.layer)]
        if self.settings.recipe.quantized:
            found.append(Variant("quantise", lambda: self.runtime.backend.records(self.x)))
        if self.plan.pipeline == "decode" and self.settings.device == "cuda":
            found.append(Variant(REPLAY, self._captured().replay))
        if self.bench.stages:
            found += self._stages()
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

    def _stages(self) -> list[Variant]:
        """Each stage by itself; together they have to give the layer's bits."""
        alone = Stages(
            self.runtime.backend, self.plan, self.x, self.routing, self.experts, self.settings.placement,
            self.settings.recipe,
        )  # fmt: skip
        if not torch.equal(alone.y, self.layer()):
            raise MoeloomError(f"{self.title}: stages by themselves give other bits")
        runs = {"dispatch": alone.dispatch, "experts": alone.compute, "combine": alone.combine}
        return [Variant(name + ALONE, run) for name, run in runs.items()]

    def _captured(self) -> torch.cuda.CUDAGraph:
        eager = self.layer()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = self.layer()
        graph.replay()
        if not torch.equal(y, eager):
            raise MoeloomError(f"{self.title}: a replayed graph gives other bits")
        return graph


def bench_rank(bench: Bench) -> Iterator[Step | Note | Measurement]:
    """The benchmark on one rank of the default group. What it yields on rank 0 is for people; others' is nothing."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    yield Step("machine", 0, 1)
    peaks = peaks_here(bench) if rank == 0 else None
    if rank == 0 and bench.device == "cuda" and bench.ranks > torch.cuda.device_count():
        yield Note(f"{bench.ranks} ranks share {torch.cuda.device_count()} GPU(s): times are not those of a GPU each")
    for number, model in enumerate(bench.models):
        first, cases = bench.at(model, bench.tokens[0]), len(bench.tokens)
        yield Step(f"{model}, weights", number * cases, len(bench.models) * cases)
        experts = local_experts(first, rank)
        others, notes = find(first, experts) if bench.peers and not bench.train else (None, [])
        for done, tokens in enumerate(bench.tokens):
            yield Step(f"{model}, {tokens} tokens", number * cases + done, len(bench.models) * cases)
            timed = time_case(bench, bench.at(model, tokens), experts, others)
            notes += timed.notes
            if rank == 0 and peaks is not None:
                settings = bench.at(model, tokens)
                limits = busiest(settings.shape, settings.recipe, peaks, loads(timed.ids, settings.placement))
                yield from summarised(bench, settings, timed, (limits, peaks))
        prefix = f"{model}: " if len(bench.models) > 1 else ""
        yield from [Note(f"{prefix}{note}") for note in notes if rank == 0]
        del experts, others  # before there are those of the next model


@dataclass(frozen=True, eq=False)
class Timed:
    """One case. everyone: all ranks' samples, on rank 0. ids: all ranks' choices. notes: of peers."""

    plan: Plan
    everyone: list[Samples]
    ids: list[Tensor]
    notes: list[str]


def time_case(bench: Bench, settings: Settings, experts: Experts, others: OtherSystems | None) -> Timed:
    """On each rank: check the case, then time all that is to be timed of it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    ids = [uniform_ids(settings, source) for source in range(bench.ranks)]
    most = bench.max_tokens or settings.tokens[0]
    with ExitStack() as stack:
        runtime = stack.enter_context(Runtime(max_tokens=most, backend=settings.backend, timeout=settings.timeout))
        if not bench.train:
            stack.enter_context(torch.no_grad())
        meter = meter_of(runtime)
        plan = choose_plan(bench, settings, runtime)
        case = Case(settings, runtime, experts, plan, routing_of(settings, ids[rank], rank), bench)
        case.check()
        case.together()
        clock = HostClock() if bench.device == "cpu" else DeviceClock(case.x.device, case.together)
        variants, notes = case.variants(others)
        return Timed(plan, gather(rounds(variants, clock, meter, bench.steps)), ids, notes)


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
    bench: Bench, settings: Settings, timed: Timed, limits: tuple[Mapping[str, Bound], Peaks]
) -> Iterator[Measurement]:
    """All ranks' samples as measurements."""
    shape, tokens, everyone, (bounds, peaks) = settings.shape, settings.tokens[0], timed.everyone, limits
    same: dict[str, Any] = {
        "machine": machine_name(bench.device), "device": bench.device, "versions": versions(),
        "date": datetime.date.today().isoformat(), "model": settings.model, "hidden": shape.expert_hidden,
        "intermediate": shape.intermediate, "experts": shape.num_experts, "topk": settings.num_topk,
        "recipe": str(settings.recipe), "ranks": bench.ranks, "train": bench.train, "asked": bench.pipeline,
        "tokens": tokens, "max_tokens": bench.max_tokens or tokens, "peaks": asdict(peaks),
    }  # fmt: skip
    products = tokens * settings.num_topk * shape.expert_hidden * shape.intermediate
    for (stage, by, cache), of_first in everyone[0].items():
        times = [[rank[stage, by, cache][number] for rank in everyone] for number in range(len(of_first))]
        good = [ranks for ranks in times if all(sample.queued for sample in ranks)]
        used = good or times
        for name in of_first[0].stages if stage == STAGES else (stage,):
            seconds = [max(s.seconds if name == stage else s.stages[name] for s in ranks) for ranks in used]
            middle, bound = median(seconds), bound_of(bounds, name)
            host = median(max(sample.host for sample in ranks) for ranks in used)
            flops = FLOPS.get(name.removesuffix(ALONE))
            yield Measurement(
                **same, plan=str(timed.plan) if by == OWN else "", stage=name, by=by, cache=cache, rounds=len(used),
                us=middle * 1e6, fastest_us=min(seconds) * 1e6,
                host_us=host * 1e6 if bench.device == "cuda" and name == stage else None, waits=not good,
                bound_us=bound.seconds * 1e6 if bound else None, bound_by=bound.by if bound else None,
                share=bound.seconds / middle if bound else None,
                tflops=flops * products / middle / 1e12 if flops else None,
            )  # fmt: skip


def bound_of(bounds: Mapping[str, Bound], stage: str) -> Bound | None:
    """The stage's own, or that of the same work within a layer or not replayed."""
    return bounds.get(LAYER if stage == REPLAY else stage) or bounds.get(stage.removesuffix(ALONE))


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
        num_tokens=settings.tokens[0], hidden=shape.expert_hidden, num_experts=shape.num_experts,
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
    recipe = RECIPES[bench.recipe_name]
    if bench.device == "cpu":
        return peaks_of_cpu(recipe, bench.ranks)
    return peaks_of_gpu(recipe, torch.device("cuda", torch.cuda.current_device()))


def versions() -> dict[str, str]:
    """Of what ran."""
    found = {"moeloom": moeloom.__version__, "torch": torch.__version__}
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})
