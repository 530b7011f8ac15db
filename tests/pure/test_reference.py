"""The reference itself, against token-by-token loops."""

from __future__ import annotations

import torch
from torch import Tensor

from moeloom import SwiGLU
from moeloom.reference import Expert, mlp, moe_reference


def scaled(e: int) -> Expert:
    """A stand-in whose results tell expert, row and weight apart."""
    return lambda x, weight: x * (e + 1) * weight.unsqueeze(1)


def test_tokens_get_the_weighted_sum_of_their_experts() -> None:
    x = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]], dtype=torch.float64)
    ids = torch.tensor([[0, 2], [2, 2], [-1, -1]])  # the same expert twice counts twice
    weights = torch.tensor([[0.5, 0.25], [1.0, 2.0], [3.0, 4.0]])
    y = moe_reference(x, ids, weights, scaled, 3)
    assert y.dtype == torch.float64
    assert y.tolist() == [[1.25, 2.5], [90.0, 180.0], [0.0, 0.0]]


def test_ids_beyond_the_experts_count_as_not_routed() -> None:
    x = torch.ones(1, 2)
    y = moe_reference(x, torch.tensor([[1, 7]]), torch.tensor([[1.0, 1.0]]), scaled, 3)
    assert y.tolist() == [[2.0, 2.0]]


def test_only_experts_with_tokens_are_made() -> None:
    made: list[int] = []

    def expert(e: int) -> Expert:
        made.append(e)
        return scaled(e)

    moe_reference(torch.ones(2, 2), torch.tensor([[3, 1], [1, -1]]), torch.ones(2, 2), expert, 5)
    assert made == [1, 3]


def test_no_tokens() -> None:
    y = moe_reference(torch.ones(0, 4), torch.empty(0, 2, dtype=torch.int64), torch.ones(0, 2), scaled, 3)
    assert y.shape == (0, 4)


def test_mlp_is_the_gated_formula() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    gate, up, down, x, weight = draw(3, 5), draw(3, 5), draw(5, 3), draw(4, 5), draw(4)
    got = mlp(gate, up, down, SwiGLU(clamp=1.0))(x, weight)
    for token in range(4):
        wanted = torch.zeros(5, dtype=torch.float64)
        for i in range(3):
            g, u = (gate[i] @ x[token]).clamp(max=1.0), (up[i] @ x[token]).clamp(-1.0, 1.0)
            wanted += down[:, i] * (g * torch.sigmoid(g) * u * weight[token])
        torch.testing.assert_close(got[token], wanted)
