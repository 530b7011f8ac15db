"""Comparing tensors: bit for bit, and by error against a truth of higher precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from moeloom import Experts, Routing

ALLOWED_RATIO = 2.0  # of our error to that of plain PyTorch in the same dtype: both round, in different places

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def equal_bits(got: Tensor, wanted: Tensor) -> bool:
    """Same shape, dtype and bits, those of NaN and zero included."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    bits = _BITS[got.dtype.itemsize]
    return torch.equal(got.contiguous().view(bits), wanted.contiguous().view(bits))


def relative_error(got: Tensor, truth: Tensor) -> float:
    """Rms of the difference over rms of the truth; NaN if anything is NaN, 0 for nothing at all."""
    if not truth.numel() and got.shape == truth.shape:
        return 0.0
    truth = truth.double()
    return float((got.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt())


def plain_expert(experts: Experts, slot: int, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """One expert on rows `x [n, H]`, as PyTorch code for `dtype` has it; activation and weight at least in fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    weight = weight.to(wide).unsqueeze(1)
    gate_up, down = experts.gate_up[slot].to(dtype), experts.down[slot].to(dtype)
    gate_up_bias = None if experts.gate_up_bias is None else experts.gate_up_bias[slot].to(dtype)
    down_bias = None if experts.down_bias is None else experts.down_bias[slot].to(dtype)
    if experts.weight_on_input:
        x = (x.to(wide) * weight).to(dtype)
    product = linear(x.to(dtype), gate_up, gate_up_bias)
    width = experts.intermediate
    if experts.gate_up_order == "interleaved":
        gate, up = product[:, ::2], product[:, 1::2]
    elif experts.gate_up_order == "gate_first":
        gate, up = product[:, :width], product[:, width:]
    else:
        gate, up = product[:, width:], product[:, :width]
    rows = linear(experts.activation(gate.to(wide), up.to(wide)).to(dtype), down, down_bias).to(wide)
    return rows if experts.weight_on_input else rows * weight


def plain_layer(
    experts: Experts,
    x: Tensor,
    routing: Routing,
    dtype: torch.dtype,
    slot_of: Callable[[int], int | None] = lambda e: e,
) -> Tensor:
    """The layer, pair by pair of (expert, top-k), summed in at least fp32 and rounded once.

    slot_of: the slot of `experts` that holds an expert's weights; None for an identity expert.
    """
    wide = torch.promote_types(dtype, torch.float32)
    y = torch.zeros(x.shape, dtype=wide)
    ids, weights = routing.topk_idx.long(), routing.topk_weights
    for expert in sorted(set(ids.flatten().tolist()) - {-1}):
        slot = slot_of(expert)
        for k in range(ids.shape[1]):
            tokens = (ids[:, k] == expert).nonzero().squeeze(1)
            weight = weights[tokens, k]
            if slot is None:
                y[tokens] += (x[tokens].to(wide) * weight.to(wide).unsqueeze(1)).to(dtype).to(wide)
            else:
                y[tokens] += plain_expert(experts, slot, x[tokens], weight, dtype)
    return y.to(dtype)


def assert_close_by_rule(got: Tensor, truth: Tensor, peer: Tensor) -> None:
    """Our error is at most twice the peer's. truth: in fp64, of the same inputs; peer: plain PyTorch in our dtype."""
    error, peer_error = relative_error(got, truth), relative_error(peer, truth)
    assert error <= ALLOWED_RATIO * peer_error, f"error {error:.3e}, of PyTorch {peer_error:.3e}"
