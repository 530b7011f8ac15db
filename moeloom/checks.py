"""What a caller can get wrong in a call, said in one place for all backends. Raises `ValueError`, or
`CapacityError`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeloom.backends.base import Backend, Handle
from moeloom.config import Recipe
from moeloom.errors import CapabilityError, CapacityError
from moeloom.experts import Experts
from moeloom.layout import first_bad_id
from moeloom.placement import Placement
from moeloom.plan.plan import Plan
from moeloom.quantize import num_groups
from moeloom.types import Quantized, Routing

ID_DTYPES = (torch.int32, torch.int64)
OVERFLOWS = ("error", "drop")


def check_call(
    x: Tensor | Quantized,
    routing: Routing,
    placement: Placement,
    recipe: Recipe,
    rank: int,
    max_tokens: int | None,
) -> None:
    """Raise unless x and routing fit together, to the recipe, the placement and the Runtime."""
    check_shapes(x, routing, recipe, rank, max_tokens)
    if isinstance(x, Quantized):
        wanted = (*x, routing.topk_weights)
        check_forward_only(recipe, torch.is_grad_enabled() and any(tensor.requires_grad for tensor in wanted))
    if routing.topk_idx.device.type != "cpu":
        return  # to look at values would make the host wait; kernels find what is wrong
    bad = first_bad_id(routing.topk_idx, placement.num_ids)
    if bad is not None:
        row, k, value = bad
        raise ValueError(
            f"rank {rank}: topk_idx[{row}, {k}] is {value}; allowed: 0..{placement.num_ids - 1}, or -1 for not routed"
        )


def check_shapes(x: Tensor | Quantized, routing: Routing, recipe: Recipe, rank: int, max_tokens: int | None) -> None:
    """Raise unless shapes and dtypes fit together; no value is read."""
    x = check_given(x, recipe.dtype)
    ids, weights = routing.topk_idx, routing.topk_weights
    if ids.dtype not in ID_DTYPES:
        raise ValueError(f"topk_idx has dtype {ids.dtype}; allowed: torch.int32, torch.int64")
    if weights.dtype != torch.float32:
        raise ValueError(f"topk_weights has dtype {weights.dtype}; it must be torch.float32")
    if ids.dim() != 2 or ids.shape[1] < 1 or ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"topk_idx is {list(ids.shape)}; with {x.shape[0]} tokens it must be [{x.shape[0]}, K], K >= 1"
        )
    if weights.shape != ids.shape:
        raise ValueError(f"topk_weights is {list(weights.shape)}; it must be shaped like topk_idx, {list(ids.shape)}")
    if max_tokens is not None and x.shape[0] > max_tokens:
        raise CapacityError(
            f"rank {rank}: {x.shape[0]} tokens, but max_tokens is {max_tokens}; construct the Runtime with"
            f" max_tokens={x.shape[0]} or more, or None to grow as needed"
        )


def check_decode(x: Tensor, routing: Routing, order: str, recipe: Recipe, rank: int, max_tokens: int | None) -> None:
    """Raise unless the decode pipeline can take this call; no value is read."""
    if max_tokens is None:
        raise CapacityError(
            "max_tokens is None; the decode pipeline's shapes follow from it, so construct with a number"
        )
    if order == "rank":
        raise ValueError("order is 'rank'; the decode pipeline has 'expert' and 'batched'")
    check_shapes(x, routing, recipe, rank, max_tokens)
    check_no_gradient(x, routing.topk_weights)


def check_no_gradient(*tensors: Tensor | None) -> None:
    """Raise if autograd expects a gradient of the decode pipeline."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise CapabilityError("the decode pipeline has no gradient; use torch.no_grad(), or the split pipeline")


def check_plan(plan: Plan, backend: Backend) -> None:
    """Raise unless the backend can run it."""
    if plan.pipeline not in backend.pipelines:
        raise CapabilityError(
            f"pipeline is {plan.pipeline!r}; the {backend.name} backend has {', '.join(backend.pipelines)}"
        )
    if plan.chunks > 1 and not backend.overlaps_chunks:
        raise CapabilityError(f"chunks is {plan.chunks}; on the {backend.name} backend nothing overlaps them: pass 1")


def check_async(async_op: bool, pipeline: str) -> None:
    """Raise unless this pipeline has two halves."""
    if async_op and pipeline != "decode":
        raise ValueError(
            f"async_op is True; the {pipeline} pipeline has no halves, pass plan=Plan('decode', ...) to dispatch"
        )


def check_given(x: Tensor | Quantized, dtype: torch.dtype | None) -> Tensor:
    """Raise unless x is rows `[T, H]` (of that dtype), or such rows quantised; returns them, or their values."""
    if not isinstance(x, Quantized):
        check_rows(x, dtype, "x")
        return x
    check_rows(x.values, torch.float8_e4m3fn, "x.values")
    check_rows(x.scales, torch.float32, "x.scales")
    wanted = [len(x.values), num_groups(x.values.shape[1])]
    if list(x.scales.shape) != wanted:
        raise ValueError(f"x.scales is {list(x.scales.shape)}; with values {list(x.values.shape)} it must be {wanted}")
    return x.values


def check_weights(experts: Experts, recipe: Recipe) -> None:
    """Raise unless the recipe can compute with these weights."""
    if experts.scales is not None and not recipe.quantized:
        raise ValueError(
            f"gate_up is {experts.gate_up.dtype} with scales; recipe {recipe.name} needs dequantised weights:"
            " pass recipe=FP8, or load them with dtype=torch.bfloat16"
        )


def check_forward_only(recipe: Recipe, grad: bool) -> None:
    """Raise if a gradient is wanted of a recipe that has none."""
    if grad and recipe.quantized:
        raise CapabilityError(
            f"recipe {recipe.name} is forward only, and a gradient is wanted; call under torch.no_grad(), or train in"
            " bf16 or fp32"
        )


def check_devices(backend: Backend, **tensors: Tensor | Quantized | None) -> None:
    """Raise unless all are where the backend works: for another device torch would not even come to its operator."""
    for name, given in tensors.items():
        parts = {name: given}
        if isinstance(given, Quantized):
            parts = {f"{name}.values": given.values, f"{name}.scales": given.scales}
        for part, tensor in parts.items():
            if isinstance(tensor, Tensor) and tensor.device != backend.device:
                place = "the CPU" if backend.device.type == "cpu" else str(backend.device)
                raise ValueError(f"{part} is on {tensor.device}; the {backend.name} backend needs it on {place}")


def check_rows(rows: Tensor, dtype: torch.dtype | None, name: str) -> None:
    """Raise unless `rows` is a tensor `[N, H]` (of that dtype)."""
    if not isinstance(rows, Tensor) or rows.dim() != 2 or rows.shape[1] < 1:
        shape = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"{name} is {shape}; it must be a tensor [tokens, hidden], hidden >= 1")
    if dtype is not None and rows.dtype != dtype:
        raise ValueError(f"{name} has dtype {rows.dtype}; the recipe needs {dtype}")


def check_handle(handle: Handle, backend: Backend) -> None:
    """Raise unless the handle is of this Runtime."""
    if handle.owner() is not backend:
        raise ValueError(f"handle (of operation #{handle.number}) is of another Runtime; use it where it was made")


def check_payload(x: Tensor, handle: Handle) -> None:
    """Raise unless x has a row for each token of the handle."""
    if x.shape[0] != handle.num_tokens:
        raise ValueError(f"x has {x.shape[0]} rows; the handle is for {handle.num_tokens} tokens")


def check_combine(rows: Tensor, handle: Handle, recipe: Recipe, weighted: bool) -> Tensor:
    """Raise unless `rows` are shaped as the handle's dispatch laid them out; returns them as `[num_rows, H]`."""
    order, layout = handle.rows.order, handle.layout
    num_local = len(layout.num_tokens_per_expert)
    shape = [num_local, layout.num_rows // max(num_local, 1)] if order == "batched" else [layout.num_rows]
    if list(rows.shape[:-1]) != shape:
        wanted = ", ".join(map(str, [*shape, "H"]))
        raise ValueError(f"rows is {list(rows.shape)}; order {order!r} of this handle needs [{wanted}]")
    if order == "rank" and weighted:
        raise ValueError("weighted is True; a row of order 'rank' serves several experts, so weight it before combine")
    if order == "rank" and recipe.reduction == "per_slot":
        raise ValueError("reduction is 'per_slot'; rows of order 'rank' are summed per rank already")
    flat = rows.reshape(-1, rows.shape[-1])
    check_rows(flat, recipe.dtype, "rows")
    return flat


def check_overflow(overflow: str) -> None:
    """Raise unless it is a known policy."""
    if overflow not in OVERFLOWS:
        raise ValueError(f"overflow is {overflow!r}; allowed: {', '.join(OVERFLOWS)}")


def check_out(out: Tensor | None, like: Tensor) -> None:
    """Raise unless out can take a result of that shape and dtype."""
    if out is not None and (out.shape != like.shape or out.dtype != like.dtype):
        raise ValueError(
            f"out is {list(out.shape)} {out.dtype}; it must be {list(like.shape)} {like.dtype} like the result"
        )
