"""What `moeloom run` does on each rank: make weights and tokens, run the layer, look at the result."""

from __future__ import annotations

import difflib
import functools
import math
import socket
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moeloom.cli.check import Verdict, judge
from moeloom.cli.drawings import TRACE_ENDINGS, check_file, predicted_events
from moeloom.cli.timing import meter_of
from moeloom.cli.weights import local_experts, one_expert, random_for, read_shape
from moeloom.config import RECIPES, Recipe
from moeloom.meter import StageStats
from moeloom.models import MODELS, ModelShape
from moeloom.placement import Placement
from moeloom.plan.plan import Plan
from moeloom.runtime import Runtime
from moeloom.schedule.trace import Event
from moeloom.topology import Topology
from moeloom.types import ExchangeName, ReductionName, Routing

ExchangeChoice = Literal["auto", "direct", "hybrid"]
RecipeName = Literal["fp32", "bf16", "fp8"]
DeviceName = Literal["cpu", "cuda"]
SYNTHETIC_ROUTING = ("uniform", "skewed")
GPU_RECIPES = ("bf16", "fp8")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run, the same on all ranks. Raises ValueError, naming the option, for what fits no run.

    tokens: for each rank. nodes: how many the ranks are declared to be on; None takes what a launcher made.
    routing: "uniform", "skewed", or the path of a safetensors file.
    checkpoint, layer: read the experts of that layer from a Hugging Face folder, whose shape then replaces the model's.
    backward: run the backward too, and check the gradient of x.
    chunks: parts of the batch; 0 asks the planner. trace: a file for what ran when in the last step.
    device: where weights and tokens are: "cuda" is each rank's current GPU.
    corrupt: spoil one value before the check, to see it fail; no option sets it.
    """

    model: str = "qwen3-30b-a3b"
    scale: int = 8
    tokens: tuple[int, ...] = (256,) * 4
    nodes: int | None = 1
    exchange: ExchangeChoice = "auto"
    recipe_name: RecipeName = "fp32"
    reduction: ReductionName = "per_rank"
    routing: str = "uniform"
    steps: int = 5
    check: bool = True
    seed: int = 0
    timeout: float = 60.0
    checkpoint: str = ""
    layer: int = 0
    backward: bool = False
    chunks: int = 0
    trace: str = ""
    device: DeviceName = "cpu"
    corrupt: bool = False

    def __post_init__(self) -> None:
        if self.nodes is not None and not 1 <= self.nodes <= self.num_ranks:
            raise ValueError(f"--nodes is {self.nodes}; allowed with {self.num_ranks} ranks: 1..{self.num_ranks}")
        if any(count < 0 for count in self.tokens):
            raise ValueError(f"--tokens is {','.join(map(str, self.tokens))}; every number must be at least 0")
        if self.backward and self.recipe.quantized:
            raise ValueError(f"--backward is set, but --recipe {self.recipe_name} is forward only; use fp32 or bf16")
        if self.device == "cuda":
            self._check_gpus()
        if not self.timeout > 0:
            raise ValueError(f"--timeout is {self.timeout:g}; it must be positive seconds")
        if self.layer and not self.checkpoint:
            raise ValueError(f"--layer is {self.layer}, which is of a checkpoint; name its folder by --checkpoint")
        if self.checkpoint:
            read_shape(self.checkpoint)  # raises
        else:
            one_model(self.model)  # raises
        if self.routing not in SYNTHETIC_ROUTING:
            load_routing(self.routing, self.shape.num_choices)  # raises; not kept, the ranks read it themselves
        if self.chunks < 0:
            raise ValueError(f"--chunks is {self.chunks}; allowed: 1 and more, or 0 to ask the planner")
        if self.trace:
            check_file("--trace", self.trace, TRACE_ENDINGS)

    def _check_gpus(self) -> None:
        """The backend for GPUs would say it too, but after the ranks have started."""
        found = {"--nodes": self.nodes, "--exchange": self.exchange, "--recipe": self.recipe_name}
        allowed = {"--nodes": (None, 1), "--exchange": ("auto", "direct"), "--recipe": GPU_RECIPES}
        for option, value in found.items():
            if value not in allowed[option]:
                names = " and ".join(str(name) for name in allowed[option] if name is not None)
                raise ValueError(f"{option} is {value}, not for GPUs yet; allowed there: {names}; or --device cpu")

    @property
    def backend(self) -> str:
        """What runs on the device."""
        return "cpu" if self.device == "cpu" else "sm90"

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.tokens)

    @property
    def recipe(self) -> Recipe:
        """Dtype and reduction."""
        return RECIPES[self.recipe_name].with_reduction(self.reduction)

    @cached_property
    def shape(self) -> ModelShape:
        """The preset, narrowed."""
        if self.checkpoint:
            return read_shape(self.checkpoint)[0]
        shape = MODELS[self.model]
        return shape if self.scale == 1 else shape.scaled(self.scale)

    @cached_property
    def placement(self) -> Placement:
        """Experts in equal shares."""
        shape = self.shape
        return Placement.even(shape.num_experts, self.num_ranks, num_identity=shape.num_identity_experts)

    @cached_property
    def recorded(self) -> Routing:
        """What the routing file holds, checked."""
        return load_routing(self.routing, self.shape.num_choices)

    @property
    def num_topk(self) -> int:
        """K, the router's or the file's."""
        return self.shape.num_topk if self.routing in SYNTHETIC_ROUTING else self.recorded.num_topk


@dataclass(frozen=True)
class Step:
    """Progress: `done` of `total` steps of `phase`."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True, eq=False)
class RankReport:
    """What one rank measured.

    stages: for each timed step what each stage took. load: its tokens' rows per id, those of identity experts last.
    verdicts: of each result that was checked, by its name. forwards: seconds of each timed step's forward.
    events: what ran when in the last step, if it was traced; host: whose clock that is.
    """

    rank: int
    stages: tuple[dict[str, StageStats], ...]
    load: tuple[int, ...]
    verdicts: dict[str, Verdict]
    forwards: tuple[float, ...]
    events: tuple[Event, ...] = ()
    host: str = ""


@dataclass(frozen=True, eq=False)
class Report:
    """The whole run: all ranks' reports, and what was the same on all of them."""

    topology: Topology
    plan: Plan
    ranks: tuple[RankReport, ...]

    @property
    def forward_seconds(self) -> float:
        """A step's forward takes as long as on its slowest rank; the median of the steps."""
        return median(map(max, zip(*(one.forwards for one in self.ranks), strict=True)))

    @property
    def trace(self) -> list[Event]:
        """The last step as measured, and as predicted; both begin at 0, on each host.

        Clocks of hosts differ by more than a step takes; ranks enter a step together.
        """
        begins: dict[str, float] = {}
        for one in self.ranks:
            begins[one.host] = min([begins.get(one.host, math.inf), *(event.begin for event in one.events)])
        measured = [
            replace(event, begin=event.begin - begins[one.host], end=event.end - begins[one.host])
            for one in self.ranks
            for event in one.events
        ]
        return predicted_events(self.plan) + measured


def run_rank(settings: Settings) -> Iterator[Step | Report]:
    """The run on one rank of the default group. Yields progress; last, on rank 0 only, the `Report`."""
    most = max(1, *settings.tokens)
    with Runtime(max_tokens=most, backend=settings.backend, timeout=settings.timeout) as runtime:
        rank, topology, meter = runtime.rank, runtime.topology, meter_of(runtime)
        if settings.nodes not in (None, topology.num_nodes):
            raise ValueError(f"--nodes is {settings.nodes}; the ranks are on {topology.num_nodes} (see MOELOOM_NODE)")
        yield Step("making weights", 0, 1)
        experts = local_experts(settings, rank)
        x, routing = make_tokens(settings, rank), make_routing(settings, rank)
        plan = choose_plan(settings, runtime)
        d_y = None
        if settings.backward:
            d_y = normal_rows(settings, "gradient", rank)
            for tensor in (x, *experts.tensors().values()):
                tensor.requires_grad_()
        stages, forwards = [], []
        traced: list[Event] = []
        y = x
        for step in range(settings.steps + 1):  # the first warms up and is not counted
            yield Step("step", step, settings.steps + 1)
            before = runtime.stats()
            with runtime.tracing() if settings.trace and step == settings.steps else nullcontext(traced) as traced:
                meter.settle()
                start = time.perf_counter()
                y = runtime.moe(x, routing, experts, recipe=settings.recipe, plan=plan)
                meter.settle()
                forwards.append(time.perf_counter() - start)
                if settings.backward:
                    x.grad = None
                    y.backward(d_y)
                    meter.settle()
            stages.append({name: now - before.get(name, StageStats()) for name, now in runtime.stats().items()})
        verdicts: dict[str, Verdict] = {}
        if settings.check:
            yield Step("checking", 0, 1)
            results = {"result": y.detach()}
            if x.grad is not None:
                results["gradient of x"] = x.grad
            if settings.corrupt and rank == min(1, settings.num_ranks - 1):
                _spoil(results["result"])
            expert = functools.partial(one_expert, settings)
            verdicts = judge(settings.shape, settings.recipe, expert, x.detach(), routing, results, d_y)
        load = torch.bincount(routing.topk_idx[routing.topk_idx >= 0].long(), minlength=settings.placement.num_ids)
        yield Step("gathering", 0, 1)
        own = RankReport(
            rank, tuple(stages[1:]), tuple(load.tolist()), verdicts, tuple(forwards[1:]), tuple(traced),
            socket.gethostname(),
        )  # fmt: skip
        reports = _gather(own, runtime, settings)
    if rank == 0:
        yield Report(topology, plan, reports)


def _gather(report: RankReport, runtime: Runtime, settings: Settings) -> tuple[RankReport, ...]:
    """All ranks' reports on rank 0; nothing on the others."""
    if not dist.is_initialized():
        return (report,)
    everyone: list = [None] * settings.num_ranks
    dist.gather_object(report, everyone if runtime.rank == 0 else None, dst=0)
    return tuple(everyone)


def choose_plan(settings: Settings, runtime: Runtime) -> Plan:
    """The planner's, or the best of its candidates that have what was asked for."""
    shape = settings.shape
    plan = runtime.plan(
        num_tokens=runtime.max_tokens, hidden=shape.expert_hidden, num_experts=shape.num_experts,
        num_topk=settings.num_topk, intermediate=shape.intermediate, recipe=settings.recipe,
        phase="train" if settings.backward else "prefill",
    )  # fmt: skip
    exchange: ExchangeName | None = None if settings.exchange == "auto" else settings.exchange
    asked = [f"--exchange {exchange}"] * (exchange is not None) + [f"--chunks {settings.chunks}"] * bool(
        settings.chunks
    )
    if not asked:
        return plan
    fitting = [
        candidate
        for candidate in plan.candidates
        if candidate.seconds is not None
        and exchange in (None, candidate.exchange)
        and settings.chunks in (0, candidate.chunks)
    ]
    reason = ", ".join(asked)
    if not fitting:  # what the planner would not look at, without a prediction
        return replace(plan, exchange=exchange or plan.exchange, chunks=settings.chunks or 1, reason=reason)
    best = min(fitting, key=lambda candidate: candidate.seconds or 0.0)
    return replace(plan, pipeline=best.pipeline, exchange=best.exchange, chunks=best.chunks, reason=reason)


def make_tokens(settings: Settings, rank: int) -> Tensor:
    """`x [T, H]` of one rank."""
    return normal_rows(settings, "tokens", rank)


def normal_rows(settings: Settings, what: str, rank: int) -> Tensor:
    """`[T, H]` normal numbers of the recipe's dtype, on the device; others for each `what`."""
    random = random_for(settings.seed, what, rank, settings.device)
    shape = (settings.tokens[rank], settings.shape.expert_hidden)
    return torch.randn(*shape, generator=random, device=random.device).to(settings.recipe.dtype)


def make_routing(settings: Settings, rank: int) -> Routing:
    """`_routing` on the device."""
    found = _routing(settings, rank)
    return Routing(found.topk_idx.to(settings.device), found.topk_weights.to(settings.device))


def _routing(settings: Settings, rank: int) -> Routing:
    """What the preset's router chooses from random logits, or the rank's rows of the file.

    skewed: expert e is drawn with a probability that falls like 1 / place, in an order of experts all ranks share.
    """
    num_tokens, shape = settings.tokens[rank], settings.shape
    if settings.routing not in SYNTHETIC_ROUTING:
        rows = (torch.arange(num_tokens) + sum(settings.tokens[:rank])) % settings.recorded.num_tokens
        return Routing(settings.recorded.topk_idx[rows], settings.recorded.topk_weights[rows])
    random = random_for(settings.seed, "logits", rank)
    logits = torch.empty(num_tokens, shape.num_choices).exponential_(generator=random).log_().neg_()  # Gumbel noise
    shared = random_for(settings.seed, "router", 0)
    if settings.routing == "skewed":
        logits -= (1.0 + torch.randperm(shape.num_choices, generator=shared)).log()
    # the shapes do not say who has a bias; the models that score by sigmoid and normalise all do
    has_bias = shape.router.score != "softmax" and shape.router.normalize
    return shape.router(logits, torch.randn(shape.num_choices, generator=shared) * 0.05 if has_bias else None)


def one_model(name: str) -> ModelShape:
    """The preset that --model names. Raises ValueError."""
    if name not in MODELS:
        close = difflib.get_close_matches(name.lower(), MODELS)
        names = f"close: {', '.join(close)}" if close else f"known: {', '.join(sorted(MODELS))}"
        raise ValueError(f"--model is {name!r}, which is no known model; {names}")
    return MODELS[name]


def load_routing(path: str, num_ids: int) -> Routing:
    """The routing that a safetensors file holds, its ids below `num_ids`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not Path(path).is_file():
        allowed = ", ".join(SYNTHETIC_ROUTING)
        raise ValueError(f"--routing is {path!r}; allowed: {allowed}, or a safetensors file, and there is no such file")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"--routing {path}: not a safetensors file ({error})") from None
    missing = {"topk_idx", "topk_weights"} - tensors.keys()
    if missing:
        raise ValueError(f"--routing {path}: {' and '.join(sorted(missing))} missing; it has {', '.join(tensors)}")
    ids, weights = tensors["topk_idx"], tensors["topk_weights"]
    if ids.dim() != 2 or not ids.numel() or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"--routing {path}: topk_idx is {ids.dtype} {list(ids.shape)}; it must be int32/int64 [N, K]")
    if weights.shape != ids.shape or weights.dtype != torch.float32:
        raise ValueError(
            f"--routing {path}: topk_weights is {weights.dtype} {list(weights.shape)}; it must be float32"
            f" {list(ids.shape)} like topk_idx"
        )
    if ids.min() < -1 or ids.max() >= num_ids:
        raise ValueError(
            f"--routing {path}: topk_idx is in {int(ids.min())}..{int(ids.max())}; the model allows -1..{num_ids - 1}"
        )
    return Routing(ids, weights)


def _spoil(y: Tensor) -> None:
    """Flip the sign of the largest value of a row in the middle."""
    row = y[len(y) // 2]
    place = row.abs().argmax()
    row[place] = -row[place]
