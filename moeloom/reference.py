"""The whole layer in plain torch, in one process: the truth that everything else is checked against."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Expert = Callable[[Tensor, Tensor], Tensor]
"""`expert(x [n, H], weight [n]) -> [n, H]`: one expert's weighted output."""


def moe_reference(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, expert: Callable[[int], Expert], num_experts: int
) -> Tensor:
    """`y[t] = sum over k of topk_weights[t, k] * expert(topk_idx[t, k])(x[t])`, expert by expert.

    x: `[T, H]`; its dtype is that of the sum. topk_idx, topk_weights: `[T, K]`; ids outside 0..num_experts-1 count as
    not routed. expert(e) gives expert e, so that no more than one need be in memory.
    """
    y = torch.zeros_like(x)
    for e in range(num_experts):
        tokens, slots = (topk_idx == e).nonzero().unbind(1)
        if len(tokens):
            y.index_add_(0, tokens, expert(e)(x[tokens], topk_weights[tokens, slots].to(x.dtype)))
    return y


def mlp(gate: Tensor, up: Tensor, down: Tensor, activation: Callable[[Tensor, Tensor], Tensor]) -> Expert:
    """A gated expert from `gate [I, H]`, `up [I, H]`, `down [H, I]`, computed in their dtype."""

    def expert(x: Tensor, weight: Tensor) -> Tensor:
        hidden = activation(x @ gate.t(), x @ up.t())
        return (hidden * weight.unsqueeze(1)) @ down.t()

    return expert
