"""experts on CPUs: fp32 products tile by tile, rounding where the GPU rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeloom.config import Recipe
from moeloom.experts import Experts
from moeloom.types import Received

if TYPE_CHECKING:
    from moeloom.backends.cpu.backend import CpuBackend

TILE_ROWS = 256  # 0.9 of the matmul rate of 2048 rows, with little memory beside the weights
MIN_ROWS = 16  # below 12 rows the matmul library takes other paths, whose bits differ; see test_experts


def experts(cpu: CpuBackend, received: Received, weights: Experts, recipe: Recipe) -> Tensor:
    """See `Backend.experts`. Returns rows shaped like `received.rows`; padding rows are zeros.

    Beside the result this needs one expert's weights in fp32 (if they are not fp32 already) and one tile of rows.
    """
    hidden = received.rows.shape[-1]
    rows = received.rows.view(-1, hidden)
    row_weights = received.topk_weights.reshape(-1)
    out = torch.empty_like(rows)
    starts, counts = received.expert_start.tolist(), received.num_tokens_per_expert.tolist()
    for slot, count in enumerate(counts):
        begin, end = starts[slot], starts[slot] + count
        out[end : starts[slot + 1]] = 0
        if not count:
            continue
        expert = _Expert(weights, slot, recipe)
        for first in range(begin, end, TILE_ROWS):
            tile = slice(first, min(first + TILE_ROWS, end))
            out[tile] = expert(rows[tile], row_weights[tile])
    if starts:
        out[starts[-1] :] = 0
    return out.view(received.rows.shape)


class _Expert:
    """One expert's weights in fp32."""

    def __init__(self, weights: Experts, slot: int, recipe: Recipe) -> None:
        self.experts, self.recipe = weights, recipe
        self.gate_up, self.down = weights.gate_up[slot].float(), weights.down[slot].float()
        self.gate_up_bias = None if weights.gate_up_bias is None else weights.gate_up_bias[slot].float()
        self.down_bias = None if weights.down_bias is None else weights.down_bias[slot].float()

    def __call__(self, rows: Tensor, row_weights: Tensor) -> Tensor:
        """`rows [n, H]`, `row_weights [n]` -> `[n, H]` fp32, not yet rounded."""
        dtype, count = self.recipe.dtype, len(rows)
        weight = row_weights.unsqueeze(1)
        x = rows.float()
        if self.experts.weight_on_input:
            x = (x * weight).to(dtype).float()
        product = _matmul(x, self.gate_up)
        if self.gate_up_bias is not None:
            product += self.gate_up_bias
        hidden = self.experts.activation(*self.experts.split_gate_up(product))
        if not self.experts.weight_on_input:
            hidden = hidden * weight
        result = _matmul(hidden.to(dtype).float(), self.down)
        if self.down_bias is not None:
            result += self.down_bias if self.experts.weight_on_input else self.down_bias * weight
        return result[:count]


def _matmul(rows: Tensor, weight: Tensor) -> Tensor:
    """`rows @ weight.T`, a row's bits independent of how many rows there are."""
    count = len(rows)
    if count >= MIN_ROWS:
        return rows @ weight.t()
    padded = rows.new_zeros(MIN_ROWS, rows.shape[1])
    padded[:count] = rows
    return (padded @ weight.t())[:count]
