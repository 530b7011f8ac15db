"""The whole layer on GPUs, a process per rank: right by the rule beside the CPU backend, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moeloom import BF16, FP8, Experts, Placement, Plan, Recipe, Router, Routing, Runtime, SwiGLU, nn
from tests.support.compare import ALLOWED_RATIO, equal_bits, plain_layer, relative_error
from tests.support.pool import Ranks, group_of

pytestmark = pytest.mark.gpu

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, MOST = 512, 256, 16, 4, 160
TOKENS = [131, 0, 160, 7]


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    pool = Ranks("cuda")
    yield pool
    pool.close()


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def every_expert(**options: Any) -> Experts:
    gate_up = normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN, seed=1, scale=2.0 * HIDDEN**-0.5).bfloat16()
    return Experts(
        gate_up, normal(EXPERTS, HIDDEN, INTERMEDIATE, seed=2, scale=INTERMEDIATE**-0.5).bfloat16(), **options
    )


def inputs(rank: int, placement: Placement) -> tuple[Tensor, Routing]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(TOKENS[rank], placement.num_ids, generator=generator).topk(TOPK).indices
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.1, -1)
    x = normal(TOKENS[rank], HIDDEN, seed=10 + rank).bfloat16()
    return x, Routing(ids.int(), torch.rand(ids.shape, generator=generator))


def held(every: Experts, placement: Placement, rank: int, device: Any) -> Experts:
    slots = torch.tensor(placement.slots[rank], dtype=torch.int64)
    return Experts(
        every.gate_up[slots].to(device), every.down[slots].to(device), activation=every.activation, placement=placement
    )


def placement_of(ranks: int, replicated: bool) -> Placement:
    if not replicated:
        return Placement.even(EXPERTS, ranks)
    slots = [list(held) for held in Placement.even(EXPERTS, ranks).slots]
    slots[0] += [EXPERTS - 1, 1]
    slots[-1] += [0]
    return Placement.from_slots(slots)


def forward(ranks: int, recipe: Recipe, pipeline: str, replicated: bool) -> list[str]:
    """On every rank of the pool."""
    group = group_of(tuple(range(ranks)))
    if group is None:
        return []
    placement, every = placement_of(ranks, replicated), every_expert(activation=SwiGLU(clamp=7.0))
    with Runtime(group, backend="cpu", timeout=60) as cpu, Runtime(group, backend="sm90", max_tokens=MOST) as gpu:
        x, routing = inputs(cpu.rank, placement)
        device = gpu.backend.device
        truth = plain_layer(every, x, routing, torch.float64)
        with torch.no_grad():
            peer = cpu.moe(x, routing, held(every, placement, cpu.rank, "cpu"), recipe=recipe)
            on_gpu = held(every, placement, cpu.rank, device)
            given = x.to(device), Routing(routing.topk_idx.to(device), routing.topk_weights.to(device))
            y = gpu.moe(*given, on_gpu, recipe=recipe, plan=Plan(pipeline))
            again = gpu.moe(*given, gpu.pack(on_gpu, recipe), recipe=recipe, plan=Plan(pipeline))
        error, peer_error = relative_error(y.cpu(), truth), relative_error(peer, truth)
        wrong = []
        if not error <= ALLOWED_RATIO * peer_error:
            wrong.append(f"error {error:.3e}, of the CPU backend {peer_error:.3e}")
        if not equal_bits(y.cpu(), again.cpu()):
            wrong.append("the same call with packed weights gives other bits")
        return [f"rank {cpu.rank}: {line}" for line in wrong]


def ranks_here(ranks: int) -> int:
    if ranks > 2 * torch.cuda.device_count():
        pytest.skip("takes minutes where more than two ranks share a GPU")
    return ranks


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("pipeline", ["split", "decode"])
@pytest.mark.parametrize("recipe", [BF16, FP8], ids=str)
@pytest.mark.parametrize("replicated", [False, True], ids=["even", "replicated"])
def test_forward(gpus: Ranks, recipe: Recipe, pipeline: str, ranks: int, replicated: bool) -> None:
    wrong = [line for lines in gpus.run(forward, ranks_here(ranks), recipe, pipeline, replicated) for line in lines]
    assert not wrong, "\n".join(wrong)


def backward(ranks: int) -> list[str]:
    """Gradients of both backends beside fp64 autograd of the whole layer, on every rank."""
    group = group_of(tuple(range(ranks)))
    if group is None:
        return []
    placement, every = placement_of(ranks, False), every_expert()
    wide = Experts(every.gate_up.double(), every.down.double(), activation=every.activation)
    shares = [inputs(rank, placement) for rank in range(ranks)]
    leaves = [wide.gate_up.requires_grad_(), wide.down.requires_grad_()]
    truth: dict[str, Tensor] = {}
    for rank, (x, routing) in enumerate(shares):
        share = x.double().requires_grad_(), routing.topk_weights.double().requires_grad_()
        y = plain_layer(wide, share[0], Routing(routing.topk_idx, share[1]), torch.float64)
        if y.requires_grad:
            (y * normal(*y.shape, seed=50 + rank).bfloat16()).sum().backward()
        if dist_rank(group) == rank:
            grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in share]
            truth |= dict(zip(("x", "topk_weights"), grads, strict=True))
    slots = list(placement.slots[dist_rank(group)])
    truth |= {name: leaf.grad[slots] for name, leaf in zip(("gate_up", "down"), leaves, strict=True)}
    with Runtime(group, backend="cpu", timeout=60) as cpu, Runtime(group, backend="sm90", timeout=60) as gpu:
        wrong, errors = [], []
        for rt in (cpu, gpu):
            x, routing = shares[rt.rank]
            device = rt.backend.device
            x = x.detach().clone().to(device).requires_grad_()
            weights = routing.topk_weights.clone().to(device).requires_grad_()
            experts = held(every, placement, rt.rank, device)
            experts.gate_up.requires_grad_(), experts.down.requires_grad_()
            y = rt.moe(x, Routing(routing.topk_idx.to(device), weights), experts)
            y.backward(normal(*y.shape, seed=50 + rt.rank).bfloat16().to(y.device))
            found = {"x": x, "topk_weights": weights, "gate_up": experts.gate_up, "down": experts.down}
            errors.append({name: relative_error(leaf.grad.cpu(), truth[name]) for name, leaf in found.items()})
        for name, error in errors[1].items():
            if not error <= ALLOWED_RATIO * errors[0][name]:
                wrong.append(f"rank {gpu.rank}: d_{name}: error {error:.3e}, of the CPU backend {errors[0][name]:.3e}")
        return wrong


def dist_rank(group: Any) -> int:
    return torch.distributed.get_rank(group)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_backward(gpus: Ranks, ranks: int) -> None:
    wrong = [line for lines in gpus.run(backward, ranks_here(ranks)) for line in lines]
    assert not wrong, "\n".join(wrong)


def graph(ranks: int, recipe: Recipe) -> list[str]:
    """Decode in a CUDA graph, replayed with other tokens, fewer of them too (ids of -1)."""
    group = group_of(tuple(range(ranks)))
    if group is None:
        return []
    placement, every = placement_of(ranks, False), every_expert()
    with Runtime(group, backend="sm90", max_tokens=64, timeout=60) as rt, torch.no_grad():
        device, wrong = rt.backend.device, []
        experts = held(every, placement, rt.rank, device)
        x = torch.zeros(64, HIDDEN, dtype=torch.bfloat16, device=device)
        ids = torch.full((64, TOPK), -1, dtype=torch.int32, device=device)
        weights = torch.zeros(64, TOPK, device=device)

        def layer() -> Tensor:
            return rt.moe(x, Routing(ids, weights), experts, recipe=recipe, plan=Plan("decode"))

        layer()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            y = layer()
        for step in range(12):
            count = [64, 1, 33, 0][(step + rt.rank) % 4]
            x.copy_(normal(64, HIDDEN, seed=100 * step + rt.rank))
            drawn = torch.rand(64, EXPERTS, generator=torch.Generator().manual_seed(step)).topk(TOPK).indices
            ids.copy_(drawn)
            ids[count:] = -1
            weights.copy_(normal(64, TOPK, seed=step).abs())
            captured.replay()
            eager = layer() if step % 3 else None
            if eager is not None and not equal_bits(y.cpu(), eager.cpu()):
                wrong.append(f"rank {rt.rank}, step {step}: replay and eager call differ")
            if y[count:].any() or (count and not y[:count].any()):
                wrong.append(f"rank {rt.rank}, step {step}: rows of unrouted tokens must be zeros, others not")
        return wrong


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("recipe", [BF16, FP8], ids=str)
def test_graph(gpus: Ranks, ranks: int, recipe: Recipe) -> None:
    wrong = [line for lines in gpus.run(graph, ranks_here(ranks), recipe) for line in lines]
    assert not wrong, "\n".join(wrong)


def module() -> list[str]:
    """`nn.MoE` in bf16 with shared experts, on both backends with the same parameters: results and gradients."""
    group = group_of((0, 1))
    if group is None:
        return []
    config = nn.MoEConfig(
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        num_experts=EXPERTS,
        router=Router(num_topk=TOPK),
        num_shared_experts=1,
    )
    with Runtime(group, backend="cpu", timeout=60) as cpu, Runtime(group, backend="sm90", timeout=60) as gpu:
        found: list[dict[str, Tensor]] = []
        start: dict[str, Tensor] = {}
        for rt in (cpu, gpu):
            device = rt.backend.device
            mesh = DeviceMesh.from_group(group, device.type)
            torch.manual_seed(3)
            layer = nn.MoE(config, rt, mesh=mesh, device=device, dtype=torch.bfloat16)
            for name, parameter in layer.named_parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                with torch.no_grad():
                    local.copy_(start.setdefault(name, local.detach().cpu()))
            x = normal(90 - 20 * rt.rank, HIDDEN, seed=rt.rank).bfloat16().to(device).requires_grad_()
            y = layer(x)
            y.backward(normal(*y.shape, seed=9 + rt.rank).bfloat16().to(device))
            grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
            local = {n: g.to_local() if isinstance(g, DTensor) else g for n, g in grads.items()}
            found.append({"y": y.detach().cpu(), "x": x.grad.cpu(), **{n: g.cpu() for n, g in local.items()}})
        # logits round differently, so a few tokens with nearly equal scores go elsewhere
        errors = {name: relative_error(found[1][name], wanted) for name, wanted in found[0].items()}
        return [f"rank {gpu.rank}: {name} differs by {error:.3g}" for name, error in errors.items() if not error < 0.1]


def test_module(gpus: Ranks) -> None:
    wrong = [line for lines in gpus.run(module) for line in lines]
    assert not wrong, "\n".join(wrong)
