"""`SwiGLU` against its formula, number by number in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from moeloom import SwiGLU

VARIANTS = [
    SwiGLU(),
    SwiGLU(clamp=7.0),
    SwiGLU(clamp=10.0),
    SwiGLU(alpha=1.702),
    SwiGLU(up_offset=1.0),
    SwiGLU(clamp=7.0, alpha=1.702, up_offset=1.0),  # gpt-oss
]
VALUES = [-100.0, -20.0, -10.5, -7.25, -7.0, -1.0, -0.3, -1e-30, 0.0, 1e-3, 0.5, 1.0, 6.9, 7.0, 7.5, 10.0, 11.0, 90.0]


def formula(activation: SwiGLU, gate: float, up: float) -> float:
    if activation.clamp is not None:
        gate = min(gate, activation.clamp)
        up = max(min(up, activation.clamp), -activation.clamp)
    return (up + activation.up_offset) * gate / (1.0 + math.exp(-activation.alpha * gate))


@pytest.mark.parametrize("activation", VARIANTS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
def test_the_formula(activation: SwiGLU, dtype: torch.dtype, tolerance: float) -> None:
    gate, up = (
        part.flatten() for part in torch.meshgrid(*[torch.tensor(VALUES, dtype=torch.float32)] * 2, indexing="ij")
    )
    wanted = [formula(activation, g, u) for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
    got = activation(gate.to(dtype), up.to(dtype))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), torch.tensor(wanted, dtype=torch.float64), rtol=tolerance, atol=1e-36)


def test_gpt_oss_by_hand() -> None:
    activation = SwiGLU(clamp=7.0, alpha=1.702, up_offset=1.0)
    one = activation(torch.tensor([100.0, 1.0, 0.0]), torch.tensor([100.0, -100.0, 3.0]))
    sigmoid = 1 / (1 + math.exp(-1.702))
    torch.testing.assert_close(one, torch.tensor([8.0 * 7.0 / (1 + math.exp(-1.702 * 7)), -6.0 * sigmoid, 0.0]))


def test_the_gate_is_clamped_from_above_only() -> None:
    got = SwiGLU(clamp=1.0)(torch.tensor([-3.0, 3.0]), torch.tensor([1.0, 1.0]))
    torch.testing.assert_close(got, torch.tensor([-3.0 / (1 + math.exp(3)), 1 / (1 + math.exp(-1))]))


@pytest.mark.parametrize("activation", VARIANTS, ids=str)
def test_inputs_are_not_modified_and_nan_stays_in_its_place(activation: SwiGLU) -> None:
    gate, up = torch.tensor([[1.0, math.nan, 20.0]]), torch.tensor([[2.0, 1.0, -20.0]])
    before = gate.clone(), up.clone()
    assert activation(gate, up).isnan().tolist() == [[False, True, False]]
    assert torch.equal(gate.nan_to_num(5.0), before[0].nan_to_num(5.0)) and torch.equal(up, before[1])


@pytest.mark.parametrize("clamp", [0.0, -1.0, math.nan])
def test_a_clamp_that_is_not_positive_is_refused(clamp: float) -> None:
    with pytest.raises(ValueError, match="it must be positive, or None for no clamp"):
        SwiGLU(clamp=clamp)
