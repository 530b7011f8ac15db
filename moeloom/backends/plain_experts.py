"""experts in plain torch: fp32 products tile by tile, rounding where the recipe does; and their gradients.

What CPUs have, and what GPUs check by (recipe fp32). The host reads how many rows each expert has.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from moeloom.backends.base import ExpertGrads
from moeloom.config import Recipe
from moeloom.errors import CapabilityError
from moeloom.experts import Experts
from moeloom.quantize import dequantize, quantize
from moeloom.types import Received

TILE_ROWS = 256  # 0.9 of the matmul rate of 2048 rows, with little memory beside the weights
BACKWARD_ROWS = 2048  # larger, since every tile adds a whole weight gradient
MIN_ROWS = 16  # below 12 rows on either side matmul takes other paths, whose bits depend on the place; see test_experts


def experts(received: Received, weights: Experts, recipe: Recipe) -> Tensor:
    """See `Backend.experts`. Returns rows shaped like `received.rows`; padding rows are zeros.

    Beside the result this needs one expert's weights in fp32 (if they are not fp32 already) and one tile of rows.
    """
    rows, row_weights = received.rows.view(-1, received.rows.shape[-1]), received.topk_weights.reshape(-1)
    scales = None if received.scales is None else received.scales.view(-1, received.scales.shape[-1])
    out = rows.new_empty(rows.shape, dtype=recipe.dtype)
    for slot, begin, end, stop in _runs(received):
        out[end:stop] = 0
        expert = None  # let go of the last one's fp32 weights before the next are made
        for first in range(begin, end, TILE_ROWS):
            expert = expert or Expert(weights, slot, recipe)
            tile = slice(first, min(first + TILE_ROWS, end))
            out[tile] = expert(rows[tile], row_weights[tile], None if scales is None else scales[tile])
    return out.view(received.rows.shape)


def experts_backward(received: Received, d_out: Tensor, weights: Experts, recipe: Recipe) -> ExpertGrads:
    """See `Backend.experts_backward`. Recomputes each expert's forward from its rows, one tile at a time."""
    if recipe.quantized:
        raise CapabilityError(f"recipe {recipe.name} is forward only; train in bf16 or fp32")
    rows, row_weights = received.rows.view(-1, received.rows.shape[-1]), received.topk_weights.reshape(-1)
    d_rows, d_row_weights = torch.zeros_like(rows), torch.zeros_like(row_weights)
    grads = ExpertGrads(d_rows, d_row_weights, weights.zero_grads())
    d_out = d_out.view(rows.shape)
    for slot, begin, end, _ in _runs(received):
        expert = None
        for first in range(begin, end, BACKWARD_ROWS):
            expert = expert or Expert(weights, slot, recipe, differentiable=True)
            tile = slice(first, min(first + BACKWARD_ROWS, end))
            inputs = [rows[tile].float().requires_grad_(), row_weights[tile].clone().requires_grad_()]
            with torch.enable_grad():
                out = expert(*inputs)
            found = torch.autograd.grad(
                out, inputs + list(expert.wanted.values()), d_out[tile].float(), allow_unused=True
            )
            d_rows[tile] = found[0]
            if found[1] is not None:
                d_row_weights[tile] = found[1]
            for name, grad in zip(expert.wanted, found[2:], strict=True):
                grads.weights[name][slot] += grad
    return grads


def _runs(received: Received) -> Iterator[tuple[int, int, int, int]]:
    """Slot, and the begin, end and padded end of its rows; a last run of slot -1 covers what is behind all experts."""
    starts, counts = received.expert_start.tolist(), received.num_tokens_per_expert.tolist()
    for slot, count in enumerate(counts):
        yield slot, starts[slot], starts[slot] + count, starts[slot + 1]
    total = received.topk_weights.numel()
    yield -1, starts[-1], starts[-1], total


class Expert:
    """One expert, its weights in fp32. differentiable: those that require a gradient are leaves, listed in `wanted`."""

    def __init__(self, weights: Experts, slot: int, recipe: Recipe, differentiable: bool = False) -> None:
        self.experts, self.recipe = weights, recipe
        tensors = weights.tensors()
        self.weights: dict[str, Tensor] = {}
        if recipe.quantized:
            self.weights["gate_up"], self.weights["down"] = weights.rounded(slot)
        for name in tensors.keys() - self.weights.keys():
            self.weights[name] = tensors[name][slot].detach().float()
        self.wanted: dict[str, Tensor] = {}
        if differentiable:
            for name, tensor in tensors.items():
                if tensor.requires_grad:
                    self.wanted[name] = self.weights[name].requires_grad_()

    def __call__(self, rows: Tensor, row_weights: Tensor, scales: Tensor | None = None) -> Tensor:
        """`rows [n, H]`, `row_weights [n]` -> `[n, H]` fp32, not yet rounded. scales: of quantised rows."""
        on_input = self.experts.weight_on_input
        weight = row_weights.unsqueeze(1)
        if scales is not None:
            x = dequantize(rows, scales * weight if on_input else scales)
        else:
            x = self._operand(rows.float() * weight) if on_input else rows.float()
        product = self._matmul(x, "gate_up")
        hidden = self.experts.activation(*self.experts.split_gate_up(product))
        if not on_input:
            hidden = hidden * weight
        return self._matmul(self._operand(hidden), "down", None if on_input else weight)

    def _operand(self, rows: Tensor) -> Tensor:
        """fp32 rows as a product takes them: rounded as the recipe says, in fp32."""
        return dequantize(*quantize(rows)) if self.recipe.quantized else rows.to(self.recipe.dtype).float()

    def _matmul(self, rows: Tensor, name: str, bias_weight: Tensor | None = None) -> Tensor:
        """`rows @ weight.T + bias`."""
        product = matmul(rows, self.weights[name])
        bias = self.weights.get(f"{name}_bias")
        if bias is not None:
            product = product + (bias if bias_weight is None else bias * bias_weight)
        return product


def matmul(rows: Tensor, weight: Tensor) -> Tensor:
    """`rows [n, K] @ weight [N, K].T` in fp32, a row's bits independent of n, of its place and of the rows beside
    it.
    """
    product = _at_least(MIN_ROWS, rows) @ _at_least(MIN_ROWS, weight).t()
    return product[: len(rows), : len(weight)]


def _at_least(count: int, rows: Tensor) -> Tensor:
    return rows if len(rows) >= count else functional.pad(rows, (0, 0, 0, count - len(rows)))
