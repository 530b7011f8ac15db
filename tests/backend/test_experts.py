"""The expert computation: right by the rule, rounded where the contract says, and the same bits in any company."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from moeloom import BF16, FP32, Experts, Placement, Received, Recipe, Routing, Runtime, SwiGLU, launch
from tests.support.compare import assert_close_by_rule, equal_bits, plain_expert, plain_layer

RECIPES = [FP32, BF16]
COUNTS = [0, 5, 131, 0, 0, 1, 17, 0]  # experts without tokens come first, in the middle and last
GPT_OSS = SwiGLU(clamp=7.0, alpha=1.702, up_offset=1.0)


@pytest.fixture(scope="module")
def alone() -> Iterator[Runtime]:
    """A Runtime of this process only."""
    with Runtime() as rt:
        yield rt


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def make_experts(
    num: int, hidden: int, intermediate: int, dtype: torch.dtype, bias: bool = False, **options: Any
) -> Experts:
    """Random weights; gate's and up's sizes differ, so that one cannot pass for the other."""
    gate_up = normal(num, 2 * intermediate, hidden, seed=1, scale=2.0 * hidden**-0.5)
    gate_up[:, ::3] *= 0.5
    down = normal(num, hidden, intermediate, seed=2, scale=intermediate**-0.5)
    if bias:
        options["gate_up_bias"] = normal(num, 2 * intermediate, seed=3).to(dtype)
        options["down_bias"] = normal(num, hidden, seed=4).to(dtype)
    return Experts(gate_up.to(dtype), down.to(dtype), **options)


def make_received(
    counts: list[int], hidden: int, dtype: torch.dtype, alignment: int = 1, order: Any = "expert"
) -> Received:
    """Rows as dispatch lays them out; padding rows hold NaN."""
    depth = -(-max(counts, default=0) // alignment) * alignment
    sizes = [depth if order == "batched" else -(-count // alignment) * alignment for count in counts]
    starts = [sum(sizes[:slot]) for slot in range(len(counts) + 1)]
    rows = normal(starts[-1], hidden, seed=5).to(dtype)
    weights = normal(starts[-1], seed=6).abs()
    ids = torch.full((starts[-1],), -1)
    for slot, (start, count, end) in enumerate(zip(starts, counts, starts[1:], strict=False)):
        ids[start : start + count] = slot
        rows[start + count : end] = float("nan")
        weights[start + count : end] = 0
    shape = (len(counts), depth) if order == "batched" else (starts[-1],)
    return Received(
        rows=rows.view(*shape, hidden),
        topk_idx=ids.view(shape),
        topk_weights=weights.view(shape),
        expert_start=torch.tensor(starts),
        num_tokens_per_expert=torch.tensor(counts, dtype=torch.int64),
        num_dropped=torch.tensor(0),
        order=order,
    )


def run(rt: Runtime, received: Received, experts: Experts, recipe: Recipe) -> Tensor:
    with torch.no_grad():
        return rt._backend.experts(received, experts, recipe)


def plain(received: Received, experts: Experts, dtype: torch.dtype) -> Tensor:
    """All experts by plain PyTorch; padding rows are zeros."""
    hidden = received.rows.shape[-1]
    rows, ids, weights = received.rows.reshape(-1, hidden), received.topk_idx.flatten(), received.topk_weights.flatten()
    out = torch.zeros(rows.shape, dtype=dtype)
    for slot in range(experts.num_local):
        mine = (ids == slot).nonzero().squeeze(1)
        out[mine] = plain_expert(experts, slot, rows[mine], weights[mine], dtype).to(dtype)
    return out.view(received.rows.shape)


def check(rt: Runtime, received: Received, experts: Experts, recipe: Recipe) -> None:
    got = run(rt, received, experts, recipe)
    assert got.dtype == recipe.dtype
    assert not got[received.topk_idx < 0].any(), "padding rows must be zeros"
    assert_close_by_rule(got, plain(received, experts, torch.float64), plain(received, experts, recipe.dtype))


def input_major(weight: Tensor) -> Tensor:
    """The same values with the input's dimension first in memory, as gpt-oss keeps them."""
    return weight.transpose(1, 2).contiguous().transpose(1, 2)


def double_relu(gate: Tensor, up: Tensor) -> Tensor:
    """An activation that moeloom does not know."""
    return torch.relu(gate) + 0.5 * torch.relu(up)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clamp": {"activation": SwiGLU(clamp=0.7)},
    "alpha": {"activation": SwiGLU(alpha=1.702)},
    "offset": {"activation": SwiGLU(up_offset=1.0)},
    "gpt-oss": {"activation": GPT_OSS, "gate_up_order": "interleaved", "bias": True},
    "bias": {"bias": True},
    "up_first": {"gate_up_order": "up_first"},
    "interleaved": {"gate_up_order": "interleaved"},
    "weight_on_input": {"weight_on_input": True},
    "weight_on_input and bias": {"weight_on_input": True, "bias": True, "gate_up_order": "up_first"},
    "custom": {"activation": double_relu},
}


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(33, 17), (64, 48)])
def test_every_variant_is_right_by_the_rule(
    alone: Runtime, recipe: Recipe, variant: str, hidden: int, intermediate: int
) -> None:
    experts = make_experts(len(COUNTS), hidden, intermediate, recipe.dtype, **VARIANTS[variant])
    check(alone, make_received(COUNTS, hidden, recipe.dtype), experts, recipe)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("order", ["expert", "batched"])
@pytest.mark.parametrize("counts", [[0, 3, 0], [4, 0, 0], [0, 0, 300], [1, 1, 1], [0, 0, 0]], ids=str)
def test_padding_and_experts_without_tokens(alone: Runtime, recipe: Recipe, order: str, counts: list[int]) -> None:
    experts = make_experts(3, 33, 17, recipe.dtype, bias=True)
    received = make_received(counts, 33, recipe.dtype, alignment=8, order=order)
    if order == "expert":  # a stated capacity leaves rows behind the last expert's
        received = replace(
            received,
            rows=torch.cat([received.rows, torch.full((5, 33), float("nan"), dtype=recipe.dtype)]),
            topk_idx=torch.cat([received.topk_idx, torch.full((5,), -1)]),
            topk_weights=torch.cat([received.topk_weights, torch.zeros(5)]),
        )
    if any(counts):
        check(alone, received, experts, recipe)
    else:
        assert not run(alone, received, experts, recipe).any()


@pytest.mark.parametrize("order", ["expert", "batched"])
def test_no_experts_on_this_rank(alone: Runtime, order: str) -> None:
    received = make_received([], 8, torch.float32, order=order)
    assert run(alone, received, make_experts(0, 8, 4, torch.float32), FP32).shape == received.rows.shape


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("on_input", [False, True])
def test_bf16_is_rounded_where_the_contract_says(alone: Runtime, bias: bool, on_input: bool) -> None:
    # gate, up and down are identities: every product is exact, so only the stated roundings can show
    size, count = 16, 37
    eye = torch.eye(size).bfloat16()
    options: dict[str, Any] = {"weight_on_input": on_input}
    if bias:
        options["gate_up_bias"] = normal(1, 2 * size, seed=3).bfloat16()
        options["down_bias"] = normal(1, size, seed=4).bfloat16()
    experts = Experts(torch.cat([eye, eye]).unsqueeze(0), eye.unsqueeze(0), **options)
    received = make_received([count], size, torch.bfloat16)
    x, weight = received.rows.float(), received.topk_weights.unsqueeze(1)
    if on_input:
        x, weight = (x * weight).bfloat16().float(), torch.ones(1)
    gate_bias, up_bias = options["gate_up_bias"][0].float().chunk(2) if bias else (0.0, 0.0)
    hidden = silu(x + gate_bias) * (x + up_bias)
    wanted = (hidden * weight).bfloat16().float()
    if bias:
        wanted = wanted + options["down_bias"][0].float() * weight
    assert equal_bits(run(alone, received, experts, BF16), wanted.bfloat16())


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("hidden_first", [False, True])
def test_transposed_weights_are_right_by_the_rule(alone: Runtime, recipe: Recipe, hidden_first: bool) -> None:
    experts = make_experts(len(COUNTS), 40, 24, recipe.dtype, bias=True)
    if hidden_first:
        gate_up, down = input_major(experts.gate_up), input_major(experts.down)
    else:  # every other element of a wider tensor
        gate_up, down = (torch.stack([weight, weight * 2], -1)[..., 0] for weight in (experts.gate_up, experts.down))
    assert not gate_up.is_contiguous() and not down.is_contiguous()
    strided = replace(experts, gate_up=gate_up, down=down)
    received = make_received(COUNTS, 40, recipe.dtype)
    check(alone, received, strided, recipe)
    assert equal_bits(run(alone, received, strided, recipe), run(alone, received, experts, recipe))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"activation": GPT_OSS, "bias": True}, {"weight_on_input": True}], ids=str)
def test_the_layer_is_right_by_the_rule(alone: Runtime, recipe: Recipe, options: dict) -> None:
    num_tokens, hidden, num_identity = 127, 33, 2
    placement = Placement.from_slots([[3, 0, 1, 2, 4, 1]], num_identity=num_identity)
    experts = make_experts(6, hidden, 17, recipe.dtype, placement=placement, **options)
    experts.gate_up[5], experts.down[5] = experts.gate_up[2], experts.down[2]  # the second replica of expert 1
    if experts.gate_up_bias is not None:
        experts.gate_up_bias[5], experts.down_bias[5] = experts.gate_up_bias[2], experts.down_bias[2]
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(-1, 5 + num_identity, (num_tokens, 5), generator=generator)
    x = normal(num_tokens, hidden, seed=8).to(recipe.dtype)
    routing = Routing(ids, normal(num_tokens, 5, seed=9).abs())
    slots = {0: 1, 1: 2, 2: 3, 3: 0, 4: 4}
    got = alone.moe(x, routing, experts)
    truth, peer = (plain_layer(experts, x, routing, dtype, slots.get) for dtype in (torch.float64, recipe.dtype))
    assert_close_by_rule(got, truth, peer)


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize(
    ("hidden", "intermediate", "transposed"),
    [
        (1, 1, False), (5, 3, False), (33, 5, False), (16, 32, False), (33, 17, False), (64, 48, False),
        (100, 7, False), (256, 128, False), (576, 320, False),
        (9, 5, True), (33, 17, True), (100, 7, True), (256, 128, True),
    ],
)  # fmt: skip
def test_a_rows_bits_do_not_depend_on_its_company(
    alone: Runtime, threads: None, recipe: Recipe, hidden: int, intermediate: int, transposed: bool
) -> None:
    count = 301
    experts = make_experts(1, hidden, intermediate, recipe.dtype, bias=True)
    if transposed:
        gate_up, down = (
            weight.transpose(1, 2).contiguous().transpose(1, 2) for weight in (experts.gate_up, experts.down)
        )
        experts = replace(experts, gate_up=gate_up, down=down)
    whole = make_received([count], hidden, recipe.dtype)

    def part(begin: int, end: int) -> Tensor:
        one = replace(
            whole,
            rows=whole.rows[begin:end],
            topk_idx=whole.topk_idx[begin:end],
            topk_weights=whole.topk_weights[begin:end],
            expert_start=torch.tensor([0, end - begin]),
            num_tokens_per_expert=torch.tensor([end - begin]),
        )
        return run(alone, one, experts, recipe)

    torch.set_num_threads(1)
    wanted = part(0, count)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        # a row alone; then at every place among up to 40 others, and of windows that move over the tiles' borders
        windows = [(row, row + 1) for row in range(0, count, 7)]
        windows += [(row - others % (row + 1), row + 1 + others) for others in range(1, 41) for row in (0, 3, 20, 250)]
        windows += [(0, count), (1, count), (13, 13 + 129), (40, 40 + 256), (44, count)]
        for begin, end in windows:
            assert equal_bits(part(begin, end), wanted[begin:end]), (num_threads, begin, end)


def test_a_rows_bits_do_not_depend_on_other_experts_rows(alone: Runtime) -> None:
    experts = make_experts(3, 33, 17, torch.float32)
    received = make_received([9, 40, 12], 33, torch.float32, alignment=8)
    wanted = run(alone, received, experts, FP32)
    received.rows[:9] = float("nan")
    received.rows[-16:] = float("inf")
    start = int(received.expert_start[1])
    assert equal_bits(run(alone, received, experts, FP32)[start : start + 40], wanted[start : start + 40])


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_inputs_are_left_alone_and_nothing_stale_is_kept(alone: Runtime, recipe: Recipe) -> None:
    experts = make_experts(len(COUNTS), 33, 17, recipe.dtype, bias=True)
    received = make_received(COUNTS, 33, recipe.dtype)
    inputs = [
        experts.gate_up,
        experts.down,
        experts.gate_up_bias,
        experts.down_bias,
        received.rows,
        received.topk_weights,
    ]
    before = [(tensor.clone(), tensor.data_ptr(), tensor._version) for tensor in inputs]
    run(alone, received, experts, recipe)
    for tensor, (values, pointer, version) in zip(inputs, before, strict=True):
        assert equal_bits(tensor, values) and (tensor.data_ptr(), tensor._version) == (pointer, version)
    for weight in (experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias):
        weight.mul_(-1.5)
        check(alone, received, experts, recipe)


def peak_bytes() -> int:
    """The most memory this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_memory(dtype: torch.dtype, intermediate: int) -> int:
    """In a fresh process: by how much the experts' computation raises the peak."""
    hidden, num = 1024, 4
    recipe = BF16 if dtype == torch.bfloat16 else FP32

    def filled(count: int) -> Experts:
        one = Experts(
            torch.empty(count, 2 * intermediate, hidden, dtype=dtype),
            torch.empty(count, hidden, intermediate, dtype=dtype),
        )
        one.gate_up.fill_(0.01), one.down.fill_(0.01)
        return one

    with Runtime() as rt:
        run(rt, make_received([17], hidden, dtype), filled(1), recipe)  # the matmul library's own buffers
        experts, received = filled(num), make_received([17] * num, hidden, dtype)
        before = peak_bytes()
        run(rt, received, experts, recipe)
        return peak_bytes() - before


def test_bf16_weights_take_the_memory_of_one_expert_more() -> None:
    intermediate = 2048
    one_expert = 4 * 3 * intermediate * 1024
    (extra,) = launch(measure_memory, 1, args=(torch.bfloat16, intermediate), timeout=60)
    assert 0.5 * one_expert < extra < 1.5 * one_expert, (
        f"{extra / 1e6:.1f} MB, one expert has {one_expert / 1e6:.1f} MB"
    )


def test_fp32_weights_take_no_memory_more() -> None:
    (extra,) = launch(measure_memory, 1, args=(torch.float32, 2048), timeout=60)
    assert extra < 6e6, f"{extra / 1e6:.1f} MB"
