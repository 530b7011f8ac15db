"""The Runtime itself: over which ranks it works, what it holds, what it says about itself."""

from __future__ import annotations

import os
import random
import time
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moeloom import BF16, FP8, FP32, Experts, Plan, Router, Routing, Runtime, Topology, env
from moeloom.backends.cpu import backend
from moeloom.backends.cpu.wire import Wire
from moeloom.backends.shared_memory import SharedFile
from moeloom.errors import MoeloomError
from tests.support.failure import Attempt, Layer, attempt, layer, layer_of, works
from tests.support.pool import Ranks, group_of, runtime_of

FOUR = (0, 1, 2, 3)
FULL_SHAPE = {"tokens": 70, "hidden": 12, "topk": 3}


# ---- over which ranks


def over_world() -> tuple[int, int, bool]:
    with Runtime(timeout=30.0) as rt:
        return rt.rank, rt.topology.num_ranks, works(rt)


def test_default_group(ranks: Ranks) -> None:
    assert ranks.run(over_world) == [(rank, 6, True) for rank in range(6)]


class SlowWire(Wire):
    """A rank that takes long to connect."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        time.sleep(0.5)


def construct_only() -> Attempt | None:
    """Nothing but construction, which takes rank 3 longer than the others."""
    group = group_of(FOUR)
    if group is None:
        return None
    backend.Wire = SlowWire if dist.get_rank() == 3 else Wire
    try:
        return attempt(lambda: Runtime(group, topology=Topology.split(4, 2)).close())
    finally:
        backend.Wire = Wire


def test_nobody_closes_before_all_have_connected(ranks: Ranks) -> None:
    """It would break off the connecting of the others."""
    for told in ranks.run(construct_only)[:4]:
        assert told.text == "" and told.seconds > 0.4


def over_subgroup(members: tuple[int, ...]) -> tuple[int, bool] | str:
    """Rank in the group, and whether it works; what the others are told."""
    group = group_of(members)
    if group is None:
        return attempt(lambda: Runtime(dist.distributed_c10d.GroupMember.NON_GROUP_MEMBER)).text
    with Runtime(group, timeout=30.0) as rt:
        return rt.rank, works(rt)


@pytest.mark.parametrize("members", [(4,), (5, 2), (1, 3, 4), (0, 1, 2, 4, 5)])
def test_subgroup(ranks: Ranks, members: tuple[int, ...]) -> None:
    outcomes = ranks.run(over_subgroup, members)
    assert [outcomes[rank] for rank in sorted(members)] == [(place, True) for place in range(len(members))]
    for rank in set(range(6)) - set(members):
        assert "does not contain this rank" in outcomes[rank]


def over_mesh() -> tuple[bool, str, tuple[int, bool]]:
    flat = init_device_mesh("cpu", (6,), mesh_dim_names=("ep",))
    square = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "ep"))
    with Runtime(flat, timeout=30.0) as rt:
        right = works(rt)
    refused = attempt(lambda: Runtime(square))
    with Runtime(square["ep"], timeout=30.0) as rt:
        return right, f"{refused.error}: {refused.text}", (rt.topology.num_ranks, works(rt))


def test_device_mesh(ranks: Ranks) -> None:
    for right, refused, of_dimension in ranks.run(over_mesh):
        assert right and of_dimension == (3, True)
        assert refused.startswith("ValueError: group is a DeviceMesh of 2 dimensions; pass one of its dimensions")


def test_without_process_group() -> None:
    assert not dist.is_initialized()
    with Runtime() as rt:
        assert (rt.rank, rt.topology.num_ranks) == (0, 1)
        assert works(rt) and works(rt, tokens=0) and rt.symmetric_bytes() > 0
        told = attempt(lambda: layer_of(rt).but(topk_idx=torch.full((5, 2), 2)).run(rt))
        assert told.error == "ValueError" and "topk_idx[0, 0] is 2; allowed: 0..1" in told.text
        assert works(rt)


def on_named_nodes(names: str) -> tuple[tuple, bool]:
    before = env.declared_node()
    env.declare_node(names[dist.get_rank()])
    try:
        with Runtime(timeout=30.0) as rt:
            return rt.topology.nodes, works(rt, tokens=70)
    finally:
        os.environ.pop(env.NODE) if before is None else env.declare_node(before)


def test_declared_nodes(ranks: Ranks) -> None:
    """Also ranks of one node that are not neighbours, and nodes of different size."""
    assert ranks.run(on_named_nodes, "abacab") == [(((0, 2, 4), (1, 5), (3,)), True)] * 6


def on_overlapping_groups() -> list[bool]:
    """Ranks 2 and 3 are in both; each Runtime has an operation of the other between its dispatch and its combine."""
    groups = [group_of(FOUR), group_of((2, 3, 4, 5))]
    runtimes = [group and Runtime(group, topology=Topology.split(4, 2), timeout=30.0) for group in groups]
    results = []
    for _ in range(3):
        flows = []
        for rt in filter(None, runtimes):
            mine = layer_of(rt)
            flows.append((rt, mine, *rt.dispatch(mine.x, mine.routing, 8)))
        for rt, mine, received, handle in flows:
            y = rt.combine(received.rows, handle, weighted=True)
            results += [torch.equal(y, weights_only(mine)), works(rt)]
    for rt in filter(None, runtimes):
        rt.close()
    return results


def weights_only(mine: Layer) -> torch.Tensor:
    """What weighted combine of the received rows gives."""
    return torch.where(mine.topk_idx >= 0, mine.topk_weights, 0.0).sum(1, keepdim=True) * mine.x


def test_overlapping_groups_used_alternately(ranks: Ranks) -> None:
    outcomes = ranks.run(on_overlapping_groups)
    assert [len(outcome) for outcome in outcomes] == [6, 6, 12, 12, 6, 6]
    assert all(map(all, outcomes))


def in_order(orders: list[list[tuple[int, ...]]]) -> list[bool]:
    """Construct over these groups in one order, use in another; ranks left out of a group have made fewer Runtimes."""
    construct, use = orders
    runtimes = {}
    for members in construct:
        group = group_of(members)
        if group is not None:
            runtimes[members] = Runtime(group, timeout=30.0)
    right = [works(runtimes[members]) for members in use if members in runtimes]
    for rt in runtimes.values():
        rt.close()
    return right


@pytest.mark.parametrize("flip", [False, True])
def test_subgroups_in_any_order(ranks: Ranks, flip: bool) -> None:
    small, other, world = (0, 1), (2, 5), tuple(range(6))
    construct = [world, other, small] if flip else [small, other, world]
    use = [small, world, small, other, world]
    outcomes = ranks.run(in_order, [construct, use])
    assert [len(outcome) for outcome in outcomes] == [4, 4, 3, 2, 2, 3]
    assert all(map(all, outcomes))


def with_different_history() -> list[bool]:
    rank = dist.get_rank()
    held = [torch.ones(1000 * (rank + 1)) for _ in range(rank)]
    files = [SharedFile.create(4096 * (rank + 1)) for _ in range(3 * (rank % 2))]
    del held[::2]
    with Runtime(timeout=30.0) as rt:
        right = [works(rt), works(rt, tokens=300)]
    for file in files:
        file.unlink()
    return right


def test_different_memory_history(ranks: Ranks) -> None:
    assert ranks.run(with_different_history) == [[True, True]] * 6


# ---- symmetric memory


def region(rows: int, row_bytes: int) -> int:
    return -(-rows * row_bytes // 64) * 64


def bytes_by_contract(tokens: int, forwarded: int, lanes: int, shape: dict[str, int]) -> int:
    """Own tokens and forwarded ones; routing words and payload for dispatch, a row per lane for combine."""
    rows, payload = tokens * (1 + forwarded), 4 * shape["hidden"]
    dispatch = region(rows, 4 * (1 + 2 * shape["topk"])) + region(rows, payload)
    return -(-max(dispatch, region(rows * lanes, payload)) // 4096) * 4096


def held_after(members: tuple[int, ...], nodes: int, exchange: str, reduction: str, skewed: bool) -> tuple | None:
    """Symmetric bytes after one call, and whether the call was right."""
    group = group_of(members)
    if group is None:
        return None
    topology = Topology.split(len(members), nodes)
    with Runtime(group, topology=topology, max_tokens=100, timeout=30.0) as rt:
        mine = layer_of(rt, **FULL_SHAPE)
        if skewed:
            mine = mine.but(topk_idx=torch.zeros_like(mine.topk_idx))
        recipe = FP32.with_reduction(reduction)
        y = rt.moe(mine.x, mine.routing, mine.experts, plan=Plan(exchange=exchange), recipe=recipe)
        return rt.symmetric_bytes(), torch.equal(y, mine.y)


SIZES = {  # (ranks, nodes): sources that a rank forwards for, ranks of the largest node
    (2, 1): (0, 2), (4, 2): (1, 2), (5, 2): (2, 3), (6, 3): (2, 2),
}  # fmt: skip


@pytest.mark.parametrize(("num_ranks", "nodes"), SIZES)
def test_symmetric_memory_is_what_the_contract_says(ranks: Ranks, num_ranks: int, nodes: int) -> None:
    forwarded, largest = SIZES[num_ranks, nodes]
    for exchange, reduction in product(("direct", "hybrid"), ("per_rank", "per_slot")):
        topk = FULL_SHAPE["topk"]
        lanes = topk if reduction == "per_slot" else min(topk, num_ranks if exchange == "direct" else largest)
        wanted = bytes_by_contract(100, forwarded if exchange == "hybrid" else 0, lanes, FULL_SHAPE)
        for skewed in (False, True):
            outcomes = ranks.run(held_after, tuple(range(num_ranks)), nodes, exchange, reduction, skewed)
            assert outcomes[:num_ranks] == [(wanted, True)] * num_ranks, (exchange, reduction, skewed)


def grow() -> tuple[list[int], list[bool]] | None:
    """Sizes after each step, with a handle from before every growth; only rank 1's tokens make it necessary."""
    group = group_of(FOUR)
    if group is None:
        return None
    sizes, right = [], []
    with Runtime(group, topology=Topology.split(4, 2), timeout=30.0) as rt:
        flows = []
        for tokens in (3, 64, 65, 10, 300):
            mine = layer_of(rt, tokens=tokens if rt.rank == 1 else 2, topk=3)
            flows.append((mine, *rt.dispatch(mine.x, mine.routing, 8, plan=Plan(exchange="hybrid"))))
            sizes.append(rt.symmetric_bytes())
        for mine, received, handle in reversed(flows):
            right.append(torch.equal(rt.combine(received.rows, handle, weighted=True), weights_only(mine)))
            right.append(works(rt))
    return sizes, right


def test_growth_by_agreed_steps(ranks: Ranks) -> None:
    def step(tokens: int) -> int:
        return bytes_by_contract(tokens, forwarded=1, lanes=0, shape={"hidden": 8, "topk": 3})

    for sizes, right in ranks.run(grow)[:4]:
        assert sizes == [step(64), step(64), step(128), step(128), step(512)]  # powers of two; never shrinks
        assert all(right)


# ---- calls


def payload_of(rank: int, dtype: torch.dtype, hidden: int) -> torch.Tensor:
    return (torch.arange(5 * hidden).view(5, hidden) % 7 + rank).to(dtype)


def send_second_payload() -> list[bool] | None:
    """Other hidden size, other dtype, over a known routing; a row tells by its last column where it comes from."""
    group = group_of(FOUR)
    if group is None:
        return None
    right = []
    for exchange, order in product(("direct", "hybrid"), ("expert", "rank", "batched")):
        with Runtime(group, topology=Topology.split(4, 2), timeout=30.0) as rt:
            mine = layer_of(rt)
            name = (10 * rt.rank + torch.arange(5.0)).unsqueeze(1)
            x = torch.cat([mine.x, name], 1)
            first, handle = rt.dispatch(x, mine.routing, 8, order=order, plan=Plan(exchange=exchange))
            for dtype, hidden in ((torch.bfloat16, 33), (torch.float32, 2)):
                y = payload_of(rt.rank, dtype, hidden)
                second, same = rt.dispatch(y, handle)
                right.append(same is handle and second.rows.shape[:-1] == first.rows.shape[:-1])
                names = first.rows.view(-1, 9)[:, -1].int().tolist()
                for rows, index in zip(second.rows.view(-1, hidden), names, strict=True):
                    source, token = divmod(index, 10)
                    wanted = payload_of(source, dtype, hidden)[token]
                    right.append(torch.equal(rows, wanted) or (index == 0 and not rows.any()))  # padding is zeros
    return right


def test_second_payload(ranks: Ranks) -> None:
    for right in ranks.run(send_second_payload)[:4]:
        assert all(right)


def hold_many_handles(count: int) -> list[bool] | None:
    group = group_of(FOUR)
    if group is None:
        return None
    right = []
    with Runtime(group, topology=Topology.split(4, 2), timeout=30.0) as rt:
        flows = []
        for number in range(count):
            mine = layer(rt.rank + 100 * number, 4, tokens=1 + number)  # only x and routing matter here
            mine = mine.but(topk_idx=mine.topk_idx.clamp(max=7))
            plan = Plan(exchange=("direct", "hybrid")[number % 2])
            flows.append((weights_only(mine), *rt.dispatch(mine.x, mine.routing, 8, plan=plan)))
            del mine  # the handle keeps what it needs
        random.Random(0).shuffle(flows)
        for wanted, received, handle in flows:
            right.append(torch.equal(rt.combine(received.rows, handle, weighted=True), wanted))
    return right


def test_many_handles_in_any_order(ranks: Ranks) -> None:
    for right in ranks.run(hold_many_handles, 20)[:4]:
        assert len(right) == 20 and all(right)


def look_at_arguments() -> list[bool] | None:
    group = group_of(FOUR)
    if group is None:
        return None
    with Runtime(group, topology=Topology.split(4, 2), timeout=30.0) as rt:
        mine = layer_of(rt)
        tensors = [mine.x, mine.topk_idx, mine.topk_weights, mine.experts.gate_up, mine.experts.down]
        before, versions = [tensor.clone() for tensor in tensors], [tensor._version for tensor in tensors]
        out = torch.full_like(mine.x, 7.0)
        right = [mine.run(rt, out) is out, torch.equal(out, mine.y)]
        received, handle = rt.dispatch(mine.x, mine.routing, 8)
        rows, back = received.rows.clone(), torch.full_like(mine.x, 7.0)
        right += [
            rt.combine(received.rows, handle, weighted=True, out=back) is back,
            torch.equal(back, weights_only(mine)),
        ]
        right.append(torch.equal(received.rows, rows))
        right += [torch.equal(old, new) for old, new in zip(before, tensors, strict=True)]
        right += [tensor._version == version for tensor, version in zip(tensors, versions, strict=True)]
        told = [attempt(mine.run, rt, mine.x.new_zeros(4, 8)), attempt(mine.run, rt, mine.x.bfloat16())]
        told.append(attempt(lambda: rt.combine(rows, handle, weighted=True, out=mine.x.new_zeros(3, 5, 8))))
        right += ["out is [" in each.text and each.error == "ValueError" for each in told]
        return [*right, works(rt)]


def test_inputs_stay_and_out_is_written(ranks: Ranks) -> None:
    for right in ranks.run(look_at_arguments)[:4]:
        assert all(right), right


def test_default_recipes() -> None:
    with Runtime() as rt:
        mine = layer_of(rt)
        for dtype, recipe in ((torch.float32, FP32), (torch.bfloat16, BF16)):
            x = mine.x.to(dtype)
            y = rt.moe(x, mine.routing, mine.experts)
            assert y.dtype == dtype and torch.equal(y, rt.moe(x, mine.routing, mine.experts, recipe=recipe))
            assert torch.equal(y.float(), mine.y)  # small integers
        assert (
            "torch.float16; allowed: torch.float32, torch.bfloat16"
            in attempt(lambda: rt.moe(mine.x.half(), mine.routing, mine.experts)).text
        )
        assert attempt(lambda: rt.moe(mine.x, mine.routing, mine.experts, recipe=BF16)).error == "ValueError"


# ---- what it says about itself


def traffic(nodes: int, padding: int, exchange: str) -> tuple | None:
    """Bytes between nodes and rows by stage, for 10 tokens and, behind them, `padding` ones that go nowhere."""
    group = group_of(FOUR)
    if group is None:
        return None
    with Runtime(group, topology=Topology.split(4, nodes), timeout=30.0) as rt:
        mine = layer_of(rt, tokens=10)
        x = torch.cat([mine.x, torch.full((padding, 8), float("nan"))])
        topk_idx = torch.cat([mine.topk_idx, torch.full((padding, 2), -1)])
        topk_weights = torch.cat([mine.topk_weights, torch.full((padding, 2), float("nan"))])
        y = rt.moe(x, Routing(topk_idx, topk_weights), mine.experts, plan=Plan(exchange=exchange))
        assert torch.equal(y[:10], mine.y) and not y[10:].any()
        stats = rt.stats()
        assert all(stage.calls == 1 and stage.seconds > 0 for stage in stats.values())
        routed = int((mine.topk_idx >= 0).sum())
        return {name: (stage.scale_out_bytes, stage.rows) for name, stage in stats.items()}, routed


@pytest.mark.parametrize("exchange", ["direct", "hybrid"])
def test_padding_tokens_cause_no_traffic(ranks: Ranks, exchange: str) -> None:
    without, padded = (ranks.run(traffic, 2, padding, exchange)[:4] for padding in (0, 90))
    assert without == padded
    assert list(without[0][0]) == ["dispatch", "experts", "combine"]
    assert sum(stats["dispatch"][1] for stats, _ in without) == sum(routed for _, routed in without)
    # a row of 8 fp32 and 5 routing words for each token that leaves its node; one fp32 row comes back
    sent = [sum(stats[stage][0] for stats, _ in without) for stage in ("dispatch", "combine")]
    assert sent[0] % (32 + 20) == 0 and sent[0] // (32 + 20) == sent[1] // 32 > 0


def test_one_node_sends_nothing_out(ranks: Ranks) -> None:
    for stats, _ in ranks.run(traffic, 1, 0, "direct")[:4]:
        assert all(scale_out_bytes == 0 for scale_out_bytes, _ in stats.values())


def explain(nodes: int) -> tuple[str, str, bool] | None:
    group = group_of(FOUR)
    if group is None:
        return None
    with Runtime(group, topology=Topology.split(4, nodes), timeout=30.0) as rt:
        plan = rt.plan(num_tokens=128, hidden=8, num_experts=8, num_topk=2)
        return str(plan), plan.explain(), torch.equal(layer_of(rt).but(plan=plan).run(rt), layer_of(rt).y)


def test_plan_for_any_number_of_tokens() -> None:
    with Runtime() as rt:
        for tokens in (None, 0, 1, 2, 1 << 20):
            assert rt.plan(num_tokens=tokens, hidden=8, num_experts=8, num_topk=8) == Plan(exchange="direct")


@pytest.mark.parametrize("nodes", [1, 2])
def test_plan_explains_itself_alike_on_all_ranks(ranks: Ranks, nodes: int) -> None:
    outcomes = ranks.run(explain, nodes)[:4]
    assert len(set(outcomes)) == 1
    chosen, text, right = outcomes[0]
    assert right and text.startswith(f"plan: {chosen} (")
    marked = [line for line in text.splitlines() if line.startswith("* ")]
    assert len(marked) == 1 and chosen.split(", ")[1] in marked[0]
    assert ("one node: nothing to forward" in text) == (nodes == 1)


def use_a_foreign_handle() -> str:
    x, routing = torch.randn(3, 8), Routing(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    group = group_of((0,))
    if group is None:
        return ""
    with Runtime(group) as first, Runtime(group) as second:
        received, handle = first.dispatch(x, routing, 1)
        second.dispatch(x, routing, 1)
        with pytest.raises(ValueError, match="another Runtime") as caught:
            second.combine(received.rows, handle, weighted=True)
        first.combine(received.rows, handle, weighted=True)
        return str(caught.value)


def test_a_handle_of_another_runtime_is_refused(ranks: Ranks) -> None:
    assert "operation #1" in ranks.run(use_a_foreign_handle)[0]


def mix_capacities() -> str:
    rt = runtime_of((0, 1), 1)
    if rt is None:
        return ""
    x, routing = torch.randn(3, 8), Routing(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    with pytest.raises(ValueError, match="differs between ranks") as caught:
        rt.dispatch(x, routing, 2, capacity=16 if rt.rank else None)
    return str(caught.value)


def test_a_capacity_on_some_ranks_only_is_an_error(ranks: Ranks) -> None:
    texts = ranks.run(mix_capacities)[:2]
    assert texts[0] == texts[1] and "capacity" in texts[0]


def test_route_pack_and_check() -> None:
    """What GPUs have kernels for: here the router, the quantiser, and nothing to find."""
    with Runtime("self", backend="cpu") as rt:
        logits, bias = torch.randn(9, 8), torch.randn(8)
        router = Router(num_topk=2, score="sigmoid")
        found, wanted = rt.route(router, logits, bias), router(logits, bias)
        assert torch.equal(found.topk_idx, wanted.topk_idx) and torch.equal(found.topk_weights, wanted.topk_weights)
        experts = Experts(torch.randn(2, 64, 256).bfloat16(), torch.randn(2, 256, 32).bfloat16())
        assert rt.pack(experts, BF16) is experts
        packed = rt.pack(experts, FP8)
        assert packed.scales is not None and rt.pack(packed, FP8) is packed
        assert torch.equal(packed.gate_up.view(torch.uint8), experts.quantized().gate_up.view(torch.uint8))
        rt.check()
        with pytest.raises(ValueError, match="logits is on meta"):
            rt.route(router, logits.to("meta"))
    with pytest.raises(MoeloomError, match="closed"):
        rt.check()
