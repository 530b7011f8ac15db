"""What a backend provides, and what dispatch remembers for combine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moeloom.config import Recipe
from moeloom.experts import Experts
from moeloom.layout import Layout
from moeloom.placement import Placement
from moeloom.route import Router
from moeloom.types import ExchangeName, Order, Overflow, Received, Routing


@dataclass(frozen=True)
class RowOrder:
    """How dispatch lays out the rows it brings; see `Runtime.dispatch`.

    exact: without a capacity, as many rows as come. False, within a layer: a backend that would have to wait for their
    number may give more, unused ones behind them, and leave out of `Received` what its own stages do not read.
    """

    order: Order = "expert"
    alignment: int = 1
    capacity: int | None = None
    overflow: Overflow = "error"
    exact: bool = True


@dataclass(frozen=True, eq=False)
class Handle:
    """What a dispatch leaves for combine, for another payload over the same routing, and later for backward.

    Opaque: only the backend reads it. It holds index maps, no rows; any number may be outstanding.
    owner: the backend that made it. number: of the operation that made it, equal on all ranks.
    x: kept for identity experts only, otherwise None.
    """

    owner: weakref.ref[Any]
    number: int
    num_tokens: int
    routing: Routing
    placement: Placement
    exchange: ExchangeName
    rows: RowOrder
    layout: Layout
    x: Tensor | None
    paths: Any
    pipeline: str = "split"


@dataclass(frozen=True, eq=False)
class ExpertGrads:
    """Gradients of the experts stage.

    rows: shaped like the received rows, of their dtype. row_weights: `[R]` fp32. weights: by field name of `Experts`,
    only for those that require one. Padding rows and experts without rows get zeros.
    """

    rows: Tensor
    row_weights: Tensor
    weights: dict[str, Tensor]


@dataclass(eq=False)
class Pending:
    """An operation whose send half is done. `wait` is its receive half; in `hybrid` all ranks wait in equal order."""

    receive: Callable[[], Any] | None
    result: Any = None

    def wait(self) -> Any:
        """What the operation returns; the same again if called again."""
        if self.receive is not None:
            self.result, self.receive = self.receive(), None
        return self.result


@dataclass
class Traffic:
    """Bytes that this rank has put on each link, and rows it has received; grows over the Runtime's life."""

    scale_up_bytes: int = 0
    scale_out_bytes: int = 0
    rows: int = 0


class Backend(Protocol):
    """One way to do the stages on one kind of hardware. A backend that cannot do what is asked raises."""

    name: str
    device: torch.device
    pipelines: tuple[str, ...]
    overlaps_chunks: bool
    layer_rows: RowOrder
    decode_rows: RowOrder
    traffic: Traffic

    def route(self, router: Router, logits: Tensor, bias: Tensor | None) -> Routing:
        """`router(logits, bias)`."""

    def pack(self, experts: Experts) -> Experts:
        """`experts.quantized()`."""

    def check(self) -> None:
        """Wait for what has been launched, and raise what was wrong with it on this rank."""

    def records(self, x: Tensor) -> Tensor:
        """Rows quantised, as they travel: what `pack_records(quantize(x))` gives."""

    def dispatch(
        self, x: Tensor, routing: Routing | Handle, placement: Placement, rows: RowOrder, exchange: ExchangeName
    ) -> tuple[Received, Handle]:
        """Bring each token's row to the ranks of its experts."""

    def experts(self, received: Received, experts: Experts, recipe: Recipe) -> Tensor:
        """up/gate, activation, router weight, down, for every received row."""

    def experts_backward(self, received: Received, d_out: Tensor, experts: Experts, recipe: Recipe) -> ExpertGrads:
        """Gradients of `experts` for the gradient `d_out` of its result."""

    def combine(self, rows: Tensor, handle: Handle, recipe: Recipe, weighted: bool, identity: bool = True) -> Tensor:
        """Bring the expert rows back and sum them: `[T, H]`. identity: add what identity experts return."""

    def begin_dispatch(
        self, x: Tensor, routing: Routing, placement: Placement, rows: RowOrder, exchange: ExchangeName
    ) -> Pending:
        """The send half of a dispatch of fixed shapes (pipeline "decode"). `wait` gives `(Received, Handle)`."""

    def decode_experts(self, received: Received, experts: Experts, recipe: Recipe) -> Tensor:
        """`experts` on rows of fixed shapes, no count read by the host."""

    def begin_combine(self, rows: Tensor, handle: Handle, recipe: Recipe, weighted: bool) -> Pending:
        """The send half of the combine of such a dispatch. `wait` gives `[T, H]`."""

    def gather(self, kind: str, own: dict) -> list[dict]:
        """Every rank's record, in rank order. Collective, a small one: JSON, at most a few kilobytes."""

    def refuse(self, kind: str, error: Exception) -> None:
        """Take part in operation `kind` by telling the other ranks why this rank cannot."""

    def symmetric_bytes(self) -> int:
        """Bytes of symmetric memory that this rank holds now."""

    def close(self) -> None:
        """Give everything back. May be called twice, and after a failure."""
