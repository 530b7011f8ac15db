"""Is the result right? Compared with a truth of higher precision, and with what plain PyTorch makes of the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from moeloom.config import Recipe
from moeloom.experts import Experts
from moeloom.models import ModelShape
from moeloom.reference import Expert, moe_reference
from moeloom.types import Routing

ALLOWED_RATIO = 2.0  # of our error to PyTorch's: both round, in different places
# PyTorch gets no fewer rows than this in a product: for fewer it sums in another order, in fp32 with down to a third of
# the error, and the check would fail where a few tokens are computed as exactly as many are
MIN_PEER_ROWS = 16
WRONG_ROW_RATIO = 8.0  # of a row's error to that of PyTorch's worst row


@dataclass(frozen=True)
class WrongRow:
    """The first wrong token of a rank, and the worst element of its row."""

    token: int
    expert_ids: tuple[int, ...]
    element: int
    expected: float
    got: float


@dataclass(frozen=True)
class Verdict:
    """One rank's check. Errors are rms of the difference over rms of the truth. wrong: None if it passed."""

    error: float
    peer_error: float
    max_difference: float
    wrong: WrongRow | None

    @property
    def allowed(self) -> float:
        """What error may be."""
        return ALLOWED_RATIO * self.peer_error

    @property
    def passed(self) -> bool:
        """Whether it is."""
        return self.wrong is None


def judge(
    shape: ModelShape,
    recipe: Recipe,
    expert: Callable[[int], Experts],
    x: Tensor,
    routing: Routing,
    results: dict[str, Tensor],
    d_y: Tensor | None,
) -> dict[str, Verdict]:
    """Check this rank's `results`, all `[T, H]`: the layer's output and, given d_y, the gradient of x (in this order).

    expert(e) gives expert e again (L = 1). Passed if the error is at most twice that of the same formula in PyTorch, in
    the recipe's dtype. A quantised recipe's truth is that of the quantised x and weights.
    """
    precise = torch.float64 if recipe.dtype == torch.float32 or recipe.quantized else torch.float32
    routing = Routing(routing.topk_idx, routing.topk_weights.detach())
    if recipe.quantized:
        fp8 = lambda e: _of_e4m3(expert(e))  # noqa: E731
        truth = [_layer(shape, x.to(precise), routing, lambda e: _on_e4m3(_exact(fp8(e), precise)), None)]
        peer = [_layer(shape, x.float(), routing, lambda e: _on_e4m3(_requantized(fp8(e), recipe.dtype)), recipe.dtype)]
        return {name: _verdict(result, truth[0], peer[0], routing) for name, result in results.items()}
    truth = _both(lambda x: _layer(shape, x, routing, lambda e: _exact(expert(e), precise), None), x.to(precise), d_y)
    rounded = recipe.dtype
    peer = _both(lambda x: _layer(shape, x, routing, lambda e: _rounded(expert(e), rounded), rounded), x.float(), d_y)
    return {
        name: _verdict(result, true, other, routing)
        for (name, result), true, other in zip(results.items(), truth, peer, strict=True)
    }


def _both(layer: Callable[[Tensor], Tensor], x: Tensor, d_y: Tensor | None) -> list[Tensor]:
    """What the layer makes of x and, given d_y, the gradient of x."""
    if d_y is None:
        return [layer(x)]
    x.requires_grad_()
    y = layer(x)
    if not y.requires_grad:  # nothing is routed
        return [y, torch.zeros_like(x)]
    return [y.detach(), *torch.autograd.grad(y, x, d_y.to(y.dtype))]


def _verdict(result: Tensor, truth: Tensor, peer: Tensor, routing: Routing) -> Verdict:
    truth = truth.double()
    difference, peer_difference = result.double() - truth, peer.double() - truth
    unit = float(_rms(truth)) or 1.0  # all zeros if nothing is routed
    error, peer_error = float(_rms(difference)) / unit, float(_rms(peer_difference)) / unit
    largest = float(difference.abs().max()) if len(result) else 0.0
    # written so that NaN fails
    wrong = None if error <= ALLOWED_RATIO * peer_error else _first_wrong(difference, peer_difference, truth, routing)
    return Verdict(error, peer_error, largest, wrong)


def _layer(
    shape: ModelShape, x: Tensor, routing: Routing, expert: Callable[[int], Expert], rounded_to: torch.dtype | None
) -> Tensor:
    """The layer, identity experts included, summed in x's dtype. rounded_to: of their rows and of the sum."""
    ids, weights = routing.topk_idx, routing.topk_weights
    y = moe_reference(x, ids, weights, expert, shape.num_experts)
    for slot in range(ids.shape[1] if shape.num_identity_experts else 0):
        row = x * weights[:, slot, None].to(x.dtype) * (ids[:, slot, None] >= shape.num_experts)
        y += row if rounded_to is None else row.to(rounded_to).to(x.dtype)
    return y if rounded_to is None else y.to(rounded_to)


def _exact(one: Experts, dtype: torch.dtype) -> Expert:
    """The formula, all of it in dtype."""
    gate_up, down = one.gate_up[0].to(dtype), one.down[0].to(dtype)

    def expert(x: Tensor, weight: Tensor) -> Tensor:
        weight = weight.unsqueeze(1)
        product = (x * weight if one.weight_on_input else x) @ gate_up.t()
        if one.gate_up_bias is not None:
            product += one.gate_up_bias[0].to(dtype)
        rows = one.activation(*one.split_gate_up(product)) @ down.t()
        if one.down_bias is not None:
            rows += one.down_bias[0].to(dtype)
        return rows if one.weight_on_input else rows * weight

    return expert


def _rounded(one: Experts, dtype: torch.dtype) -> Expert:
    """The formula as PyTorch code for that dtype has it: products in it, and their results rounded to it."""

    def expert(x: Tensor, weight: Tensor) -> Tensor:
        missing = max(0, MIN_PEER_ROWS - len(x))
        x, weight = functional.pad(x, (0, 0, 0, missing)), functional.pad(weight, (0, missing)).unsqueeze(1)
        product = (x * weight if one.weight_on_input else x).to(dtype) @ one.gate_up[0].t()
        if one.gate_up_bias is not None:
            product += one.gate_up_bias[0]
        hidden = one.activation(*one.split_gate_up(product.float()))
        rows = ((hidden if one.weight_on_input else hidden * weight).to(dtype) @ one.down[0].t()).float()
        if one.down_bias is not None:
            rows += one.down_bias[0].float() if one.weight_on_input else one.down_bias[0].float() * weight
        return rows[: len(rows) - missing].to(dtype).float()

    return expert


def _requantized(one: Experts, dtype: torch.dtype) -> Expert:
    """The formula in fp32 on quantised numbers, the activation quantised in between and the result rounded to dtype."""

    def expert(x: Tensor, weight: Tensor) -> Tensor:
        missing = max(0, MIN_PEER_ROWS - len(x))
        x, weight = functional.pad(x, (0, 0, 0, missing)), functional.pad(weight, (0, missing)).unsqueeze(1)
        product = (x * weight if one.weight_on_input else x) @ one.gate_up[0].t()
        if one.gate_up_bias is not None:
            product += one.gate_up_bias[0]
        hidden = one.activation(*one.split_gate_up(product))
        rows = _e4m3(hidden if one.weight_on_input else hidden * weight, 1) @ one.down[0].t()
        if one.down_bias is not None:
            rows += one.down_bias[0] if one.weight_on_input else one.down_bias[0] * weight
        return rows[: len(rows) - missing].to(dtype).float()

    return expert


def _on_e4m3(expert: Expert) -> Expert:
    """The expert on quantised rows."""
    return lambda x, weight: expert(_e4m3(x.float(), 1).to(x.dtype), weight)


def _of_e4m3(one: Experts) -> Experts:
    """The expert (L = 1) with the numbers that its quantised weights stand for, in fp32, gate first."""
    halves = [half.mT for half in one.split_gate_up(one.gate_up[0].mT)]
    scales: list = [None] * 3
    if one.scales is not None:
        scales = [*one.scales[0][0].chunk(2), one.scales[1][0]]
        if one.gate_up_order == "up_first":
            scales[:2] = reversed(scales[:2])
    numbers = [
        _e4m3(weight.float(), 128) if scale is None else _scaled(weight.float(), scale)
        for weight, scale in zip([*halves, one.down[0]], scales, strict=True)
    ]
    bias = one.gate_up_bias
    return replace(
        one,
        gate_up=torch.cat(numbers[:2]).unsqueeze(0),
        down=numbers[2].unsqueeze(0),
        gate_up_bias=None if bias is None else torch.cat(one.split_gate_up(bias), 1).float(),
        down_bias=None if one.down_bias is None else one.down_bias.float(),
        gate_up_order="gate_first",
        scales=None,
    )


def _e4m3(numbers: Tensor, height: int) -> Tensor:
    """fp32 `[N, K]` rounded to E4M3 in blocks of `height` x 128, each with its largest value as 448."""
    rounded = torch.empty_like(numbers)
    for strip, out in zip(numbers.split(128, 1), rounded.split(128, 1), strict=True):
        blocks, outs = (strip.split(height), out.split(height)) if height > 1 else ([strip], [out])
        for block, target in zip(blocks, outs, strict=True):
            largest = block.abs().amax(1 if height == 1 else (0, 1), keepdim=True).clamp(min=2.0**-116)
            limit = torch.full_like(largest, 448.0)
            target.copy_(
                (block * (limit / largest)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * (largest / limit)
            )
    return rounded


def _scaled(numbers: Tensor, scales: Tensor) -> Tensor:
    """fp32 `[N, K]`, every block of 128 x 128 times its scale."""
    rows, columns = (torch.arange(size, device=numbers.device) // 128 for size in numbers.shape)
    return numbers * scales[rows][:, columns]


def _first_wrong(difference: Tensor, peer_difference: Tensor, truth: Tensor, routing: Routing) -> WrongRow:
    """The first row far worse than PyTorch's worst one; the worst row if errors are spread thinly."""
    rows, limit = _rms(difference, 1), WRONG_ROW_RATIO * _rms(peer_difference, 1).max() + 1e-12 * _rms(truth)
    wrong = (~(rows <= limit)).nonzero()
    token = int(wrong[0]) if len(wrong) else int(rows.argmax())
    element = int(difference[token].abs().nan_to_num(nan=torch.inf).argmax())
    expected = float(truth[token, element])
    ids = tuple(routing.topk_idx[token].tolist())
    return WrongRow(token, ids, element, expected, expected + float(difference[token, element]))


def _rms(values: Tensor, dim: int | None = None) -> Tensor:
    """Root mean square; 0 of nothing."""
    return values.square().mean(dim).sqrt() if values.numel() else values.new_zeros(())
