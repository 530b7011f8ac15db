"""`Experts`: what is refused by name, and which rows of gate_up are gate and which are up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeloom import Experts

L, H, I = 3, 6, 4  # noqa: E741


def experts(**changes: Any) -> Experts:
    weights = {"gate_up": torch.zeros(L, 2 * I, H), "down": torch.zeros(L, H, I)}
    return Experts(**{**weights, **changes})


def test_shapes_are_read_off_the_weights() -> None:
    one = experts()
    assert (one.num_local, one.hidden, one.intermediate) == (L, H, I)


def test_right_ones_pass() -> None:
    experts().check(L, H)
    experts(gate_up_bias=torch.zeros(L, 2 * I), down_bias=torch.zeros(L, H)).check(L, H)
    experts(gate_up=torch.zeros(L, H, 2 * I).transpose(1, 2)).check(L, H)
    experts(gate_up=torch.zeros(0, 2 * I, H), down=torch.zeros(0, H, I)).check(0, H)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gate_up": torch.zeros(L, 2 * I, H + 1)},
            r"gate_up is \[3, 8, 7\]; with 3 slots, hidden 6 and intermediate 4",
        ),
        ({"gate_up": torch.zeros(L, I, H)}, r"gate_up is \[3, 4, 6\]; .* it must be \[3, 8, 6\]"),
        ({"gate_up": torch.zeros(L + 1, 2 * I, H)}, r"gate_up is \[4, 8, 6\]"),
        ({"down": torch.zeros(L, H + 1, I)}, r"down is \[3, 7, 4\]; .* it must be \[3, 6, 4\]"),
        ({"down": torch.zeros(L - 1, H, I)}, r"down is \[2, 6, 4\]"),
        ({"down": torch.zeros(H, I), "gate_up": torch.zeros(2 * I, H)}, "both need 3 dimensions"),
        ({"down": torch.zeros(L, H, I).bfloat16()}, "gate_up is torch.float32, down is torch.bfloat16"),
        ({"gate_up_order": "down_first"}, "gate_up_order is 'down_first'; allowed: gate_first, up_first, interleaved"),
        ({"gate_up_bias": torch.zeros(L, 2 * I)}, "gate_up_bias and down_bias: give both or neither"),
        ({"down_bias": torch.zeros(L, H)}, "give both or neither"),
        ({"gate_up_bias": torch.zeros(L, I), "down_bias": torch.zeros(L, H)}, r"gate_up_bias is \[3, 4\]; .*\[3, 8\]"),
        ({"gate_up_bias": torch.zeros(L, 2 * I), "down_bias": torch.zeros(H)}, r"down_bias is \[6\]; .*\[3, 6\]"),
        ({"gate_up_bias": torch.zeros(L, 2 * I), "down_bias": torch.zeros(L, I)}, r"down_bias is \[3, 4\]; .*\[3, 6\]"),
    ],
)
def test_wrong_ones_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        experts(**changes).check(L, H)


def test_a_wrong_number_of_slots_or_hidden_size_is_refused() -> None:
    with pytest.raises(ValueError, match="with 2 slots"):
        experts().check(2, H)
    with pytest.raises(ValueError, match="hidden 8"):
        experts().check(L, 8)


@pytest.mark.parametrize(
    ("order", "gate", "up"),
    [
        ("gate_first", [0, 1, 2, 3], [4, 5, 6, 7]),
        ("up_first", [4, 5, 6, 7], [0, 1, 2, 3]),
        ("interleaved", [0, 2, 4, 6], [1, 3, 5, 7]),
    ],
)
def test_the_three_orders_of_gate_and_up(order: Any, gate: list[int], up: list[int]) -> None:
    product = torch.arange(8) + torch.tensor([[[0]], [[100]]])
    parts = experts(gate_up_order=order).split_gate_up(product)
    for part, columns in zip(parts, (gate, up), strict=True):
        assert torch.equal(part, product[..., columns])
        assert part.untyped_storage().data_ptr() == product.untyped_storage().data_ptr()  # a view
