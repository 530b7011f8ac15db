"""Quantisation on a GPU, by kernels and by `moeloom.quantize`: of any numbers the bytes that the CPU makes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moeloom import CapabilityError, Experts
from moeloom.backends.sm90.quantize import quantize_blocks, quantize_experts, quantize_rows
from moeloom.quantize import (
    decode_e8m0,
    decode_mxfp4,
    dequantize,
    dequantize_blocks,
    pack_records,
    quantize,
    record_bytes,
)
from moeloom.quantize import quantize_blocks as quantize_block_by_block
from tests.support.compare import equal_bits
from tests.support.host_reads import NoHostReads

gpu = pytest.mark.gpu

SPECIAL = (math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 1e-40, -1e-45, 2.0**-117, 448.0)
KINDS = ("normal", "special", "tiny", "wide", "zeros")
POISON = 0xA5

each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
each_kind = pytest.mark.parametrize("kind", KINDS)
each_order = pytest.mark.parametrize("order", ["gate_first", "up_first", "interleaved"])


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """New tensors are NaN or the largest integer, so that what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def numbers(*shape: int, kind: str = "normal", seed: int = 0) -> Tensor:
    """fp32 on the CPU. special: rows with few to many of `SPECIAL`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if kind == "special":
        rate = torch.rand(*shape[:-1], 1, generator=generator) ** 4
        chosen = torch.rand(shape, generator=generator) < rate
        x[chosen] = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (int(chosen.sum()),), generator=generator)]
    elif kind == "tiny":
        x *= 1e-38
    elif kind == "wide":
        x *= torch.exp2(torch.randint(-120, 120, shape, generator=generator).float())
    elif kind == "zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    return x


def records_of(x: Tensor) -> Tensor:
    """By the CPU."""
    return pack_records(quantize(x.cpu()))


@gpu
@each_dtype
@each_kind
@pytest.mark.parametrize("hidden", [8, 16, 120, 128, 136, 1024, 1032, 2880, 7168])
def test_rows(hidden: int, kind: str, dtype: torch.dtype) -> None:
    x = numbers(37, hidden, kind=kind, seed=hidden).to(dtype)
    assert torch.equal(quantize_rows(x.cuda()).cpu(), records_of(x))


@gpu
def test_every_bf16() -> None:
    """Each with others of its size, then all sizes together."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    mixed = every[torch.randperm(65536, generator=torch.Generator().manual_seed(0))]
    for x in (every.view(512, 128), mixed.view(512, 128), mixed.view(8192, 8), mixed.view(8, 8192)):
        assert torch.equal(quantize_rows(x.cuda()).cpu(), records_of(x))


@gpu
def test_any_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (1024, 1024), generator=generator).int().view(torch.float32)
    narrow = (x.view(torch.int32) & (0x80FFFFFF - 2**32) | 0x3F000000).view(
        torch.float32
    )  # of equal size, all mantissas
    for some in (x, narrow):
        assert torch.equal(quantize_rows(some.cuda()).cpu(), records_of(some))


@gpu
@each_dtype
@pytest.mark.parametrize("count", [None, -3, 0, 1, 20, 33, 99])
def test_strides_and_counts(count: int | None, dtype: torch.dtype) -> None:
    """Rows in the midst of others, and records too; what lies around them and beyond the count stays."""
    rows, hidden = 33, 1160
    x = numbers(rows, hidden).to(dtype)
    wide = torch.full((rows, hidden + 48), math.nan, dtype=dtype, device="cuda")
    wide[:, 16 : 16 + hidden] = x.cuda()
    size = record_bytes(hidden)
    around = torch.full((rows, size + 64), POISON, dtype=torch.uint8, device="cuda")
    out = around[:, 16 : 16 + size]
    num_tokens = None if count is None else torch.tensor([count], dtype=torch.int32, device="cuda")
    before = wide.clone()
    got = quantize_rows(wide[:, 16 : 16 + hidden], num_tokens=num_tokens, out=out)
    assert got.data_ptr() == out.data_ptr()
    written = rows if count is None else min(max(count, 0), rows)
    wanted = torch.full(around.shape, POISON, dtype=torch.uint8)
    wanted[:written, 16 : 16 + size] = records_of(x)[:written]
    assert torch.equal(around.cpu(), wanted)
    assert torch.equal(wide.view(torch.uint8), before.view(torch.uint8))


@gpu
@pytest.mark.parametrize("rows", [0, 1, 7, 8192])
def test_any_number_of_rows(rows: int) -> None:
    x = numbers(rows, 1152, kind="special", seed=rows).bfloat16()
    assert torch.equal(quantize_rows(x.cuda()).cpu(), records_of(x))


@gpu
def test_more_than_4_gb() -> None:
    rows, hidden = 300_000, 7680
    x = torch.empty(rows, hidden, dtype=torch.bfloat16, device="cuda")
    last = numbers(5, hidden).bfloat16()
    x[-5:] = last.cuda()
    out = torch.empty(rows, record_bytes(hidden), dtype=torch.uint8, device="cuda")
    assert out.numel() > 2**31 and torch.equal(quantize_rows(x, out=out)[-5:].cpu(), records_of(last))


@gpu
def test_a_graph_replays_with_other_numbers_and_counts() -> None:
    x = numbers(64, 1024).bfloat16().cuda()
    num_tokens = torch.tensor([64], dtype=torch.int32, device="cuda")
    out = torch.empty(64, record_bytes(1024), dtype=torch.uint8, device="cuda")
    with NoHostReads():
        quantize_rows(x, num_tokens=num_tokens, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize_rows(x, num_tokens=num_tokens, out=out)
    for count, seed in ((64, 1), (7, 2), (0, 3)):
        x.copy_(numbers(64, 1024, seed=seed))
        num_tokens.fill_(count)
        out.fill_(POISON)
        graph.replay()
        assert torch.equal(out[:count].cpu(), records_of(x)[:count]) and (out[count:] == POISON).all()


@gpu
@each_dtype
@each_kind
@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (1, 8), (130, 296), (256, 120), (5, 1024)])
def test_blocks(rows: int, columns: int, kind: str, dtype: torch.dtype) -> None:
    weight = numbers(3, rows, columns, kind=kind, seed=rows).to(dtype)
    got = quantize_blocks(weight.cuda())
    for slot in range(3):
        values, scales = quantize_block_by_block(weight[slot])
        assert torch.equal(got.values[slot].cpu().view(torch.uint8), values.view(torch.uint8))
        assert equal_bits(got.scales[slot].cpu(), scales)


def weights(order: str, dtype: torch.dtype, intermediate: int = 200, kind: str = "normal") -> Experts:
    gate_up = numbers(3, 2 * intermediate, 136, kind=kind, seed=1).to(dtype)
    down = numbers(3, 136, intermediate, kind=kind, seed=2).to(dtype)
    return Experts(gate_up, down, gate_up_order=order)  # type: ignore[arg-type]


@gpu
@each_dtype
@each_order
@pytest.mark.parametrize("intermediate", [8, 128, 200, 264])
def test_gate_and_up_have_blocks_of_their_own(intermediate: int, order: str, dtype: torch.dtype) -> None:
    experts = weights(order, dtype, intermediate, "special")
    wanted = experts.quantized()
    got = quantize_experts(replace(experts, gate_up=experts.gate_up.cuda(), down=experts.down.cuda()))
    got.check(3, 136)
    assert quantize_experts(got) is got and got.gate_up_order == order
    assert wanted.scales is not None and got.scales is not None
    for ours, theirs in ((got.gate_up, wanted.gate_up), (got.down, wanted.down)):
        assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))
    for ours, theirs in zip(got.scales, wanted.scales, strict=True):
        assert equal_bits(ours.cpu(), theirs)


@gpu
@each_order
def test_weights_may_be_parts_of_others(order: str) -> None:
    experts = weights(order, torch.bfloat16)
    wide = torch.full((5, 432, 152), math.nan, dtype=torch.bfloat16, device="cuda")
    part = wide[1:4, 8:408, 8:144]
    part.copy_(experts.gate_up)
    got = quantize_blocks(part, gate_up_order=experts.gate_up_order)
    wanted = experts.quantized()
    assert torch.equal(got.values.cpu().view(torch.uint8), wanted.gate_up.view(torch.uint8))
    assert wanted.scales is not None and equal_bits(got.scales.cpu(), wanted.scales[0])


@gpu
@each_dtype
@each_kind
def test_the_pure_functions_make_the_same_bits_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    x = numbers(130, 300, kind=kind).to(dtype)
    on_gpu, on_cpu = quantize(x.cuda()), quantize(x)
    records = pack_records(on_gpu)
    assert records.is_cuda and torch.equal(records.cpu(), pack_records(on_cpu))
    assert equal_bits(dequantize(*on_gpu).cpu().nan_to_num(nan=1e9), dequantize(*on_cpu).nan_to_num(nan=1e9))
    blocks_on_gpu, blocks_on_cpu = quantize_block_by_block(x.cuda()), quantize_block_by_block(x)
    assert torch.equal(blocks_on_gpu.values.cpu().view(torch.uint8), blocks_on_cpu.values.view(torch.uint8))
    assert equal_bits(blocks_on_gpu.scales.cpu(), blocks_on_cpu.scales)
    back = dequantize_blocks(*blocks_on_gpu).cpu().nan_to_num(nan=1e9)
    assert equal_bits(back, dequantize_blocks(*blocks_on_cpu).nan_to_num(nan=1e9))


@gpu
def test_mxfp4_on_a_gpu() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (16, 16, 16), generator=generator).to(torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8).view(16, 16)
    got = decode_mxfp4(blocks.cuda(), scales.cuda()).cpu()
    assert equal_bits(got.nan_to_num(nan=1e9), decode_mxfp4(blocks, scales).nan_to_num(nan=1e9))
    assert equal_bits(decode_e8m0(scales.cuda()).cpu(), decode_e8m0(scales))


def test_what_is_not_on_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x is torch.float32 \[2, 8\] on cpu; allowed: .*on a GPU"):
        quantize_rows(torch.ones(2, 8))
    with pytest.raises(ValueError, match=r"weight is torch.float32 \[1, 2, 8\] on cpu"):
        quantize_blocks(torch.ones(1, 2, 8))
    with pytest.raises(CapabilityError, match="fp8 is forward only"):
        quantize_rows(torch.ones(2, 8, requires_grad=True))


@gpu
def test_what_does_not_fit_is_named() -> None:
    x = torch.ones(4, 72, dtype=torch.bfloat16, device="cuda")
    size = record_bytes(72)
    out = torch.zeros(4, size, dtype=torch.uint8, device="cuda")
    count = torch.ones(1, dtype=torch.int32, device="cuda")
    for refused, message in [
        (lambda: quantize_rows(x.half()), "x is torch.float16"),
        (lambda: quantize_rows(x[0]), r"x is .*\[72\].* with 2 dimensions"),
        (lambda: quantize_rows(x[:, :60]), "x has rows of 60; allowed: multiples of 8"),
        (lambda: quantize_rows(x[:, :0]), "x has rows of 0"),
        (lambda: quantize_rows(x[:, ::2][:, :32]), "x has strides"),
        (lambda: quantize_rows(x[:, 4:12]), "x is at .*; allowed: multiples of 16"),
        (lambda: quantize_rows(torch.ones(4, 84, device="cuda").bfloat16()[:, :80]), r"rows \[168\] bytes apart"),
        (lambda: quantize_rows(x, num_tokens=count.long()), "num_tokens is torch.int64"),
        (lambda: quantize_rows(x, num_tokens=count.cpu()), "num_tokens is .* on cpu"),
        (lambda: quantize_rows(x, num_tokens=count.repeat(2)), r"num_tokens is torch.int32 \[2\]"),
        (lambda: quantize_rows(x, out=out[:3]), r"out is torch.uint8 \[3, 80\]"),
        (lambda: quantize_rows(x, out=out.view(torch.int8)), "out is torch.int8"),
        (lambda: quantize_blocks(x), "weight is .* with 3 dimensions"),
        (lambda: quantize_blocks(x[None, :3], gate_up_order="gate_first"), "weight has 3 rows; .*: an even number"),
    ]:
        with pytest.raises(ValueError, match=message):
            refused()
