"""The whole layer as one operator of `torch.library`: `torch.ops.moeloom.moe`, with its gradients.

An operator takes tensors and numbers only. Everything else about a call (Runtime, placement, recipe, plan, activation)
is a `LayerCall`, which the operator finds by its number, as long as somebody holds it: the Runtime the latest ones,
`MoE` its own, and a graph until its backward.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from moeloom import checks
from moeloom.autograd import bring, identity_backward, return_scalars
from moeloom.backends.base import Backend, Handle
from moeloom.config import Recipe
from moeloom.experts import Experts
from moeloom.meter import Meter
from moeloom.pipeline import Call, run
from moeloom.placement import Placement
from moeloom.plan.plan import Plan
from moeloom.plan.problem import Problem
from moeloom.types import Routing

_numbers = itertools.count()
_calls: weakref.WeakValueDictionary[int, LayerCall] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class LayerCall:
    """One way of calling the layer: all but the tensors.

    backend: gives the Runtime's backend, or raises if it is closed. choose: problem and plan for (hidden,
    intermediate, top-k). record: told the problem, the plan and how long the forward took.
    like: an Experts of any tensors, for its options. handle: of the last forward that wants a backward, until it is
    taken.
    """

    backend: Callable[[], Backend]
    meter: Meter
    choose: Callable[[int, int, int], tuple[Problem, Plan]]
    like: Experts
    placement: Placement
    recipe: Recipe
    rank: int
    max_tokens: int | None
    record: Callable[[Problem, str, float], None]
    handle: Handle | None = None

    def __post_init__(self) -> None:
        self.number = next(_numbers)
        _calls[self.number] = self

    def forward(self, x: Tensor, routing: Routing, experts: Experts) -> tuple[Tensor, Handle | None]:
        """Check, plan and run."""
        backend = self.backend()
        try:
            checks.check_shapes(x, routing, self.recipe, self.rank, self.max_tokens)
            experts.check(self.placement.num_local(self.rank), x.shape[1])
            checks.check_weights(experts, self.recipe)
            problem, plan = self.choose(x.shape[1], experts.down.shape[2], routing.num_topk)
            checks.check_plan(plan, backend)
            if plan.pipeline == "decode":
                checks.check_decode(x, routing, "batched", self.recipe, self.rank, self.max_tokens)
            else:
                checks.check_call(x, routing, self.placement, self.recipe, self.rank, self.max_tokens)
        except Exception as error:
            backend.refuse("dispatch", error)
            raise
        call = Call(backend, self.meter, x, routing, experts, self.placement, self.recipe, plan)
        start = time.perf_counter()
        with torch.autocast(x.device.type, enabled=False):  # the recipe says what is rounded
            result = run(call)
        self.record(problem, str(plan), time.perf_counter() - start)
        return result

    def backward(self, d_y: Tensor, x: Tensor, handle: Handle, experts: Experts) -> list[Tensor]:
        """Gradients of x, of topk_weights and of the experts' tensors that require one, in `Experts.tensors` order.

        Two dispatches over the handle (x again, and d_y), the experts' backward, two combines.
        """
        checks.check_forward_only(self.recipe, True)
        backend = self.backend()
        with self.meter.stage("backward"), torch.autocast(x.device.type, enabled=False):
            rows, d_rows = bring(backend, x, handle), bring(backend, d_y, handle)
            try:
                grads = backend.experts_backward(rows, d_rows.rows, experts, self.recipe)
            except Exception as error:
                backend.refuse("combine", error)
                raise
            d_x = backend.combine(grads.rows, handle, self.recipe, weighted=False, identity=False)
            d_topk_weights = return_scalars(backend, grads.row_weights, handle)
        if self.placement.num_identity:
            d_x_identity, d_identity = identity_backward(x, d_y, handle)
            d_x, d_topk_weights = d_x + d_x_identity, d_topk_weights + d_identity
        return [d_x, d_topk_weights, *grads.weights.values()]

    def experts(self, tensors: list[Tensor | None], wanted: list[bool]) -> Experts:
        """Experts with these tensors (gate_up, down and their biases) and this call's options."""
        ready: list[Any] = [
            None if t is None else t.detach().requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)
        ]
        gate_up, down, gate_up_bias, down_bias = ready
        return replace(self.like, gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias)


@contextmanager
def _autograd_in_operator() -> Iterator[None]:
    """Let autograd work: an operator's kernel runs below it, but the experts' backward differentiates their forward."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (DispatchKey.AutogradFunctionality, DispatchKey.AutogradOther, DispatchKey.AutogradNestedTensor):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


@torch.library.custom_op("moeloom::moe", mutates_args=())
def moe(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    call: int,
    keep: bool,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> Tensor:
    """`LayerCall` number `call` on these tensors: `y [T, H]`. keep: leave the handle for `_save`, which follows at
    once. gate_up_scale, down_scale: `Experts.scales`.
    """
    this = _calls[call]
    experts = this.experts([gate_up, down, gate_up_bias, down_bias], [False] * 4)
    if gate_up_scale is not None and down_scale is not None:
        experts = replace(experts, scales=(gate_up_scale, down_scale))
    y, handle = this.forward(x, Routing(topk_idx, topk_weights), experts)
    this.handle = (
        replace(handle, x=None) if keep and handle else None
    )  # autograd keeps x itself, or checkpointing drops it
    return y


@moe.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("moeloom::moe_backward", mutates_args=())
def moe_backward(
    d_y: Tensor,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    tensors: list[Tensor],
    has_biases: bool,
    wanted: list[bool],
    call: int,
) -> list[Tensor]:
    """`LayerCall.backward` where no handle could be kept (compiled graphs): the routing is exchanged again."""
    this = _calls[call]
    backend = this.backend()
    _, plan = this.choose(x.shape[1], tensors[1].shape[2], topk_idx.shape[1])
    _, handle = backend.dispatch(x, Routing(topk_idx, topk_weights), this.placement, backend.layer_rows, plan.exchange)
    experts = this.experts([*tensors, *([] if has_biases else [None, None])], wanted)
    with _autograd_in_operator():
        return this.backward(d_y, x, handle, experts)


@moe_backward.register_fake
def _(
    d_y: Tensor, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, tensors: list[Tensor], *rest: Any
) -> list[Tensor]:
    wanted = rest[1]
    grads = [torch.empty_like(tensor) for tensor, want in zip(tensors, wanted, strict=False) if want]
    rows = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (x, topk_weights)]
    return [*rows, *grads]


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, topk_idx, topk_weights, gate_up, down, gate_up_bias, down_bias, call, keep, *_ = inputs
    ctx.save_for_backward(x, topk_idx, topk_weights, gate_up, down, gate_up_bias, down_bias)
    ctx.number, ctx.call, ctx.handle = call, None, None
    if keep:
        ctx.call = _calls[call]
        ctx.handle, ctx.call.handle = ctx.call.handle, None


def _backward(ctx: Any, d_y: Tensor) -> tuple:
    x, topk_idx, topk_weights, *tensors = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[3:7])
    if ctx.handle is not None:
        grads = ctx.call.backward(d_y, x, ctx.handle, ctx.call.experts(tensors, wanted))
    else:
        present = [tensor for tensor in tensors if tensor is not None]
        grads = torch.ops.moeloom.moe_backward(
            d_y, x, topk_idx, topk_weights, present, len(present) == 4, wanted, ctx.number
        )
    d_x, d_topk_weights, *rest = grads
    found = iter(rest)
    return d_x, None, d_topk_weights, *(next(found) if want else None for want in wanted), *[None] * 4


moe.register_autograd(_backward, setup_context=_save)
