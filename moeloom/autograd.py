"""Gradients: dispatch and combine are each other's backward, over the same handle.

They are those of the sum of all ranks' losses. The backward of an operation is itself collective: all ranks must run
it, in the same order, also those without tokens. Autograd keeps x, the weights and the handle; rows are brought again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moeloom.backends.base import Backend, Handle
from moeloom.config import FP32, Recipe, recipe_for
from moeloom.types import Quantized, Received, Routing


class Dispatch(torch.autograd.Function):
    """`x, topk_weights -> rows, the rows' weights`. `run()` does the stage, and tells `done` what came of it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, topk_weights: Tensor | None, backend: Backend, run: Callable, done: list
    ) -> tuple[Tensor, Tensor]:
        received, handle = run()
        done += (received, handle)
        ctx.backend, ctx.handle = backend, handle
        # a row of order "rank" has places for all slots of its token; those of other ranks are constants here
        ctx.elsewhere = received.topk_idx < 0 if handle.rows.order == "rank" and ctx.needs_input_grad[1] else None
        return received.rows, received.topk_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, d_row_weights: Tensor) -> tuple:
        d_x = d_topk_weights = None
        if ctx.needs_input_grad[0]:
            flat = d_rows.reshape(-1, d_rows.shape[-1])
            d_x = ctx.backend.combine(flat, ctx.handle, recipe_for(d_rows.dtype), weighted=False, identity=False)
        if ctx.needs_input_grad[1]:
            if ctx.elsewhere is not None:
                d_row_weights = d_row_weights.masked_fill(ctx.elsewhere, 0)
            d_topk_weights = return_scalars(ctx.backend, d_row_weights, ctx.handle)
        return d_x, d_topk_weights, None, None, None


class Combine(torch.autograd.Function):
    """`rows, topk_weights, x -> y`. topk_weights take part if weighted or used by identity experts, x by the latter."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        topk_weights: Tensor,
        x: Tensor | None,
        backend: Backend,
        handle: Handle,
        recipe: Recipe,
        weighted: bool,
    ) -> Tensor:
        ctx.backend, ctx.handle, ctx.weighted = backend, handle, weighted
        wanted_rows = rows if weighted and topk_weights.requires_grad else None
        # topk_weights for autograd's check only: identity_backward reads them from the handle
        ctx.save_for_backward(wanted_rows, x, None if x is None else topk_weights)
        return backend.combine(rows, handle, recipe, weighted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple:
        rows, x, _ = ctx.saved_tensors
        handle: Handle = ctx.handle
        received = bring(ctx.backend, d_y, handle)
        d_rows = received.rows.view(-1, d_y.shape[1])
        d_topk_weights = d_x = None
        if ctx.needs_input_grad[1]:
            d_topk_weights = torch.zeros_like(handle.routing.topk_weights)
            if rows is not None:
                dots = (rows.float() * d_rows.float()).sum(1)
                d_topk_weights += return_scalars(ctx.backend, dots, handle)
        if ctx.weighted:
            d_rows = (d_rows.float() * received.topk_weights.view(-1, 1)).to(d_rows.dtype)
        if x is not None:
            d_x, d_identity = identity_backward(x, d_y, handle)
            if d_topk_weights is not None:
                d_topk_weights += d_identity
        return d_rows, d_topk_weights, d_x, None, None, None, None


def bring(backend: Backend, payload: Tensor, handle: Handle) -> Received:
    """Dispatch another payload over a known routing."""
    return backend.dispatch(payload, handle, handle.placement, handle.rows, handle.exchange)[0]


def return_scalars(backend: Backend, values: Tensor, handle: Handle) -> Tensor:
    """One number per received (token, slot) pair, back to its source: `[T, K]` fp32, 0 where no pair was received.

    values: shaped like `Received.topk_weights`. Each travels in a row of K, in its slot's place, the others zero: a
    combine adds nothing but zeros to it.
    """
    num_topk = handle.routing.num_topk
    if handle.rows.order == "rank":
        wide = values
    else:
        slot = handle.layout.pos_to_topk.unsqueeze(1)
        valid = torch.where(slot >= 0, values.reshape(-1, 1).float(), 0)  # what padding holds may be NaN
        wide = valid.new_zeros(len(slot), num_topk).scatter_(1, slot.clamp(min=0), valid)
    return backend.combine(wide, handle, FP32, weighted=False, identity=False)


def identity_backward(x: Tensor, d_y: Tensor, handle: Handle) -> tuple[Tensor, Tensor]:
    """Gradients of the identity experts' term, of x and of topk_weights: it never left this rank."""
    identity = handle.placement.is_identity(handle.routing.topk_idx)
    weight = (handle.routing.topk_weights * identity).sum(1, keepdim=True)
    dot = (x.float() * d_y.float()).sum(1, keepdim=True)
    return (d_y.float() * weight).to(x.dtype), dot * identity


def differentiable_dispatch(
    backend: Backend, x: Tensor | Quantized, routing: Routing | Handle, run: Callable[[], tuple[Received, Handle]]
) -> tuple[Received, Handle]:
    """The dispatch that `run` does, with gradients to x and (if it brings the routing too) to the router weights."""
    topk_weights = routing.topk_weights if isinstance(routing, Routing) else None
    done: list = []
    rows, row_weights = Dispatch.apply(x, topk_weights, backend, run, done)
    received, handle = done
    return replace(received, rows=rows, topk_weights=row_weights), handle
