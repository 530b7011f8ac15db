"""experts on SM90: numbers by the rule, bits that depend on nothing but the row, whatever lies beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moeloom import Experts, SwiGLU, jit
from moeloom.backends.sm90 import experts as sm90
from moeloom.backends.sm90.experts import Scratch, experts
from moeloom.config import BF16, FP8, FP32, Recipe
from moeloom.errors import CapabilityError
from moeloom.quantize import dequantize, dequantize_blocks, num_groups, quantize, record_bytes, unpack_records

gpu = pytest.mark.gpu
RECIPES = pytest.mark.parametrize("recipe", [FP8, BF16], ids=lambda recipe: recipe.name)
SENTINEL = -17.0
# clamps are met often, so that they matter
GPT_OSS = SwiGLU(clamp=1.5, alpha=1.702, up_offset=1.0)
EDGES = [1, 5, 8, 13, 16, 30, 33, 64, 65, 100, 128, 129, 192, 193, 257]


@pytest.fixture(scope="module", autouse=True)
def compiled(request) -> None:
    """All kernels before the first test on a GPU, so that no test is charged for it."""
    if torch.cuda.is_available():
        for declared in sm90.KERNELS:
            jit.compile(declared.source)


@dataclass
class Case:
    """Rows as dispatch leaves them, and their experts; what is padding holds a poison."""

    rows: Tensor
    start: Tensor
    count: Tensor
    weight: Tensor
    experts: Experts
    recipe: Recipe

    def run(self, scratch=None, out=None) -> Tensor:
        return experts(self.rows, self.start, self.count, self.weight, self.experts, self.recipe, scratch, out)

    @property
    def ranges(self) -> list[range]:
        """Rows of each expert."""
        starts, counts = self.start.tolist(), self.count.tolist()
        return [range(start, start + count) for start, count in zip(starts, counts, strict=False)]

    @property
    def valid(self) -> Tensor:
        """Which rows are no padding: `[R]`."""
        valid = torch.zeros(len(self.rows), dtype=torch.bool, device=self.rows.device)
        for rows in self.ranges:
            valid[rows.start : rows.stop] = True
        return valid

    def of(self, rows: slice) -> Case:
        """These rows alone, of the first expert."""
        count = torch.tensor([rows.stop - rows.start], dtype=torch.int32, device=self.rows.device)
        return replace(self, rows=self.rows[rows], weight=self.weight[rows], count=count, start=torch.zeros_like(count))


def random_e4m3(*shape: int) -> Tensor:
    """Finite values below 2."""
    values = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    return values.bitwise_and_(0xBF).view(torch.float8_e4m3fn)


def random_rows(num_rows: int, hidden: int, recipe: Recipe) -> Tensor:
    if not recipe.quantized:
        return torch.randn(num_rows, hidden, device="cuda", dtype=torch.bfloat16)
    records = torch.zeros(num_rows, record_bytes(hidden), dtype=torch.uint8, device="cuda")
    rows = unpack_records(records, hidden)
    rows.values.copy_(random_e4m3(num_rows, hidden))
    rows.scales.uniform_(0.5, 2)
    return records


def random_experts(slots: int, hidden: int, intermediate: int, recipe: Recipe, biased=False, **options) -> Experts:
    shapes = ((slots, 2 * intermediate, hidden), (slots, hidden, intermediate))
    if recipe.quantized:
        gate_up, down = (random_e4m3(*shape) for shape in shapes)
        groups, hidden_groups = num_groups(intermediate), num_groups(hidden)
        scales = [torch.rand(slots, 2 * groups, hidden_groups, device="cuda") + 0.5]
        scales.append(torch.rand(slots, hidden_groups, groups, device="cuda") + 0.5)
        options["scales"] = (scales[0] * 3 * hidden**-0.5, scales[1] * intermediate**-0.5)
    else:
        gate_up, down = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        gate_up, down = gate_up * hidden**-0.5, down * intermediate**-0.5
    if biased:
        options["gate_up_bias"], options["down_bias"] = (torch.randn(shape[:2], device="cuda") for shape in shapes)
    return Experts(gate_up, down, **options)


def make(counts, hidden, intermediate, recipe, *, alignment=1, spare=5, poison=0xFF, seed=0, **options) -> Case:
    """spare: rows behind all experts. poison: every byte of what is padding."""
    torch.manual_seed(seed)
    starts = [0]
    for count in counts:
        starts.append(-(-(starts[-1] + count) // alignment) * alignment)
    start, count = (torch.tensor(numbers, dtype=torch.int32, device="cuda") for numbers in (starts, counts))
    num_rows = starts[-1] + spare
    weight = torch.rand(num_rows, device="cuda") + 0.1
    case = Case(
        random_rows(num_rows, hidden, recipe),
        start,
        count,
        weight,
        random_experts(len(counts), hidden, intermediate, recipe, **options),
        recipe,
    )
    case.rows.view(torch.uint8)[~case.valid] = poison
    weight[~case.valid] = torch.nan
    return case


def halves(experts: Experts, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of gate and of up."""
    if experts.gate_up_order == "interleaved":
        return gate_up[0::2], gate_up[1::2]
    first, second = gate_up.chunk(2)
    return (first, second) if experts.gate_up_order == "gate_first" else (second, first)


def expected(case: Case, slot: int, rounded: bool) -> Tensor:
    """One expert's rows in fp32. rounded: as PyTorch has them if it rounds where the recipe says."""
    weights, fp8, rows = case.experts, case.recipe.quantized, case.ranges[slot]
    here = slice(rows.start, rows.stop)
    weight = case.weight[here].unsqueeze(1)
    on_input = weights.weight_on_input
    gate, up = halves(weights, weights.gate_up[slot])
    down = weights.down[slot].float()
    if fp8:
        values, scales = unpack_records(case.rows[here], weights.hidden)
        x = dequantize(values, scales * weight if on_input else scales)
        of_gate, of_up = weights.scales[0][slot].chunk(2)
        if weights.gate_up_order == "up_first":
            of_gate, of_up = of_up, of_gate
        gate, up = dequantize_blocks(gate, of_gate), dequantize_blocks(up, of_up)
        down = dequantize_blocks(weights.down[slot], weights.scales[1][slot])
    else:
        x = case.rows[here].float() * (weight if on_input else 1)
        x = x.bfloat16().float() if rounded else x
    gate, up = x @ gate.float().t(), x @ up.float().t()
    if weights.gate_up_bias is not None:
        bias = halves(weights, weights.gate_up_bias[slot].float())
        gate, up = gate + bias[0], up + bias[1]
    hidden = weights.activation(gate, up) * (1 if on_input else weight)
    if rounded:
        hidden = dequantize(*quantize(hidden)) if fp8 else hidden.bfloat16().float()
    out = hidden @ down.t()
    if weights.down_bias is not None:
        out = out + weights.down_bias[slot].float() * (1 if on_input else weight)
    return out.bfloat16().float() if rounded else out


def assert_by_rule(case: Case, out: Tensor) -> None:
    """Row by row, and with no element far from what it should be."""
    for slot, rows in enumerate(case.ranges):
        if not rows:
            continue
        exact, torchs = expected(case, slot, rounded=False), expected(case, slot, rounded=True)
        ours = out[rows.start : rows.stop].float()
        error, allowed = (ours - exact).norm(dim=1), 2 * (torchs - exact).norm(dim=1)
        worst = (error / allowed).nan_to_num(nan=torch.inf).argmax()
        found = f"expert {slot} of {len(rows)} rows, row {worst}: {error[worst]:.3e}, allowed {allowed[worst]:.3e}"
        assert bool((error <= allowed).all()), found


@gpu
@RECIPES
class TestNumbers:
    def test_every_number_of_rows(self, recipe) -> None:
        case = make(list(range(131)), 384, 256, recipe)
        assert_by_rule(case, case.run())

    @pytest.mark.parametrize(
        "hidden, intermediate", [(16, 16), (2880, 2880), (2048, 704), (144, 1408), (2304, 112), (512, 16384)]
    )
    def test_sizes(self, recipe, hidden, intermediate) -> None:
        case = make([3, 0, 300, 65, 20], hidden, intermediate, recipe, alignment=8)
        assert_by_rule(case, case.run())

    @pytest.mark.parametrize("order", ["gate_first", "up_first", "interleaved"])
    @pytest.mark.parametrize("on_input", [False, True])
    @pytest.mark.parametrize("biased", [False, True])
    def test_options(self, recipe, order, on_input, biased) -> None:
        options = {"gate_up_order": order, "weight_on_input": on_input, "biased": biased, "activation": GPT_OSS}
        case = make([150, 3, 0, 40], 272, 336, recipe, alignment=16, **options)
        assert_by_rule(case, case.run())

    def test_biases_in_bf16(self, recipe) -> None:
        case = make([150, 3], 272, 336, recipe, biased=True)
        weights = case.experts
        biases = {name: getattr(weights, name).bfloat16() for name in ("gate_up_bias", "down_bias")}
        case = replace(case, experts=replace(weights, **biases))
        assert_by_rule(case, case.run())

    @pytest.mark.parametrize("slots, busy", [(1, 2500), (70, 0), (300, 7)])
    def test_numbers_of_experts(self, recipe, slots, busy) -> None:
        """More blocks of rows than run together; nothing to do; experts looked at in several rounds."""
        counts = [busy if slot % 61 == 0 else 0 for slot in range(slots)]
        case = make(counts, 256, 128, recipe)
        assert_by_rule(case, case.run())

    def test_weights_that_are_views(self, recipe) -> None:
        case = make([40, 130], 256, 128, recipe)
        weights = case.experts
        wide = torch.empty(2, 300, 320, dtype=weights.gate_up.dtype, device="cuda")
        wide[:, 20:276, 32:288] = weights.gate_up
        viewed = replace(case, experts=replace(weights, gate_up=wide[:, 20:276, 32:288]))
        assert torch.equal(viewed.run()[case.valid], case.run()[case.valid])

    def test_beyond_32_bits(self, recipe) -> None:
        """The last expert of over 2^31 values, and rows behind as many."""
        slots, hidden, intermediate = 74, 7168, 2048
        num_rows = (1 << 31) // (record_bytes(hidden) if recipe.quantized else hidden) + 300
        case = make([130], hidden, intermediate, recipe, spare=0)
        weights = random_experts(slots, hidden, intermediate, recipe)
        weights.gate_up[-1], weights.down[-1] = case.experts.gate_up[0], case.experts.down[0]
        for ours, theirs in zip(weights.scales or (), case.experts.scales or (), strict=True):
            ours[-1] = theirs[0]
        rows = torch.empty(num_rows, case.rows.shape[1], dtype=case.rows.dtype, device="cuda")
        weight = torch.empty(num_rows, device="cuda")
        rows[-130:], weight[-130:] = case.rows, case.weight
        counts = torch.zeros(slots, dtype=torch.int32, device="cuda")
        counts[-1] = 130
        starts = torch.full((slots + 1,), num_rows - 130, dtype=torch.int32, device="cuda")
        assert weights.gate_up.numel() > 1 << 31 and rows.numel() > 1 << 31
        out = experts(rows, starts, counts, weight, weights, recipe)
        assert torch.equal(out[-130:], case.run())


@gpu
@RECIPES
class TestBits:
    def test_alone_or_among_others(self, recipe) -> None:
        """Every tile and orientation gives a row the same bits."""
        case = make([300], 640, 384, recipe, spare=0, biased=True)
        everything = case.run()
        for count in EDGES:
            for begin in (0, 43):
                part = slice(begin, begin + count)
                assert torch.equal(case.of(part).run(), everything[part]), (count, begin)

    def test_two_runs_on_dirty_memory(self, recipe) -> None:
        case = make([700, 3, 0, 129, 64, 17], 512, 640, recipe)
        scratch = Scratch.make(len(case.rows), case.experts, recipe)
        results = []
        for byte in (0xFF, 0x7B):
            scratch.hidden.fill_(byte)
            out = torch.full((len(case.rows), 512), SENTINEL, dtype=torch.bfloat16, device="cuda")
            results.append(case.run(scratch, out))
            assert bool((out[~case.valid] == SENTINEL).all()), "padding is written"
            assert not scratch.tickets[0], "tickets of the next call"
        assert torch.equal(*results)

    @pytest.mark.parametrize("poison", [0x7F, 0x7B])
    def test_padding(self, recipe, poison) -> None:
        """NaN, and huge values, between the experts and behind them; rows are many more than the valid ones."""
        counts = [1, 63, 0, 65, 130]
        cases = [make(counts, 400, 272, recipe, alignment=32, spare=2000, poison=byte) for byte in (0, poison)]
        valid = cases[0].valid
        clean, poisoned = (case.run()[valid] for case in cases)
        assert torch.equal(clean, poisoned) and bool(clean.isfinite().all())

    def test_special_values_stay_in_their_row(self, recipe) -> None:
        case = make([140, 20], 256, 256, recipe)
        clean = case.run().clone()
        special = torch.tensor([5, 77, 145], device="cuda")
        if recipe.quantized:
            values, scales = unpack_records(case.rows, 256)
            values.view(torch.uint8)[5, 9] = 0x7F
            scales[77, 1], scales[145, 0] = torch.inf, 3e38
        else:
            case.rows[5, 9], case.rows[77, 3], case.rows[145] = torch.nan, torch.inf, 3e38
        dirty = case.run()
        others = case.valid.clone()
        others[special] = False
        assert torch.equal(dirty[others], clean[others])
        assert bool(dirty[5].isnan().all()) and not bool(dirty[77].isfinite().all())

    def test_in_a_graph(self, recipe) -> None:
        """Replayed with other rows, counts and places."""
        first, second = (
            make(counts, 256, 384, recipe, spare=spare) for counts, spare in (([40, 0, 9], 206), ([2, 250, 1], 2))
        )
        second = replace(second, experts=first.experts)
        scratch = Scratch.make(len(first.rows), first.experts, recipe)
        out = torch.empty(len(first.rows), 256, dtype=torch.bfloat16, device="cuda")
        first.run(scratch, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first.run(scratch, out)
        for name in ("rows", "start", "count", "weight"):
            getattr(first, name).copy_(getattr(second, name))
        for _ in range(2):
            out.fill_(SENTINEL)
            graph.replay()
            assert torch.equal(out[second.valid], second.run()[second.valid])


class TestRefusals:
    """On the CPU: nothing is launched for what is wrong."""

    def call(self, recipe=BF16, hidden=32, rows=None, **changes) -> Tensor:
        weights = Experts(torch.zeros(2, 64, hidden).bfloat16(), torch.zeros(2, hidden, 32).bfloat16())
        weights = replace(weights, **changes)
        rows = torch.zeros(4, 32).bfloat16() if rows is None else rows
        numbers = torch.zeros(3, dtype=torch.int32)
        return experts(rows, numbers, numbers[:2], torch.zeros(4), weights, recipe)

    def test_what_the_kernels_lack(self) -> None:
        with pytest.raises(CapabilityError, match="recipe fp32"):
            self.call(recipe=FP32)
        with pytest.raises(CapabilityError, match="activation <built-in method mul"):
            self.call(activation=torch.mul)
        with pytest.raises(CapabilityError, match="hidden 24, intermediate 32"):
            self.call(gate_up=torch.zeros(2, 64, 24).bfloat16(), down=torch.zeros(2, 24, 32).bfloat16())
        with pytest.raises(CapabilityError, match="gate_up has strides"):
            self.call(gate_up=torch.zeros(2, 32, 64).bfloat16().mT)

    def test_wrong_arguments(self) -> None:
        with pytest.raises(ValueError, match="`Experts.quantized` makes them"):
            self.call(recipe=FP8)
        with pytest.raises(ValueError, match=r"rows are torch.float32 \[4, 32\]"):
            self.call(rows=torch.zeros(4, 32))
        with pytest.raises(ValueError, match=r"row_weight is torch.float32 \[4\]; allowed: contiguous .* \[5\]"):
            self.call(rows=torch.zeros(5, 32).bfloat16())
