"""The data flow, on one screen.

route -> Routing -> dispatch -> experts -> combine, for the whole batch or in chunks that overlap
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeloom.backends.base import Backend, Handle, RowOrder
from moeloom.config import Recipe
from moeloom.experts import Experts
from moeloom.meter import Meter
from moeloom.placement import Placement
from moeloom.plan.plan import Plan
from moeloom.quantize import dequantize, pack_records, unpack_received
from moeloom.schedule.chunk_graph import Stage, layer_graph
from moeloom.schedule.execute import execute
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
        lambda payload: backend.dispatch(payload, call.routing, call.placement, backend.layer_rows, plan.exchange)
    )
    rows = call.compute(backend.experts, received)
    with call.meter.stage("combine"):
        return backend.combine(rows, handle, call.recipe, weighted=False), handle


def run_decode(call: Call) -> tuple[Tensor, Handle]:
    """The same stages for few tokens: fixed shapes, no value read by the host."""
    backend, plan, order = call.backend, call.plan, call.backend.decode_rows
    received, handle = call.dispatch(
        lambda payload: backend.begin_dispatch(payload, call.routing, call.placement, order, plan.exchange).wait()
    )
    rows = call.compute(backend.decode_experts, received)
    with call.meter.stage("combine"):
        return backend.begin_combine(rows.view(-1, rows.shape[-1]), handle, call.recipe, weighted=False).wait(), handle


def run_in_chunks(call: Call) -> tuple[Tensor, None]:
    """`run_split` in parts of the batch: one is on the links while another is in the experts. The same bits.

    The links' tasks run here, in an order that is the same on every rank; the experts in a thread of their own. No
    handle: a backward exchanges the routing again.
    """
    parts = [Part(part) for part in call.parts()]
    stages = [Stage("dispatch", "links", 1.0), Stage("experts", "compute", 1.0), Stage("combine", "links", 1.0)]
    graph = layer_graph(stages, len(parts))
    execute(graph, [getattr(parts[task.chunk], task.kind) for task in graph.tasks], caller="links")
    return torch.cat([part.y for part in parts]), None


def run(call: Call) -> tuple[Tensor, Handle | None]:
    """What the plan says."""
    if call.plan.chunks > 1:
        return run_in_chunks(call)
    return PIPELINES[call.plan.pipeline](call)


PIPELINES = {"split": run_split, "decode": run_decode}


@dataclass(frozen=True, eq=False)
class Call:
    """One layer's tensors and how to run them, and what the pipelines have in common. chunk: which part, if any."""

    backend: Backend
    meter: Meter
    x: Tensor
    routing: Routing
    experts: Experts
    placement: Placement
    recipe: Recipe
    plan: Plan
    chunk: int = 0

    def dispatch(self, send: Callable[[Tensor], tuple[Received, Handle]]) -> tuple[Received, Handle]:
        """Rows of x as the recipe has them, to where `send` brings them."""
        with self.meter.stage("dispatch", self.chunk):
            if not self.recipe.quantized:
                return send(self.x)
            received, handle = send(self.backend.records(self.x))
            if self.placement.num_identity:
                handle = replace(handle, x=self.x)  # what stays here was not rounded
            return unpack_received(received, self.x.shape[1]), handle

    def compute(self, stage: Callable[[Received, Experts, Recipe], Tensor], received: Received) -> Tensor:
        """The experts stage. If it fails here, the other ranks are on their way to combine: they have to be told."""
        try:
            with self.meter.stage("experts", self.chunk):
                return stage(received, self.experts, self.recipe)
        except Exception as error:
            self.backend.refuse("combine", error)
            raise

    def parts(self) -> list[Call]:
        """The tokens in `plan.chunks` consecutive parts, as even as replicas of experts allow: which replica serves a
        token must not depend on the parts.
        """
        tokens, chunks, step = len(self.x), self.plan.chunks, self.placement.replica_period
        ends = [tokens * (chunk + 1) // chunks // step * step for chunk in range(chunks - 1)] + [tokens]
        cuts = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        routings = [Routing(self.routing.topk_idx[cut], self.routing.topk_weights[cut]) for cut in cuts]
        return [
            replace(self, x=self.x[cut], routing=routing, chunk=chunk)
            for chunk, (cut, routing) in enumerate(zip(cuts, routings, strict=True))
        ]


class Part:
    """A part of the batch on its way through the stages; its actions are called in this order, by two threads."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.y = call.x
        self.threads = torch.get_num_threads()

    def dispatch(self) -> None:
        """On the links."""
        call, backend = self.call, self.call.backend
        self.received, self.handle = call.dispatch(
            lambda rows: backend.dispatch(rows, call.routing, call.placement, backend.layer_rows, call.plan.exchange)
        )

    @torch.no_grad()
    def experts(self) -> None:
        """On the cores. What goes wrong waits for combine, where the other ranks are told."""
        self.failure: Exception | None = None
        torch.set_num_threads(self.threads)  # a new thread would take every core, as many ranks as there are
        try:
            with self.call.meter.stage("experts", self.call.chunk):
                self.rows = self.call.backend.experts(self.received, self.call.experts, self.call.recipe)
        except Exception as error:
            self.failure = error
        del self.received

    def combine(self) -> None:
        """On the links."""
        call = self.call
        if self.failure is not None:
            call.backend.refuse("combine", self.failure)
        with call.meter.stage("combine", call.chunk):
            self.y = call.backend.combine(self.rows, self.handle, call.recipe, weighted=False)
        del self.rows, self.handle
