"""The stages of a layer, each to be called and timed by itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from moeloom.backends.base import Backend, Handle
from moeloom.config import Recipe
from moeloom.experts import Experts
from moeloom.placement import Placement
from moeloom.plan.plan import Plan
from moeloom.quantize import unpack_received
from moeloom.types import Received, Routing


@dataclass(eq=False)
class Stages:
    """Each method is one stage as the plan's pipeline runs it, on what the stage before it gave last. Collective.

    x: `[T, H]`. Rows that travel quantised are quantised here, once: that is no part of `dispatch`.
    """

    backend: Backend
    plan: Plan
    x: Tensor
    routing: Routing
    experts: Experts
    placement: Placement
    recipe: Recipe
    payload: Tensor = field(init=False)
    received: Received = field(init=False)
    handle: Handle = field(init=False)
    rows: Tensor = field(init=False)
    y: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.payload = self.backend.records(self.x) if self.recipe.quantized else self.x
        self.dispatch()
        self.compute()
        self.combine()

    @property
    def fixed(self) -> bool:
        """Whether shapes are."""
        return self.plan.pipeline == "decode"

    def dispatch(self) -> None:
        """Rows to their experts."""
        backend, what = self.backend, (self.payload, self.routing, self.placement)
        if self.fixed:
            received, self.handle = backend.begin_dispatch(*what, backend.decode_rows, self.plan.exchange).wait()
        else:
            received, self.handle = backend.dispatch(*what, backend.layer_rows, self.plan.exchange)
        self.received = unpack_received(received, self.x.shape[1]) if self.recipe.quantized else received

    def compute(self) -> None:
        """The experts on them."""
        run = self.backend.decode_experts if self.fixed else self.backend.experts
        rows = run(self.received, self.experts, self.recipe)
        self.rows = rows.view(-1, rows.shape[-1])

    def combine(self) -> None:
        """Rows back to their tokens."""
        backend, what = self.backend, (self.rows, self.handle, self.recipe)
        if self.fixed:
            self.y = backend.begin_combine(*what, weighted=False).wait()
        else:
            self.y = backend.combine(*what, weighted=False)
