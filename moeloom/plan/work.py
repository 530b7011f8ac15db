"""What each stage of a layer has to do: operations, bytes of memory, bytes on each link, messages. No speeds here."""

from __future__ import annotations

from dataclasses import dataclass

from moeloom.config import Recipe
from moeloom.plan.flow import Flow
from moeloom.plan.problem import Problem
from moeloom.quantize import record_bytes

STAGES = ("dispatch", "experts", "combine")


@dataclass(frozen=True)
class Work:
    """One stage on the busiest rank.

    flops: multiplications and additions. memory_bytes: read and written in its own memory. scale_up_bytes,
    scale_out_bytes: on its link within and between nodes, in the busier direction. hops, messages: flags it waits for
    one after the other, and messages it posts. experts: it begins one after the other.
    """

    stage: str
    flops: float = 0.0
    memory_bytes: float = 0.0
    scale_up_bytes: float = 0.0
    scale_out_bytes: float = 0.0
    scale_up_hops: int = 0
    scale_out_hops: int = 0
    messages: float = 0.0
    experts: float = 0.0


def weight_bytes(recipe: Recipe) -> float:
    """Bytes of one weight: E4M3 with an fp32 scale for each 128 x 128, or the recipe's dtype."""
    return 1.0 + 4 / 128**2 if recipe.quantized else float(recipe.dtype.itemsize)


def row_bytes(recipe: Recipe, width: int) -> int:
    """Bytes of a row of activations as the recipe stores it."""
    return record_bytes(width) if recipe.quantized else width * recipe.dtype.itemsize


def layer_work(problem: Problem, flow: Flow, tile_rows: int = 1) -> tuple[Work, Work, Work]:
    """The three stages of a forward.

    dispatch: reads T rows, writes and reads the arrived ones once, writes a row for each (token, expert) pair.
    experts: 6 H I operations per row (gate, up and down: three products of 2 H I), rows padded to `tile_rows`; reads
    the weights of the experts hit, 3 H I each, and the rows; writes and reads the activation; writes the result.
    combine: reads a row for each pair, writes and reads one partial sum for each (token, rank), writes T rows. Its
    rows go the way of dispatch backwards, so the links carry as many.
    """
    hidden, inner, recipe = problem.hidden, problem.width, problem.recipe
    there, back = row_bytes(recipe, hidden), hidden * recipe.dtype.itemsize
    tokens = problem.tokens
    each = recipe.reduction == "per_slot"  # every pair's row travels back, not one for each rank or node
    back_up, back_out, returned = (
        (flow.pairs_up, flow.pairs_out, flow.pairs) if each else (flow.scale_up, flow.scale_out, flow.tokens)
    )
    up_hops, out_hops = (2 if flow.handed_on else 1), (1 if flow.peers else 0)
    posted = min(flow.peers, tokens * problem.num_topk)  # few tokens need few receivers
    hops = {"scale_up_hops": up_hops, "scale_out_hops": out_hops}
    dispatch = Work(
        "dispatch",
        memory_bytes=there * (tokens + 2 * flow.tokens + flow.pairs),
        scale_up_bytes=there * flow.scale_up,
        scale_out_bytes=there * flow.scale_out,
        messages=posted,
        **hops,
    )
    experts = Work(
        "experts",
        flops=6.0 * flow.padded(tile_rows) * hidden * inner,
        memory_bytes=flow.experts_hit * 3 * hidden * inner * weight_bytes(recipe)
        + flow.pairs * (there + 2 * row_bytes(recipe, inner) + back),
        experts=flow.experts_hit,
    )
    combine = Work(
        "combine",
        memory_bytes=back * (flow.pairs + 2 * returned + tokens),
        scale_up_bytes=back * back_up,
        scale_out_bytes=back * back_out,
        messages=posted,
        **hops,
    )
    return dispatch, experts, combine


def layer_memory(problem: Problem, flow: Flow, num_ranks: int, share: float = 1.0) -> float:
    """Bytes that one layer's data takes on a rank beside the weights, at its fullest.

    Symmetric: own and arrived rows, routing and partial sums. Rows: for each pair, before and after the experts.
    share: of the batch that is in flight at once (two of eight chunks: 0.25).
    """
    hidden, recipe = problem.hidden, problem.recipe
    there, back = row_bytes(recipe, hidden), hidden * recipe.dtype.itemsize
    lanes = problem.num_topk if recipe.reduction == "per_slot" else min(problem.num_topk, num_ranks)
    own = problem.tokens * (there + 4 * (1 + 2 * problem.num_topk) + lanes * back)
    arrived = flow.tokens * there
    return own + share * (arrived + flow.pairs * (there + row_bytes(recipe, problem.width) + back))
