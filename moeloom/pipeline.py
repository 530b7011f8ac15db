"""The data flow, on one screen.

route -> Routing -> dispatch -> experts -> combine
"""

from __future__ import annotations

from dataclasses import replace

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


def run_split(
    backend: Backend,
    meter: Meter,
    x: Tensor,
    routing: Routing,
    experts: Experts,
    *,
    placement: Placement,
    recipe: Recipe,
    plan: Plan,
) -> tuple[Tensor, Handle]:
    """The stages one after the other: `x [T, H]` -> `y [T, H]`, and the handle for backward."""
    with meter.stage("dispatch"):
        payload = quantize(x) if recipe.quantized else x
        received, handle = dispatch_rows(backend, payload, routing, placement, RowOrder(), plan.exchange)
        if recipe.quantized and placement.num_identity:
            handle = replace(handle, x=x)  # what stays here was not rounded
    try:
        with meter.stage("experts"):
            rows = backend.experts(received, experts, recipe)
    except Exception as error:
        backend.refuse("combine", error)  # the other ranks are on their way there; raises
        raise
    with meter.stage("combine"):
        return backend.combine(rows, handle, recipe, weighted=False), handle


def run_decode(
    backend: Backend,
    meter: Meter,
    x: Tensor,
    routing: Routing,
    experts: Experts,
    *,
    placement: Placement,
    recipe: Recipe,
    plan: Plan,
) -> tuple[Tensor, Handle]:
    """The same stages for few tokens: fixed shapes, no value read by the host."""
    with meter.stage("dispatch"):
        received, handle = backend.begin_dispatch(x, routing, placement, RowOrder("batched"), plan.exchange).wait()
    try:
        with meter.stage("experts"):
            rows = backend.decode_experts(received, experts, recipe)
    except Exception as error:
        backend.refuse("combine", error)
        raise
    with meter.stage("combine"):
        return backend.begin_combine(rows.flatten(0, 1), handle, recipe, weighted=False).wait(), handle


PIPELINES = {"split": run_split, "decode": run_decode}
