"""The data flow, on one screen.

route -> Routing -> dispatch -> experts -> combine
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from moeloom.backends.base import Backend, Handle, RowOrder
from moeloom.config import Recipe
from moeloom.experts import Experts
from moeloom.meter import Meter
from moeloom.placement import Placement
from moeloom.plan.plan import Plan
from moeloom.quantize import dequantize, pack_records, quantize, unpack_received
from moeloom.types import ExchangeName, Quantized, Received, Routing


def dispatch_rows(
    backend: Backend,
    x: Tensor | Quantized,
    routing: Routing | Handle,
    placement: Placement,
    rows: RowOrder,
    exchange: ExchangeName,
) -> tuple[Received, Handle]:
    """`Backend.dispatch` of rows, or of quantised ones: each then travels as one record of values and scales."""
    if not isinstance(x, Quantized):
        return backend.dispatch(x, routing, placement, rows, exchange)
    received, handle = backend.dispatch(pack_records(x), routing, placement, rows, exchange)
    if placement.num_identity and isinstance(routing, Routing):
        handle = replace(handle, x=dequantize(*x).bfloat16())
    return unpack_received(received, x.values.shape[1]), handle


def run_split(call: Call) -> tuple[Tensor, Handle]:
    """The stages one after the other: `x [T, H]` -> `y [T, H]`, and the handle for backward."""
    backend, plan = call.backend, call.plan
    received, handle = call.dispatch(
        lambda payload: backend.dispatch(payload, call.routing, call.placement, RowOrder(), plan.exchange)
    )
    rows = call.compute(backend.experts, received)
    with call.meter.stage("combine"):
        return backend.combine(rows, handle, call.recipe, weighted=False), handle


def run_decode(call: Call) -> tuple[Tensor, Handle]:
    """The same stages for few tokens: fixed shapes, no value read by the host."""
    backend, plan, order = call.backend, call.plan, RowOrder("batched")
    received, handle = call.dispatch(
        lambda payload: backend.begin_dispatch(payload, call.routing, call.placement, order, plan.exchange).wait()
    )
    rows = call.compute(backend.decode_experts, received)
    with call.meter.stage("combine"):
        return backend.begin_combine(rows.flatten(0, 1), handle, call.recipe, weighted=False).wait(), handle


PIPELINES = {"split": run_split, "decode": run_decode}


@dataclass(frozen=True, eq=False)
class Call:
    """One layer's tensors and how to run them, and what the pipelines have in common."""

    backend: Backend
    meter: Meter
    x: Tensor
    routing: Routing
    experts: Experts
    placement: Placement
    recipe: Recipe
    plan: Plan

    def dispatch(self, send: Callable[[Tensor], tuple[Received, Handle]]) -> tuple[Received, Handle]:
        """Rows of x as the recipe has them, to where `send` brings them."""
        with self.meter.stage("dispatch"):
            if not self.recipe.quantized:
                return send(self.x)
            received, handle = send(pack_records(quantize(self.x)))
            if self.placement.num_identity:
                handle = replace(handle, x=self.x)  # what stays here was not rounded
            return unpack_received(received, self.x.shape[1]), handle

    def compute(self, stage: Callable[[Received, Experts, Recipe], Tensor], received: Received) -> Tensor:
        """The experts stage. If it fails here, the other ranks are on their way to combine: they have to be told."""
        try:
            with self.meter.stage("experts"):
                return stage(received, self.experts, self.recipe)
        except Exception as error:
            self.backend.refuse("combine", error)
            raise
