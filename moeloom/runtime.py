"""Runtime: owns group, topology and backend. The only thing with a lifetime."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed.device_mesh import DeviceMesh

from moeloom import checks, env, machine_cache
from moeloom.autograd import Combine, differentiable_dispatch
from moeloom.backends.base import Backend, Handle, RowOrder
from moeloom.backends.cpu.backend import CpuBackend
from moeloom.backends.peers import Peers
from moeloom.config import FP8, FP32, Recipe, recipe_for
from moeloom.errors import CapabilityError, MoeloomError
from moeloom.experts import Experts
from moeloom.layer import LayerCall
from moeloom.layout import check_order
from moeloom.meter import Meter, StageStats
from moeloom.pipeline import dispatch_rows
from moeloom.placement import Placement
from moeloom.plan.plan import Plan
from moeloom.plan.planner import Planner
from moeloom.plan.problem import Phase, Problem
from moeloom.route import Router
from moeloom.schedule.trace import Event
from moeloom.topology import Topology
from moeloom.types import Order, Overflow, Quantized, Received, Routing

log = logging.getLogger("moeloom")
BACKENDS = ("auto", "cpu", "sm90")
MAX_LAYER_CALLS = 64  # an activation or placement made anew in every step must not add up


class Runtime:
    """Expert-parallel data flow over a group of ranks. One serves all layers of a model.

    group: a ProcessGroup of any backend, a one-dimensional DeviceMesh, "self" for this process alone, or None for the
        default group (this process alone if there is none). The Runtime makes a private group of its own beside it.
    topology: which ranks share a node; None asks the machine (or the environment variable MOELOOM_NODE).
    max_tokens: the most tokens any rank will pass. Memory is then sized for it at the first call; None grows as needed.
    backend: "cpu" (tensors on the CPU), "sm90" (on this process's current GPU, an H100 or H200), or "auto": "sm90"
        where there is such a GPU and the group is not one for CPUs only.
    timeout: seconds after which a rank that does not come is an error, `PeerTimeout`.

    Construction and every operation are collective: all ranks of the group, in the same order. Use it as a context
    manager, or call `close`: then a rank that leaves with an exception tells the others.
    """

    def __init__(
        self,
        group: ProcessGroup | DeviceMesh | Literal["self"] | None = None,
        *,
        topology: Topology | None = None,
        max_tokens: int | None = None,
        backend: str = "auto",
        timeout: float = 300.0,
    ) -> None:
        rank, num_ranks, store = _meeting_place(group)
        self._peers = Peers(store, rank, num_ranks, timeout)
        try:
            _check_arguments(num_ranks, topology, max_tokens, backend, timeout)
        except Exception as error:
            raise self._peers.refuse(error) from None
        backend = _backend_name(backend, group)
        announced = self._peers.gather(
            "arrival",
            {
                "node": env.declared_node() or socket.gethostname(),
                "max_tokens": max_tokens,
                "backend": backend,
                "topology": None if topology is None else [list(ranks) for ranks in topology.nodes],
                **machine_cache.announcement(rank, backend),
            },
        )
        _refuse_differences(announced)
        self.topology = topology or Topology.from_names([record["node"] for record in announced])
        self.rank, self.max_tokens = rank, max_tokens
        self._backend = _make_backend(announced, self._peers, store, self.topology, max_tokens)
        self._meter = Meter(self._backend.traffic, rank)
        self._planner = Planner(machine_cache.setting(announced, self.topology, self._backend))
        self._closed, self._process = False, os.getpid()
        self._even: dict[int, Placement] = {}
        self._calls: dict[tuple, LayerCall] = {}
        log.info("Runtime: rank %d of %s, backend %s", rank, self.topology, self._backend.name)

    def moe(
        self,
        x: Tensor,
        routing: Routing,
        experts: Experts,
        *,
        recipe: Recipe | None = None,
        plan: Plan | None = None,
        tokens_hint: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The whole layer: `y[t] = sum over k of topk_weights[t, k] * expert[topk_idx[t, k]](x[t])`.

        x: `[T, H]` of the recipe's dtype. routing: of its T tokens. experts: this rank's.
        recipe: None takes the one of x's dtype. plan: None asks the planner, which uses `tokens_hint` (equal on all
        ranks) or max_tokens. out: `[T, H]` to write into; NaN if the call fails. Returns `[T, H]`.
        Differentiable in x, the router weights and the experts' tensors: gradients of the sum of all ranks' losses.
        """
        with _poisoned_on_failure(out):
            with self.refusing("dispatch"):
                tensors = (experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias)
                idx, weights = routing.topk_idx, routing.topk_weights
                checks.check_devices(self._open(), x=x, topk_idx=idx, topk_weights=weights, **experts.tensors())
                recipe = recipe or recipe_for(x.dtype)
                checks.check_out(out, x)
                call = self.layer_call(experts, recipe, plan, tokens_hint)
                grad = torch.is_grad_enabled() and any(
                    tensor is not None and tensor.requires_grad for tensor in (x, routing.topk_weights, *tensors)
                )
                checks.check_forward_only(recipe, grad)
                if plan is not None and plan.pipeline == "decode":
                    checks.check_no_gradient(x, routing.topk_weights, *tensors)
            keep = grad and not torch.compiler.is_compiling()
            y = torch.ops.moeloom.moe(
                x, routing.topk_idx, routing.topk_weights, *tensors, call.number, keep, *experts.scales or ()
            )
            return y if out is None else out.copy_(y)

    def dispatch(
        self,
        x: Tensor | Quantized,
        routing: Routing | Handle,
        placement: Placement | int | None = None,
        *,
        order: Order = "expert",
        alignment: int = 1,
        capacity: int | None = None,
        overflow: Overflow = "error",
        plan: Plan | None = None,
        async_op: bool = False,
    ) -> Any:
        """Bring each token's row to the ranks of its experts: `(Received, Handle)`.

        x: `[T, H]`, any dtype of a recipe, or such rows quantised (`moeloom.quantize.quantize`): values and scales then
        travel, and `Received.scales` is there. routing: a Routing, or the Handle of an earlier dispatch to send another
        payload over the same routing (its order and placement then hold). placement: a Placement, or a number of
        experts for an even one.
        order: see `Received`. alignment: each expert's rows start at a multiple of it. capacity: fixed number of rows
        (per expert for "batched"); overflow: "error", or "drop" what does not fit and count it.
        plan: `Plan("decode", ...)` gives shapes fixed by max_tokens, reads no value and has no gradient; what is wrong
        with ids or capacity is then found by a later call; an expert has room for one row per token of all ranks unless
        capacity says otherwise ("batched"). async_op: only send; the Pending's `wait()` receives.
        Differentiable in x and, with a Routing, in its weights: `Received.topk_weights` carries their gradient.
        """
        if plan is not None and plan.pipeline == "decode":
            return self._begin_dispatch(
                x, routing, placement, RowOrder(order, alignment, capacity, overflow), plan, async_op
            )
        with self.refusing("dispatch"):
            self._check_devices(x, routing)
            given = checks.check_given(x, None)
            checks.check_async(async_op, "split")
            if isinstance(routing, Handle):
                checks.check_handle(routing, self._open())
                checks.check_payload(given, routing)
                placed, rows, exchange = routing.placement, routing.rows, routing.exchange
            else:
                if placement is None:
                    raise ValueError("placement is None; pass a Placement, or the number of experts")
                check_order(order, alignment, capacity)
                checks.check_overflow(overflow)
                placed, rows = self._placement(placement, 0), RowOrder(order, alignment, capacity, overflow)
                recipe = FP8 if isinstance(x, Quantized) else recipe_for(x.dtype)
                checks.check_call(x, routing, placed, recipe, self.rank, self.max_tokens)
                shape = (given.shape[1], placed.num_experts, routing.num_topk)
                plan = plan or self._planner(Problem(self.max_tokens, *shape, recipe))
                exchange = plan.exchange

        def run() -> tuple[Received, Handle]:
            with self._meter.stage("dispatch"):
                return dispatch_rows(self._open(), x, routing, placed, rows, exchange)

        return differentiable_dispatch(self._open(), x, routing, run)

    def combine(
        self,
        rows: Tensor,
        handle: Handle,
        *,
        weighted: bool,
        recipe: Recipe | None = None,
        out: Tensor | None = None,
        async_op: bool = False,
    ) -> Any:
        """Bring rows back to their tokens and sum them: `[T, H]`.

        rows: shaped like the `Received.rows` of handle's dispatch; what padding rows hold does not matter.
        weighted: multiply by the router weights here (rows of a foreign expert function); False if the rows have been
        weighted already, as `moe`'s experts do. recipe: None takes the one of rows' dtype, with reduction per_rank.
        async_op: of a dispatch by the decode pipeline: only send, and return a Pending whose `wait()` gives the sums.
        Differentiable in rows and, where they are used here, in the router weights of the handle.
        """
        with _poisoned_on_failure(out):
            with self.refusing("combine"):
                recipe = recipe or recipe_for(rows.dtype)
                checks.check_handle(handle, self._open())
                checks.check_devices(self._open(), rows=rows)
                flat = checks.check_combine(rows, handle, recipe, weighted)
                checks.check_out(out, flat.new_empty((handle.num_tokens, flat.shape[1]), device="meta"))
                checks.check_async(async_op, handle.pipeline)
                if handle.pipeline == "decode":
                    checks.check_no_gradient(rows)
            with self._meter.stage("combine"):
                if handle.pipeline == "decode":
                    pending = self._open().begin_combine(flat, handle, recipe, weighted)
                    if async_op:
                        return pending
                    y = pending.wait()
                    return y if out is None else out.copy_(y)
                weights = handle.routing.topk_weights
                y = Combine.apply(flat, weights, handle.x, self._open(), handle, recipe, weighted)
            return y if out is None else out.copy_(y)

    def _begin_dispatch(
        self,
        x: Tensor | Quantized,
        routing: Routing | Handle,
        placement: Placement | int | None,
        rows: RowOrder,
        plan: Plan,
        async_op: bool,
    ) -> Any:
        """`dispatch` by the decode pipeline."""
        with self.refusing("dispatch"):
            if isinstance(x, Quantized):
                raise CapabilityError("x is quantised; the decode pipeline takes unquantised rows, the split one both")
            self._check_devices(x, routing)
            checks.check_rows(x, None, "x")
            if isinstance(routing, Handle):
                checks.check_handle(routing, self._open())
                placement, rows, routing = routing.placement, routing.rows, routing.routing
            if placement is None:
                raise ValueError("placement is None; pass a Placement, or the number of experts")
            check_order(rows.order, rows.alignment, rows.capacity)
            checks.check_overflow(rows.overflow)
            checks.check_decode(x, routing, rows.order, recipe_for(x.dtype), self.rank, self.max_tokens)
            placed = self._placement(placement, 0)
        with self._meter.stage("dispatch"):
            pending = self._open().begin_dispatch(x, routing, placed, rows, plan.exchange)
            return pending if async_op else pending.wait()

    def route(self, router: Router, logits: Tensor, bias: Tensor | None = None) -> Routing:
        """`router(logits, bias)`; on GPUs by one kernel. Not collective. See `Router`."""
        checks.check_devices(self._open(), logits=logits, bias=bias)
        return self._open().route(router, logits, bias)

    def pack(self, experts: Experts, recipe: Recipe) -> Experts:
        """Weights as the recipe computes with them, for inference: a copy for fp8, which else quantises them in every
        call; otherwise experts themselves. Not collective, and not remembered: pack again when they have changed.
        """
        checks.check_devices(self._open(), **experts.tensors())
        return self._open().pack(experts) if recipe.quantized else experts

    def check(self) -> None:
        """Raise what kernels have found wrong on this rank, in calls that could not say so: replays of a CUDA graph.

        Waits for the GPU. Not collective; a failed exchange is told to the other ranks.
        """
        self._open().check()

    def plan(
        self,
        *,
        hidden: int,
        num_experts: int,
        num_topk: int,
        intermediate: int | None = None,
        num_tokens: int | None = None,
        recipe: Recipe = FP32,
        phase: Phase = "prefill",
        agree: bool = False,
    ) -> Plan:
        """What `moe` would run for such a problem; `.explain()` says why. Only phase "decode" may give that pipeline.

        A pure function of its arguments, which must be equal on all ranks, and needs no communication. With agree=True
        it is collective: `num_tokens` is this rank's, the largest of all ranks counts, and what the ranks have measured
        of such problems since corrects the model, equally on all.
        """
        with self.refusing("plan") if agree else nullcontext():
            problem = Problem(num_tokens, hidden, num_experts, num_topk, recipe, phase, intermediate)
        if not agree:
            return self._planner(problem)
        shown = self._open().gather("plan", {"tokens": num_tokens, "problem": str(replace(problem, num_tokens=None))})
        for rank, record in enumerate(shown):
            if record["problem"] != shown[0]["problem"]:
                raise ValueError(
                    f"plan: the problem differs between ranks: rank 0 has {shown[0]['problem']}, rank {rank} has"
                    f" {record['problem']}"
                )
        counts = [record["tokens"] for record in shown]
        problem = replace(problem, num_tokens=None if None in counts else max(counts))
        feedback = self._planner.feedback
        self._planner.learn(problem, self._open().gather("plan", feedback.report(problem)))
        return self._planner(problem)

    def tracing(self) -> AbstractContextManager[list[Event]]:
        """While it is open, every stage that runs on this rank is added to the list it gives."""
        return self._meter.tracing()

    @property
    def backend(self) -> Backend:
        """What runs the stages; for measurements and tests."""
        return self._open()

    @property
    def meter(self) -> Meter:
        """What counts the stages; for measurements."""
        return self._meter

    def stats(self) -> dict[str, StageStats]:
        """Per stage: calls, seconds, bytes on each link and rows, on this rank, since construction."""
        return dict(self._meter.stages)

    def symmetric_bytes(self) -> int:
        """Bytes of symmetric memory this rank holds now."""
        return self._open().symmetric_bytes()

    def close(self) -> None:
        """Give everything back; not collective. Calling it again does nothing, nor does it in a forked child."""
        if not self._closed and self._process == os.getpid():
            self._closed = True
            self._peers.say_closed()
            self._backend.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not self._closed and self._process == os.getpid():
            self._peers.abort(MoeloomError(f"rank {self.rank} left: {type(error).__name__}: {error}"))
        self.close()

    def _open(self) -> Backend:
        if self._closed:
            raise MoeloomError("this Runtime is closed")
        return self._backend

    def _check_devices(self, x: Tensor | Quantized, routing: Routing | Handle) -> None:
        given = routing.routing if isinstance(routing, Handle) else routing
        tensors = {"topk_idx": given.topk_idx, "topk_weights": given.topk_weights}
        checks.check_devices(self._open(), x=x, **tensors)

    def _placement(self, placement: Placement | int | None, num_local: int) -> Placement:
        """The placement meant: given, even over that many experts, or `num_local` experts on every rank."""
        num_ranks = self.topology.num_ranks
        if placement is None:
            placement = num_local * num_ranks
        if isinstance(placement, int):
            if placement not in self._even:
                self._even[placement] = Placement.even(placement, num_ranks)
            placement = self._even[placement]
        if placement.num_ranks != num_ranks:
            raise ValueError(f"placement is for {placement.num_ranks} ranks; the Runtime has {num_ranks}")
        return placement

    def layer_call(self, experts: Experts, recipe: Recipe, plan: Plan | None, tokens_hint: int | None) -> LayerCall:
        """What `moe` does with experts of these options. The latest are kept; who needs one longer holds it."""
        placement = self._placement(experts.placement, experts.num_local)
        options = (experts.activation, experts.gate_up_order, experts.weight_on_input)
        key = (*options, placement, recipe, plan, tokens_hint)
        if key not in self._calls:
            num_tokens = self.max_tokens if tokens_hint is None else tokens_hint

            def choose_plan(hidden: int, intermediate: int, num_topk: int) -> tuple[Problem, Plan]:
                shape = (hidden, placement.num_experts, num_topk)
                problem = Problem(num_tokens, *shape, recipe, intermediate=intermediate)
                return problem, plan or self._planner(problem)

            none = torch.empty(0)
            like = replace(experts, gate_up=none, down=none, gate_up_bias=None, down_bias=None, scales=None)
            self._calls[key] = LayerCall(
                self._open, self._meter, choose_plan, like, placement, recipe, self.rank, self.max_tokens,
                self._planner.feedback.record,
            )  # fmt: skip
            if len(self._calls) > MAX_LAYER_CALLS:
                del self._calls[next(iter(self._calls))]
        return self._calls[key]

    @contextmanager
    def refusing(self, kind: str) -> Iterator[None]:
        """What is wrong with this rank's call is told to the others before it is raised."""
        backend = self._open()
        try:
            yield
        except Exception as error:
            backend.refuse(kind, error)
            raise


@contextmanager
def _poisoned_on_failure(out: Tensor | None) -> Iterator[None]:
    """The output of a failed call is NaN."""
    try:
        yield
    except BaseException:
        if out is not None and out.is_floating_point():
            out.fill_(float("nan"))
        raise


def _check_arguments(
    num_ranks: int, topology: Topology | None, max_tokens: int | None, backend: str, timeout: float
) -> None:
    """Raise unless a Runtime can be made so."""
    if backend not in BACKENDS:
        raise CapabilityError(f"backend {backend!r} is not in this version; allowed: {', '.join(BACKENDS)}")
    if backend == "sm90" and not torch.cuda.is_available():
        raise CapabilityError("backend 'sm90' needs an H100 or H200; found: no GPU that torch can use")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1, or None to grow as needed")
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout}; it must be positive seconds")
    if topology is not None and topology.num_ranks != num_ranks:
        raise ValueError(f"topology is for {topology.num_ranks} ranks; the group has {num_ranks}")


def _backend_name(backend: str, group: Any) -> str:
    """What "auto" means here: GPUs that the kernels are for, unless the group is for CPUs only."""
    if backend != "auto":
        return backend
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "cpu"
    if group != "self" and dist.is_initialized():
        given = group if isinstance(group, ProcessGroup) else None
        if "nccl" not in dist.get_backend_config(given):
            return "cpu"
    return "sm90"


def _make_backend(
    announced: list[dict], peers: Peers, store: Store | None, topology: Topology, max_tokens: int | None
) -> Backend:
    if announced[0]["backend"] == "cpu":
        return CpuBackend(peers, store, topology, max_tokens)
    from moeloom.backends.sm90.backend import Sm90Backend  # its kernels are of no use without a GPU

    return Sm90Backend(peers, store, topology, max_tokens)


def _refuse_differences(announced: list[dict]) -> None:
    """The same error on every rank if ranks were constructed differently."""
    for name in ("max_tokens", "topology", "backend"):
        first = announced[0][name]
        for rank, record in enumerate(announced):
            if record[name] != first:
                raise ValueError(f"{name} differs between ranks: rank 0 has {first}, rank {rank} has {record[name]}")


def _meeting_place(group: ProcessGroup | DeviceMesh | str | None) -> tuple[int, int, Store | None]:
    """Rank, number of ranks and a store of this Runtime's own, which all ranks of the group name alike."""
    if group == "self":
        return 0, 1, None
    if isinstance(group, str):
        raise ValueError(f"group is {group!r}; allowed: a ProcessGroup, a DeviceMesh, 'self' or None")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions; pass one of its dimensions: mesh['ep']"
            )
        group = group.get_group()
    if group is None:
        if not dist.is_initialized():
            return 0, 1, None
        group = dist.group.WORLD
    assert group is not None
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("group does not contain this rank; construct the Runtime on its members only")
    if num_ranks == 1:
        return 0, 1, None
    store = dist.distributed_c10d._get_process_group_store(group)
    attempt = store.add(f"moeloom/{rank}", 1)  # ranks construct in the same order, so they count alike
    return rank, num_ranks, PrefixStore(f"moeloom/{attempt}", store)
