"""combine beyond the exchange matrix: bits that do not depend on ranks, nodes or placement; odd values; odd calls."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moeloom import BF16, FP32, Experts, Placement, Plan, Recipe, Routing, Runtime, SwiGLU
from tests.support.cases import MEMBERS
from tests.support.compare import equal_bits
from tests.support.exchange import expert_fn, poison
from tests.support.pool import Ranks, runtime_of

SETTINGS = [
    (ranks, nodes, exchange)
    for ranks in (1, 2, 3, 4)
    for nodes in (1, 2, 3)
    for exchange in ("direct", "hybrid")
    if nodes <= ranks
]
NUM_TOKENS, NUM_EXPERTS, NUM_TOPK = 83, 8, 4
REPLICAS = {  # for each number of ranks a placement with replicas, in no order
    1: [[3, 1, 2, 0, 7, 5, 6, 4, 3]],
    2: [[3, 1, 0, 7, 0], [2, 5, 6, 4, 3, 1]],
    3: [[7, 6, 5, 4, 3], [], [2, 1, 0, 7, 7]],
    4: [[0, 1], [7, 6, 0], [5, 4, 3, 0], [2, 0, 2]],
}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def global_tokens(hidden: int, dtype: torch.dtype) -> tuple[Tensor, Routing]:
    """The tokens of all ranks together; some pairs unrouted, some experts named twice."""
    ids = torch.randint(-1, NUM_EXPERTS, (NUM_TOKENS, NUM_TOPK), generator=torch.Generator().manual_seed(0))
    return normal(NUM_TOKENS, hidden, seed=1).to(dtype), Routing(ids, normal(NUM_TOKENS, NUM_TOPK, seed=2))


def share_of(rank: int, num_ranks: int) -> slice:
    """Unequal parts of the tokens: the first rank has none if there are three."""
    ends = {1: [83], 2: [13, 83], 3: [0, 42, 83], 4: [31, 32, 60, 83]}[num_ranks]
    return slice([0, *ends][rank], ends[rank])


def experts_of(
    held: tuple[int, ...], placement: Placement, hidden: int, intermediate: int, dtype: torch.dtype
) -> Experts:
    """The weights that these slots hold."""
    slots = torch.tensor(held, dtype=torch.int64)
    gate_up = normal(NUM_EXPERTS, 2 * intermediate, hidden, seed=3).to(dtype)[slots]
    down = normal(NUM_EXPERTS, hidden, intermediate, seed=4).to(dtype)[slots]
    return Experts(gate_up, down, activation=SwiGLU(clamp=7.0), placement=placement)


def foreign(
    rt: Runtime, x: Tensor, routing: Routing, placement: Placement, recipe: Recipe, exchange: Any, weighted: bool
) -> Tensor:
    """dispatch, elementwise experts, combine."""
    received, handle = rt.dispatch(x, routing, placement, plan=Plan(exchange=exchange))
    held = torch.tensor([*placement.slots[rt.rank], 0])
    rows = expert_fn(received.rows, held[received.topk_idx])
    return rt.combine(rows, handle, weighted=weighted, recipe=recipe)


def run_setting(setting: tuple, recipe: Recipe, flow: str, sizes: tuple[int, int], slots: list | None) -> Tensor | None:
    """On every rank: this rank's part of the global tokens through one flow."""
    num_ranks, nodes, exchange = setting
    rt = runtime_of(MEMBERS[num_ranks][-1], nodes)
    if rt is None:
        return None
    poison(rt)
    hidden, intermediate = sizes
    placement = Placement.even(NUM_EXPERTS, num_ranks) if slots is None else Placement.from_slots(slots)
    x, routing = global_tokens(hidden, recipe.dtype)
    mine = share_of(rt.rank, num_ranks)
    x, routing = x[mine], Routing(routing.topk_idx[mine], routing.topk_weights[mine])
    if flow == "moe":
        experts = experts_of(placement.slots[rt.rank], placement, hidden, intermediate, recipe.dtype)
        return rt.moe(x, routing, experts, recipe=recipe, plan=Plan(exchange=exchange))
    return foreign(rt, x, routing, placement, recipe, exchange, weighted=flow == "weighted")


def run(
    ranks: Ranks,
    setting: tuple,
    recipe: Recipe,
    flow: str,
    sizes: tuple[int, int] = (33, 17),
    slots: list | None = None,
) -> Tensor:
    """All tokens' results, in global order."""
    members = MEMBERS[setting[0]][-1]
    results = ranks.run(run_setting, setting, recipe, flow, sizes, slots)
    return torch.cat([results[world_rank] for world_rank in members])


def in_slot_order(recipe: Recipe, weighted: bool) -> Tensor:
    """What per_slot must give for elementwise experts: one fp32 sum in slot order, rounded once."""
    x, routing = global_tokens(33, recipe.dtype)
    y = torch.zeros_like(x)
    for token, (ids, weights) in enumerate(zip(routing.topk_idx.tolist(), routing.topk_weights, strict=True)):
        rows = [
            expert_fn(x[token], expert).float() * (weights[k] if weighted else 1)
            for k, expert in enumerate(ids)
            if expert >= 0
        ]
        y[token] = functools.reduce(torch.add, rows, torch.tensor(-0.0))
    return y


@pytest.mark.parametrize("recipe", [FP32, BF16], ids=str)
@pytest.mark.parametrize("flow", ["weighted", "unweighted", "moe"])
def test_per_slot_bits_do_not_depend_on_ranks_nodes_or_exchange(ranks: Ranks, recipe: Recipe, flow: str) -> None:
    recipe = recipe.with_reduction("per_slot")
    wanted = run(ranks, SETTINGS[0], recipe, flow)
    if flow != "moe":
        assert equal_bits(wanted, in_slot_order(recipe, flow == "weighted"))
    for setting in SETTINGS[1:]:
        assert equal_bits(run(ranks, setting, recipe, flow), wanted), setting


@pytest.mark.parametrize("recipe", [FP32, BF16], ids=str)
@pytest.mark.parametrize("sizes", [(16, 32), (100, 24), (256, 64)], ids=str)
def test_an_expert_rows_bits_do_not_depend_on_the_number_of_ranks(ranks: Ranks, recipe: Recipe, sizes: tuple) -> None:
    recipe = recipe.with_reduction("per_slot")
    wanted = run(ranks, SETTINGS[0], recipe, "moe", sizes)
    for setting in [(2, 1, "direct"), (3, 2, "hybrid"), (4, 2, "direct")]:
        assert equal_bits(run(ranks, setting, recipe, "moe", sizes), wanted), setting


@pytest.mark.parametrize("recipe", [FP32, BF16], ids=str)
@pytest.mark.parametrize("flow", ["weighted", "moe"])
def test_replicas_and_rebalancing_leave_per_slot_bits_alone(ranks: Ranks, recipe: Recipe, flow: str) -> None:
    recipe = recipe.with_reduction("per_slot")
    wanted = run(ranks, SETTINGS[0], recipe, flow)
    for setting in SETTINGS:
        assert equal_bits(run(ranks, setting, recipe, flow, slots=REPLICAS[setting[0]]), wanted), setting


@pytest.mark.parametrize("recipe", [FP32, BF16], ids=str)
@pytest.mark.parametrize("flow", ["weighted", "moe"])
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_on_one_node_direct_and_hybrid_are_the_same_bits(
    ranks: Ranks, recipe: Recipe, flow: str, num_ranks: int
) -> None:
    results = [run(ranks, (num_ranks, 1, exchange), recipe, flow) for exchange in ("direct", "hybrid")]
    assert equal_bits(*results)


def test_per_rank_bits_do_depend_on_the_placement(ranks: Ranks) -> None:
    """Otherwise the tests above would show nothing."""
    one, four = (run(ranks, setting, BF16, "weighted") for setting in (SETTINGS[0], (4, 1, "direct")))
    assert not equal_bits(one, four)


ODD_IDS = [[0], [5], [3], [-1], [7], [1], [6]]
ODD_VALUES = [-0.0, math.nan, math.inf, 1.0, -math.inf, 3.0, -0.0]


def odd_rows(recipe: Recipe, exchange: Any, nodes: int, num_topk: int, hidden: int) -> list[str]:
    """On every rank: rows of odd values, each token with a single contribution; rank 1 has ordinary tokens only."""
    rt = runtime_of(MEMBERS[3][0], nodes)
    if rt is None:
        return []
    poison(rt)
    ids = torch.full((len(ODD_IDS), num_topk), -1)
    ids[:, -1:] = torch.tensor(ODD_IDS)
    x = torch.tensor(ODD_VALUES).unsqueeze(1).repeat(1, hidden)
    x[:, 3:] = torch.arange(hidden - 3.0) - 1.0
    if rt.rank == 1:
        x = normal(len(ODD_IDS), hidden, seed=5)
    x = x.to(recipe.dtype)
    received, handle = rt.dispatch(x, Routing(ids, torch.ones(ids.shape)), NUM_EXPERTS, plan=Plan(exchange=exchange))
    y = rt.combine(received.rows, handle, weighted=False, recipe=recipe)
    wanted = torch.where(ids[:, -1:] < 0, 0.0, x)
    return [] if equal_bits(y, wanted) else [f"rank {rt.rank}: {y} is not {wanted}"]


@pytest.mark.parametrize(
    "recipe", [FP32, BF16, FP32.with_reduction("per_slot"), BF16.with_reduction("per_slot")], ids=str
)
@pytest.mark.parametrize("exchange", ["direct", "hybrid"])
@pytest.mark.parametrize("hidden", [6, 8])  # copied element by element, and 16 bytes at a time
@pytest.mark.parametrize(("nodes", "num_topk"), [(1, 1), (2, 1), (2, 3)])
def test_a_single_contribution_passes_unchanged(
    ranks: Ranks, recipe: Recipe, exchange: str, nodes: int, num_topk: int, hidden: int
) -> None:
    wrong = [line for lines in ranks.run(odd_rows, recipe, exchange, nodes, num_topk, hidden) for line in lines]
    assert not wrong, "\n".join(wrong)


def spoiled(recipe: Recipe, exchange: Any, nodes: int, value: float, spoil: bool, through_moe: bool) -> Tensor | None:
    """On every rank: y, with some tokens of rank 0 spoiled or not."""
    rt = runtime_of(MEMBERS[3][0], nodes)
    if rt is None:
        return None
    x, routing = global_tokens(33, recipe.dtype)
    if spoil and rt.rank == 0:
        x[[3, 40]] = value
    placement = Placement.even(NUM_EXPERTS, 3)
    if through_moe:
        experts = experts_of(placement.slots[rt.rank], placement, 33, 17, recipe.dtype)
        return rt.moe(x, routing, experts, recipe=recipe, plan=Plan(exchange=exchange))
    return foreign(rt, x, routing, placement, recipe, exchange, weighted=True)


@pytest.mark.parametrize("recipe", [BF16, FP32.with_reduction("per_slot")], ids=str)
@pytest.mark.parametrize(("exchange", "nodes"), [("direct", 1), ("direct", 2), ("hybrid", 2)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("through_moe", [False, True])
def test_nan_and_infinity_stay_in_their_own_token(
    ranks: Ranks, recipe: Recipe, exchange: str, nodes: int, value: float, through_moe: bool
) -> None:
    before, after = (ranks.run(spoiled, recipe, exchange, nodes, value, spoil, through_moe) for spoil in (False, True))
    for rank in range(3):
        same = (before[rank] == after[rank]).all(1)
        assert (~same).nonzero().flatten().tolist() == ([3, 40] if rank == 0 else [])
    assert not after[0][[3, 40]].isfinite().any()


def unrouted(recipe: Recipe, exchange: Any, nodes: int) -> list[str]:
    """On every rank: some tokens unrouted, then all of them on all ranks."""
    rt = runtime_of(MEMBERS[3][0], nodes)
    if rt is None:
        return []
    poison(rt)
    x, routing = global_tokens(33, recipe.dtype)
    wrong = []
    for every in (False, True):
        ids = routing.topk_idx.clone()
        ids[7:20] = -1
        if every:
            ids[:] = -1
        placement = Placement.even(NUM_EXPERTS, 3)
        y = foreign(rt, x, Routing(ids, routing.topk_weights), placement, recipe, exchange, weighted=True)
        none = (ids < 0).all(1)
        if not equal_bits(y[none], torch.zeros_like(x[none])):
            wrong.append(f"rank {rt.rank}: unrouted tokens are not zeros")
        if not y[~none].float().any(1).all():
            wrong.append(f"rank {rt.rank}: routed tokens are zeros")
    return wrong


@pytest.mark.parametrize("recipe", [FP32, BF16.with_reduction("per_slot")], ids=str)
@pytest.mark.parametrize(("exchange", "nodes"), [("direct", 1), ("direct", 2), ("hybrid", 2)])
def test_tokens_without_any_expert_give_zeros(ranks: Ranks, recipe: Recipe, exchange: str, nodes: int) -> None:
    assert not [line for lines in ranks.run(unrouted, recipe, exchange, nodes) for line in lines]


def combine_again(recipe: Recipe, exchange: Any, nodes: int) -> list[str]:
    """On every rank: one handle combined twice, with something else between; rows are left alone."""
    rt = runtime_of(MEMBERS[4][0], nodes)
    if rt is None:
        return []
    x, routing = global_tokens(33, recipe.dtype)
    received, handle = rt.dispatch(x, routing, NUM_EXPERTS, plan=Plan(exchange=exchange))
    before = received.rows.clone()
    first = rt.combine(received.rows, handle, weighted=True, recipe=recipe)
    foreign(rt, x * 3, routing, Placement.even(NUM_EXPERTS, 4), recipe, exchange, weighted=False)
    out = torch.full_like(x, 7.0)
    second = rt.combine(received.rows, handle, weighted=True, recipe=recipe, out=out)
    right = {"y": equal_bits(first, second), "out": second is out, "rows": equal_bits(received.rows, before)}
    return [f"rank {rt.rank}: {name}" for name, good in right.items() if not good]


@pytest.mark.parametrize("recipe", [BF16, BF16.with_reduction("per_slot")], ids=str)
@pytest.mark.parametrize(("exchange", "nodes"), [("direct", 1), ("direct", 2), ("hybrid", 2)])
def test_combining_again_gives_the_same_bits(ranks: Ranks, recipe: Recipe, exchange: str, nodes: int) -> None:
    assert not [line for lines in ranks.run(combine_again, recipe, exchange, nodes) for line in lines]


def token_rows(exchange: Any, nodes: int, dtype: torch.dtype) -> list[str]:
    """On every rank: rows of order "rank", summed by the caller, against the same experts on rows of order "expert"."""
    rt = runtime_of(MEMBERS[4][1], nodes)
    if rt is None:
        return []
    recipe = BF16 if dtype == torch.bfloat16 else FP32
    placement = Placement.from_slots(REPLICAS[4])
    x, routing = global_tokens(33, dtype)
    wanted = foreign(rt, x, routing, placement, recipe, exchange, weighted=True)
    received, handle = rt.dispatch(x, routing, placement, order="rank", plan=Plan(exchange=exchange))
    held = torch.tensor([*placement.slots[rt.rank], 0])
    sums = torch.zeros(received.rows.shape)
    for k in range(NUM_TOPK):  # in slot order, fp32
        one = expert_fn(received.rows, held[received.topk_idx[:, k]]).float() * received.topk_weights[:, k, None]
        sums = torch.where(received.topk_idx[:, k, None] >= 0, sums + one, sums)
    y = rt.combine(sums.to(dtype), handle, weighted=False)
    wrong = [] if torch.equal(y, wanted) else [f"rank {rt.rank}: y"]
    for options, text in (
        ({"weighted": True}, "weighted is True; a row of order 'rank' serves several experts"),
        (
            {"weighted": False, "recipe": recipe.with_reduction("per_slot")},
            "rows of order 'rank' are summed per rank already",
        ),
    ):
        try:
            rt.combine(sums.to(dtype), handle, **options)
            wrong.append(f"rank {rt.rank}: no error for {options}")
        except ValueError as error:
            wrong += [] if text in str(error) else [f"rank {rt.rank}: {error}"]
    return wrong


@pytest.mark.parametrize(("exchange", "nodes"), [("direct", 1), ("direct", 2), ("hybrid", 2), ("hybrid", 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_order_rank_summed_by_the_caller(ranks: Ranks, exchange: str, nodes: int, dtype: torch.dtype) -> None:
    wrong = [line for lines in ranks.run(token_rows, exchange, nodes, dtype) for line in lines]
    assert not wrong, "\n".join(wrong)
