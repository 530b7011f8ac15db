"""`layer_work`: bytes and operations by hand, and what the CPU backend really sends between nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moeloom import BF16, FP8, FP32, Plan, Recipe, Routing
from moeloom.plan.choices import Uniform
from moeloom.plan.flow import Flow, expected_flow
from moeloom.plan.problem import Domains, Problem
from moeloom.plan.work import STAGES, layer_memory, layer_work, row_bytes, weight_bytes
from moeloom.quantize import quantize
from moeloom.types import ExchangeName
from tests.support.pool import Ranks, runtime_of

# A rank with 10 tokens that choose 2 experts each, H = 256, I = 128. 25 rows arrive for 30 pairs.
FLOW = Flow(
    pairs=30.0,
    tokens=25.0,
    rows_of_experts=(1e4, 0.0, 1e4),  # two are hit for sure
    scale_out=6.0,
    scale_up=9.0,
    handed_on=4.0,
    pairs_out=7.0,
    pairs_up=11.0,
    peers=3.0,
)


def problem(recipe: Recipe, tokens: int = 10) -> Problem:
    return Problem(tokens, hidden=256, num_experts=12, num_topk=2, recipe=recipe, intermediate=128)


def test_rows_and_weights_by_hand() -> None:
    assert [row_bytes(recipe, 256) for recipe in (FP32, BF16, FP8)] == [1024, 512, 256 + 2 * 4 + 8]
    assert [weight_bytes(recipe) for recipe in (FP32, BF16)] == [4.0, 2.0]
    assert 128 * 256 * weight_bytes(FP8) == 128 * 256 + 2 * 4  # two blocks of 128 x 128


@pytest.mark.parametrize(
    ("recipe", "there", "experts", "back"),
    [
        # rows of 1024, activation of 512: 2 x 3 x 256 x 128 x 4 of weights, 30 x (1024 + 2 x 512 + 1024)
        (FP32, 1024, 786_432 + 92_160, 1024),
        (BF16, 512, 393_216 + 46_080, 512),
        # rows of 272, activation of 128 + 4, a multiple of 16: 144; 196608 weights, 12 scales of 4;
        # 30 x (272 + 2 x 144 + 512)
        (FP8, 272, 196_656 + 32_160, 512),
    ],
    ids=str,
)
def test_layer_by_hand(recipe: Recipe, there: int, experts: int, back: int) -> None:
    dispatch, computed, combine = layer_work(problem(recipe), FLOW)
    assert (dispatch.stage, computed.stage, combine.stage) == STAGES
    assert dispatch.memory_bytes == there * (10 + 25 + 25 + 30)
    assert computed.memory_bytes == pytest.approx(experts, rel=1e-12)
    assert combine.memory_bytes == back * (30 + 25 + 25 + 10)
    assert (dispatch.scale_up_bytes, dispatch.scale_out_bytes) == (9 * there, 6 * there)
    assert (combine.scale_up_bytes, combine.scale_out_bytes) == (9 * back, 6 * back)
    assert (computed.scale_up_bytes, computed.scale_out_bytes) == (0, 0)
    assert (dispatch.flops, combine.flops) == (0.0, 0.0)
    assert computed.flops == 20_000 * 6 * 256 * 128
    assert computed.experts == 2.0 and dispatch.experts == combine.experts == 0.0


@pytest.mark.parametrize("recipe", [FP32, BF16, FP8], ids=str)
def test_per_slot_sends_a_row_back_for_each_pair(recipe: Recipe) -> None:
    each = recipe.with_reduction("per_slot")
    back = 256 * recipe.dtype.itemsize
    (dispatch, computed, combine), per_rank = layer_work(problem(each), FLOW), layer_work(problem(recipe), FLOW)
    assert (dispatch, computed) == per_rank[:2]
    assert combine.memory_bytes == back * (30 + 30 + 30 + 10)
    assert (combine.scale_up_bytes, combine.scale_out_bytes) == (11 * back, 7 * back)


def test_rows_are_padded_for_products_only() -> None:
    plain, tiled = layer_work(problem(BF16), FLOW), layer_work(problem(BF16), FLOW, tile_rows=64)
    assert tiled[1].flops == pytest.approx((20_000 + 2 * 31.5) * 6 * 256 * 128)
    assert replace(tiled[1], flops=plain[1].flops) == plain[1]
    assert (tiled[0], tiled[2]) == (plain[0], plain[2])


def test_hops_and_messages() -> None:
    for tokens, messages in ((10, 3), (1, 2), (0, 0)):  # one token reaches 2 ranks at most
        for work in layer_work(problem(BF16, tokens), FLOW)[::2]:
            assert (work.scale_up_hops, work.scale_out_hops, work.messages) == (2, 1, messages)
    one_node = replace(FLOW, peers=0.0, handed_on=0.0, scale_out=0.0, pairs_out=0.0)
    for work in layer_work(problem(BF16), one_node)[::2]:
        assert (work.scale_up_hops, work.scale_out_hops, work.messages, work.scale_out_bytes) == (1, 0, 0, 0)


def test_memory_by_hand() -> None:
    """10 own rows with 5 words of routing and 2 partial sums; 25 arrived; 30 pairs in, between and out."""
    own, arrived, pairs = 10 * (512 + 20 + 2 * 512), 25 * 512, 30 * (512 + 256 + 512)
    assert layer_memory(problem(BF16), FLOW, num_ranks=8) == own + arrived + pairs
    assert layer_memory(problem(BF16), FLOW, num_ranks=8, share=0.25) == own + (arrived + pairs) / 4
    assert layer_memory(problem(BF16), FLOW, num_ranks=1) == own - 10 * 512 + arrived + pairs
    each = problem(BF16.with_reduction("per_slot"))
    assert layer_memory(each, FLOW, num_ranks=1) == own + arrived + pairs
    fp8 = 10 * (272 + 20 + 2 * 512) + 25 * 272 + 30 * (272 + 144 + 512)
    assert layer_memory(problem(FP8), FLOW, num_ranks=8) == fp8


# ---- against what is really sent

TOKENS, EXPERTS, TOPK, HIDDEN = 3000, 8, 2, 256
ROUTING_BYTES = 4 * (1 + 2 * TOPK)  # beside each row


def sent_between_nodes(exchange: ExchangeName, recipe: Recipe) -> tuple[int, int] | None:
    """Bytes that dispatch and combine put on this rank's link between nodes."""
    rt = runtime_of((0, 1, 2, 3), 2)
    if rt is None:
        return None
    before = rt.stats()
    generator = torch.Generator().manual_seed(rt.rank)
    topk_idx = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK).indices
    x = torch.ones(TOKENS, HIDDEN, dtype=recipe.dtype)
    routing = Routing(topk_idx, torch.full((TOKENS, TOPK), 0.5))
    received, handle = rt.dispatch(
        quantize(x) if recipe.quantized else x, routing, EXPERTS, plan=Plan(exchange=exchange)
    )
    rows = torch.ones(len(received.rows), HIDDEN, dtype=recipe.dtype)
    assert torch.equal(rt.combine(rows, handle, weighted=True, recipe=recipe), x)
    after = rt.stats()
    there, back = (
        (after[name] - before[name] if name in before else after[name]).scale_out_bytes
        for name in ("dispatch", "combine")
    )
    return there, back


@pytest.mark.parametrize("exchange", ["direct", "hybrid"])
@pytest.mark.parametrize("recipe", [FP32, BF16, FP8, BF16.with_reduction("per_slot")], ids=str)
def test_scale_out_bytes_are_those_of_the_cpu_backend(ranks: Ranks, exchange: ExchangeName, recipe: Recipe) -> None:
    """On average over four ranks, each of them as busy as the others. 2 % are three standard errors."""
    sent = [one for one in ranks.run(sent_between_nodes, exchange, recipe) if one is not None]
    there, back = (sum(one[stage] for one in sent) / 4 for stage in (0, 1))
    work = Problem(TOKENS, HIDDEN, EXPERTS, TOPK, recipe)
    flow = expected_flow(work, Domains(4, 2), exchange, Uniform())
    dispatch, _, combine = layer_work(work, flow)
    assert dispatch.scale_out_bytes + ROUTING_BYTES * flow.scale_out == pytest.approx(there, rel=0.02)
    assert combine.scale_out_bytes == pytest.approx(back, rel=0.02)
