"""What goes wrong on one rank of several on GPUs: all hear of it, the devices stay usable, memory comes back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moeloom import BF16, Placement, Plan, RankPool, Routing, Runtime
from moeloom.backends.base import Handle
from moeloom.errors import CapabilityError, CapacityError, MoeloomError, PeerTimeout
from moeloom.types import Received
from tests.sm90.test_layer import HIDDEN, MOST, TOPK, every_expert, held, inputs, normal, placement_of
from tests.support.compare import equal_bits
from tests.support.pool import Ranks, group_of

pytestmark = pytest.mark.gpu

RANKS = 2


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    pool = Ranks("cuda")
    yield pool
    pool.close()


class Layer:
    """A Runtime over the first ranks of the pool, and what to call it with."""

    def __init__(self, rt: Runtime) -> None:
        self.rt, device = rt, rt.backend.device
        self.placement = placement_of(RANKS, False)
        self.experts = held(every_expert(), self.placement, rt.rank, device)
        x, routing = inputs(2 * rt.rank, self.placement)  # of those with tokens
        self.x, self.routing = x.to(device), Routing(routing.topk_idx.to(device), routing.topk_weights.to(device))

    def __call__(self, **changes: Any) -> Tensor:
        given = {"x": self.x, "routing": self.routing, "experts": self.experts, **changes}
        with torch.no_grad():
            y = self.rt.moe(given["x"], given["routing"], given["experts"])
        torch.cuda.synchronize()
        return y

    def dispatch(self, **options: Any) -> tuple[Received, Handle]:
        found = self.rt.dispatch(self.x, self.routing, self.placement, **options)
        torch.cuda.synchronize()
        return found


def on_ranks(case: Any) -> list[str]:
    """On every rank of the pool: `case(layer)`, between two good calls of equal bits."""
    group = group_of(tuple(range(RANKS)))
    if group is None:
        return []
    with Runtime(group, backend="sm90", timeout=20) as rt:
        layer = Layer(rt)
        before = layer()
        wrong = case(layer)
        if not equal_bits(layer(), before):
            wrong.append("a good call afterwards gives other bits")
        return [f"rank {rt.rank}: {line}" for line in wrong]


def raises(call: Any, kind: type[Exception], *parts: str) -> list[str]:
    try:
        call()
    except kind as error:
        return [f"{error!r} does not say {part!r}" for part in parts if part not in str(error)]
    except Exception as error:
        return [f"{error!r}, wanted {kind.__name__}"]
    return [f"no error, wanted {kind.__name__}"]


def wrong_argument(layer: Layer) -> list[str]:
    x = layer.x.float() if layer.rt.rank == 1 else layer.x
    return raises(lambda: layer.rt.moe(x, layer.routing, layer.experts, recipe=BF16), ValueError, "rank 1: x has dtype")


def wrong_id(layer: Layer) -> list[str]:
    """Found by the kernel: the next stage that begins after it says so, on all ranks."""
    ids = layer.routing.topk_idx.clone()
    if layer.rt.rank == 1:
        ids[3, 1] = 99
    with torch.no_grad():
        layer.rt.dispatch(layer.x, Routing(ids, layer.routing.topk_weights), layer.placement)
    torch.cuda.synchronize()
    return raises(layer, ValueError, "rank 1:", "topk_idx[3, 1] was 99")


def too_many_rows(layer: Layer) -> list[str]:
    layer.dispatch(capacity=8)
    wrong = raises(layer, CapacityError, "rows did not fit")
    received, handle = layer.dispatch(capacity=8, overflow="drop")
    wanted = int(layer.dispatch()[0].num_tokens_per_expert.sum()) - 8
    if int(received.num_dropped) != wanted:
        wrong.append(f"num_dropped is {int(received.num_dropped)}, wanted {wanted}")
    y = layer.rt.combine(received.rows, handle, weighted=True)
    return wrong if y.isfinite().all() else [*wrong, "y is not finite"]


def failing_experts(layer: Layer) -> list[str]:
    """One rank's experts cannot be computed, while the others are on their way to combine."""
    experts = layer.experts
    if layer.rt.rank == 1:
        experts = type(experts)(experts.gate_up, experts.down, activation=_product, placement=experts.placement)
    return raises(lambda: layer(experts=experts), CapabilityError, "rank 1:")


def _product(gate: Tensor, up: Tensor) -> Tensor:
    return gate * up


def different_calls(layer: Layer) -> list[str]:
    received, handle = layer.dispatch()
    if layer.rt.rank == 0:
        return raises(layer.dispatch, MoeloomError, "rank 0 called dispatch", "rank 1 called combine")
    return raises(
        lambda: layer.rt.combine(received.rows, handle, weighted=True), MoeloomError, "rank 0 called dispatch"
    )


def too_many_slots(layer: Layer) -> list[str]:
    """More than the kernels can do is refused before anything is launched."""
    many = Routing(torch.zeros(len(layer.x), 33, dtype=torch.int32, device="cuda"), torch.ones(len(layer.x), 33).cuda())
    call = lambda: layer.rt.dispatch(layer.x, many, layer.placement, plan=Plan("split"))  # noqa: E731
    return raises(call, ValueError, "num_topk is 33; allowed: 1..32")


def changed_ids(layer: Layer) -> list[str]:
    """They are the caller's, who may change them between dispatch and combine."""
    received, handle = layer.dispatch()
    wanted = layer.rt.combine(received.rows, handle, weighted=True)
    ids = layer.routing.topk_idx.clone()
    received, handle = layer.rt.dispatch(layer.x, Routing(ids, layer.routing.topk_weights), layer.placement)
    ids.fill_(0)
    found = layer.rt.combine(received.rows, handle, weighted=True)
    return [] if equal_bits(found, wanted) else ["a change of topk_idx after dispatch changed the sums"]


def strided_rows(layer: Layer) -> list[str]:
    """Parts of wider rows, permuted rows, and rows as order "rank" brings them."""
    wrong = []
    for order, weighted in (("expert", True), ("rank", False)):
        received, handle = layer.dispatch(order=order)
        wanted = layer.rt.combine(received.rows.clone(), handle, weighted=weighted)
        wide = torch.full((len(received.rows), HIDDEN + 24), float("nan"), dtype=torch.bfloat16, device="cuda")
        wide[:, 8 : 8 + HIDDEN] = received.rows
        turned = received.rows.t().contiguous().t()
        for name, rows in (("wider", wide[:, 8 : 8 + HIDDEN]), ("turned", turned), ("given", received.rows)):
            if not equal_bits(layer.rt.combine(rows, handle, weighted=weighted), wanted):
                wrong.append(f"order {order}, {name} rows give other bits")
    return wrong


def two_streams(layer: Layer) -> list[str]:
    """Dispatch on one stream, combine on another that is late, and memory of the handle given away before."""
    received, handle = layer.dispatch()
    wanted = layer.rt.combine(received.rows, handle, weighted=True)
    received, handle = layer.dispatch()
    rows, stream = received.rows.clone(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        found = layer.rt.combine(rows, handle, weighted=True)
    sizes = [tensor.numel() for tensor in vars(handle.paths.arrived).values()]
    del handle, received
    junk = [torch.full((size,), -77, dtype=torch.int32, device="cuda") for size in sizes * 3]
    torch.cuda.synchronize()
    return [] if equal_bits(found, wanted) and len(junk) else ["combine on another stream gives other bits"]


def late(layer: Layer) -> list[str]:
    if layer.rt.rank == 1:
        time.sleep(3)
    layer()
    return []


def other_stream(layer: Layer) -> list[str]:
    wanted = layer()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = layer()
    torch.cuda.current_stream().wait_stream(stream)
    return [] if equal_bits(found, wanted) else ["another stream gives other bits"]


CASES = [
    wrong_argument, wrong_id, too_many_rows, too_many_slots, failing_experts, different_calls, changed_ids,
    strided_rows, late, other_stream, two_streams,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_case(gpus: Ranks, case: Any) -> None:
    wrong = [line for lines in gpus.run(on_ranks, case) for line in lines]
    assert not wrong, "\n".join(wrong)


def replay_after_growth() -> list[str]:
    """A graph goes on in the memory it was captured with, and is exact beside calls in the new one."""
    group = group_of(tuple(range(RANKS)))
    if group is None:
        return []
    with Runtime(group, backend="sm90", max_tokens=MOST, timeout=20) as rt, torch.no_grad():
        layer, wrong = Layer(rt), []

        def decode() -> Tensor:
            return rt.moe(layer.x, layer.routing, layer.experts, plan=Plan("decode"))

        wanted = decode().clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = decode()
        before = rt.symmetric_bytes()
        rt.dispatch(torch.cat([layer.x, layer.x], 1), layer.routing, layer.placement)
        if rt.symmetric_bytes() < 2 * before:
            wrong.append(f"{before} bytes of symmetric memory, later {rt.symmetric_bytes()}")
        for step in range(5):
            y.fill_(float("nan"))
            graph.replay()
            if not equal_bits(y, wanted) or not equal_bits(decode(), wanted):
                wrong.append(f"step {step}: other bits")
        return [f"rank {rt.rank}: {line}" for line in wrong]


def test_replay_after_growth(gpus: Ranks) -> None:
    wrong = [line for lines in gpus.run(replay_after_growth) for line in lines]
    assert not wrong, "\n".join(wrong)


def wrong_id_in_a_replay() -> list[str]:
    """A replay cannot raise: `Runtime.check` does, on the rank whose id it is."""
    group = group_of(tuple(range(RANKS)))
    if group is None:
        return []
    with Runtime(group, backend="sm90", max_tokens=MOST, timeout=20) as rt, torch.no_grad():
        layer = Layer(rt)
        ids = layer.routing.topk_idx.clone()

        def decode() -> Tensor:
            routing = Routing(ids, layer.routing.topk_weights)
            return rt.moe(layer.x, routing, layer.experts, plan=Plan("decode"))

        decode()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = decode()
        graph.replay()
        rt.check()
        right = ids.clone()
        ids[2, 0] = 77 + rt.rank
        graph.replay()
        wrong = raises(rt.check, ValueError, f"topk_idx[2, 0] was {77 + rt.rank}")
        ids.copy_(right)
        graph.replay()
        rt.check()
        if not y.isfinite().all():
            wrong.append("y is not finite")
        return [f"rank {rt.rank}: {line}" for line in wrong]


def test_wrong_id_in_a_replay(gpus: Ranks) -> None:
    wrong = [line for lines in gpus.run(wrong_id_in_a_replay) for line in lines]
    assert not wrong, "\n".join(wrong)


def until_killed(seconds: float) -> list[str]:
    rt = Runtime(backend="sm90", timeout=seconds)
    layer = Layer(rt)
    layer()
    if rt.rank == 1:
        os._exit(1)
    time.sleep(0.5)
    begin = time.monotonic()
    wrong = raises(layer, PeerTimeout, "rank(s) 1")
    if time.monotonic() - begin > seconds + 5:
        wrong.append(f"after {time.monotonic() - begin:.1f} s")
    wrong += raises(layer, PeerTimeout, "rank(s) 1")
    rt.close()
    with Runtime("self", backend="sm90") as alone:
        x = normal(5, HIDDEN, seed=1).bfloat16().cuda()
        routing = Routing(torch.arange(5 * TOPK, device="cuda").view(5, TOPK) % 16, torch.ones(5, TOPK, device="cuda"))
        every = held(every_expert(), Placement.even(16, 1), 0, "cuda")
        with torch.no_grad():
            y = alone.moe(x, routing, every)
        if not y.isfinite().all() or not y.any():
            wrong.append("the survivor's new Runtime does not work")
    return wrong


def test_a_killed_rank() -> None:
    with RankPool(RANKS, device="cuda") as pool:
        survivor, killed = pool.outcomes(until_killed, 4.0, timeout=60)
    assert survivor == [] and isinstance(killed, Exception), (survivor, killed)


def open_and_close(rounds: int) -> list[str]:
    """Free memory of the device is what it was, also after an exception inside."""
    group = group_of(tuple(range(RANKS)))
    if group is None:
        return []
    free = []
    for number in range(rounds):
        try:
            with Runtime(group, backend="sm90", max_tokens=2048, timeout=20) as rt:
                Layer(rt)()
                if number % 2:
                    raise KeyError("on all ranks")
        except KeyError:
            pass
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    lost = free[1] - free[-1]
    return [f"{lost} bytes are lost in {rounds - 2} rounds: {free}"] if lost > 4 << 20 else []


def test_memory_comes_back(gpus: Ranks) -> None:
    wrong = [line for lines in gpus.run(open_and_close, 12) for line in lines]
    assert not wrong, "\n".join(wrong)


def repeated(steps: int) -> list[str]:
    """Allocated memory stays flat over training steps, forwards, forwards with a dropped result, and exceptions."""
    group = group_of(tuple(range(RANKS)))
    if group is None:
        return []
    wrong = []
    with Runtime(group, backend="sm90", timeout=20) as rt:
        layer = Layer(rt)
        layer.experts.gate_up.requires_grad_(), layer.experts.down.requires_grad_()
        x = layer.x.requires_grad_()

        def train() -> None:
            rt.moe(x, layer.routing, layer.experts).float().sum().backward()
            for leaf in (x, layer.experts.gate_up, layer.experts.down):
                leaf.grad = None

        def drop() -> None:
            rt.moe(x, layer.routing, layer.experts)

        def fail() -> None:
            try:
                rt.moe(x.double(), layer.routing, layer.experts)
            except ValueError:
                pass

        for step in (train, layer, drop, fail):
            seen = []
            for _ in range(steps):
                step()
                seen.append(torch.cuda.memory_allocated())
            if seen[-1] > seen[2]:
                wrong.append(f"rank {rt.rank}: {step}: {seen[2]} bytes after 3, {seen[-1]} after {steps}")
    return wrong


def test_memory_is_flat(gpus: Ranks) -> None:
    wrong = [line for lines in gpus.run(repeated, 300) for line in lines]
    assert not wrong, "\n".join(wrong)
