"""A batch in chunks: the bits of the whole batch, overlap in order, and errors that all ranks hear of."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from moeloom import FP8, RECIPES, Experts, Placement, Plan, Recipe, Routing, Runtime
from moeloom.config import recipe_for
from moeloom.schedule.trace import Event
from tests.backend.test_failure import DIFFERENT, SOON, WRONG, explode, with_activation
from tests.support.cases import MEMBERS, Case, covering_cases
from tests.support.compare import equal_bits
from tests.support.exchange import poison
from tests.support.failure import FOUR, Attempt, attempt, layer_of, over_four, the_same, works
from tests.support.pool import Ranks, runtime_of

INTERMEDIATE = 5
on_nodes = pytest.mark.parametrize("nodes", [1, 2])


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def numbers_of_chunks(case: Case) -> tuple[int, ...]:
    """2, 3, 4, and more than any rank has tokens, where that is not many."""
    return (2, 3, 4, max(case.tokens) + 3) if max(case.tokens) <= 5 else (2, 3, 4)


def experts_of(case: Case, rank: int, recipe: Recipe, **options: Any) -> Experts:
    """The weights of a rank's slots; replicas are equal."""
    placement = case.placement()
    held = torch.tensor(placement.slots[rank], dtype=torch.int64)
    gate_up = normal(case.experts, 2 * INTERMEDIATE, case.hidden, seed=case.seed) * case.hidden**-0.5
    down = normal(case.experts, case.hidden, INTERMEDIATE, seed=case.seed + 1)
    return Experts(gate_up[held].to(recipe.dtype), down[held].to(recipe.dtype), placement=placement, **options)


# ---- the same bits


def layer_in_chunks(cases: list[Case], recipe_name: str | None) -> list[str]:
    """On every rank, each case: the whole layer in any number of chunks against the whole batch."""
    wrong = []
    for case in cases:
        rt = runtime_of(case.members, case.nodes)
        if rt is None:
            continue
        rt.backend.gather("end of the last case", {})  # the others may still read
        poison(rt)
        recipe = RECIPES[recipe_name] if recipe_name else recipe_for(case.torch_dtype)
        recipe = recipe.with_reduction(case.reduction)
        x, routing = case.inputs(rt.rank)
        x, experts = x.to(recipe.dtype), experts_of(case, rt.rank, recipe)
        before = [tensor.clone() for tensor in (x, routing.topk_idx, routing.topk_weights)]

        def run(
            chunks: int, rt: Runtime = rt, case: Case = case, recipe: Recipe = recipe, x: Tensor = x,
            routing: Routing = routing, experts: Experts = experts,
        ) -> Tensor:  # fmt: skip
            out = torch.full_like(x, 7.0)
            plan = Plan(exchange=case.exchange, chunks=chunks)
            return rt.moe(x, routing, experts, recipe=recipe, plan=plan, out=out)

        wanted = run(1)
        wrong += [
            f"{chunks} chunks, {case}" for chunks in numbers_of_chunks(case) if not equal_bits(run(chunks), wanted)
        ]
        if not all(map(equal_bits, (x, routing.topk_idx, routing.topk_weights), before)):
            wrong.append(f"inputs, {case}")
    return wrong


CASES = covering_cases()


@pytest.mark.parametrize("part", range(4))
def test_any_number_of_chunks_gives_the_same_bits(ranks: Ranks, part: int) -> None:
    wrong = [line for lines in ranks.run(layer_in_chunks, CASES[part::4], None) for line in lines]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", range(2))
def test_fp8_in_chunks_gives_the_same_bits(ranks: Ranks, part: int) -> None:
    cases = [case for case in CASES if case.dtype == "bfloat16"][part::2]
    wrong = [line for lines in ranks.run(layer_in_chunks, cases, "fp8") for line in lines]
    assert not wrong, "\n".join(wrong)


def test_the_cases_have_what_chunks_may_get_wrong() -> None:
    periods = {case.placement().replica_period for case in CASES}
    assert {1, 2, 3, 6} & periods and any(period % 3 == 0 for period in periods)
    assert any(0 in case.tokens and max(case.tokens) > 100 for case in CASES)
    assert any(case.identity and case.exchange == "hybrid" and case.nodes > 1 for case in CASES)
    assert any(set(case.tokens) == {0} for case in CASES) or any(case.tokens == (0,) for case in CASES)


def large_layer(recipe_name: str, exchange: Any) -> list[str]:
    """Sizes at which products work in blocks, and a placement of three and two replicas."""
    rt = runtime_of(MEMBERS[4][0], 2)
    if rt is None:
        return []
    placement = Placement.from_slots([[0, 1, 2], [0, 3, 1], [4, 0, 5], [6, 7]])
    recipe, num_tokens = RECIPES[recipe_name], [700, 1, 333, 0][rt.rank]
    held = torch.tensor(placement.slots[rt.rank])
    experts = Experts(
        (normal(8, 256, 160, seed=1) / 12)[held].to(recipe.dtype),
        (normal(8, 160, 128, seed=2) / 11)[held].to(recipe.dtype),
        placement=placement,
    )
    x = normal(num_tokens, 160, seed=3 + rt.rank).to(recipe.dtype)
    ids = torch.rand(num_tokens, 8, generator=torch.Generator().manual_seed(rt.rank)).argsort(1)[:, :3]
    routing = Routing(ids, torch.rand(num_tokens, 3, generator=torch.Generator().manual_seed(9)))
    results = [
        rt.moe(x, routing, experts, recipe=recipe, plan=Plan(exchange=exchange, chunks=chunks))
        for chunks in (1, 2, 5, 64)
    ]
    return [f"rank {rt.rank}: {number}" for number, y in enumerate(results) if not equal_bits(y, results[0])]


@pytest.mark.parametrize("exchange", ["direct", "hybrid"])
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_larger_layers_have_the_same_bits(ranks: Ranks, recipe: str, exchange: str) -> None:
    assert ranks.run(large_layer, recipe, exchange)[:4] == [[]] * 4


# ---- gradients


def gradients(cases: list[Case]) -> list[str]:
    """On every rank, each case: y and all gradients in chunks against those of the whole batch."""
    wrong = []
    for case in cases:
        rt = runtime_of(case.members, case.nodes)
        if rt is None:
            continue
        recipe = recipe_for(case.torch_dtype).with_reduction(case.reduction)
        found = []
        for chunks in (1, 3):
            x, routing = case.inputs(rt.rank)
            x, weights = x.requires_grad_(), routing.topk_weights.requires_grad_()
            held = experts_of(case, rt.rank, recipe)
            gate_up, down = held.gate_up.requires_grad_(), held.down.requires_grad_()
            y = rt.moe(x, routing, held, recipe=recipe, plan=Plan(exchange=case.exchange, chunks=chunks))
            (y.float() * normal(*y.shape, seed=rt.rank)).sum().backward()
            found.append([y.detach(), x.grad, weights.grad, gate_up.grad, down.grad])
        for number, tensors in enumerate(found):
            if not all(map(equal_bits, tensors, found[0])):
                wrong.append(f"rank {rt.rank}, {number}: {case}")
    return wrong


def test_gradients_are_those_of_the_whole_batch(ranks: Ranks) -> None:
    wrong = [line for lines in ranks.run(gradients, CASES[::3]) for line in lines]
    assert not wrong, "\n".join(wrong)


def other_modes() -> list[str]:
    """What a thread does not inherit from its caller: modes of torch."""
    rt = runtime_of((0, 1), 1)
    if rt is None:
        return []
    case = next(c for c in CASES if c.ranks == 2 and c.dtype == "float32" and min(c.tokens) > 4)
    (x, routing), experts = case.inputs(rt.rank), experts_of(case, rt.rank, recipe_for(torch.float32))

    def run(chunks: int) -> Tensor:
        return rt.moe(x, routing, experts, plan=Plan(chunks=chunks))

    def grad(chunks: int) -> Tensor:
        leaf = x.clone().requires_grad_()
        rt.moe(leaf, routing, experts, plan=Plan(chunks=chunks)).square().sum().backward()
        return leaf.grad

    wanted, wanted_grad, wrong = run(1), grad(1), []
    for name, mode in {
        "inference_mode": torch.inference_mode(),
        "no_grad": torch.no_grad(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
    }.items():
        with mode:
            wrong += [f"{name}, {chunks}" for chunks in (1, 3) if not equal_bits(run(chunks), wanted)]
    with torch.autocast("cpu", torch.bfloat16):
        wrong += [f"autocast, gradient, {chunks}" for chunks in (1, 3) if not equal_bits(grad(chunks), wanted_grad)]
    return wrong


def test_modes_of_the_caller_change_no_bit(ranks: Ranks) -> None:
    assert ranks.run(other_modes)[:2] == [[]] * 2


# ---- what is counted, and what ran when


SLEEP = 0.04


def slow_activation(gate: Tensor, up: Tensor) -> Tensor:
    """Long enough for another chunk's dispatch."""
    time.sleep(SLEEP)
    return up


def counted(nodes: int, exchange: Any, recipe_name: str) -> list[dict] | None:
    """What one call of each number of chunks adds to `stats`."""
    rt = runtime_of(MEMBERS[4][0], nodes)
    if rt is None:
        return None
    recipe, placement = RECIPES[recipe_name], Placement.even(10, 4, num_identity=1)
    local = placement.num_local(rt.rank)
    experts = Experts(
        normal(local, 8, 12, seed=1).to(recipe.dtype),
        normal(local, 12, 4, seed=2).to(recipe.dtype),
        activation=slow_activation,
        placement=placement,
    )
    num_tokens = [53, 0, 7, 64][rt.rank]
    ids = torch.randint(-1, 11, (num_tokens, 3), generator=torch.Generator().manual_seed(rt.rank))
    x, routing = normal(num_tokens, 12, seed=3).to(recipe.dtype), Routing(ids, torch.ones(num_tokens, 3))
    found = []
    for chunks in (1, 2, 4):
        before = rt.stats()
        rt.moe(x, routing, experts, recipe=recipe, plan=Plan(exchange=exchange, chunks=chunks))
        after = rt.stats()
        found.append({name: vars(after[name] - before[name] if name in before else after[name]) for name in after})
    return found


@pytest.mark.parametrize("recipe", ["fp32", "fp8"])
@pytest.mark.parametrize(("nodes", "exchange"), [(1, "direct"), (2, "direct"), (2, "hybrid")])
def test_chunks_move_the_same_bytes(ranks: Ranks, nodes: int, exchange: str, recipe: str) -> None:
    moved = 0
    for whole, *parts in ranks.run(counted, nodes, exchange, recipe)[:4]:
        for chunks, part in zip((2, 4), parts, strict=True):
            for stage in ("dispatch", "experts", "combine"):
                assert part[stage]["calls"] == chunks * whole[stage]["calls"] == chunks
                for what in ("scale_up_bytes", "scale_out_bytes", "rows"):
                    assert part[stage][what] == whole[stage][what], (stage, what)
                    assert stage != "experts" or part[stage][what] == 0
                    moved += part[stage][what]
                assert part[stage]["seconds"] > 0
    assert moved > 0


def traced(nodes: int, chunks: int) -> tuple[list[Event], bool, int] | None:
    """The events of one call whose experts take their time; whether y is right, and how many there are afterwards."""
    rt = over_four(nodes)
    if rt is None:
        return None
    with rt:
        mine = layer_of(rt, tokens=40).but(plan=Plan(chunks=chunks))  # every rank gets rows of both experts
        works(rt)
        with rt.tracing() as events:
            y = with_activation(slow_activation)(mine).run(rt)
        mine.run(rt)
        return list(events), torch.equal(y, mine.y), len(events)


def span_of(events: list[Event], kind: str, chunk: int) -> Event:
    (found,) = [event for event in events if (event.kind, event.chunk) == (kind, chunk)]
    return found


@on_nodes
def test_chunks_overlap_in_order(ranks: Ranks, nodes: int) -> None:
    chunks = 4
    for rank, (events, right, afterwards) in enumerate(ranks.run(traced, nodes, chunks)[:4]):
        assert right and afterwards == len(events) == 3 * chunks
        assert {event.rank for event in events} == {rank}
        assert {(e.kind, e.resource) for e in events} == {
            ("dispatch", "links"), ("experts", "compute"), ("combine", "links"),
        }  # fmt: skip
        by_begin = sorted(events, key=lambda event: event.begin)
        assert [event.name for event in by_begin if event.resource == "links"] == [
            "dispatch 0", "dispatch 1", "combine 0", "dispatch 2", "combine 1", "dispatch 3", "combine 2", "combine 3",
        ]  # fmt: skip
        for resource in ("links", "compute"):
            for first, second in pairwise(event for event in by_begin if event.resource == resource):
                assert first.begin <= first.end <= second.begin
        for chunk in range(chunks):
            there, experts, back = (span_of(events, kind, chunk) for kind in ("dispatch", "experts", "combine"))
            assert there.end <= experts.begin <= experts.end <= back.begin
            assert experts.end - experts.begin >= 2 * SLEEP  # two experts a rank
        # links work while experts do: chunk 1 sets out during the experts of chunk 0
        assert span_of(events, "dispatch", 1).begin < span_of(events, "experts", 0).end


# ---- what goes wrong


def fail_in_chunk(nodes: int, chunk: int, chunks: int) -> tuple[Attempt, bool, bool] | None:
    """Rank 1's activation raises in one chunk."""
    rt = over_four(nodes)
    if rt is None:
        return None
    with rt:
        mine = layer_of(rt, tokens=40).but(plan=Plan(chunks=chunks))
        calls = []

        def activation(gate: Tensor, up: Tensor) -> Tensor:
            calls.append(gate)
            return explode() if len(calls) == 2 * chunk + 1 else up  # two experts a rank, and rows for both

        out = torch.zeros_like(mine.x)
        told = attempt((with_activation(activation)(mine) if rt.rank == 1 else mine).run, rt, out)
        return told, bool(out.isnan().all()), works(rt) and torch.equal(mine.run(rt), mine.y)


@on_nodes
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_error_in_the_experts_of_a_chunk(ranks: Ranks, nodes: int, chunk: int) -> None:
    attempts, poisoned, usable = zip(*ranks.run(fail_in_chunk, nodes, chunk, 3)[:4], strict=True)
    told = the_same([attempts[rank] for rank in (0, 2, 3)])
    assert (told.error, told.text) == ("MoeloomError", "rank 1: RuntimeError: boom")
    assert (attempts[1].error, attempts[1].text) == ("RuntimeError", "boom")  # the user's own
    assert all(poisoned) and all(usable)
    assert max(each.seconds for each in attempts) < SOON


def call_with(nodes: int, plans: list[Plan]) -> tuple[Attempt, bool] | None:
    """Each rank with its own plan."""
    rt = over_four(nodes, timeout=10.0)
    if rt is None:
        return None
    with rt:
        mine = layer_of(rt).but(plan=plans[rt.rank])
        out = torch.zeros_like(mine.x)
        return attempt(mine.run, rt, out), bool(out.isnan().all())


@on_nodes
@pytest.mark.parametrize("chunks", [(1, 2, 2, 2), (2, 1, 1, 1), (3, 3, 2, 3), (4, 4, 4, 3), (1, 2, 3, 4)])
def test_different_chunks_are_an_error_everywhere(ranks: Ranks, nodes: int, chunks: tuple[int, ...]) -> None:
    attempts, poisoned = zip(*ranks.run(call_with, nodes, [Plan(chunks=n) for n in chunks])[:4], strict=True)
    told = the_same(list(attempts))
    assert told.error and says_who_called_what(told.text), told
    assert all(poisoned)
    assert max(each.seconds for each in attempts) < SOON


def says_who_called_what(text: str) -> bool:
    """Whether the text says who called what."""
    return "rank 0 called" in text or "differs between ranks" in text


def mega(nodes: int, who: tuple[int, ...]) -> tuple[Attempt, bool, bool] | None:
    rt = over_four(nodes)
    if rt is None:
        return None
    with rt:
        mine = layer_of(rt)
        out = torch.zeros_like(mine.x)
        told = attempt(mine.but(plan=Plan("mega" if rt.rank in who else "split")).run, rt, out)
        return told, bool(out.isnan().all()), works(rt)


@on_nodes
def test_a_pipeline_that_the_backend_has_not(ranks: Ranks, nodes: int) -> None:
    attempts, poisoned, usable = zip(*ranks.run(mega, nodes, FOUR)[:4], strict=True)
    for rank, told in enumerate(attempts):  # each is wrong by itself, and says so at once
        assert told.error == "CapabilityError", told
        assert told.text == f"rank {rank}: pipeline is 'mega'; the cpu backend has split, decode"
    assert all(poisoned) and all(usable)


@on_nodes
def test_a_pipeline_that_the_backend_has_not_on_one_rank(ranks: Ranks, nodes: int) -> None:
    attempts, poisoned, usable = zip(*ranks.run(mega, nodes, (2,))[:4], strict=True)
    told = the_same(list(attempts))
    assert (told.error, told.text[:30]) == ("CapabilityError", "rank 2: pipeline is 'mega'; th"), told
    assert all(poisoned) and all(usable)


def call_wrongly_in_chunks(nodes: int, names: list[str]) -> list[tuple[Attempt, bool, bool]] | None:
    """Rank 1 calls each of these ways in two chunks; then all ranks call correctly."""
    rt = over_four(nodes, max_tokens=8)
    if rt is None:
        return None
    results = []
    with rt:
        for name in names:
            mine = layer_of(rt).but(plan=Plan(chunks=2))
            if rt.rank == 1:
                mine = (WRONG.get(name) or DIFFERENT[name])[0](mine)
            out = torch.zeros(mine.x.shape, dtype=mine.x.dtype)
            results.append((attempt(mine.run, rt, out), bool(out.isnan().all()), works(rt)))
    return results


@on_nodes
def test_wrong_arguments(ranks: Ranks, nodes: int) -> None:
    results = ranks.run(call_wrongly_in_chunks, nodes, list(WRONG))[:4]
    for number, (name, (_, error, text)) in enumerate(WRONG.items()):
        attempts, poisoned, usable = zip(*(result[number] for result in results), strict=True)
        if error != "MoeloomError":  # rank 1 itself raises what happened
            assert the_same(list(attempts)).error == error, name
        assert all(text in each.text for each in attempts[2:]) and all(poisoned) and all(usable), (name, results)


@on_nodes
def test_different_arguments(ranks: Ranks, nodes: int) -> None:
    names = [name for name in DIFFERENT if name != "exchange"]  # that one changes the plan
    results = ranks.run(call_wrongly_in_chunks, nodes, names)[:4]
    for number, name in enumerate(names):
        attempts, poisoned, usable = zip(*(result[number] for result in results), strict=True)
        told = the_same(list(attempts))
        assert told.error == "ValueError" and DIFFERENT[name][1] in told.text, (name, told)
        assert all(poisoned) and all(usable), name


def chunked_fp8_gradient() -> Attempt | None:
    rt = runtime_of((0, 1), 1)
    if rt is None:
        return None
    x = normal(4, 8, seed=0).bfloat16().requires_grad_()
    routing = Routing(torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))
    experts = Experts(normal(1, 8, 8, seed=1).bfloat16(), normal(1, 8, 4, seed=2).bfloat16())
    return attempt(lambda: rt.moe(x, routing, experts, recipe=FP8, plan=Plan(chunks=2)))


def test_no_gradient_of_fp8(ranks: Ranks) -> None:
    for told in ranks.run(chunked_fp8_gradient)[:2]:
        assert told.error == "CapabilityError" and "recipe fp8 is forward only" in told.text
