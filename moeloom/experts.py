"""The weights of this rank's experts, as the caller holds them: references, never copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from moeloom.activation import Activation, SwiGLU
from moeloom.placement import Placement

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
    """

    gate_up: Tensor
    down: Tensor
    activation: Activation = field(default_factory=SwiGLU, kw_only=True)
    gate_up_order: GateUpOrder = field(default="gate_first", kw_only=True)
    gate_up_bias: Tensor | None = field(default=None, kw_only=True)
    down_bias: Tensor | None = field(default=None, kw_only=True)
    placement: Placement | None = field(default=None, kw_only=True)
    weight_on_input: bool = field(default=False, kw_only=True)

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

    def split_gate_up(self, product: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up parts of `[..., 2I]`, as views."""
        if self.gate_up_order == "interleaved":
            return product[..., 0::2], product[..., 1::2]
        first, second = product.chunk(2, dim=-1)
        return (first, second) if self.gate_up_order == "gate_first" else (second, first)


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
