"""The weights of this rank's experts, as the caller holds them: references, never copies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from moeloom.activation import Activation, SwiGLU
from moeloom.placement import Placement
from moeloom.quantize import dequantize_blocks, num_groups, quantize_blocks
from moeloom.types import Quantized

GateUpOrder = Literal["gate_first", "up_first", "interleaved"]
GATE_UP_ORDERS: tuple[GateUpOrder, ...] = ("gate_first", "up_first", "interleaved")


@dataclass(frozen=True, eq=False)
class Experts:
    """This rank's experts, slot by slot.

    gate_up: `[L, 2I, H]`, the rows ordered as gate_up_order says ("interleaved": gate, up, gate, up, ...).
    down: `[L, H, I]`. Both of one dtype, any strides.
    activation: `SwiGLU(...)` or any elementwise callable (gate, up) -> hidden, fp32.
    gate_up_bias `[L, 2I]` (ordered like gate_up), down_bias `[L, H]`: both or neither.
    placement: which expert each slot of each rank holds; None: L consecutive experts on every rank.
    weight_on_input: the router weight scales the row before the up/gate product instead of the activation after it
    (Llama-4).
    scales: (gate_up_scale, down_scale) of float8_e4m3fn weights, fp32, for blocks of 128 x 128 values, which they are
    multiplied with. down_scale: `[L, ceil(H/128), ceil(I/128)]`. gate_up_scale: `[L, 2 * ceil(I/128), ceil(H/128)]`:
    the blocks of gate and those of up (up's first if gate_up_order is "up_first"), each counted from its own first row.
    """

    gate_up: Tensor
    down: Tensor
    activation: Activation = field(default_factory=SwiGLU, kw_only=True)
    gate_up_order: GateUpOrder = field(default="gate_first", kw_only=True)
    gate_up_bias: Tensor | None = field(default=None, kw_only=True)
    down_bias: Tensor | None = field(default=None, kw_only=True)
    placement: Placement | None = field(default=None, kw_only=True)
    weight_on_input: bool = field(default=False, kw_only=True)
    scales: tuple[Tensor, Tensor] | None = field(default=None, kw_only=True)

    @property
    def num_local(self) -> int:
        """L, the slots of this rank."""
        return self.gate_up.shape[0]

    @property
    def hidden(self) -> int:
        """H."""
        return self.gate_up.shape[2]

    @property
    def intermediate(self) -> int:
        """I."""
        return self.down.shape[2]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that there are, by field name."""
        named = {name: getattr(self, name) for name in ("gate_up", "down", "gate_up_bias", "down_bias")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def zero_grads(self) -> dict[str, Tensor]:
        """Zeros shaped like each tensor that requires a gradient."""
        return {name: torch.zeros_like(tensor) for name, tensor in self.tensors().items() if tensor.requires_grad}

    def check(self, num_local: int, hidden: int) -> None:
        """Raise `ValueError` unless shapes, dtypes and options fit together and to this rank's `num_local` slots."""
        if self.gate_up_order not in GATE_UP_ORDERS:
            raise ValueError(f"gate_up_order is {self.gate_up_order!r}; allowed: {', '.join(GATE_UP_ORDERS)}")
        if self.gate_up.dim() != 3 or self.down.dim() != 3:
            raise ValueError(f"gate_up is {_shape(self.gate_up)}, down is {_shape(self.down)}; both need 3 dimensions")
        intermediate = self.intermediate
        wanted = {
            "gate_up": (num_local, 2 * intermediate, hidden),
            "down": (num_local, hidden, intermediate),
            "gate_up_bias": (num_local, 2 * intermediate),
            "down_bias": (num_local, hidden),
        }
        for name, shape in wanted.items():
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{name} is {_shape(tensor)}; with {num_local} slots, hidden {hidden} and intermediate"
                    f" {intermediate} it must be {list(shape)}"
                )
        if self.gate_up.dtype != self.down.dtype:
            raise ValueError(f"gate_up is {self.gate_up.dtype}, down is {self.down.dtype}; they must be equal")
        if (self.gate_up_bias is None) != (self.down_bias is None):
            raise ValueError("gate_up_bias and down_bias: give both or neither")
        self._check_scales(num_local, hidden)

    def _check_scales(self, num_local: int, hidden: int) -> None:
        if (self.scales is not None) != (self.gate_up.dtype == torch.float8_e4m3fn):
            given = "given" if self.scales is not None else "None"
            raise ValueError(
                f"gate_up is {self.gate_up.dtype}, scales is {given}; float8_e4m3fn needs them, others not"
            )
        if self.scales is None:
            return
        groups, hidden_groups = num_groups(self.intermediate), num_groups(hidden)
        shapes = ((num_local, 2 * groups, hidden_groups), (num_local, hidden_groups, groups))
        for name, scale, shape in zip(("scales[0]", "scales[1]"), self.scales, shapes, strict=True):
            if scale.dtype != torch.float32 or tuple(scale.shape) != shape or scale.device != self.gate_up.device:
                raise ValueError(
                    f"{name} is {scale.dtype} {_shape(scale)} on {scale.device}; it must be torch.float32 {list(shape)}"
                    f" on {self.gate_up.device}, where the weights are"
                )

    def quantized(self) -> Experts:
        """The same experts with float8_e4m3fn weights and scales, for the recipe fp8: a copy of half the bytes."""
        if self.scales is not None:
            return self
        gate_up, down = (torch.empty_like(w, dtype=torch.float8_e4m3fn) for w in (self.gate_up, self.down))
        groups, hidden_groups = num_groups(self.intermediate), num_groups(self.hidden)
        device = self.gate_up.device
        gate_up_scale = torch.empty(self.num_local, 2 * groups, hidden_groups, device=device)
        down_scale = torch.empty(self.num_local, hidden_groups, groups, device=device)
        for slot in range(self.num_local):
            targets = zip(self._halves(gate_up[slot]), gate_up_scale[slot].chunk(2), strict=True)
            for half, (values, scales) in zip(self._halves(self.gate_up[slot]), targets, strict=True):
                _fill(values, scales, quantize_blocks(half))
            _fill(down[slot], down_scale[slot], quantize_blocks(self.down[slot]))
        return replace(self, gate_up=gate_up, down=down, scales=(gate_up_scale, down_scale))

    def rounded(self, slot: int) -> tuple[Tensor, Tensor]:
        """gate_up and down of one slot as the recipe fp8 computes with them, in fp32: quantised and dequantised.

        Where there are no scales, quantising the slot takes several passes over its weights in fp32, at every call (16
        ms for one expert of Qwen3-30B on two cores, against 4 with scales): `quantized` does it once.
        """
        weights = (self.gate_up, self.down)
        gate_up, down = (torch.empty(weight.shape[1:], device=weight.device) for weight in weights)
        scales = (None, None) if self.scales is None else self.scales[0][slot].chunk(2)
        for half, target, scale in zip(self._halves(self.gate_up[slot]), self._halves(gate_up), scales, strict=True):
            target.copy_(_rounded(half, scale))
        down.copy_(_rounded(self.down[slot], None if self.scales is None else self.scales[1][slot]))
        return gate_up, down

    def _halves(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of gate and of up, as they are ordered: views of `[2I, ...]`."""
        if self.gate_up_order == "interleaved":
            return gate_up[0::2], gate_up[1::2]
        first, second = gate_up.chunk(2)
        return first, second

    def split_gate_up(self, product: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up parts of `[..., 2I]`, as views."""
        if self.gate_up_order == "interleaved":
            return product[..., 0::2], product[..., 1::2]
        first, second = product.chunk(2, dim=-1)
        return (first, second) if self.gate_up_order == "gate_first" else (second, first)


def _fill(values: Tensor, scales: Tensor, quantized: Quantized) -> None:
    values.copy_(quantized.values)
    scales.copy_(quantized.scales)


def _rounded(weight: Tensor, scale: Tensor | None) -> Tensor:
    return dequantize_blocks(*(quantize_blocks(weight) if scale is None else (weight, scale)))


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
