"""The whole layer: the stages by hand give the same bits, and recorded routing gives the right result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moeloom import BF16, FP32, Experts, Placement, Plan, Recipe, Routing, SwiGLU
from tests.support.cases import MEMBERS
from tests.support.compare import assert_close_by_rule, equal_bits, plain_layer
from tests.support.exchange import poison
from tests.support.pool import Ranks, runtime_of

RECORDED = Path(__file__).parents[1] / "assets" / "routing_qwen3moe_stdlib.safetensors"
HIDDEN, INTERMEDIATE = 64, 32
REPLICATED = [[0, 1, 2, 9], [3, 4], [], [5, 6, 7, 8, 0, 0]]
RECIPES = [FP32, BF16, FP32.with_reduction("per_slot"), BF16.with_reduction("per_slot")]


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def all_experts(
    num_experts: int, dtype: torch.dtype, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE, **options: Any
) -> Experts:
    """Every expert's weights, by global id."""
    gate_up = normal(num_experts, 2 * intermediate, hidden, seed=1, scale=2.0 * hidden**-0.5)
    down = normal(num_experts, hidden, intermediate, seed=2, scale=intermediate**-0.5)
    return Experts(gate_up.to(dtype), down.to(dtype), **options)


def held_by(rank: int, every: Experts, placement: Placement) -> Experts:
    """The weights of a rank's slots."""
    slots = torch.tensor(placement.slots[rank], dtype=torch.int64)
    return Experts(every.gate_up[slots], every.down[slots], activation=every.activation, placement=placement)


def by_hand(recipe: Recipe, exchange: Any, nodes: int, slots: list | None) -> list[str]:
    """On every rank: `moe` against its stages, called one by one."""
    rt = runtime_of(MEMBERS[4][0], nodes)
    if rt is None:
        return []
    poison(rt)
    placement = Placement.even(10, 4, num_identity=2) if slots is None else Placement.from_slots(slots)
    experts = held_by(rt.rank, all_experts(10, recipe.dtype, 33, 17, activation=SwiGLU(clamp=7.0)), placement)
    num_tokens = [53, 0, 7, 131][rt.rank]
    ids = torch.randint(-1, placement.num_ids, (num_tokens, 5), generator=torch.Generator().manual_seed(rt.rank))
    x = normal(num_tokens, 33, seed=10 + rt.rank).to(recipe.dtype)
    routing, plan = Routing(ids.int(), normal(num_tokens, 5, seed=20 + rt.rank)), Plan(exchange=exchange)
    before = [tensor.clone() for tensor in (x, routing.topk_idx, routing.topk_weights)]
    out = torch.full_like(x, 7.0)
    y = rt.moe(x, routing, experts, recipe=recipe, plan=plan, out=out)
    received, handle = rt.dispatch(x, routing, placement, plan=plan)
    with torch.no_grad():
        rows = rt._backend.experts(received, experts, recipe)
    wanted = rt.combine(rows, handle, weighted=False, recipe=recipe)
    right = {
        "y": equal_bits(y, wanted),
        "y is not zero": not num_tokens or bool(y.any()),
        "out": y is out,
        "again": equal_bits(rt.moe(x, routing, experts, recipe=recipe, plan=plan), y),
        "inputs": all(map(equal_bits, (x, routing.topk_idx, routing.topk_weights), before)),
    }
    return [f"rank {rt.rank}: {name}" for name, good in right.items() if not good]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize(("exchange", "nodes"), [("direct", 1), ("direct", 2), ("hybrid", 2), ("hybrid", 3)])
@pytest.mark.parametrize("slots", [None, REPLICATED], ids=["even", "replicated"])
def test_moe_is_its_stages_bit_for_bit(
    ranks: Ranks, recipe: Recipe, exchange: str, nodes: int, slots: list | None
) -> None:
    wrong = [line for lines in ranks.run(by_hand, recipe, exchange, nodes, slots) for line in lines]
    assert not wrong, "\n".join(wrong)


def recorded_inputs(dtype: torch.dtype) -> tuple[Tensor, Routing]:
    """All tokens of the recording; the payload is drawn."""
    recorded = load_file(RECORDED)
    routing = Routing(recorded["topk_idx"], recorded["topk_weights"])
    return normal(routing.num_tokens, HIDDEN, seed=3).to(dtype), routing


def part(rank: int, num_tokens: int) -> slice:
    """Unequal shares of the recording for four ranks."""
    ends = [0, num_tokens // 7, num_tokens // 3, num_tokens // 3 + 1, num_tokens]
    return slice(ends[rank], ends[rank + 1])


def run_recorded(recipe: Recipe, plan: Plan | None) -> Tensor | None:
    """On every rank: its share of the recording through `moe`, on two nodes."""
    rt = runtime_of(MEMBERS[4][1], 2)
    if rt is None:
        return None
    x, routing = recorded_inputs(recipe.dtype)
    mine = part(rt.rank, len(x))
    experts = held_by(rt.rank, all_experts(32, recipe.dtype), Placement.even(32, 4))
    return rt.moe(
        x[mine], Routing(routing.topk_idx[mine], routing.topk_weights[mine]), experts, recipe=recipe, plan=plan
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_recorded_routing_on_two_nodes(ranks: Ranks, recipe: Recipe) -> None:
    x, routing = recorded_inputs(recipe.dtype)
    experts = all_experts(32, recipe.dtype)
    truth, peer = (plain_layer(experts, x, routing, dtype) for dtype in (torch.float64, recipe.dtype))
    results = []
    for plan in (Plan(exchange="direct"), Plan(exchange="hybrid"), None):
        shares = ranks.run(run_recorded, recipe, plan)
        results.append(torch.cat([shares[rank] for rank in MEMBERS[4][1]]))
        assert_close_by_rule(results[-1], truth, peer)
    if recipe.reduction == "per_slot":
        assert equal_bits(results[0], results[1])
    assert any(equal_bits(results[2], one) for one in results[:2])  # the planner's is one of the two
