"""The module under torch.compile: one graph, the bits of eager, no recompilation for another routing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from moeloom import FP32, Experts, Router, Runtime, Topology
from moeloom.nn import MoE, MoEConfig
from tests.support.pool import Ranks, group_of

HIDDEN, EXPERTS = 16, 6
ROUTERS = {
    "softmax": Router(num_topk=2),
    "groups": Router(num_topk=3, score="sigmoid", num_groups=3, num_topk_groups=2, scale=2.5),
}


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    with Runtime() as runtime:
        yield runtime


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def make(runtime: Runtime, mesh: DeviceMesh | None = None, router: str = "softmax") -> MoE:
    torch.manual_seed(0)
    config = MoEConfig(
        hidden=HIDDEN,
        intermediate=8,
        num_experts=EXPERTS,
        router=ROUTERS[router],
        biases=router == "groups",
        num_shared_experts=1,
        shared_gate=True,
        aux_loss_weight=0.1,
    )
    return MoE(config, runtime, mesh=mesh)


def compiled(module: Any, **options: Any) -> Any:
    return torch.compile(module, backend="aot_eager", fullgraph=True, **options)


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def step(moe: MoE, run: Any, x: Tensor) -> list[Tensor]:
    """Output and gradients (of x first), and what the module has counted."""
    x = x.clone().requires_grad_()
    moe.zero_grad()
    moe.load.zero_()
    y = run(x)
    y.square().sum().backward()
    grads = [x.grad, *(parameter.grad for parameter in moe.parameters())]
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    return [y.detach(), *(grad.clone() for grad in local), moe.load.clone(), moe.aux_loss.clone()]


def same(got: list[Tensor], wanted: list[Tensor]) -> list[bool]:
    return [torch.equal(one, other) for one, other in zip(got, wanted, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("router", ROUTERS)
def test_forward_has_the_bits_of_eager(rt: Runtime, router: str, dtype: torch.dtype) -> None:
    moe = make(rt, router=router).to(dtype).eval()
    run = compiled(moe)
    with torch.no_grad():
        for seed in range(5):
            x = tokens(13, seed).to(dtype)
            with torch._dynamo.config.patch(error_on_recompile=seed > 0):
                y = run(x)
            assert y.dtype == dtype and torch.equal(y, moe(x))


@pytest.mark.parametrize("router", ROUTERS)
def test_gradients_have_the_bits_of_eager(rt: Runtime, router: str) -> None:
    moe = make(rt, router=router)
    run = compiled(moe)
    for seed in range(3):
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            got = step(moe, run, tokens(13, seed))
        assert all(same(got, step(moe, moe, tokens(13, seed))))


def test_token_counts_make_two_graphs_at_most(rt: Runtime) -> None:
    """One for the first count, one for all others, and one each for 0 and 1, which torch always sees as special."""
    moe = make(rt)
    run = compiled(moe)
    torch._dynamo.utils.counters.clear()
    for count in (13, 7, 64, 2, 131, 5):
        assert all(same(step(moe, run, tokens(count)), step(moe, moe, tokens(count))))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    for count in (0, 1):
        assert all(same(step(moe, run, tokens(count)), step(moe, moe, tokens(count))))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


def test_changed_weights_are_seen(rt: Runtime) -> None:
    moe, x = make(rt), tokens(13)
    run = compiled(moe)
    with torch.no_grad():
        run(x)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for parameter in (*moe.parameters(), moe.router_bias):
            parameter += 0.1 * torch.randn_like(parameter)
        assert torch.equal(run(x), moe(x))


def test_checkpointing_inside_a_graph_counts_once(rt: Runtime) -> None:
    moe = make(rt)
    run = compiled(lambda x: checkpoint(moe, x, use_reentrant=False))
    assert all(same(step(moe, run, tokens(13)), step(moe, moe, tokens(13))))


# ---- several ranks


def on_ranks(num_ranks: int, nodes: int) -> list[list[bool]] | None:
    """Forward and gradients on every rank, with and without tokens there."""
    members = tuple(range(num_ranks))
    group = group_of(members)
    if group is None:
        return None
    torch._dynamo.reset()
    with Runtime(group, topology=Topology.split(num_ranks, nodes), timeout=60.0) as runtime:
        moe = make(runtime, DeviceMesh.from_group(group, "cpu"))
        run = compiled(moe)
        right = []
        for counts in ([13] * num_ranks, [7, 0, 64, 0]):
            x = tokens(counts[runtime.rank], seed=runtime.rank)
            right.append(same(step(moe, run, x), step(moe, moe, x)))
        return right


def test_on_four_ranks(ranks: Ranks) -> None:
    """The experts' parameters are DTensors here; every rank compiles for itself, and not all for the same sizes."""
    for right in ranks.run(on_ranks, 4, 2)[:4]:
        assert right and all(map(all, right)), right


# ---- the operators


def arguments(rt: Runtime, num_tokens: int, transposed: bool = False, biases: bool = False) -> tuple[Any, ...]:
    """What `torch.ops.moeloom.moe` takes, but for `keep`."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator)
        return (drawn.t().contiguous().t() if transposed and len(shape) == 2 else drawn).requires_grad_()

    experts = Experts(
        draw(EXPERTS, 16, HIDDEN),
        draw(EXPERTS, HIDDEN, 8),
        gate_up_bias=draw(EXPERTS, 16) if biases else None,
        down_bias=draw(EXPERTS, HIDDEN) if biases else None,
    )
    number = rt.layer_call(experts, FP32, None, None).number
    topk_idx = torch.randint(-1, EXPERTS, (num_tokens, 2), generator=generator)
    tensors = (experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias)
    return draw(num_tokens, HIDDEN), topk_idx, draw(num_tokens, 2), *tensors, number


CASES = [(5, False, False), (5, True, True), (0, False, False), (1, False, True)]


@pytest.mark.parametrize(("num_tokens", "transposed", "biases"), CASES)
def test_opcheck_moe(rt: Runtime, num_tokens: int, transposed: bool, biases: bool) -> None:
    torch.library.opcheck(torch.ops.moeloom.moe.default, (*arguments(rt, num_tokens, transposed, biases), False))


@pytest.mark.parametrize(("num_tokens", "transposed", "biases"), CASES)
def test_opcheck_moe_backward(rt: Runtime, num_tokens: int, transposed: bool, biases: bool) -> None:
    x, topk_idx, topk_weights, *tensors, number = arguments(rt, num_tokens, transposed, biases)
    present = [tensor.detach() for tensor in tensors if tensor is not None]
    inputs = (torch.ones_like(x).detach(), x.detach(), topk_idx, topk_weights.detach(), present, biases)
    for wanted in ([True, True, biases, biases], [False, True, False, False]):
        torch.library.opcheck(torch.ops.moeloom.moe_backward.default, (*inputs, wanted, number))


def test_opcheck_keep_choice() -> None:
    torch.library.opcheck(torch.ops.moeloom.keep_choice.default, (torch.ones(3, 2, dtype=torch.int64),))
