"""Kinds of faults of training: replicas that move, memory that grows, adapters, recomputation, what a module forgets.

The letters in brackets are those of tests/failure_kinds.toml.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import linear
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from moeloom import FP32, Experts, Placement, Router, Routing, Runtime, SwiGLU, Topology
from moeloom.backends.base import Handle
from moeloom.layer import LayerCall
from moeloom.nn import MoE, MoEConfig
from tests.support.compare import equal_bits, plain_layer, relative_error
from tests.support.failure import FOUR, attempt, layer_of, over_four, the_same, works
from tests.support.pool import Ranks, group_of

HIDDEN, WIDTH, EXPERTS, TOPK = 16, 10, 8, 3
LONG = {"num_tokens": 1000, "hidden": 128}  # where memory is measured: x has 512 KB
EVEN = Placement.even(EXPERTS, 4)
MOVING = [  # two replicas on one rank, three in all, none, a rank without slots, other orders
    Placement.from_slots([[0, 1, 0], [2, 3], [4, 5, 7], [6, 7, 0]]),
    Placement.from_slots([[7, 6, 5, 4], [], [3, 2, 1], [0, 3, 3]]),
    EVEN,
    Placement.from_slots([list(range(EXPERTS))] * 4),
]


@pytest.fixture(scope="module")
def alone() -> Iterator[Runtime]:
    with Runtime() as rt:
        yield rt


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def config(**options: Any) -> MoEConfig:
    shape = {"hidden": HIDDEN, "intermediate": WIDTH, "num_experts": EXPERTS, "router": Router(num_topk=TOPK)}
    return MoEConfig(**{**shape, **options})


def module(rt: Runtime, seed: int = 0, **options: Any) -> MoE:
    """Over the Runtime's ranks: the pool's first ones, or this one alone."""
    num_ranks = rt.topology.num_ranks
    mesh = None if num_ranks == 1 else DeviceMesh.from_group(group_of(tuple(range(num_ranks))), "cpu")
    torch.manual_seed(seed)
    return MoE(config(**options), rt, mesh=mesh)


def routing_of(rank: int, num_tokens: int, seed: int = 0) -> Routing:
    ids = draw(num_tokens, EXPERTS, seed=100 * seed + rank).argsort(1)[:, :TOPK]
    return Routing(ids, draw(num_tokens, TOPK, seed=100 * seed + rank + 50).sigmoid())


# ---- replicas (X)


def rebalanced(placements: list[Placement]) -> list[tuple[Any, ...]] | None:
    """Training with the nth placement at step n: output, and gradients of x, the router weights and all experts."""
    rt = over_four(2)
    if rt is None:
        return None
    every = [0.3 * draw(EXPERTS, 2 * WIDTH, HIDDEN, seed=1), 0.3 * draw(EXPERTS, HIDDEN, WIDTH, seed=2)]
    found = []
    with rt:
        for step, placement in enumerate(placements):
            held = torch.tensor(placement.slots[rt.rank], dtype=torch.int64)
            slots = [weight[held].requires_grad_() for weight in every]
            x = draw(20 * rt.rank, HIDDEN, seed=rt.rank).requires_grad_()
            routing = routing_of(rt.rank, len(x), step)
            routing.topk_weights.requires_grad_()
            y = rt.moe(x, routing, Experts(*slots, placement=placement), recipe=FP32.with_reduction("per_slot"))
            (y * draw(*y.shape, seed=10 + rt.rank)).sum().backward()
            grads = [
                torch.zeros_like(weight).index_add_(0, held, slot.grad)
                for weight, slot in zip(every, slots, strict=True)
            ]
            for weight, grad in zip(every, grads, strict=True):
                dist.all_reduce(grad, group=group_of(FOUR))
                weight -= 0.01 * grad
            found.append(tuple(t.numpy() for t in (y.detach(), x.grad, routing.topk_weights.grad, *grads)))
    return found


def test_replicas_and_rebalancing_between_steps_change_nothing(ranks: Ranks) -> None:
    """X1, X2, X5: one contribution per pair; an expert's gradient is the sum of those of its replicas."""
    wanted = ranks.run(rebalanced, [EVEN] * len(MOVING))[:4]
    for got, want in zip(ranks.run(rebalanced, MOVING)[:4], wanted, strict=True):
        for step, (one, other) in enumerate(zip(got, want, strict=True)):
            tensors = [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in zip(one, other, strict=True)]
            assert step > 0 or equal_bits(*tensors[0])  # later, sums of gradients have been rounded differently
            for pair in tensors:
                torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)


def counted(placement: Placement, order: Any, capacity: int | None) -> tuple[list[int], list[int], bool] | None:
    """Rows by expert of all ranks' slots, the ranks' choices by expert, and whether the counts lie beside the rows."""
    rt = over_four(1)
    if rt is None:
        return None
    with rt:
        routing = routing_of(rt.rank, 30)
        received, _ = rt.dispatch(draw(30, HIDDEN, seed=1), routing, placement, order=order, capacity=capacity)
        by_slot = received.num_tokens_per_expert
        right = all(
            isinstance(counts, Tensor) and counts.dtype == torch.int64 and counts.device == received.rows.device
            for counts in (by_slot, received.expert_start, received.num_dropped)
        )
        right &= len(by_slot) == placement.num_local(rt.rank) and len(received.expert_start) == len(by_slot) + 1
        held = torch.tensor(placement.slots[rt.rank], dtype=torch.int64)
        by_expert = torch.zeros(EXPERTS, dtype=torch.int64).index_add_(0, held, by_slot)
        wanted = torch.bincount(routing.topk_idx.flatten(), minlength=EXPERTS)
        for each in (by_expert, wanted):
            dist.all_reduce(each, group=group_of(FOUR))
        return by_expert.tolist(), wanted.tolist(), right


@pytest.mark.parametrize(("order", "capacity"), [("expert", None), ("expert", 400), ("batched", 120), ("rank", 130)])
def test_counts_are_tensors_and_add_up_by_expert(ranks: Ranks, order: str, capacity: int | None) -> None:
    """X4, Y6: a slot's count is of one replica; by the placement they add up to the experts' load."""
    for placement in MOVING[:2]:
        for by_expert, wanted, right in ranks.run(counted, placement, order, capacity)[:4]:
            assert right and by_expert == wanted and sum(wanted) == 4 * 30 * TOPK


def test_load_is_of_routed_experts_only(alone: Runtime) -> None:
    """X4: shared experts, which every token passes, are not in it."""
    moe = module(alone, num_shared_experts=2)
    moe(draw(11, HIDDEN, seed=1))
    assert moe.load.shape == (EXPERTS,) and int(moe.load.sum()) == 11 * TOPK


# ---- memory (R)


def bytes_here() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later is not a leak
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(thing) is kind for thing in gc.get_objects())


def way_through(moe: MoE, x: Tensor, way: str) -> None:
    """One step's forward and backward, or what goes wrong with them."""
    if way == "refused":
        wrong = x[:, :3] if moe.runtime.rank == 1 else x
        assert attempt(moe, wrong).error == "ValueError"
        return
    run: Callable[[], Tensor] = lambda: moe(x)  # noqa: E731
    if way.startswith("checkpointed"):
        run = lambda: checkpoint(moe, x, use_reentrant=way.endswith("reentrant"))  # noqa: E731
    loss = run().square().mean()
    if way != "abandoned":
        loss.backward(retain_graph=way == "twice")
    if way == "twice":
        loss.backward()


WAYS = ("plain", "checkpointed", "checkpointed reentrant", "abandoned", "twice", "refused")


def train_long(first: int, rounds: int) -> tuple[list[int], list[int], list[int], int] | None:
    """Bytes of this process, symmetric bytes and new handles after the first rounds and after all; new calls in all."""
    group = group_of((0, 1))
    if group is None:
        return None
    with Runtime(group, topology=Topology.split(2, 2), timeout=30.0) as rt:
        moe = module(rt, hidden=LONG["hidden"], num_shared_experts=1, aux_loss_weight=0.1, bias_update_speed=0.01)
        optimizer = torch.optim.SGD(moe.parameters(), lr=1e-3)
        held, symmetric, handles = [], [], []
        before, calls_before = alive(Handle), alive(LayerCall)
        for number in range(first + rounds):
            for way in WAYS:
                way_through(moe, draw(LONG["num_tokens"], LONG["hidden"], seed=number).requires_grad_(), way)
                optimizer.step()
                optimizer.zero_grad()
            moe.update_bias(group)
            if number in (first - 1, first + rounds - 1):
                held.append(bytes_here())
                symmetric.append(rt.symmetric_bytes())
                handles.append(alive(Handle) - before)
        return held, symmetric, handles, alive(LayerCall) - calls_before


def test_many_training_steps_do_not_grow_memory(ranks: Ranks) -> None:
    """R3, R4: also if a graph is dropped, goes back twice, is recomputed, or if a forward fails."""
    rounds = 20
    for held, symmetric, handles, calls in ranks.run(train_long, 10, rounds)[:2]:
        assert symmetric[1] == symmetric[0] > 0 and handles == [0, 0] and calls == 0
        assert held[1] - held[0] < rounds * 512 * 1024 * 2 // 3  # less than x by one of the ways


# ---- autograd (Q)


def crossed_recomputation(reentrant: bool) -> tuple[str, bool] | None:
    """Rank 0 goes back through its two checkpointed regions in another order than the others."""
    rt = over_four(1)
    if rt is None:
        return None
    with rt:
        moes = [module(rt, seed) for seed in (1, 2)]
        losses = [
            checkpoint(moe, draw(9, HIDDEN, seed=rt.rank).requires_grad_(), use_reentrant=reentrant).sum()
            for moe in moes
        ]
        order = losses if rt.rank == 0 else losses[::-1]
        told = [attempt(loss.backward) for loss in order]
        return "; ".join(each.text for each in told), works(rt)


@pytest.mark.parametrize(
    "reentrant",
    [
        False,
        pytest.param(True, marks=pytest.mark.xfail(strict=True, reason="two layers alike: nothing tells them apart")),
    ],
)
def test_regions_recomputed_in_another_order_are_reported(ranks: Ranks, reentrant: bool) -> None:
    """Q5."""
    outcomes = ranks.run(crossed_recomputation, reentrant)[:4]
    assert {told for told, _ in outcomes} == {outcomes[0][0]} and all(usable for _, usable in outcomes)
    assert "handle of operation differs between ranks" in outcomes[0][0]


def test_one_choice_trains_the_gate_unless_normalized(alone: Runtime) -> None:
    """Q6: a weight divided by itself is 1, so that no gradient is right; the router warns of it."""
    with pytest.warns(UserWarning, match="never trains"):
        normalized = Router(num_topk=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = Router(num_topk=1, normalize=False)
    largest = []
    for router in (normalized, plain):
        moe = module(alone, router=router)
        moe(draw(20, HIDDEN, seed=3)).square().sum().backward()
        largest.append(float(moe.gate.grad.abs().max()))
    assert largest[0] < 1e-5 < 1e-2 < largest[1]


class Adapter(nn.Module):
    """`weight + b @ a` for each expert."""

    def __init__(self, num_experts: int, rows: int, columns: int) -> None:
        super().__init__()
        self.a = nn.Parameter(draw(num_experts, 2, columns, seed=8))
        self.b = nn.Parameter(draw(num_experts, rows, 2, seed=9))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def adapter_errors(grad: Tensor, adapter: Adapter) -> list[float]:
    """How far the adapter's gradients are from those that follow from its weight's."""
    wanted = (adapter.b.detach().mT @ grad, grad @ adapter.a.detach().mT)
    found = (adapter.a.grad, adapter.b.grad)
    return [
        relative_error(got, want) if got is not None else torch.inf for got, want in zip(found, wanted, strict=True)
    ]


def train_adapters() -> list[float] | None:
    """On the weights of a rank's experts, which are frozen; the worst error, and what the frozen ones got."""
    rt = over_four(2)
    if rt is None:
        return None
    with rt:
        weights = [0.3 * draw(2, 2 * WIDTH, HIDDEN, seed=rt.rank), 0.3 * draw(2, HIDDEN, WIDTH, seed=rt.rank)]
        adapters = [Adapter(2, *weight.shape[1:]) for weight in weights]
        x, routing = draw(40, HIDDEN, seed=10 + rt.rank), routing_of(rt.rank, 40)
        adapted = [adapter(weight) for adapter, weight in zip(adapters, weights, strict=True)]
        leaves = [tensor.detach().requires_grad_() for tensor in adapted]
        for tensors in (leaves, adapted):
            rt.moe(x, routing, Experts(*tensors)).square().sum().backward()
        assert all(weight.grad is None for weight in weights)
        return [
            error
            for leaf, adapter in zip(leaves, adapters, strict=True)
            for error in adapter_errors(leaf.grad, adapter)
        ]


def test_adapters_on_expert_weights_train(ranks: Ranks) -> None:
    """Q7: every adapter of every rank."""
    for errors in ranks.run(train_adapters)[:4]:
        assert max(errors) < 1e-5


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_adapters_on_a_modules_experts_train(alone: Runtime, compiled: bool) -> None:
    """Q7, Q8: put there by torch's parametrizations, over frozen weights."""
    torch._dynamo.reset()
    moe, x = module(alone), draw(40, HIDDEN, seed=1)
    adapters = {name: Adapter(EXPERTS, *getattr(moe, name).shape[1:]) for name in ("gate_up", "down")}
    for name, adapter in adapters.items():
        getattr(moe, name).requires_grad_(False)
        register_parametrization(moe, name, adapter)
    leaves = {name: getattr(moe, name).detach().requires_grad_() for name in adapters}
    routing = moe.config.router(x @ moe.gate.detach().t(), moe.router_bias)
    alone.moe(x, routing, Experts(leaves["gate_up"], leaves["down"])).square().sum().backward()
    run = torch.compile(moe, backend="aot_eager", fullgraph=True) if compiled else moe
    run(x).square().sum().backward()
    for name, adapter in adapters.items():
        assert max(adapter_errors(leaves[name].grad, adapter)) < 1e-5
        assert moe.parametrizations[name].original.grad is None


# ---- weights and activations (V)


def load_in_place() -> list[bool] | None:
    """A loader that writes into the tensors of the state dict, as torch.distributed.checkpoint does."""
    rt = over_four(1)
    if rt is None:
        return None
    with rt:
        one, other = (module(rt, seed, biases=True, num_shared_experts=1) for seed in (1, 2))
        x = draw(7, HIDDEN, seed=rt.rank)
        wanted = other(x)
        right = [not torch.equal(one(x), wanted)]
        with torch.no_grad():
            for name, tensor in one.state_dict().items():
                tensor.copy_(other.state_dict()[name])
        return [*right, torch.equal(one(x), wanted)]


def test_the_state_dict_is_the_storage_on_every_rank(ranks: Ranks) -> None:
    """V6."""
    assert ranks.run(load_in_place)[:4] == [[True, True]] * 4


WAYS_OF_CALLING: dict[str, Callable[[MoE], Callable[[Tensor], Tensor]]] = {
    "eager": lambda moe: moe,
    "compiled": lambda moe: torch.compile(moe, backend="aot_eager", fullgraph=True),
    "recomputed": lambda moe: lambda x: checkpoint(moe, x, use_reentrant=False),
}


@pytest.mark.parametrize("way", WAYS_OF_CALLING)
@pytest.mark.parametrize("options", [{"clamp": 0.2}, {"alpha": 1.702}, {"up_offset": 1.0}], ids=str)
def test_every_activation_parameter_reaches_every_path(alone: Runtime, options: dict[str, float], way: str) -> None:
    """V8: routed and shared experts, forward and backward, against plain PyTorch with the parameter and without."""
    torch._dynamo.reset()
    moe, x = (
        module(alone, num_shared_experts=1, activation=SwiGLU(**options)),
        draw(31, HIDDEN, seed=1).requires_grad_(),
    )
    y = WAYS_OF_CALLING[way](moe)(x)
    (got,) = torch.autograd.grad(y.square().sum(), x)

    def plain(activation: SwiGLU) -> tuple[Tensor, Tensor]:
        routing = moe.config.router(x @ moe.gate.t())
        gate, up = linear(x.double(), moe.shared.gate_up.double()).chunk(2, 1)
        z = plain_layer(Experts(moe.gate_up, moe.down, activation=activation), x, routing, torch.float64)
        z = z + linear(activation(gate, up), moe.shared.down.double())
        return z.detach(), torch.autograd.grad(z.square().sum(), x)[0]

    for found, wanted, other in zip((y.detach(), got), plain(SwiGLU(**options)), plain(SwiGLU()), strict=True):
        assert relative_error(found, wanted) < 1e-5 and relative_error(other, wanted) > 1e-2


@pytest.mark.parametrize(
    "make",
    [
        lambda: SwiGLU(limit=7.0),
        lambda: config(swiglu_limit=7.0),
        lambda: Experts(torch.empty(1, 2, 2), torch.empty(1, 2, 1), alpha=1.702),
    ],
)
def test_unknown_activation_parameters_are_refused(make: Callable[[], Any]) -> None:
    """V8: none is swallowed."""
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        make()


# ---- limits (Y)


def full_everywhere(nodes: int, skewed: bool) -> tuple[bool, Any] | None:
    """As many tokens as allowed on every rank, perhaps all to one expert; then rank 2 passes one more."""
    rt = over_four(nodes, max_tokens=8)
    if rt is None:
        return None
    with rt:
        full = layer_of(rt, tokens=8)
        if skewed:
            full = full.but(topk_idx=torch.full_like(full.topk_idx, 5))
        right = torch.equal(full.run(rt), full.y)
        told = attempt(layer_of(rt, tokens=9 if rt.rank == 2 else 8).run, rt)
        return right and works(rt, tokens=8), told


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("nodes", [1, 2])
def test_max_tokens_is_of_one_rank_whatever_it_receives(ranks: Ranks, nodes: int, skewed: bool) -> None:
    """Y8."""
    outcomes = ranks.run(full_everywhere, nodes, skewed)[:4]
    assert all(right for right, _ in outcomes)
    assert "rank 2: 9 tokens, but max_tokens is 8" in the_same([told for _, told in outcomes]).text
