"""The module on one rank, against plain PyTorch; its statistics, its losses, its state dict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint

from moeloom import BF16, Placement, Router, Runtime, SwiGLU
from moeloom.nn import (
    MoE,
    MoEConfig,
    _chunked,
    balance_loss,
    checkpoint_contexts,
    exclude_from_ddp,
    expert_parameters,
    scale_expert_gradients,
)
from tests.support.compare import assert_close_by_rule, plain_layer, relative_error

HIDDEN, WIDTH, EXPERTS = 24, 10, 6


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    with Runtime() as runtime:
        yield runtime


def config(**options: Any) -> MoEConfig:
    shape = {"hidden": HIDDEN, "intermediate": WIDTH, "num_experts": EXPERTS, "router": Router(num_topk=2)}
    return MoEConfig(**{**shape, **options})


def make(rt: Runtime, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> MoE:
    torch.manual_seed(seed)
    return MoE(config(**options), rt, dtype=dtype)


def tokens(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed))


def plain(moe: MoE, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The module in plain PyTorch for dtype, of the same parameters."""
    flat = x.reshape(-1, HIDDEN)
    routing = moe.config.router(flat.float() @ moe.gate.float().t(), moe.router_bias)
    y = plain_layer(moe.experts(), flat, routing, dtype)
    if moe.shared is not None:
        wide = torch.promote_types(dtype, torch.float32)
        gate, up = linear(flat.to(dtype), moe.shared.gate_up.to(dtype)).to(wide).chunk(2, 1)
        shared = linear((silu(gate) * up).to(dtype), moe.shared.down.to(dtype))
        if moe.shared.gate is not None:
            shared = shared * linear(flat.to(dtype), moe.shared.gate.to(dtype)).sigmoid()
        y = y + shared
    return y.view(x.shape)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"biases": True},
    "shared": {"num_shared_experts": 2},
    "gated": {"num_shared_experts": 1, "shared_gate": True},
    "deepseek": {
        "num_shared_experts": 1,
        "router": Router(num_topk=3, score="sigmoid", num_groups=3, num_topk_groups=2, scale=2.5),
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_against_plain_pytorch(rt: Runtime, variant: str, dtype: torch.dtype) -> None:
    moe = make(rt, dtype=dtype, **VARIANTS[variant])
    moe.router_bias += 0.1 * torch.randn(EXPERTS)
    x = tokens(3, 47).to(dtype)
    before = x.clone()
    y = moe(x).detach()
    assert y.shape == x.shape and y.dtype == dtype and torch.equal(x, before)  # W2
    assert_close_by_rule(y, plain(moe, x, torch.float64).detach(), plain(moe, x, dtype).detach())


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_against_plain_pytorch(rt: Runtime, variant: str) -> None:
    moe, x = make(rt, **VARIANTS[variant]), tokens(61).requires_grad_()
    found = []
    for y in (moe(x), plain(moe, x, torch.float64)):
        (y * tokens(61, seed=6)).sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in moe.parameters())])
        x.grad = None
        moe.zero_grad()
    for got, wanted in zip(*found, strict=True):
        assert relative_error(got, wanted) < 1e-5


def test_shared_once_and_scale_once(rt: Runtime) -> None:
    """W1, W3, W6, with numbers that can be told apart: experts give nothing, then shared ones give nothing."""
    moe = make(rt, num_shared_experts=1, router=Router(num_topk=2, scale=2.5))
    once = make(rt, num_shared_experts=1, router=Router(num_topk=2))
    x = tokens(31)
    with torch.no_grad():
        torch.testing.assert_close(moe(x) - moe.shared(x), 2.5 * (once(x) - once.shared(x)))
        moe.down.zero_()
        assert torch.equal(moe(x), moe.shared(x))


def test_any_leading_shape_and_strides(rt: Runtime) -> None:
    moe, x = make(rt, num_shared_experts=1), tokens(4, 6)
    wanted = moe(x)
    assert torch.equal(moe(x.view(24, HIDDEN)).view_as(x), wanted)
    assert torch.equal(moe(torch.stack([x, x], -1)[..., 0]), wanted)
    assert torch.equal(moe(x.transpose(0, 1)), wanted.transpose(0, 1))
    assert moe(x[:0]).shape == (0, 6, HIDDEN) and moe(x[0, 0]).shape == (HIDDEN,)


# ---- statistics and losses


def counted(moe: MoE, x: Tensor) -> Tensor:
    topk_idx = moe.config.router(x @ moe.gate.t(), moe.router_bias).topk_idx
    return torch.bincount(topk_idx.flatten(), minlength=EXPERTS)


def test_load_is_counted_once_in_training(rt: Runtime) -> None:
    """Q4: also with activation checkpointing of either kind, and in a second backward."""
    moe, x = make(rt, aux_loss_weight=0.1), tokens(40).requires_grad_()
    wanted = counted(moe, x)
    for number, run in enumerate(
        (
            lambda: moe(x),
            lambda: checkpoint(moe, x, use_reentrant=True),
            lambda: checkpoint(moe, x, use_reentrant=False),
            lambda: checkpoint(moe, x, use_reentrant=False, context_fn=checkpoint_contexts),
        ),
        start=1,
    ):
        loss = run().sum()
        assert torch.equal(moe.load, number * wanted)
        loss.backward()
        assert torch.equal(moe.load, number * wanted)
    assert torch.equal(moe.global_load(), moe.load)
    with torch.no_grad():
        moe(x)
    assert torch.equal(moe.load, 5 * wanted)
    moe.eval()(x)
    assert torch.equal(moe.load, 5 * wanted)


def test_balance_loss_by_hand() -> None:
    scores = torch.tensor([[0.5, 0.25, 0.25], [1.5, 0.75, 0.75]])  # divided by their sum the same
    assert float(balance_loss(scores, torch.tensor([2, 1, 1]))) == pytest.approx(3 * (0.5 * 0.5 + 0.25 * 0.25 * 2))
    assert float(balance_loss(torch.rand(0, 3), torch.zeros(3))) == 0.0
    assert float(balance_loss(torch.rand(7, 3), torch.ones(3))) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", [None, True, False])
def test_the_balance_loss_reaches_the_gate(rt: Runtime, kind: bool | None) -> None:
    """As if `aux_loss_weight * aux_loss_scale * loss` had been added, whatever the loss is multiplied by."""
    found = []
    for weight in (0.0, 0.3):
        moe, x = make(rt, aux_loss_weight=weight), tokens(40).requires_grad_()
        moe.aux_loss_scale = 0.5
        y = moe(x) if kind is None else checkpoint(moe, x, use_reentrant=kind)
        (7.0 * y).sum().backward()
        found.append((moe, x, moe.gate.grad, x.grad))
    (_, _, gate, d_x), (moe, x, with_loss, d_x_with_loss) = found
    loss = balance_loss((x @ moe.gate.t()).softmax(1), counted(moe, x).float())
    wanted = torch.autograd.grad(0.3 * 0.5 * loss, (moe.gate, x))
    torch.testing.assert_close(with_loss - gate, wanted[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(d_x_with_loss - d_x, wanted[1], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(moe.aux_loss, loss.detach())


def test_update_bias(rt: Runtime) -> None:
    moe = make(rt, bias_update_speed=0.01)
    moe.load.copy_(torch.tensor([0, 9, 3, 3, 1, 2]))  # mean 3
    moe.update_bias()
    assert torch.equal(moe.router_bias, 0.01 * torch.tensor([1.0, -1, 0, 0, 1, 1]))
    assert not moe.load.any()


def test_bias_balances_a_skewed_gate(rt: Runtime) -> None:
    moe, x = make(rt, bias_update_speed=0.02, router=Router(num_topk=2, score="sigmoid")), tokens(256)
    x = x + 2 * moe.gate[0].detach() / moe.gate[0].norm()
    spread = []
    for _ in range(60):
        moe(x)
        spread.append(int(moe.load.max() - moe.load.min()))
        moe.update_bias()
    assert spread[-1] < spread[0] / 4 and moe.gate.grad is None


def test_the_choice_is_saved_by_a_checkpointing_policy(rt: Runtime) -> None:
    """An input that is another one when it is recomputed: without the policy the choice is another one too."""
    moe, x = make(rt), tokens(40)
    chosen: list[Tensor] = []
    weigh = Router.weigh

    def watch(self: Router, scores: Tensor, ids: Tensor) -> Tensor:
        chosen.append(ids.clone())
        return weigh(self, scores, ids)

    def noisy(x: Tensor) -> Tensor:
        return moe(x + torch.randn_like(x))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "weigh", watch)
        for options in ({}, {"context_fn": checkpoint_contexts}):
            y = checkpoint(noisy, x, use_reentrant=False, preserve_rng_state=False, **options)
            y.sum().backward()
    assert not torch.equal(chosen[0], chosen[1]) and torch.equal(chosen[2], chosen[3])


# ---- parameters


def test_chunks_are_those_of_torch() -> None:
    for experts in (1, 5, 8, 10, 33):
        for num_ranks in (1, 2, 3, 4, 6):
            sizes = [len(chunk) for chunk in torch.arange(experts).chunk(num_ranks)]
            sizes += [0] * (num_ranks - len(sizes))
            placement = _chunked(experts, num_ranks)
            assert [placement.num_local(rank) for rank in range(num_ranks)] == sizes
            assert sum(placement.slots, ()) == tuple(range(experts))
    assert _chunked(10, 4) == Placement.from_slots([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]])


def test_state_dict_round_trip(rt: Runtime) -> None:
    options = {"biases": True, "num_shared_experts": 1, "shared_gate": True}
    moe, other, x = make(rt, **options), make(rt, seed=1, **options), tokens(9)
    moe.router_bias += torch.randn(EXPERTS)
    assert not torch.equal(moe(x), other(x))
    assert other.load_state_dict(moe.state_dict()).missing_keys == []
    assert torch.equal(moe(x), other(x))
    experts, shared = ["gate_up", "down", "gate_up_bias", "down_bias"], ["shared.gate_up", "shared.down", "shared.gate"]
    assert set(moe.state_dict()) == {"gate", "router_bias", *experts, *shared}
    assert moe.state_dict()["gate_up"].data_ptr() == moe.gate_up.data_ptr()  # V6: not a copy


def test_parameters_by_kind(rt: Runtime) -> None:
    moe = make(rt, biases=True, num_shared_experts=1)
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), moe, nn.ModuleDict({"inner": make(rt)}))
    wanted = (moe.gate_up, moe.down, moe.gate_up_bias, moe.down_bias)
    assert [id(parameter) for parameter in moe.expert_parameters()] == [id(parameter) for parameter in wanted]
    assert len(expert_parameters(model)) == 6
    exclude_from_ddp(model)
    ignored = set(model._ddp_params_and_buffers_to_ignore)
    assert {"1.gate_up", "1.load", "2.inner.down", "2.inner.aux_loss"} <= ignored
    assert not ignored & {"1.gate", "1.router_bias", "1.shared.down", "0.weight"}
    exclude_from_ddp(moe)
    assert "gate_up" in moe._ddp_params_and_buffers_to_ignore


def test_scaling_of_gradients(rt: Runtime) -> None:
    moe, x = make(rt), tokens(9)
    moe(x).sum().backward()
    gate, gate_up = moe.gate.grad.clone(), moe.gate_up.grad.clone()
    moe.down.grad = None  # as if frozen
    scale_expert_gradients(moe, 4)
    assert torch.equal(moe.gate.grad, gate) and torch.equal(moe.gate_up.grad, gate_up / 4) and moe.down.grad is None


def test_dtype_and_device_moves(rt: Runtime) -> None:
    moe = make(rt, num_shared_experts=1, biases=True)
    moe.router_bias += torch.tensor([1e-3] * EXPERTS)
    moe.bfloat16()
    assert all(parameter.dtype == torch.bfloat16 for parameter in moe.parameters())
    assert moe.router_bias.dtype == torch.float32 and float(moe.router_bias[0]) == pytest.approx(1e-3, rel=1e-6)
    assert moe(tokens(9).bfloat16()).dtype == torch.bfloat16


def test_meta_then_empty_then_reset(rt: Runtime) -> None:
    torch.manual_seed(0)
    wanted = MoE(config(num_shared_experts=1), rt)
    moe = MoE(config(num_shared_experts=1), rt, device="meta").to_empty(device="cpu")
    torch.manual_seed(0)
    for module in (moe.shared, moe):
        module.reset_parameters()
    assert torch.equal(moe(tokens(9)), wanted(tokens(9)))
    bound = max(float(parameter.detach().abs().max()) for parameter in (moe.gate, moe.gate_up))
    assert 0.9 * HIDDEN**-0.5 < bound <= HIDDEN**-0.5


def test_recipe_and_activation_are_passed_on(rt: Runtime) -> None:
    x = tokens(9)
    clamped = make(rt, activation=SwiGLU(clamp=0.01, alpha=1.702, up_offset=1.0))
    assert relative_error(clamped(x).detach(), plain(clamped, x, torch.float64).detach()) < 1e-6
    assert not torch.equal(clamped(x), make(rt)(x))
    with pytest.raises(ValueError, match="the recipe needs torch.bfloat16"):
        make(rt, recipe=BF16)(x)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"hidden": 0}, "hidden is 0"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_shared_experts": -1}, "num_shared_experts is -1"),
        ({"bias_update_speed": -0.1}, "bias_update_speed is -0.1"),
        ({"aux_loss_weight": float("nan")}, "aux_loss_weight is nan"),
        ({"shared_gate": True}, "shared_gate is True; it needs num_shared_experts"),
        ({"router": Router(num_topk=7)}, "num_topk is 7"),
    ],
)
def test_wrong_options(rt: Runtime, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        MoE(config(**options), rt)
