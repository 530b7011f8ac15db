"""dispatch beyond the exchange matrix: capacity, dropping, second payloads, large sizes, wrong arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moeloom import FP32, CapacityError, Plan, Received, Runtime
from tests.support.cases import Case
from tests.support.compare import equal_bits
from tests.support.exchange import expert_fn, poison, run_case, world_of
from tests.support.oracle import World
from tests.support.pool import Ranks, runtime_of

ORDERS = ["expert", "batched", "rank"]
SKEWED = Case(
    ranks=3, nodes=2, tokens=(17, 5, 31), topk=3, experts=7, exchange="direct", order="expert", reduction="per_rank",
    weighted=True, dtype="float32", skew="steep", replicas=False, masked="some", duplicates=False, contiguous=True,
    alignment=1, index_dtype="int64", identity=0, subgroup=0,
)  # fmt: skip


def names_and_texts(outcomes: list) -> set[tuple[str, str]]:
    """The different errors of the ranks that took part."""
    return {outcome for outcome in outcomes if outcome is not None}


def outcome_of(rt: Runtime, case: Case, **options: Any) -> tuple[str, str]:
    """The error of a dispatch with these options."""
    x, routing = case.inputs(rt.rank)
    try:
        rt.dispatch(x, routing, case.placement(), plan=Plan(exchange=case.exchange), **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def attempt(case: Case, options: dict[str, Any], only: int | None = None) -> tuple[str, str] | None:
    """On every rank: the error of a dispatch, after which an ordinary one must be right in every bit.

    only: the one rank that has these options.
    """
    rt = runtime_of(case.members, case.nodes)
    if rt is None:
        return None
    outcome = outcome_of(rt, case, **(options if only in (None, rt.rank) else {}))
    wrong = run_case(case)
    return outcome if not wrong else ("then", "\n".join(wrong))


@pytest.mark.parametrize(("order", "capacity"), [("expert", 40), ("batched", 20), ("rank", 35), ("expert", 0)])
@pytest.mark.parametrize("exchange", ["direct", "hybrid"])
def test_an_overflow_is_the_same_error_on_all_ranks(ranks: Ranks, order: str, capacity: int, exchange: str) -> None:
    case = replace(SKEWED, exchange=exchange, replicas=True, seed=4)  # rank 0 has fewer rows than rank 1
    world = world_of(case)
    missing = [len(world.rows_of(rank)) - len(kept_rows(world, rank, order, 1, capacity)) for rank in range(case.ranks)]
    first = next(rank for rank, count in enumerate(missing) if count)
    assert first == (1 if capacity else 0)  # then a rank with room must raise, too
    ((name, text),) = names_and_texts(ranks.run(attempt, case, {"order": order, "capacity": capacity}))
    assert name == CapacityError.__name__
    assert f"rank {first}: {missing[first]} rows do not fit into capacity {capacity}" in text
    assert "overflow='drop'" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"order": "token"}, "order is 'token'; allowed: expert, rank, batched"),
        ({"overflow": "ignore"}, "overflow is 'ignore'; allowed: error, drop"),
        ({"order": "batched", "alignment": 8, "capacity": 12}, "capacity is 12; order 'batched' needs a multiple of"),
        ({"order": "rank", "alignment": 8}, "alignment is 8; rows of order 'rank' belong to no single expert"),
        ({"alignment": 0}, "alignment is 0; it must be at least 1"),
        ({"capacity": -5}, "capacity is -5; it must be 0 or more"),
    ],
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_one_ranks_wrong_options_are_the_same_error_on_all(ranks: Ranks, nodes: int, options: dict, text: str) -> None:
    ((name, said),) = names_and_texts(ranks.run(attempt, replace(SKEWED, nodes=nodes), options, 1))
    assert name == "ValueError" and text in said


def test_wrong_options_everywhere_are_refused_everywhere(ranks: Ranks) -> None:
    outcomes = names_and_texts(ranks.run(attempt, SKEWED, {"order": "token"}))
    assert {name for name, _ in outcomes} == {"ValueError"}
    assert all("order is 'token'; allowed: expert, rank, batched" in said for _, said in outcomes)


def kept_rows(world: World, rank: int, order: str, alignment: int, capacity: int) -> list[tuple[int, int, int, int]]:
    """The (slot, source, token, k) that a capacity leaves on a rank, in the contract's order."""
    rows = world.rows_of(rank)
    if order == "rank":
        tokens = sorted({row[1:3] for row in rows})[:capacity]
        return [row for row in rows if row[1:3] in tokens]
    kept, start = [], 0
    for slot in range(world.placement.num_local(rank)):
        mine = [row for row in rows if row[0] == slot]
        kept += mine[: capacity if order == "batched" else max(capacity - start, 0)]
        start += -(-len(mine) // alignment) * alignment
    return kept


def received_with(world: World, rank: int, order: str, alignment: int, capacity: int) -> list[Tensor]:
    """Rows, ids and weights with a capacity, from those without."""
    rows, ids, weights, starts, _ = world.received(rank, order, alignment)
    flat = [rows, torch.tensor(ids, dtype=torch.int64).reshape(weights.shape), weights]
    depth = starts[1] - starts[0] if order == "batched" else len(rows)
    groups = len(starts) - 1 if order == "batched" else 1
    out = []
    for tensor, padding in zip(flat, (0.0, -1, 0.0), strict=True):
        grouped = tensor.reshape(groups, depth, *tensor.shape[1:])
        wide = grouped.new_full((groups, capacity, *tensor.shape[1:]), padding)
        kept = min(depth, capacity)
        wide[:, :kept] = grouped[:, :kept]
        out.append(wide if order == "batched" else wide[0])
    return out


def whole_numbers(case: Case, rank: int) -> tuple[Tensor, Any]:
    """Inputs whose sums are exact in any order."""
    x, routing = case.inputs(rank)
    x = (x * 8).round()
    routing.topk_weights.mul_(8).round_()
    return x, routing


def drop(case: Case, capacity: int) -> list[str]:
    """On every rank: what a dispatch that drops brings, and what combine makes of it."""
    rt = runtime_of(case.members, case.nodes)
    if rt is None:
        return []
    poison(rt)
    drawn = [whole_numbers(case, rank) for rank in range(case.ranks)]
    placement = case.placement()
    world = World(
        [x for x, _ in drawn], [r.topk_idx.tolist() for _, r in drawn], [r.topk_weights for _, r in drawn], placement
    )
    x, routing = drawn[rt.rank]
    received, handle = rt.dispatch(
        x, routing, placement, order=case.order, alignment=case.alignment, capacity=capacity, overflow="drop",
        plan=Plan(exchange=case.exchange),
    )  # fmt: skip
    kept = [kept_rows(world, rank, case.order, case.alignment, capacity) for rank in range(case.ranks)]
    mine = [row[0] for row in kept[rt.rank]]
    rows, ids, weights = received_with(world, rt.rank, case.order, case.alignment, capacity)
    right = {
        "rows": equal_bits(received.rows, rows),
        "topk_idx": torch.equal(received.topk_idx, ids),
        "topk_weights": torch.equal(received.topk_weights, weights),
        "counts": received.num_tokens_per_expert.tolist()
        == [mine.count(slot) for slot in range(placement.num_local(rt.rank))],
        "num_dropped": int(received.num_dropped) == len(world.rows_of(rt.rank)) - len(mine),
    }
    for reduction in ("per_rank", "per_slot") if case.order != "rank" else ("per_rank",):
        right[reduction] = torch.equal(
            combined(rt, case, received, handle, reduction), wanted(world, rt.rank, kept, case.order)
        )
    return [f"rank {rt.rank}: {name}" for name, good in right.items() if not good]


def combined(rt: Runtime, case: Case, received: Received, handle: Any, reduction: Any) -> Tensor:
    """y of elementwise experts; padding rows hold NaN."""
    if case.order == "rank":
        rows = expert_fn(received.rows, 0)
        rows[(received.topk_idx < 0).all(1)] = float("nan")
    else:
        held = torch.tensor([*case.placement().slots[rt.rank], 0])
        rows = expert_fn(received.rows, held[received.topk_idx])
        rows[received.topk_idx < 0] = float("nan")
    return rt.combine(rows, handle, weighted=case.order != "rank", recipe=FP32.with_reduction(reduction))


def wanted(world: World, source: int, kept: list, order: str) -> Tensor:
    """The sum over the pairs (order "rank": the ranks) that were not dropped; exact, so in any order."""
    y = torch.zeros_like(world.xs[source])
    for rows in kept:
        pairs = [(token, k) for _, origin, token, k in rows if origin == source]
        for token, k in [(token, -1) for token in {token for token, _ in pairs}] if order == "rank" else pairs:
            x = world.xs[source][token]
            y[token] += (
                expert_fn(x, 0)
                if k < 0
                else expert_fn(x, world.ids[source][token][k]) * world.weights[source][token, k]
            )
    return y


@pytest.mark.parametrize("exchange", ["direct", "hybrid"])
@pytest.mark.parametrize(
    ("order", "alignment", "capacity"),
    [
        ("expert", 1, 40), ("expert", 8, 40), ("expert", 8, 37), ("expert", 1, 0), ("expert", 8, 500),
        ("batched", 1, 5), ("batched", 8, 16), ("batched", 4, 0), ("batched", 1, 100),
        ("rank", 1, 20), ("rank", 1, 0), ("rank", 1, 77),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_dropped_and_counts_as_zeros(
    ranks: Ranks, exchange: str, order: str, alignment: int, capacity: int
) -> None:
    for replicas, nodes in ((False, 2), (True, 1)):
        case = replace(SKEWED, exchange=exchange, order=order, alignment=alignment, replicas=replicas, nodes=nodes)
        wrong = [line for lines in ranks.run(drop, case, capacity) for line in lines]
        assert not wrong, f"{case}\n" + "\n".join(wrong)


def send_twice(case: Case, capacity: int | None) -> list[str]:
    """On every rank: a second payload over a handle, and the same by a dispatch of its own."""
    rt = runtime_of(case.members, case.nodes)
    if rt is None:
        return []
    x, routing = case.inputs(rt.rank)
    other = torch.randn(
        len(x), 21, generator=torch.Generator().manual_seed(rt.rank)
    ).bfloat16()  # its own width and dtype
    options: dict[str, Any] = {
        "order": case.order, "alignment": case.alignment, "capacity": capacity, "overflow": "drop"
    }  # fmt: skip
    _, handle = rt.dispatch(x, routing, case.placement(), plan=Plan(exchange=case.exchange), **options)
    fresh, fresh_handle = rt.dispatch(other, routing, case.placement(), plan=Plan(exchange=case.exchange), **options)
    again, again_handle = rt.dispatch(other, handle)
    wrong = [
        name
        for name in ("rows", "topk_weights", "topk_idx", "expert_start", "num_tokens_per_expert", "num_dropped")
        if not equal_bits(getattr(again, name), getattr(fresh, name))
    ]
    results = [rt.combine(again.rows, one, weighted=case.order != "rank") for one in (fresh_handle, again_handle)]
    wrong += [] if equal_bits(*results) else ["y"]
    return [f"rank {rt.rank}: {name}" for name in wrong]


@pytest.mark.parametrize("exchange", ["direct", "hybrid"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("capacity", [None, 16])
def test_a_second_payload_over_a_handle_is_like_a_dispatch_of_its_own(
    ranks: Ranks, exchange: str, order: str, capacity: int | None
) -> None:
    case = replace(SKEWED, exchange=exchange, order=order, alignment=1 if order == "rank" else 8)
    wrong = [line for lines in ranks.run(send_twice, case, capacity) for line in lines]
    assert not wrong, "\n".join(wrong)


def refuse_payload(case: Case) -> tuple[str, str] | None:
    """On every rank: a second payload, on rank 2 with a row too many."""
    rt = runtime_of(case.members, case.nodes)
    if rt is None:
        return None
    x, routing = case.inputs(rt.rank)
    _, handle = rt.dispatch(x, routing, case.placement())
    try:
        rt.dispatch(torch.zeros(len(x) + (rt.rank == 2), 4), handle)
    except ValueError as error:
        wrong = run_case(case)
        return ("then", "\n".join(wrong)) if wrong else ("ValueError", str(error))
    return "no error", ""


def test_a_second_payload_must_have_the_handles_tokens(ranks: Ranks) -> None:
    ((name, text),) = names_and_texts(ranks.run(refuse_payload, SKEWED))
    assert name == "ValueError" and "x has 32 rows; the handle is for 31 tokens" in text


LARGE = replace(SKEWED, ranks=4, nodes=2, tokens=(40, 0, 3, 61), topk=16, skew="uniform", hidden=5)


@pytest.mark.parametrize("exchange", ["direct", "hybrid"])
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize(("experts", "ranks_", "nodes"), [(1025, 4, 2), (2048, 4, 1), (2048, 3, 2)])
def test_many_experts_and_sixteen_of_them_for_each_token(
    ranks: Ranks, exchange: str, index_dtype: str, experts: int, ranks_: int, nodes: int
) -> None:
    case = replace(LARGE, experts=experts, index_dtype=index_dtype, exchange=exchange, nodes=nodes)
    case = replace(case, ranks=ranks_, tokens=case.tokens[:ranks_])
    wrong = [line for lines in ranks.run(run_case, case) for line in lines]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("order", ["expert", "batched"])
@pytest.mark.parametrize("exchange", ["direct", "hybrid"])
def test_alignment_128(ranks: Ranks, order: str, exchange: str) -> None:
    for skew in ("uniform", "all to one"):
        case = replace(SKEWED, order=order, exchange=exchange, alignment=128, skew=skew, tokens=(64, 131, 0), experts=8)
        wrong = [line for lines in ranks.run(run_case, case) for line in lines]
        assert not wrong, f"{case}\n" + "\n".join(wrong)
