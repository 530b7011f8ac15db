"""The decode pipeline: the bits of split, with fixed shapes and no value read by the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moeloom import FP32, RECIPES, CapabilityError, CapacityError, Experts, Placement, Plan, Routing, Runtime, Topology
from moeloom.config import recipe_for
from tests.support.cases import Case, covering_cases
from tests.support.exchange import differences, expert_fn
from tests.support.host_reads import NoHostReads
from tests.support.pool import Ranks, group_of, runtime_of

MAX_TOKENS = 131
_fixed: dict[tuple, Runtime] = {}  # of a rank's process


def fixed_runtime(members: tuple[int, ...], nodes: int, max_tokens: int = MAX_TOKENS) -> Runtime | None:
    """A Runtime of fixed size, kept."""
    group = group_of(members)
    if group is None:
        return None
    key = (members, nodes, max_tokens)
    if key not in _fixed:
        topology = Topology.split(len(members), nodes)
        _fixed[key] = Runtime(group, topology=topology, max_tokens=max_tokens, timeout=30)
    return _fixed[key]


def foreign(received, placement: Placement, rank: int) -> torch.Tensor:
    """Expert outputs without reading a value: padding becomes NaN."""
    held = torch.tensor([*placement.slots[rank], 0])
    rows = expert_fn(received.rows, held[received.topk_idx])
    return torch.where((received.topk_idx < 0).unsqueeze(-1), float("nan"), rows)


def same_as_split(case: Case) -> list[str]:
    """Both pipelines on one Runtime: y bit for bit, and every valid row in its place."""
    rt = fixed_runtime(case.members, case.nodes)
    if rt is None:
        return []
    (x, routing), placement = case.inputs(rt.rank), case.placement()
    recipe = recipe_for(case.torch_dtype).with_reduction(case.reduction)
    how = {"order": case.order, "alignment": case.alignment}
    received, handle = rt.dispatch(x, routing, placement, plan=Plan("split", case.exchange), **how)
    wanted = rt.combine(foreign(received, placement, rt.rank), handle, weighted=case.weighted, recipe=recipe)
    if case.order == "batched":  # ids repeat within a token here: more than a row per token for one expert
        how["capacity"] = -(-case.ranks * MAX_TOKENS * case.topk // case.alignment) * case.alignment
    with NoHostReads():
        fixed, handle = rt.dispatch(x, routing, placement, plan=Plan("decode", case.exchange), **how)
        y = rt.combine(foreign(fixed, placement, rt.rank), handle, weighted=case.weighted, recipe=recipe)
    wrong = differences("y", y, wanted)
    wrong += differences("counts", fixed.num_tokens_per_expert, received.num_tokens_per_expert)
    for slot, count in enumerate(received.num_tokens_per_expert.tolist()):
        if case.order == "batched":
            mine, other = fixed.rows[slot, :count], received.rows[slot, :count]
        else:
            begin, start = int(fixed.expert_start[slot]), int(received.expert_start[slot])
            mine, other = fixed.rows[begin : begin + count], received.rows[start : start + count]
        wrong += differences(f"rows of slot {slot}", mine, other)
    wrong += differences("padding", fixed.rows[fixed.topk_idx < 0], torch.zeros_like(fixed.rows[fixed.topk_idx < 0]))
    return [f"rank {rt.rank}: {line}" for line in wrong]


CASES = [case for case in covering_cases() if case.order != "rank"]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_bits_of_split(ranks: Ranks, number: int) -> None:
    wrong = [line for lines in ranks.run(same_as_split, CASES[number]) for line in lines]
    assert not wrong, f"{CASES[number]}\n" + "\n".join(wrong)


def layer_twice(nodes: int, exchange: str, recipe_name: str, reduction: str) -> list[str]:
    rt = fixed_runtime((0, 1, 2, 3), nodes, 8)
    if rt is None:
        return []
    recipe = RECIPES[recipe_name].with_reduction(reduction)
    placement = Placement.even(10, 4, num_identity=1)
    generator = torch.Generator().manual_seed(rt.rank)
    local = placement.num_local(rt.rank)
    experts = Experts(
        torch.randn(local, 34, 20, generator=generator).to(recipe.dtype),
        torch.randn(local, 20, 17, generator=generator).to(recipe.dtype),
        gate_up_bias=torch.randn(local, 34, generator=generator).to(recipe.dtype),
        down_bias=torch.randn(local, 20, generator=generator).to(recipe.dtype),
        placement=placement,
    )
    wrong, shapes = [], set()
    for step in range(20):
        num_tokens = 8 if step % 2 else 3
        x = torch.randn(8, 20, generator=generator).to(recipe.dtype)
        ids = torch.randint(-1, 11, (8, 3), generator=generator)
        ids[num_tokens:] = -1  # fewer tokens: rows of -1
        routing = Routing(ids, torch.rand(8, 3, generator=generator))
        plan = Plan("decode", exchange)
        with NoHostReads():  # a mode does not see into an operator, so what rt.moe's operator does is called itself
            y, _ = rt.layer_call(experts, recipe, plan, None).forward(x, routing, experts)
        wrong += differences("operator", rt.moe(x, routing, experts, recipe=recipe, plan=plan), y)
        shapes.add(tuple(y.shape))
        wanted = rt.moe(x, routing, experts, recipe=recipe, plan=Plan("split", exchange))
        wrong += differences(f"step {step}", y, wanted)
    return wrong + ([] if len(shapes) == 1 else [str(shapes)])


@pytest.mark.parametrize("reduction", ["per_rank", "per_slot"])
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize(("nodes", "exchange"), [(1, "direct"), (2, "direct"), (2, "hybrid")])
def test_layer_has_the_bits_of_split(ranks: Ranks, nodes: int, exchange: str, recipe: str, reduction: str) -> None:
    assert ranks.run(layer_twice, nodes, exchange, recipe, reduction)[:4] == [[]] * 4


def received_shapes(order: str) -> set[tuple]:
    rt = fixed_runtime((0, 1), 2, 8)
    if rt is None:
        return set()
    generator, shapes = torch.Generator().manual_seed(rt.rank), set()
    for _ in range(20):
        routing = Routing(torch.randint(-1, 5, (8, 2), generator=generator), torch.rand(8, 2, generator=generator))
        received, _ = rt.dispatch(
            torch.randn(8, 4), routing, 5, order=order, alignment=4, plan=Plan("decode", "hybrid")
        )
        named = vars(received).items()
        shapes.add(tuple((name, tuple(value.shape)) for name, value in named if isinstance(value, torch.Tensor)))
    return shapes


@pytest.mark.parametrize("order", ["expert", "batched"])
def test_shapes_do_not_depend_on_the_routing(ranks: Ranks, order: str) -> None:
    assert [len(shapes) for shapes in ranks.run(received_shapes, order)[:2]] == [1, 1]


def two_in_flight(nodes: int, exchange: str, steps: int) -> tuple[list[str], int]:
    """Two dispatches sent before either is received, both combines too; the buffers do not grow."""
    rt = fixed_runtime((0, 1, 2, 3), nodes, 8)
    if rt is None:
        return [], 0
    generator, wrong, sizes = torch.Generator().manual_seed(rt.rank), [], set()
    plan = Plan("decode", exchange)
    for step in range(steps):
        calls = []
        for _ in range(2):
            ids = torch.randint(-1, 10, (8, 3), generator=generator)
            ids[step % 9 :] = -1
            calls.append((torch.randn(8, 6, generator=generator), Routing(ids, torch.rand(8, 3, generator=generator))))
        pending = [rt.dispatch(x, routing, 10, plan=plan, async_op=True) for x, routing in calls]
        flows = [one.wait() for one in pending]
        assert pending[0].wait() is flows[0]
        back = [rt.combine(received.rows, handle, weighted=True, async_op=True) for received, handle in flows]
        for (x, routing), sums in zip(calls, [one.wait() for one in back], strict=True):
            routed = (routing.topk_idx >= 0) * routing.topk_weights
            wanted = sum(x * routed[:, k : k + 1] for k in range(3))
            if not torch.allclose(sums, wanted, atol=1e-5):
                wrong.append(f"step {step}")
        sizes.add(rt.symmetric_bytes())
    return wrong, len(sizes)


@pytest.mark.parametrize(("nodes", "exchange", "steps"), [(1, "direct", 1000), (2, "hybrid", 60), (2, "direct", 60)])
def test_two_in_flight_without_growth(ranks: Ranks, nodes: int, exchange: str, steps: int) -> None:
    assert ranks.run(two_in_flight, nodes, exchange, steps)[:4] == [([], 1)] * 4


def errors() -> list[str]:
    rt = fixed_runtime((0, 1), 1, 8)
    if rt is None:
        return []
    x, plan, texts = torch.randn(4, 4), Plan("decode", "direct"), []

    def catch(kind: type[Exception], call) -> None:
        with pytest.raises(kind) as caught:
            call()
        texts.append(str(caught.value))

    def routing(value: int) -> Routing:
        return Routing(torch.full((4, 1), value), torch.ones(4, 1))

    rt.dispatch(x, routing(99 if rt.rank else 0), 2, plan=plan)
    catch(ValueError, lambda: rt.dispatch(x, routing(0), 2, plan=plan))
    rt.dispatch(x, routing(0), 2, plan=plan, capacity=3)  # rank 0 gets 8 rows
    catch(CapacityError, lambda: rt.dispatch(x, routing(0), 2, plan=plan))
    received, handle = rt.dispatch(x, routing(0), 2, plan=plan, capacity=3, overflow="drop")
    assert int(received.num_dropped) == (5 if rt.rank == 0 else 0) and len(received.rows) == 3
    y = rt.combine(received.rows, handle, weighted=True)
    torch.testing.assert_close(y, torch.where(torch.tensor(rt.rank == 0) & (torch.arange(4) < 3).unsqueeze(1), x, 0))
    catch(CapabilityError, lambda: rt.dispatch(x.requires_grad_(), routing(0), 2, plan=plan))
    x = x.detach()
    catch(ValueError, lambda: rt.dispatch(x, routing(0), 2, plan=plan, order="rank"))
    catch(ValueError, lambda: rt.dispatch(x, routing(0), 2, async_op=True))
    pending = [rt.dispatch(x, routing(0), 2, plan=plan, async_op=True) for _ in range(2)]
    catch(Exception, lambda: rt.dispatch(x, routing(0), 2, plan=plan, async_op=True))
    for one in pending:
        one.wait()
    rt.moe(x, routing(0), Experts(torch.randn(1, 6, 4), torch.randn(1, 4, 3)), recipe=FP32)
    return texts


def test_errors_are_the_same_on_all_ranks_and_leave_the_runtime_usable(ranks: Ranks) -> None:
    first, second = ranks.run(errors)[:2]
    assert first[:2] == second[:2]  # one rank is at fault
    assert [text.split(": ")[-1] for text in first] == [text.split(": ")[-1] for text in second]
    for text, word in zip(
        first, ("not allowed", "capacity", "no gradient", "'rank'", "no halves", "in flight"), strict=True
    ):
        assert word in text


def test_decode_needs_a_fixed_size(ranks: Ranks) -> None:
    assert all("max_tokens" in text for text in ranks.run(without_a_size)[:2])


def without_a_size() -> str:
    rt = runtime_of((0, 1), 1)
    if rt is None:
        return ""
    with pytest.raises(CapacityError) as caught:
        rt.dispatch(
            torch.randn(2, 4), Routing(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)), 2, plan=Plan("decode")
        )
    return str(caught.value)


def test_cases_cover_what_decode_has() -> None:
    assert {case.order for case in CASES} == {"expert", "batched"} and len(
        {replace(case, seed=0) for case in CASES}
    ) > 50
