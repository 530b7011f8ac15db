"""The recipe fp8: right by the rule, smooth, the same bits in any company, and half of bf16's bytes to the experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from moeloom import (
    FP8,
    CapabilityError,
    Experts,
    MoeloomError,
    Placement,
    Plan,
    Quantized,
    Routing,
    Runtime,
    SwiGLU,
    launch,
)
from moeloom.quantize import dequantize, pack_records, quantize, record_bytes, unpack_records
from tests.backend.test_experts import COUNTS, GPT_OSS, make_experts, make_received, normal
from tests.support.cases import MEMBERS, Case, covering_cases
from tests.support.compare import assert_close_by_rule, equal_bits, relative_error
from tests.support.exchange import expert_fn, poison
from tests.support.oracle import World
from tests.support.pool import Ranks, runtime_of


@pytest.fixture(scope="module")
def alone() -> Iterator[Runtime]:
    """A Runtime of this process only."""
    with Runtime() as rt:
        yield rt


def same(got: Tensor, wanted: Tensor) -> bool:
    """Equal shapes and bytes."""
    return got.shape == wanted.shape and torch.equal(
        got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
    )


def given(rt: Runtime, received: Any) -> Any:
    """The same rows, quantised."""
    rows = quantize(received.rows)
    return replace(received, rows=rows.values, scales=rows.scales)


def run(rt: Runtime, received: Any, experts: Experts) -> Tensor:
    with torch.no_grad():
        return rt._backend.experts(received, experts, FP8)


def rounded(x: Tensor) -> Tensor:
    """Rows in E4M3, group by group, said once more."""
    out = torch.empty_like(x)
    for begin in range(0, x.shape[1], 128):
        part = x[:, begin : begin + 128]
        scale = (part.abs().amax(1, keepdim=True) / 448).clamp(min=1e-30)
        out[:, begin : begin + 128] = (part / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
    return out


def plain(experts: Experts, slot: int, x: Tensor, weight: Tensor, exact: bool) -> Tensor:
    """One expert on rows that are quantised already: in fp64, or in fp32 with the recipe's rounding."""
    dtype = torch.float64 if exact else torch.float32
    gate_up, down = (matrix.to(dtype) for matrix in experts.rounded(slot))
    x, weight = x.to(dtype), weight.to(dtype).unsqueeze(1)
    product = linear(x * weight if experts.weight_on_input else x, gate_up)
    if experts.gate_up_bias is not None:
        product = product + experts.gate_up_bias[slot].to(dtype)
    hidden = experts.activation(*experts.split_gate_up(product))
    if not experts.weight_on_input:
        hidden = hidden * weight
    rows = linear(hidden if exact else rounded(hidden), down)
    if experts.down_bias is not None:
        bias = experts.down_bias[slot].to(dtype)
        rows = rows + (bias if experts.weight_on_input else bias * weight)
    return rows if exact else rows.bfloat16()


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpt-oss": {"activation": GPT_OSS, "gate_up_order": "interleaved", "bias": True},
    "up_first": {"gate_up_order": "up_first"},
    "weight_on_input": {"weight_on_input": True},
    "weight_on_input and bias": {"weight_on_input": True, "bias": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(33, 17), (256, 200)])
@pytest.mark.parametrize("order", ["expert", "batched"])
def test_every_variant_is_right_by_the_rule(
    alone: Runtime, variant: str, hidden: int, intermediate: int, order: str
) -> None:
    experts = make_experts(len(COUNTS), hidden, intermediate, torch.bfloat16, **VARIANTS[variant])
    received = given(alone, make_received(COUNTS, hidden, torch.bfloat16, alignment=8, order=order))
    got = run(alone, received, experts)
    assert got.dtype == torch.bfloat16 and got.shape == received.rows.shape
    assert not got[received.topk_idx < 0].any(), "padding rows must be zeros"
    assert equal_bits(got, run(alone, received, experts.quantized())), "quantised before or at the call"
    x = dequantize(received.rows, received.scales)
    truth, peer = torch.zeros(x.shape, dtype=torch.float64), torch.zeros_like(got)
    for slot in range(len(COUNTS)):
        mine = received.topk_idx == slot
        truth[mine], peer[mine] = (
            plain(experts, slot, x[mine], received.topk_weights[mine], exact) for exact in (True, False)
        )
    assert_close_by_rule(got, truth, peer)


def test_the_layer_is_as_close_as_fp8_gets(alone: Runtime) -> None:
    """Against the unquantised layer: a few per cent, of four roundings to three bits of mantissa."""
    experts = make_experts(6, 384, 200, torch.bfloat16)
    x, routing = tokens(127, 384, 6, 5)
    exact = alone.moe(x.float(), routing, replace(experts, gate_up=experts.gate_up.float(), down=experts.down.float()))
    assert 0.01 < relative_error(alone.moe(x, routing, experts, recipe=FP8), exact) < 0.08


def tokens(num_tokens: int, hidden: int, ids: int, num_topk: int, seed: int = 0) -> tuple[Tensor, Routing]:
    generator = torch.Generator().manual_seed(seed)
    topk_idx = torch.randint(-1, ids, (num_tokens, num_topk), generator=generator)
    return normal(num_tokens, hidden, seed=100 + seed).bfloat16(), Routing(
        topk_idx, torch.rand(num_tokens, num_topk, generator=generator)
    )


def test_the_weight_on_input_scales_the_scales(alone: Runtime) -> None:
    experts = make_experts(len(COUNTS), 200, 64, torch.bfloat16, weight_on_input=True)
    received = given(alone, make_received(COUNTS, 200, torch.bfloat16))
    scaled = replace(
        received,
        scales=received.scales * received.topk_weights.unsqueeze(1),
        topk_weights=(received.topk_idx >= 0).float(),
    )
    assert equal_bits(run(alone, received, experts), run(alone, scaled, experts))


# smooth


def gate_only(gate: Tensor, up: Tensor) -> Tensor:
    """Linear, so that y follows what is scaled."""
    return gate + 0.5 * up


@pytest.mark.parametrize("what", ["x", "gate_up", "down"])
@pytest.mark.parametrize("top", [1.0, 448.0, 512.0, 2.0**-7])
def test_scaling_by_a_little_changes_the_result_by_as_much(alone: Runtime, what: str, top: float) -> None:
    """Also where the largest number crosses a power of two, at which rounded scales would jump."""
    experts = make_experts(4, 128, 128, torch.float32, activation=gate_only)
    received = make_received([9, 0, 20, 5], 128, torch.float32)
    results = []
    for factor in (0.99995, 1.00005):
        tensors = {"x": received.rows, "gate_up": experts.gate_up, "down": experts.down}
        tensors[what] = tensors[what] / tensors[what].abs().max() * top * factor
        some = replace(experts, gate_up=tensors["gate_up"], down=tensors["down"])
        with torch.no_grad():
            rows = quantize(tensors["x"])
            out = run(alone, replace(received, rows=rows.values, scales=rows.scales), some)
        results.append(out.float())
    assert relative_error(results[1], results[0] * 1.0001) < 5e-3


@pytest.mark.parametrize("what", ["x", "gate_up", "down"])
def test_a_little_noise_changes_little(alone: Runtime, what: str) -> None:
    """1e-4 moves one value in a thousand to its neighbour, which moves one in thirty of what is rounded next; the
    result moves less than by rounding all values once, 2.6e-2.
    """
    experts = make_experts(4, 256, 200, torch.float32)
    received = make_received([9, 0, 20, 5], 256, torch.float32)
    tensors = {"x": received.rows, "gate_up": experts.gate_up, "down": experts.down}
    results = []
    for noise in (0.0, 1e-4):
        noisy = tensors | {what: tensors[what] * (1 + noise * torch.randn(tensors[what].shape).clamp(-2, 2))}
        rows = quantize(noisy["x"])
        some = replace(experts, gate_up=noisy["gate_up"], down=noisy["down"])
        results.append(run(alone, replace(received, rows=rows.values, scales=rows.scales), some))
    assert 0 < relative_error(results[1], results[0]) < 0.02


# special values


def test_nan_stays_in_its_token(alone: Runtime) -> None:
    experts = make_experts(4, 200, 64, torch.bfloat16)
    x, routing = tokens(40, 200, 4, 2)
    routing.topk_idx[7] = torch.tensor([1, 2])
    before = alone.moe(x, routing, experts, recipe=FP8)
    for value in (float("nan"), float("inf")):
        x[7, 3] = value
        y = alone.moe(x, routing, experts, recipe=FP8)
        assert y[7].isnan().all()
        y[7] = before[7]
        assert equal_bits(y, before)
    x[7] = 0
    assert not alone.moe(x, routing, experts, recipe=FP8)[7].any()


# the same bits in any company


@pytest.mark.parametrize("transposed", [False, True])
def test_a_rows_bits_do_not_depend_on_its_company(alone: Runtime, transposed: bool) -> None:
    experts = make_experts(1, 160, 40, torch.bfloat16)
    if transposed:
        experts = replace(experts, gate_up=experts.gate_up.mT.contiguous().mT, down=experts.down.mT.contiguous().mT)
    every = given(alone, make_received([300], 160, torch.bfloat16))
    wanted = run(alone, every, experts)
    for begin, end in [(0, 1), (7, 8), (0, 13), (5, 200), (299, 300), (250, 260)]:
        count = torch.tensor([end - begin])
        part = replace(
            every,
            rows=every.rows[begin:end],
            scales=every.scales[begin:end],
            topk_idx=every.topk_idx[begin:end],
            topk_weights=every.topk_weights[begin:end],
            expert_start=torch.tensor([0, end - begin]),
            num_tokens_per_expert=count,
        )
        assert equal_bits(run(alone, part, experts), wanted[begin:end]), (begin, end)


def test_inputs_stay_as_they_are_whatever_their_strides(alone: Runtime) -> None:
    experts = make_experts(4, 200, 64, torch.bfloat16)
    x, routing = tokens(40, 200, 4, 2)
    wanted = alone.moe(x, routing, experts, recipe=FP8)
    wide = torch.full((40, 400), float("nan"), dtype=torch.bfloat16)
    wide[:, 1::2] = x
    out = torch.empty_like(x)
    for given_x in (wide[:, 1::2], x.t().contiguous().t()):
        before = given_x.clone()
        assert alone.moe(given_x, routing, experts, recipe=FP8, out=out) is out and equal_bits(out, wanted)
        assert equal_bits(given_x, before)


# the exchange


def exchange(case: Case) -> list[str]:
    """On every rank: every bit of quantised rows, and of what comes back, as the oracle says."""
    rt = runtime_of(case.members, case.nodes)
    if rt is None:
        return []
    poison(rt)
    drawn = [case.inputs(rank) for rank in range(case.ranks)]
    ids, weights = [r.topk_idx.tolist() for _, r in drawn], [r.topk_weights for _, r in drawn]
    rows = [quantize(x) for x, _ in drawn]
    records = World([pack_records(some) for some in rows], ids, weights, case.placement())
    numbers = World([dequantize(*some).bfloat16() for some in rows], ids, weights, case.placement())
    _, routing = drawn[rt.rank]
    plan = Plan(exchange=case.exchange)
    received, handle = rt.dispatch(
        rows[rt.rank], routing, case.placement(), order=case.order, alignment=case.alignment, plan=plan
    )
    wanted = unpack_records(records.received(rt.rank, case.order, case.alignment)[0].to(torch.uint8), case.hidden)
    again, _ = rt.dispatch(rows[rt.rank], handle)
    hidden, groups = received.rows.shape[-1], received.scales.shape[-1]
    right = {
        "values": same(received.rows.reshape(-1, hidden), wanted.values),
        "scales": same(received.scales.reshape(-1, groups), wanted.scales),
        "again": same(again.rows, received.rows) and same(again.scales, received.scales),
    }
    held = torch.tensor([*case.placement().slots[rt.rank], 0])  # the last entry serves padding
    expert = 0 if case.order == "rank" else held[received.topk_idx]
    results = expert_fn(dequantize(received.rows, received.scales).bfloat16(), expert)
    recipe = FP8.with_reduction(case.reduction)
    y = rt.combine(results, handle, weighted=case.weighted, recipe=recipe)
    how = {"exchange": case.exchange, "reduction": case.reduction, "weighted": case.weighted, "order": case.order}
    summed = numbers.combined(rt.rank, expert_fn, case.topology, **how)
    # small numbers become -0.0, and the sum with identity experts gives zeros another sign than the oracle's
    right["y"] = torch.equal(y, summed) if case.identity else equal_bits(y, summed)
    return [f"rank {rt.rank}: {name}" for name, good in right.items() if not good]


def test_every_bit_of_the_exchange(ranks: Ranks) -> None:
    cases = [replace(case, dtype="bfloat16", hidden=(12, 130, 33)[n % 3]) for n, case in enumerate(covering_cases())]
    for case in cases[::2]:
        wrong = [line for lines in ranks.run(exchange, case) for line in lines]
        assert not wrong, f"{case}\n" + "\n".join(wrong)


NUM_EXPERTS, HIDDEN = 8, 200


def held_by(rank: int, placement: Placement) -> Experts:
    every = make_experts(NUM_EXPERTS, HIDDEN, 72, torch.bfloat16, activation=SwiGLU(clamp=7.0))
    slots = torch.tensor(placement.slots[rank], dtype=torch.int64)
    return replace(every, gate_up=every.gate_up[slots], down=every.down[slots], placement=placement)


def shares(num_tokens: int, num_ranks: int) -> list[int]:
    """Where each rank's tokens begin: the first of several ranks has none."""
    return [0, num_tokens] if num_ranks == 1 else [0, *(num_tokens * n // (num_ranks - 1) for n in range(num_ranks))]


def layer(num_ranks: int, nodes: int, plan: Plan, reduction: Any) -> tuple[Tensor, bool] | None:
    """On every rank: its share of 61 tokens through `moe`; and whether its stages, called one by one, make the same."""
    rt = runtime_of(MEMBERS[num_ranks][0], nodes)
    if rt is None:
        return None
    x, routing = tokens(61, HIDDEN, NUM_EXPERTS, 3)
    begin, end = shares(61, num_ranks)[rt.rank : rt.rank + 2]
    x, routing = x[begin:end], Routing(routing.topk_idx[begin:end], routing.topk_weights[begin:end])
    placement, recipe = Placement.even(NUM_EXPERTS, num_ranks), FP8.with_reduction(reduction)
    experts = held_by(rt.rank, placement)
    y = rt.moe(x, routing, experts.quantized(), recipe=recipe, plan=plan)
    received, handle = rt.dispatch(quantize(x), routing, placement, plan=plan)
    with torch.no_grad():
        rows = rt._backend.experts(received, experts, recipe)
    return y, equal_bits(y, rt.combine(rows, handle, weighted=False, recipe=recipe))


@pytest.mark.parametrize("reduction", ["per_rank", "per_slot"])
def test_ranks_nodes_and_exchanges(ranks: Ranks, reduction: str) -> None:
    """per_slot: equal bits on 1..4 ranks. per_rank: close."""
    wanted = None
    for num_ranks, nodes, way in [(1, 1, "direct"), (2, 1, "direct"), (2, 2, "direct"), (3, 1, "direct"),
                                  (3, 2, "hybrid"), (4, 1, "direct"), (4, 2, "direct"), (4, 2, "hybrid")]:  # fmt: skip
        results = [one for one in ranks.run(layer, num_ranks, nodes, Plan(exchange=way), reduction) if one is not None]
        assert len(results) == num_ranks and all(by_hand for _, by_hand in results)
        y = torch.cat([one for one, _ in results])
        wanted = y if wanted is None else wanted
        assert equal_bits(y, wanted) if reduction == "per_slot" else relative_error(y, wanted) < 5e-3


def traffic(nodes: int, hidden: int) -> list[tuple[int, int]] | None:
    """On every rank: bytes that a dispatch put on both links, in bf16 and in fp8."""
    rt = runtime_of(MEMBERS[4][0], nodes)
    if rt is None:
        return None
    x, routing = tokens(64, hidden, 8, 2, seed=rt.rank)
    found = []
    for payload in (x, quantize(x)):
        before = rt.stats().get("dispatch")
        rt.dispatch(payload, routing, 8, plan=Plan(exchange="direct"))
        now = rt.stats()["dispatch"]
        change = now - before if before else now
        found.append((change.scale_up_bytes, change.scale_out_bytes))
    return found


@pytest.mark.parametrize("hidden", [512, 1920])
def test_bytes_on_the_links(ranks: Ranks, hidden: int) -> None:
    """A row is H bytes and 4 for each 128 of them, instead of 2 H; the routing beside it is the same."""
    assert record_bytes(hidden) == -(-(hidden + hidden // 32) // 16) * 16
    routing = 4 * (1 + 2 * 2)
    for nodes in (1, 2):
        for (up, out), (fp8_up, fp8_out) in filter(None, ranks.run(traffic, nodes, hidden)):
            rows = (2 * hidden + routing, record_bytes(hidden) + routing)
            assert up == 64 * rows[0] and fp8_up == 64 * rows[1]
            assert out * rows[1] == fp8_out * rows[0] and (out > 0) == (nodes == 2)
            assert fp8_up / up < 0.54


# what is refused


def expect(kind: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_gradients_are_refused_by_name() -> None:
    """Each in a Runtime of its own: nothing runs after a refusal."""
    experts = make_experts(4, 32, 16, torch.bfloat16)
    x, routing = tokens(5, 32, 4, 2)
    wanted = "recipe fp8 is forward only"
    with Runtime() as rt:
        expect(CapabilityError, wanted, lambda: rt.moe(x.clone().requires_grad_(), routing, experts, recipe=FP8))
    trained = replace(experts, down=experts.down.clone().requires_grad_())
    with Runtime() as rt:
        with torch.no_grad():
            rt.moe(x, routing, trained, recipe=FP8)
        expect(CapabilityError, wanted, lambda: rt.moe(x, routing, trained, recipe=FP8))
    weighted = Routing(routing.topk_idx, routing.topk_weights.clone().requires_grad_())
    with Runtime() as rt:
        expect(CapabilityError, wanted, lambda: rt.dispatch(quantize(x), weighted, 4))
    with Runtime() as rt:
        received, _ = rt.dispatch(quantize(x), routing, 4)
        d_out = torch.zeros(received.rows.shape)
        expect(CapabilityError, wanted, lambda: rt._backend.experts_backward(received, d_out, experts, FP8))


def test_what_does_not_fit_is_named() -> None:
    experts = make_experts(4, 32, 16, torch.bfloat16)
    x, routing = tokens(5, 32, 4, 2)
    rows = quantize(x)
    wide, double, meta = torch.ones(5, 2), rows.scales.double(), rows.scales.to("meta")
    quantized = experts.quantized()
    cases: list[tuple[str, Callable[[Runtime], Any]]] = [
        ("recipe bf16 needs dequantised weights", lambda rt: rt.moe(x, routing, quantized)),
        ("x has dtype torch.float32; the recipe", lambda rt: rt.moe(x.float(), routing, experts, recipe=FP8)),
        (r"x.scales is \[5, 2\].*be \[5, 1\]", lambda rt: rt.dispatch(Quantized(rows.values, wide), routing, 4)),
        ("x.scales has dtype torch.float64", lambda rt: rt.dispatch(Quantized(rows.values, double), routing, 4)),
        ("x.values has dtype torch.bfloat16", lambda rt: rt.dispatch(Quantized(x, rows.scales), routing, 4)),
        ("x.scales is on meta", lambda rt: rt.dispatch(Quantized(rows.values, meta), routing, 4)),
    ]
    for message, call in cases:
        with Runtime() as rt:
            expect(ValueError, message, lambda call=call, rt=rt: call(rt))  # type: ignore[misc]


def test_a_quantised_payload_in_decode_is_refused_by_name() -> None:
    x, routing = tokens(5, 32, 4, 2)
    plan = Plan("decode")
    with Runtime(max_tokens=8) as rt:
        expect(CapabilityError, "x is quantised; the decode", lambda: rt.dispatch(quantize(x), routing, 4, plan=plan))


def mixed() -> str:
    """On each of two ranks: one quantises its rows, the other does not."""
    with Runtime(timeout=20.0) as rt:
        x, routing = tokens(5, 32, 4, 2)
        try:
            rt.dispatch(quantize(x) if rt.rank else x, routing, 4)
        except (MoeloomError, ValueError) as error:
            return str(error)
    return "no error"


def test_ranks_of_different_recipes_find_out() -> None:
    messages = launch(mixed, ranks=2)
    wanted = "dtype differs between ranks: rank 0 has torch.bfloat16, rank 1 has torch.float8_e4m3fn with scales"
    assert all(wanted in message for message in messages), messages
