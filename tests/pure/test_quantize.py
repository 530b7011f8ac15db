"""FP8 quantisation, to the bit: against a loop in double precision, with special values, in any memory layout."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from moeloom import CapabilityError, Experts
from moeloom.quantize import (
    decode_e8m0,
    decode_mxfp4,
    dequantize,
    dequantize_blocks,
    num_groups,
    pack_records,
    quantize,
    quantize_blocks,
    record_bytes,
    unpack_records,
)
from moeloom.types import Quantized
from tests.support.compare import equal_bits

# every finite E4M3 number, from the format's definition
NUMBERS = sorted({m * 2.0**-9 for m in range(8)} | {(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)})
NUMBERS.remove(480.0)  # is NaN


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).float())


def nearest(value: float) -> float:
    """The E4M3 number nearest to it, ties to the even mantissa, limited to 448."""
    size = min(abs(value), 448.0)
    below = max(number for number in NUMBERS if number <= size)
    above = min(number for number in NUMBERS if number >= size)
    if size - below == above - size:
        chosen = below if NUMBERS.index(below) % 2 == 0 else above
    else:
        chosen = below if size - below < above - size else above
    return math.copysign(chosen, value)


def plain(group: list[float]) -> tuple[list[float], float]:
    """Values and scale of one group, each operation in double and rounded to fp32 (exactly what IEEE fp32 gives)."""
    amax = max([abs(x) for x in group if not math.isnan(x)] + [2.0**-116])
    factor = fp32(448.0 / amax)
    return [math.nan if math.isnan(x) else nearest(fp32(x * factor)) for x in group], fp32(amax / 448.0)


def same(got: Tensor, wanted: list[float]) -> bool:
    """Equal values (NaN equals NaN) and signs of zero."""
    return equal_bits(got.double().nan_to_num(nan=1e9), torch.tensor(wanted, dtype=torch.float64).nan_to_num(nan=1e9))


@pytest.mark.parametrize("width", [1, 5, 127, 128, 129, 300])
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-3, 1.0, 1e4, 1e37])
def test_it_is_what_a_loop_in_double_makes(width: int, size: float) -> None:
    x = normal(3, width, seed=width) * size
    got = quantize(x)
    assert got.values.dtype == torch.float8_e4m3fn and got.scales.dtype == torch.float32
    assert got.values.shape == (3, width) and got.scales.shape == (3, num_groups(width))
    for row in range(3):
        for group in range(num_groups(width)):
            part = slice(128 * group, 128 * group + 128)
            values, scale = plain(x[row, part].tolist())
            assert same(got.values[row, part], values)
            assert float(got.scales[row, group]) == scale


def test_ties_go_to_even_and_every_number_is_kept() -> None:
    exact = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)])
    got = quantize(exact)  # two groups, whose largest is 448
    assert same(got.values, exact.tolist()) and got.scales.tolist() == [1.0, 1.0]
    middles = torch.tensor([448.0, *((low + high) / 2 for low, high in pairwise(NUMBERS))])[:128]
    assert same(quantize(middles).values, [nearest(value) for value in middles.tolist()])


def test_zeros_stay_zero_with_their_sign_and_a_finite_scale() -> None:
    x = torch.zeros(2, 200)
    x[1] = -0.0
    got = quantize(x)
    assert equal_bits(dequantize(*got), x)
    assert got.scales.tolist() == [[fp32(2.0**-116 / 448)] * 2] * 2


@pytest.mark.parametrize("tiny", [1e-45, 1.1754944e-38, 2.0**-117, 2.0**-116, 2.0**-110])
def test_tiny_numbers_have_normal_scales(tiny: float) -> None:
    x = torch.full((1, 128), tiny)
    got = quantize(x)
    assert got.scales.item() >= 2.0**-126
    assert same(got.values[0], plain([tiny] * 128)[0])
    assert (dequantize(*got) <= 2.0**-116).all() or tiny > 2.0**-116


def test_the_largest_number_has_a_finite_scale() -> None:
    most = torch.finfo(torch.float32).max
    got = quantize(torch.tensor([[most, -most, most / 2]]))
    assert got.values.float().tolist() == [[448.0, -448.0, 224.0]] and got.scales.isfinite().all()


@pytest.mark.parametrize("large", [448.0, 449.0, 464.0, 1e4, 3e38])
def test_what_is_large_saturates_nothing_else(large: float) -> None:
    x = normal(2, 256)
    x[0, 3] = -large
    got = quantize(x)
    assert float(got.values[0, 3].float()) == -448.0
    assert same(got.values[0, :128], plain(x[0, :128].tolist())[0])
    assert torch.equal(got.values.float()[0, 128:], quantize(x[:1, 128:]).values.float()[0])


def test_nan_stays_in_its_element() -> None:
    x = normal(3, 256)
    x[1, 5] = 0.0
    clean = quantize(x)
    for nan in (float("nan"), -float("nan")):
        x[1, 5] = nan
        got = quantize(x)
        assert equal_bits(got.scales, clean.scales)
        assert int(got.values.view(torch.uint8)[1, 5]) == 0x7F, "one NaN, whatever the sign"
        got.values[1, 5] = 0.0
        assert torch.equal(got.values.view(torch.uint8), clean.values.view(torch.uint8))
    all_nan = quantize(torch.full((1, 130), float("nan")))
    assert all_nan.scales.isfinite().all() and dequantize(*all_nan).isnan().all()


@pytest.mark.parametrize("infinity", [float("inf"), -float("inf")])
def test_infinity_stays_in_its_group_and_is_seen(infinity: float) -> None:
    x = normal(3, 256)
    clean = quantize(x)
    x[1, 5] = infinity
    got = quantize(x)
    assert got.scales[1, 0].isinf() and dequantize(*got)[1, :128].isnan().all()
    got.values[1, :128], got.scales[1, 0] = clean.values[1, :128], clean.scales[1, 0]
    assert torch.equal(got.values.view(torch.uint8), clean.values.view(torch.uint8))
    assert equal_bits(got.scales, clean.scales)


@pytest.mark.parametrize("scale", [0.25, 4.0])
def test_scales_are_multiplied_with(scale: float) -> None:
    x = torch.full((1, 128), 448.0 * scale)
    got = quantize(x)
    assert got.scales.item() == scale and torch.equal(dequantize(*got), x)
    weight = torch.full((128, 128), 448.0 * scale)
    blocks = quantize_blocks(weight)
    assert blocks.scales.item() == scale and torch.equal(dequantize_blocks(*blocks), weight)


def test_a_group_knows_nothing_of_its_neighbours() -> None:
    x = normal(2, 384)
    got = quantize(x)
    for group in range(3):
        part = slice(128 * group, 128 * group + 128)
        alone = quantize(x[:, part])
        assert torch.equal(alone.values.float(), got.values[:, part].float())
        assert equal_bits(alone.scales[:, 0], got.scales[:, group])


def test_scales_are_continuous() -> None:
    """No powers of two: a change of 1e-4 in what is largest changes the scale by as much, also across one."""
    for top in (1.0, 448.0, 512.0, 2.0**-20):
        low, high = (quantize(torch.tensor([[top * factor]])).scales.item() for factor in (0.99995, 1.00005))
        assert high / low == pytest.approx(1.0001, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_memory_layout_does_not_matter(dtype: torch.dtype) -> None:
    x = normal(6, 200).to(dtype)
    before = x.clone()
    wanted = quantize(x)
    wide = torch.full((6, 400), float("nan"), dtype=dtype)
    wide[:, ::2] = x
    for other in (wide[:, ::2], x.t().contiguous().t(), x.repeat(2, 1)[6:]):
        got = quantize(other)
        assert torch.equal(got.values.float(), wanted.values.float()) and equal_bits(got.scales, wanted.scales)
    assert equal_bits(x, before)
    three = quantize(x.view(2, 3, 200))
    assert torch.equal(three.values.float().view(6, 200), wanted.values.float())
    assert quantize(x[:0]).values.shape == (0, 200) and quantize(x[:0]).scales.shape == (0, 2)


def test_every_value_is_widened_exactly() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert same(dequantize(values, torch.ones(2)), values.float().tolist())


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (1, 1), (130, 300), (256, 127), (5, 128)])
def test_blocks(rows: int, columns: int) -> None:
    weight = normal(rows, columns, seed=rows)
    got = quantize_blocks(weight)
    assert got.scales.shape == (num_groups(rows), num_groups(columns))
    for i in range(num_groups(rows)):
        for j in range(num_groups(columns)):
            part = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale = fp32(float(weight[part].abs().max()) / 448.0)
            assert float(got.scales[i, j]) == scale
            wanted = quantize(weight[part].reshape(1, -1)) if weight[part].numel() <= 128 else None
            if wanted is not None:
                assert torch.equal(got.values[part].float().reshape(1, -1), wanted.values.float())
            error = (dequantize_blocks(*got)[part] - weight[part]).abs()
            assert (error <= weight[part].abs() / 16 + scale * 2.0**-10).all()
    other = quantize_blocks(weight.t().contiguous().t())
    assert torch.equal(other.values.float(), got.values.float()) and equal_bits(other.scales, got.scales)


def test_a_block_with_one_number_keeps_the_zeros() -> None:
    weight = torch.zeros(256, 256)
    weight[3, 200] = 1.0
    weight[130, 7] = float("nan")
    got = dequantize_blocks(*quantize_blocks(weight))
    assert int(got.isnan().sum()) == 1 and bool(got[130, 7].isnan())
    assert got[3, 200] == 1.0 and int((got.nan_to_num() != 0).sum()) == 1


@pytest.mark.parametrize("hidden", [1, 12, 33, 128, 129, 2880, 7168])
def test_records_bring_every_bit_and_are_aligned(hidden: int) -> None:
    rows = quantize(normal(5, hidden))
    records = pack_records(rows)
    assert records.shape == (5, record_bytes(hidden)) and record_bytes(hidden) % 16 == 0
    assert hidden + 4 * num_groups(hidden) <= record_bytes(hidden) < hidden + 4 * num_groups(hidden) + 19
    back = unpack_records(records, hidden)
    assert isinstance(back, Quantized) and back.scales.data_ptr() % 4 == 0
    assert torch.equal(back.values.view(torch.uint8), rows.values.view(torch.uint8))
    assert equal_bits(back.scales, rows.scales)


def test_a_gradient_is_refused() -> None:
    with pytest.raises(CapabilityError, match="fp8 is forward only"):
        quantize(torch.ones(2, 4, requires_grad=True))
    with torch.no_grad():
        quantize(torch.ones(2, 4, requires_grad=True))


# MXFP4


def test_mxfp4() -> None:
    """Each of the sixteen codes, each exponent, low half first; written out in double."""
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table += [-value for value in table]
    blocks = torch.randint(0, 256, (3, 5, 16), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    blocks[0, 0] = torch.arange(0, 256, 16) + torch.arange(15, -1, -1)
    scales = torch.tensor([[127, 0, 1, 126, 128], [120, 130, 254, 100, 150], [64, 192, 5, 200, 127]]).to(torch.uint8)
    got = decode_mxfp4(blocks, scales)
    assert got.shape == (3, 160) and got.dtype == torch.float32
    for row in range(3):
        for group in range(5):
            codes = [code for byte in blocks[row, group].tolist() for code in (byte & 15, byte >> 4)]
            exact = torch.tensor([table[c] for c in codes], dtype=torch.float64) * 2.0 ** (
                int(scales[row, group]) - 127
            )
            assert equal_bits(got[row, 32 * group : 32 * group + 32], exact.float())


def test_exponents_are_exact() -> None:
    got = decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert got[255].isnan()
    assert got[:255].double().tolist() == [2.0 ** (e - 127) for e in range(255)]
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
    assert equal_bits(got[:255], theirs[:255])


# experts


def made(order: str, intermediate: int = 200) -> tuple[Experts, Tensor, Tensor]:
    gate, up = normal(2, intermediate, 130, seed=1), 3 * normal(2, intermediate, 130, seed=2)
    if order == "interleaved":
        gate_up = torch.stack([gate, up], 2).flatten(1, 2)
    else:
        gate_up = torch.cat([gate, up] if order == "gate_first" else [up, gate], 1)
    return Experts(gate_up, normal(2, 130, intermediate, seed=3), gate_up_order=order), gate, up  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["gate_first", "up_first", "interleaved"])
def test_gate_and_up_are_quantised_apart(order: str) -> None:
    """So that their order, and an I that is no multiple of 128, changes no bit."""
    experts, gate, up = made(order)
    quantized = experts.quantized()
    quantized.check(2, 130)
    assert quantized.gate_up.dtype == quantized.down.dtype == torch.float8_e4m3fn and quantized.quantized() is quantized
    for some in (experts, quantized):
        gate_up, down = some.rounded(1)
        got_gate, got_up = experts.split_gate_up(gate_up.t())
        assert equal_bits(got_gate.t(), dequantize_blocks(*quantize_blocks(gate[1])))
        assert equal_bits(got_up.t(), dequantize_blocks(*quantize_blocks(up[1])))
        assert equal_bits(down, dequantize_blocks(*quantize_blocks(experts.down[1])))


def test_scales_that_do_not_fit_are_named() -> None:
    experts, _, _ = made("gate_first")
    quantized = experts.quantized()
    assert quantized.scales is not None
    gate_up_scale, down_scale = quantized.scales
    for scales, message in [
        (None, "gate_up is torch.float8_e4m3fn, scales is None"),
        (
            (gate_up_scale[:, :3], down_scale),
            r"scales\[0\] is torch.float32 \[2, 3, 2\].*must be torch.float32 \[2, 4, 2\]",
        ),
        ((gate_up_scale, down_scale.double()), r"scales\[1\] is torch.float64"),
        ((gate_up_scale, down_scale.to("meta")), r"scales\[1\] is torch.float32 \[2, 2, 2\] on meta"),
    ]:
        with pytest.raises(ValueError, match=message):
            Experts(quantized.gate_up, quantized.down, scales=scales).check(2, 130)
    with pytest.raises(ValueError, match="gate_up is torch.float32, scales is given"):
        Experts(experts.gate_up, experts.down, scales=quantized.scales).check(2, 130)
