"""Recipes: how numbers are rounded and summed. Frozen, shared by all ranks, never chosen by the planner."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moeloom.types import ReductionName

REDUCTIONS: tuple[ReductionName, ...] = ("per_rank", "per_slot")


@dataclass(frozen=True)
class Recipe:
    """What rows are made of on the wire and between the products, and how `combine` sums them.

    dtype: of `x`, of the rows that travel, of the expert outputs and of `y`. Products, activation, router weights and
    sums are fp32 in every recipe.
    reduction: "per_rank" sums a token's rows on each rank first (few bytes; bits depend on the placement only),
    "per_slot" sends every row and sums once (bits independent of ranks and nodes).
    quantized: rows travel to the experts, and enter both products, as E4M3 values with a scale for each 128; weights
    with one for each 128 x 128. Forward only.
    """

    name: str
    dtype: torch.dtype
    reduction: ReductionName = "per_rank"
    quantized: bool = False

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction is {self.reduction!r}; allowed: {', '.join(REDUCTIONS)}")

    def with_reduction(self, reduction: ReductionName) -> Recipe:
        """The same recipe with another reduction."""
        return replace(self, reduction=reduction)

    def __str__(self) -> str:
        return f"{self.name}/{self.reduction}"


FP32 = Recipe("fp32", torch.float32)
BF16 = Recipe("bf16", torch.bfloat16)
FP8 = Recipe("fp8", torch.bfloat16, quantized=True)
RECIPES = {recipe.name: recipe for recipe in (FP32, BF16, FP8)}


def recipe_for(dtype: torch.dtype) -> Recipe:
    """The recipe whose rows have this dtype, unquantised."""
    recipes = [recipe for recipe in RECIPES.values() if not recipe.quantized]
    for recipe in recipes:
        if recipe.dtype == dtype:
            return recipe
    allowed = ", ".join(str(recipe.dtype) for recipe in recipes)
    raise ValueError(f"x has dtype {dtype}; allowed: {allowed}")
