"""The data flow, on one screen.

route -> Routing -> dispatch -> experts -> combine
"""

from __future__ import annotations

from torch import Tensor

from moeloom.backends.base import Backend, Handle, RowOrder
from moeloom.config import Recipe
from moeloom.experts import Experts
from moeloom.meter import Meter
from moeloom.placement import Placement
from moeloom.plan.plan import Plan
from moeloom.types import Routing


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
        received, handle = backend.dispatch(x, routing, placement, RowOrder(), plan.exchange)
    try:
        with meter.stage("experts"):
            rows = backend.experts(received, experts, recipe)
    except Exception as error:
        backend.refuse("combine", error)  # the other ranks are on their way there; raises
        raise
    with meter.stage("combine"):
        return backend.combine(rows, handle, recipe, weighted=False), handle
