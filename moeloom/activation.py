"""Activations between the up/gate and the down product. Everything here is fp32 in, fp32 out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Activation = Callable[[Tensor, Tensor], Tensor]
"""`activation(gate [R, I], up [R, I]) -> [R, I]`, elementwise. Any callable works in the split pipeline."""


@dataclass(frozen=True)
class SwiGLU:
    """`(up + up_offset) * gate * sigmoid(alpha * gate)`, the inputs clamped first if `clamp` is set.

    clamp: gate is limited from above, up on both sides (DeepSeek-V4: 10; gpt-oss and MiniMax-M3: 7).
    alpha, up_offset: gpt-oss uses 1.702 and 1.
    """

    clamp: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        if self.clamp is not None and not self.clamp > 0:
            raise ValueError(f"clamp is {self.clamp}; it must be positive, or None for no clamp")

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.clamp is not None:
            gate = gate.clamp(max=self.clamp)
            up = up.clamp(min=-self.clamp, max=self.clamp)
        # on CPUs torch takes exp of a tensor's last elements by another function, whose last bit may differ: rounded
        # from fp64, a row's bits do not depend on where it lies
        wide = gate.double() if gate.device.type == "cpu" else gate
        glu = (wide * torch.sigmoid(wide * self.alpha)).to(gate.dtype)
        return glu * (up + self.up_offset if self.up_offset else up)
