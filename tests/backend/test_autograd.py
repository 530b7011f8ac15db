"""Gradients are those of the sum of all ranks' losses: compared with plain PyTorch in one process, on any exchange."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moeloom import FP32, Experts, Plan, Router, Routing, Runtime, SwiGLU
from moeloom.backends.base import Handle
from moeloom.config import recipe_for
from tests.support.cases import Case, covering_cases
from tests.support.compare import assert_close_by_rule, plain_expert, relative_error
from tests.support.oracle import home
from tests.support.pool import Ranks, runtime_of

INTERMEDIATE = 5
FP32_TOLERANCE = 1e-5  # relative, rms, against fp64
TENSORS = ("gate_up", "down", "gate_up_bias", "down_bias")
Grads = dict[str, Any]

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "weight_on_input": {"weight_on_input": True, "bias": True},
    "gpt-oss": {"activation": SwiGLU(0.7, 1.702, 1.0), "gate_up_order": "interleaved", "bias": True},
    "up_first": {"gate_up_order": "up_first"},
}


@dataclass(frozen=True)
class Job:
    """The exchange, which experts, and whether the whole layer or dispatch and combine around a function."""

    case: Case
    variant: str = "plain"
    whole: bool = True

    def draw(self, name: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.case.seed + 100 + name)
        return torch.randn(shape, generator=generator)

    def slots(self) -> list[int]:
        """The experts of all ranks' slots, one rank after the other."""
        return [expert for rank in self.case.placement().slots for expert in rank]

    def experts(self) -> dict[str, Tensor]:
        """The tensors of all ranks' slots; replicas are equal."""
        case, held, width = self.case, self.slots(), INTERMEDIATE
        tensors = {
            "gate_up": self.draw(1, case.experts, 2 * width, case.hidden) * case.hidden**-0.5,
            "down": self.draw(2, case.experts, case.hidden, width) * width**-0.5,
        }
        if VARIANTS[self.variant].get("bias"):
            tensors["gate_up_bias"] = self.draw(3, case.experts, 2 * width)
            tensors["down_bias"] = self.draw(4, case.experts, case.hidden)
        return {name: tensor[held].to(case.torch_dtype) for name, tensor in tensors.items()}

    def options(self) -> dict[str, Any]:
        return {name: value for name, value in VARIANTS[self.variant].items() if name != "bias"}

    def cotangent(self, rank: int) -> Tensor:
        """`[T, H]`; the loss of a rank is its product with y."""
        return self.draw(10 + rank, self.case.tokens[rank], self.case.hidden)

    def scale(self) -> Tensor:
        """The parameter of the function between dispatch and combine, per slot (order "rank": per rank)."""
        return 0.5 + self.draw(5, self.case.ranks if self.case.order == "rank" else len(self.slots()), self.case.hidden)

    def span(self, rank: int) -> slice:
        """This rank's part of `slots`."""
        sizes = [len(experts) for experts in self.case.placement().slots]
        return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def gradients(jobs: list[Job], steps: int = 1) -> list[Grads]:
    """This rank's gradients of each job (of its last step), as arrays. New tensors hold NaN until they are written."""
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for job in jobs:
            rt = runtime_of(job.case.members, job.case.nodes)
            for _ in range(steps if rt else 0):
                grads = layer_gradients(rt, job) if job.whole else flow_gradients(rt, job)
            found.append({name: grad.float().numpy() for name, grad in grads.items()} if rt else {})
    finally:
        torch.use_deterministic_algorithms(False)
    return found


def leaves(job: Job, rank: int) -> tuple[Tensor, Tensor, Routing]:
    x, routing = job.case.inputs(rank)
    x.requires_grad_(), routing.topk_weights.requires_grad_()
    return x, routing.topk_weights, routing


def layer_gradients(rt: Runtime, job: Job) -> dict[str, Tensor]:
    case = job.case
    x, weights, routing = leaves(job, rt.rank)
    tensors = {name: t[job.span(rt.rank)].clone().requires_grad_() for name, t in job.experts().items()}
    experts = Experts(**tensors, placement=case.placement(), **job.options())
    recipe = recipe_for(case.torch_dtype).with_reduction(case.reduction)
    y = rt.moe(x, routing, experts, recipe=recipe, plan=Plan(exchange=case.exchange))
    (y.float() * job.cotangent(rt.rank)).sum().backward()
    return {"x": x.grad, "topk_weights": weights.grad, **{name: t.grad for name, t in tensors.items()}}


def flow_gradients(rt: Runtime, job: Job) -> dict[str, Tensor]:
    case = job.case
    x, weights, routing = leaves(job, rt.rank)
    received, handle = rt.dispatch(
        x, routing, case.placement(), order=case.order, alignment=case.alignment, plan=Plan(exchange=case.exchange)
    )
    rows = received.rows.float()
    if case.order == "rank":
        scale = job.scale()[rt.rank].clone().requires_grad_()
        out = torch.tanh(rows * scale) * received.topk_weights.sum(1, keepdim=True)
    else:
        scale = job.scale()[job.span(rt.rank)].clone().requires_grad_()
        out = torch.tanh(rows * scale[received.topk_idx.clamp(min=0)])
        if not case.weighted:
            out = out * received.topk_weights.unsqueeze(-1)
        out = torch.where(received.topk_idx.unsqueeze(-1) < 0, torch.nan, out)  # padding may hold anything
    recipe = recipe_for(case.torch_dtype).with_reduction(case.reduction)
    y = rt.combine(out.to(x.dtype), handle, weighted=case.weighted, recipe=recipe)
    (y.float() * job.cotangent(rt.rank)).sum().backward()
    return {"x": x.grad, "topk_weights": weights.grad, "scale": scale.grad}


# ---- plain PyTorch


def pairs(job: Job) -> Tensor:
    """The slot (an index into `slots`, their number for identity experts, or -1) of every token's pairs: `[T, K]`."""
    case, placement = job.case, job.case.placement()

    def slot(expert: int, source: int, token: int) -> int:
        place = home(placement, expert, source, token)
        if place is not None:
            return job.span(place[0]).start + place[1]
        return len(job.slots()) if expert >= 0 else -1

    rows = [
        [slot(expert, rank, token) for expert in row]
        for rank in range(case.ranks)
        for token, row in enumerate(case.inputs(rank)[1].topk_idx.tolist())
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, case.topk)


def plain_gradients(job: Job, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same over all ranks' tokens: x and topk_weights one rank after the other, the others slot after slot."""
    case, wide = job.case, torch.promote_types(dtype, torch.float32)
    drawn = [case.inputs(rank) for rank in range(case.ranks)]
    x = torch.cat([x for x, _ in drawn]).to(dtype).requires_grad_()
    weights = torch.cat([routing.topk_weights for _, routing in drawn]).to(wide).requires_grad_()
    tensors = {name: tensor.to(dtype).requires_grad_() for name, tensor in job.experts().items()}
    experts, scale = Experts(**tensors, **job.options()), job.scale().to(wide).requires_grad_()
    slots, num_slots = pairs(job), len(job.slots())
    y = torch.zeros(x.shape, dtype=wide)
    for slot in range(num_slots + 1):
        token, k = (slots == slot).nonzero().unbind(1)
        rows, weight = x[token], weights[token, k]
        if slot == num_slots:
            out = (rows.to(wide) * weight.unsqueeze(1)).to(dtype).to(wide)
        elif job.whole:
            out = plain_expert(experts, slot, rows, weight, dtype)
        else:
            index = next(r for r in range(case.ranks) if slot < job.span(r).stop) if case.order == "rank" else slot
            out = torch.tanh(rows.to(wide) * scale[index]).to(dtype).to(wide) * weight.unsqueeze(1)
        y = y.index_add(0, token, out)
    cotangent = torch.cat([job.cotangent(rank) for rank in range(case.ranks)])
    (y.to(dtype).to(wide) * cotangent).sum().backward()
    used = tensors if job.whole else {"scale": scale}
    return {name: leaf.grad for name, leaf in {"x": x, "topk_weights": weights, **used}.items()}


def check(name: str, got: Tensor, wanted: Tensor, peer: Callable[[], Tensor] | None, strict: bool) -> None:
    """fp32 within a tolerance or, as sums that cancel leave few digits, by the rule; strict: only by the rule."""
    tolerance = FP32_TOLERANCE * (10 if wanted.numel() < 16 else 1)  # the rms of few numbers is one number's luck
    assert got.shape == wanted.shape, name
    if not wanted.any():
        assert not got.any(), name
    elif strict or not relative_error(got, wanted) < tolerance:
        assert_close_by_rule(got, wanted, peer())


def compare(ranks: Ranks, jobs: list[Job], steps: int = 1) -> None:
    """Every rank's gradients of every job against plain PyTorch."""
    outcomes = ranks.run(gradients, jobs, steps)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # many small products: two threads cost more than they give
    for number, job in enumerate(jobs):
        parts = [outcomes[member][number] for member in job.case.members]
        truth, dtype = plain_gradients(job, torch.float64), job.case.torch_dtype
        assert set(parts[0]) == set(truth)
        for name, wanted in truth.items():
            join = np.stack if name == "scale" and job.case.order == "rank" else np.concatenate
            got = torch.from_numpy(join([part[name] for part in parts]))

            def peer(name: str = name, job: Job = job, dtype: torch.dtype = dtype) -> Tensor:
                return plain_gradients(job, dtype)[name]

            check(f"{name} of {job}", got, wanted, peer, dtype != torch.float32)
    torch.set_num_threads(threads)


def fp32_jobs(whole: bool) -> list[Job]:
    """Covering cases of up to four ranks; the variants of the experts in turn."""
    cases = [replace(case, dtype="float32") for case in covering_cases() if case.ranks <= 4]
    if whole:
        cases = [replace(case, order="expert", alignment=1, weighted=False) for case in cases[::3]]
    return [Job(case, list(VARIANTS)[i % len(VARIANTS)], whole) for i, case in enumerate(cases)]


CASE = Case(
    ranks=4, nodes=2, tokens=(131, 64, 0, 97), topk=4, experts=10, exchange="direct", order="expert",
    reduction="per_rank", weighted=False, dtype="bfloat16", skew="steep", replicas=False, masked="some",
    duplicates=False, contiguous=True, alignment=1, index_dtype="int64", identity=2, subgroup=0, hidden=33, seed=3,
)  # fmt: skip


@pytest.mark.parametrize("whole", [True, False], ids=["layer", "dispatch and combine"])
def test_fp32(ranks: Ranks, whole: bool) -> None:
    compare(ranks, fp32_jobs(whole))


def test_bf16_by_the_rule(ranks: Ranks) -> None:
    exchanges = [("direct", "per_rank"), ("hybrid", "per_rank"), ("hybrid", "per_slot")]
    layers = [
        Job(replace(CASE, exchange=exchange, reduction=reduction, replicas=variant == "bias"), variant)
        for (exchange, reduction), variant in zip(exchanges * 2, [*VARIANTS, "plain"], strict=True)
    ]
    orders = [("expert", False), ("expert", True), ("batched", True), ("rank", False)]
    flows = [
        Job(replace(CASE, exchange=exchange, order=order, weighted=weighted, skew="uniform"), whole=False)
        for (order, weighted), exchange in zip(orders, ("direct", "hybrid") * 2, strict=True)
    ]
    compare(ranks, layers + flows)


def test_nothing_to_do_and_a_second_step(ranks: Ranks) -> None:
    """No tokens at all; all tokens to one expert, so that the others get zeros; each twice, over dirty memory."""
    cases = [replace(CASE, dtype="float32", tokens=(0, 0, 0, 0)), replace(CASE, dtype="float32", skew="all to one")]
    compare(ranks, [Job(case, "bias", whole) for case in cases for whole in (True, False)], steps=2)


# ---- one layer with a router, on any number of ranks

HIDDEN, EXPERTS, TOKENS = 12, 10, 61
SPLITS = {1: (61,), 2: (40, 21), 4: (40, 0, 1, 20)}


class Parts(nn.Module):
    """This rank's leaves of a layer that is the same for any number of ranks."""

    def __init__(self, rt: Runtime, seed: int = 0) -> None:
        def draw(number: int, *shape: int) -> Tensor:
            return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + number))

        super().__init__()
        self.rt = rt
        sizes = SPLITS[rt.topology.num_ranks]
        tokens = slice(sum(sizes[: rt.rank]), sum(sizes[: rt.rank + 1]))
        held = rt._placement(EXPERTS, 0).slots[rt.rank]
        self.x = draw(1, TOKENS, HIDDEN)[tokens].requires_grad_()
        self.cotangent = draw(2, TOKENS, HIDDEN)[tokens]
        self.gate = draw(3, EXPERTS, HIDDEN).requires_grad_()
        shapes = {"gate_up": (6, HIDDEN), "down": (HIDDEN, 3), "gate_up_bias": (6,), "down_bias": (HIDDEN,)}
        tensors = {name: draw(4 + i, EXPERTS, *shape) for i, (name, shape) in enumerate(shapes.items())}
        self.tensors = {name: tensor[list(held)].requires_grad_() for name, tensor in tensors.items()}

    def leaves(self) -> dict[str, Tensor]:
        return {"x": self.x, "gate": self.gate, **self.tensors}

    def experts(self) -> Experts:
        return Experts(**self.tensors, placement=self.rt._placement(EXPERTS, 0))

    def forward(self, x: Tensor) -> Tensor:
        # in fp64, so that the bits do not depend on the number of tokens
        logits = (x.double() @ self.gate.double().t()).float()
        routing = Router(num_topk=4)(logits)
        return x + self.rt.moe(x, routing, self.experts(), recipe=FP32.with_reduction("per_slot"))

    def loss(self, y: Tensor) -> Tensor:
        return (y * self.cotangent[: len(y)]).sum()

    def grads(self) -> dict[str, Any]:
        return {name: None if leaf.grad is None else leaf.grad.clone().numpy() for name, leaf in self.leaves().items()}


def on(num_ranks: int, fn: Callable[[Runtime], Any]) -> Any:
    """`fn` on the first ranks of the pool, on two nodes; None on the others."""
    rt = runtime_of(tuple(range(num_ranks)), 2 if num_ranks > 1 else 1)
    return None if rt is None else fn(rt)


def same(one: Grads, other: Grads) -> bool:
    """Equal bits for all names."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def whole_layer(rt: Runtime) -> Grads:
    parts = Parts(rt)
    parts.loss(parts(parts.x)).backward()
    return parts.grads()


def test_gradients_do_not_depend_on_the_number_of_ranks(ranks: Ranks) -> None:
    """Bit for bit: an expert sees the same rows in the same order, and x's parts are summed per slot."""
    (alone,) = ranks.run(on, 1, whole_layer)[:1]
    for num_ranks in (2, 4):
        outcomes = ranks.run(on, num_ranks, whole_layer)[:num_ranks]
        for name in ("x", *TENSORS):
            assert np.array_equal(np.concatenate([o[name] for o in outcomes]), alone[name]), (name, num_ranks)
        gate = sum(outcome["gate"] for outcome in outcomes)
        np.testing.assert_allclose(gate, alone["gate"], rtol=1e-4, atol=1e-5)


def only_wanted(rt: Runtime) -> list[str]:
    """Each leaf alone, each left out, none: who gets a gradient, and whether it has the bits of the full backward."""
    full, wrong = Parts(rt), []
    full.loss(full(full.x)).backward()
    names = list(full.leaves())
    for wanted in [{name} for name in names] + [set(names) - {name} for name in names]:
        parts = Parts(rt)
        for name, leaf in parts.leaves().items():
            leaf.requires_grad_(name in wanted)
        parts.loss(parts(parts.x)).backward()
        expected = {name: grad if name in wanted else None for name, grad in full.grads().items()}
        if not same(parts.grads(), expected):
            wrong.append(f"wanted {sorted(wanted)}")
    for leaf in full.leaves().values():
        leaf.requires_grad_(False)
    return wrong + ["frozen, yet a graph"] * full(full.x).requires_grad


def test_only_what_is_wanted_gets_a_gradient(ranks: Ranks) -> None:
    for wrong in ranks.run(on, 4, only_wanted)[:4]:
        assert wrong == []


def several_in_flight(rt: Runtime) -> list[bool]:
    """Two layers, two microbatches: backwards in reverse after all forwards, or one after the other; then twice."""
    one, two = Parts(rt, 1), Parts(rt, 2)
    batches = [Parts(rt, seed).x.detach() for seed in (3, 4)]

    def run(x: Tensor) -> Tensor:
        return one.loss(two(one(x)))

    def collect() -> list[Grads]:
        found = [one.grads(), two.grads()]
        for leaf in (*one.leaves().values(), *two.leaves().values()):
            leaf.grad = None
        return found

    for x in batches:
        run(x).backward()
    wanted = collect()
    losses = [run(x) for x in batches]
    for loss in reversed(losses):
        loss.backward()
    right = [same(got, want) for got, want in zip(collect(), wanted, strict=True)]

    loss = run(batches[0])
    loss.backward(retain_graph=True)
    once = [{n: None if g is None else 2 * g for n, g in grads.items()} for grads in (one.grads(), two.grads())]
    loss.backward()
    return right + [same(got, want) for got, want in zip(collect(), once, strict=True)]


def test_microbatches_in_reverse_and_backward_twice(ranks: Ranks) -> None:
    for right in ranks.run(on, 4, several_in_flight)[:4]:
        assert right == [True] * 4


def crossed_backwards(rt: Runtime) -> str:
    """Rank 0 goes back through its layers in another order than the others."""
    parts = Parts(rt)
    losses = [parts.loss(parts(parts.x)) for _ in range(2)]
    told = ""
    for loss in losses if rt.rank == 0 else reversed(losses):
        try:
            loss.backward()
        except ValueError as error:
            told += str(error)
    parts.loss(parts(parts.x)).backward()  # the Runtime is as good as before
    return told


def test_backwards_in_another_order_are_reported(ranks: Ranks) -> None:
    told = set(ranks.run(on, 4, crossed_backwards)[:4])
    assert len(told) == 1 and "handle of operation differs between ranks" in told.pop()


def recomputed(rt: Runtime) -> list[bool]:
    """Activation checkpointing of both kinds, around two layers each."""
    found = []
    for kind in (None, False, True):
        one, two = Parts(rt, 1), Parts(rt, 2)
        both, y = nn.Sequential(one, two), one.x
        for _ in range(2):
            y = both(y) if kind is None else checkpoint(both, y, use_reentrant=kind)
        one.loss(y).backward()
        found.append((one.grads(), two.grads()))
    plain, *others = found
    return [same(got, want) for other in others for got, want in zip(other, plain, strict=True)]


def test_activation_checkpointing_gives_the_same_bits(ranks: Ranks) -> None:
    for right in ranks.run(on, 4, recomputed)[:4]:
        assert right == [True] * 4


# ---- what a graph holds


@pytest.fixture(scope="module")
def alone() -> Iterator[Runtime]:
    with Runtime() as rt:
        yield rt


def alive(kind: type) -> list[Any]:
    """All objects of this class that the interpreter knows."""
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is kind]


@pytest.mark.parametrize("kind", ["layer", "flow", "checkpointed"])
def test_a_graph_keeps_x_and_the_handle_but_no_rows(alone: Runtime, kind: str) -> None:
    parts, saved = Parts(alone), []
    routing = Router(num_topk=4)(parts.x @ parts.gate.t())
    may_be_kept = {t.data_ptr() for t in (*parts.leaves().values(), routing.topk_idx, routing.topk_weights)}
    before, old = len(alive(Handle)), {id(tensor) for tensor in alive(Tensor)}

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.data_ptr())
        return tensor.detach()

    if kind == "checkpointed":
        y = checkpoint(parts, parts.x, use_reentrant=False)
    else:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if kind == "layer":
                y = alone.moe(parts.x, routing, parts.experts())
            else:
                received, handle = alone.dispatch(parts.x, routing, EXPERTS)
                y = alone.combine(received.rows, handle, weighted=False)
                del received, handle
    assert set(saved) <= may_be_kept and bool(saved) == (kind == "layer")
    rows_bytes = TOKENS * 4 * HIDDEN * 4
    held = [t.numel() * t.element_size() for t in alive(Tensor) if id(t) not in old and t is not y]
    assert max(held) < rows_bytes // 2 and len(alive(Handle)) == before + 1
    del y
    assert len(alive(Handle)) == before  # dropped without a backward


def test_a_graph_is_freed_after_a_failed_and_a_second_backward(alone: Runtime) -> None:
    parts, before = Parts(alone), len(alive(Handle))
    loss = parts.loss(parts(parts.x))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    del loss
    assert len(alive(Handle)) == before


@pytest.mark.parametrize("name", ["x", "topk_weights", *TENSORS])
def test_a_change_in_place_before_backward_is_an_error(alone: Runtime, name: str) -> None:
    parts = Parts(alone)
    routing = Router(num_topk=4)(parts.x @ parts.gate.t())
    routing = Routing(routing.topk_idx, routing.topk_weights.clone())
    y = alone.moe(parts.x, routing, parts.experts())
    with torch.no_grad():
        {**parts.leaves(), "topk_weights": routing.topk_weights}[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        parts.loss(y).backward()


@pytest.mark.parametrize("name", ["x", "topk_weights"])
def test_the_same_for_identity_experts_in_combine(alone: Runtime, name: str) -> None:
    parts, case = Parts(alone), replace(CASE, ranks=1, nodes=1)
    routing = Routing(torch.tensor([[0, 10], [11, 11]]), torch.rand(2, 2, requires_grad=True))
    x = torch.randn(2, HIDDEN, requires_grad=True)
    received, handle = alone.dispatch(x, routing, case.placement())
    y = alone.combine(received.rows, handle, weighted=True)
    with torch.no_grad():
        {"x": x, "topk_weights": routing.topk_weights}[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        parts.loss(y).backward()
