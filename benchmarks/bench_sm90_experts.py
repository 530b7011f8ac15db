"""experts on one H100/H200: `python -m benchmarks.bench_sm90_experts`, beside cuBLAS and a kernel that only reads.

Rates are of true rows: of a product alone and with all that follows it. The second-level cache is cold before each
product; medians. Few rows are measured by the bytes of the weights of the experts hit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu_clock import GpuClock
from moeloom import Experts, jit
from moeloom.backends.sm90.experts import KERNELS, Layout, Scratch, check, check_rows, launches
from moeloom.config import BF16, FP8, Recipe
from moeloom.models import MODELS
from moeloom.quantize import num_groups, record_bytes, unpack_records

SQUARE = 8192  # of cuBLAS's product
SHAPES = {
    name: (MODELS[name].expert_hidden, MODELS[name].intermediate)
    for name in ("deepseek-v3", "qwen3-235b-a22b", "deepseek-v4-flash", "qwen3-30b-a3b")
}

_READ = """
extern "C" __global__ void __launch_bounds__(512) read_only(const uint4* from, long long vectors, unsigned* to) {
    unsigned all = 0;
    long long step = (long long)gridDim.x * blockDim.x;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * step < vectors; i += 8 * step) {
        uint4 v[8];
        for (int j = 0; j < 8; ++j) v[j] = __ldg(from + i + j * step);
        for (int j = 0; j < 8; ++j) all ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (all == 0x12345678) *to = all;
}
"""


@dataclass
class Case:
    """Experts, and rows of them."""

    name: str
    weights: Experts
    recipe: Recipe
    counts: Sequence[int]

    @property
    def phases(self) -> list[Callable[[], None]]:
        hidden = self.weights.hidden
        count = torch.tensor(self.counts, dtype=torch.int32, device="cuda")
        start = torch.zeros(len(self.counts) + 1, dtype=torch.int32, device="cuda")
        start[1:] = count.cumsum(0)
        num_rows = sum(self.counts)
        rows = torch.randn(num_rows, hidden, device="cuda").bfloat16()
        if self.recipe.quantized:
            values, rows = rows, torch.zeros(num_rows, record_bytes(hidden), dtype=torch.uint8, device="cuda")
            unpacked = unpack_records(rows, hidden)
            unpacked.values.copy_(values)
            unpacked.scales.uniform_(0.5, 1)
        layout = Layout(start, count, torch.rand(num_rows, device="cuda"))
        check(self.weights, self.recipe)
        check_rows(rows, layout, self.weights, self.recipe)
        out = torch.empty(num_rows, hidden, dtype=torch.bfloat16, device="cuda")
        scratch = Scratch.make(num_rows, self.weights, self.recipe)
        self.kept = (rows, layout, scratch, out)
        return launches(rows, layout, self.weights, self.recipe, scratch, out)


def random_weights(slots: int, hidden: int, intermediate: int, recipe: Recipe) -> Experts:
    """Normal numbers; written expert by expert, to need no memory beside them."""
    dtype = torch.float8_e4m3fn if recipe.quantized else torch.bfloat16
    gate_up = torch.empty(slots, 2 * intermediate, hidden, dtype=dtype, device="cuda")
    down = torch.empty(slots, hidden, intermediate, dtype=dtype, device="cuda")
    for weight in (gate_up, down):
        for of_expert in weight:
            of_expert.copy_(torch.randn(of_expert.shape, device="cuda"))
    if not recipe.quantized:
        return Experts(gate_up, down)
    groups, hidden_groups = num_groups(intermediate), num_groups(hidden)
    scales = (torch.rand(slots, 2 * groups, hidden_groups), torch.rand(slots, hidden_groups, groups))
    return Experts(gate_up, down, scales=(scales[0].cuda() * 0.01 + 0.01, scales[1].cuda() * 0.01 + 0.01))


def cublas(recipe: Recipe) -> Callable[[], Tensor]:
    """A product of 8192 x 8192 matrices."""
    a, b = (torch.randn(SQUARE, SQUARE, device="cuda").bfloat16() for _ in range(2))
    if not recipe.quantized:
        return lambda: a @ b.t()
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    scale = torch.ones(SQUARE, 1, device="cuda")
    return lambda: torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.bfloat16)


def reading(num_bytes: int) -> Callable[[], None]:
    """A kernel that reads so many bytes and does nothing else."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device="cuda")
    to = torch.zeros(1, dtype=torch.int32, device="cuda")
    (kernel,) = jit.load(jit.compile(jit.Source("read_only", _READ, ("read_only",))), source.device).values()
    args = (source.data_ptr(), num_bytes // 16, to.data_ptr())
    blocks = 4 * torch.cuda.get_device_properties(source.device).multi_processor_count
    return lambda: (kernel.launch(torch.cuda.current_stream().cuda_stream, blocks, 512, 0, args), source, to)[0]


def routed(slots: int, mean: int, seed: int = 0) -> list[int]:
    """Rows per expert from a router without preferences."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(slots, (slots * mean,), generator=generator)
    return torch.bincount(ids, minlength=slots).tolist()


def report(case: Case, clock: GpuClock, peak: Callable[[], object], read: float | None) -> None:
    """One line: both products, as rates or as bytes."""
    phases = case.phases
    up, down, whole = clock.microseconds(*phases, peak)
    rows, (hidden, intermediate) = sum(case.counts), (case.weights.hidden, case.weights.intermediate)
    rates = [2 * rows * size * hidden * intermediate / time / 1e6 for size, time in ((2, up), (1, down))]
    square = 2 * SQUARE**3 / whole / 1e6
    line = f"{case.name:34s} {case.recipe.name} up {up:7.1f} us down {down:7.1f} us"
    if read is None:
        shares = [rate / square for rate in (*rates, 6 * rows * hidden * intermediate / (up + down) / 1e6)]
        line += f"  {rates[0]:5.0f} {rates[1]:5.0f} TFLOP/s = {shares[0]:.3f} {shares[1]:.3f}, both {shares[2]:.3f}"
        line += f" of cuBLAS {square:.0f}"
    else:
        hit = sum(count > 0 for count in case.counts)
        num_bytes = hit * hidden * intermediate * case.weights.gate_up.element_size()
        bandwidth = [num_bytes * size / time / 1e6 for size, time in ((2, up), (1, down))]
        line += f"  weights at {bandwidth[0]:.2f} {bandwidth[1]:.2f} TB/s = {bandwidth[0] / read:.3f}"
        line += f" {bandwidth[1] / read:.3f} of {read:.2f}"
    print(line, flush=True)


def cases(shape: str, recipe: Recipe, quick: bool) -> list[tuple[int, str, list[int]]]:
    """Experts, a name, and their rows."""
    exact = [(32, 512), (32, 2048), (128, 512)] if shape == "deepseek-v3" else [(64, 512), (64, 1024)]
    found = [(slots, f"{slots} x {rows}", [rows] * slots) for slots, rows in exact]
    means = [(32, 512), (32, 2048), (64, 128)] if shape == "deepseek-v3" else [(64, 128), (64, 1024)]
    found += [(slots, f"{slots} x about {rows}", routed(slots, rows)) for slots, rows in means]
    return [case for case in found if case[0] <= 64] if quick or not recipe.quantized else found


def decode_cases() -> list[tuple[int, str, list[int]]]:
    """Few rows of many experts, or of eight."""
    found = [(64, f"decode 64 x {rows}", [rows] * 64) for rows in (1, 8, 16, 64)]
    eight = [(64, f"decode 8 of 64 x {rows}", [rows if slot % 8 == 3 else 0 for slot in range(64)]) for rows in (1, 16)]
    return found + eight


def main() -> None:
    """Print all lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES), help="of whose experts")
    parser.add_argument("--recipes", nargs="+", default=["fp8", "bf16"], choices=["fp8", "bf16"], help="of rows")
    parser.add_argument("--rounds", type=int, default=8, help="of which the median counts")
    parser.add_argument("--quick", action="store_true", help="at most 64 experts")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    for declared in KERNELS:
        jit.compile(declared.source)
    clock = GpuClock("cuda", chosen.rounds)
    num_bytes = 2 << 30
    (read_time,) = clock.microseconds(reading(num_bytes))
    read = num_bytes / read_time / 1e6
    print(f"{torch.cuda.get_device_name()}: read only {read:.2f} TB/s", flush=True)
    for recipe in (recipe for recipe in (FP8, BF16) if recipe.name in chosen.recipes):
        peak = cublas(recipe)
        for shape in chosen.shapes:
            listed = cases(shape, recipe, chosen.quick)
            decode = decode_cases() if shape == "deepseek-v3" else []
            slots = max(slots for slots, *_ in listed + decode)
            weights = random_weights(slots, *SHAPES[shape], recipe)
            for number, (count, name, counts) in enumerate(listed + decode):
                options = {name: getattr(weights, name)[:count] for name in ("gate_up", "down")}
                scales = weights.scales and (weights.scales[0][:count], weights.scales[1][:count])
                case = Case(f"{shape} {name}", Experts(**options, scales=scales), recipe, counts)
                report(case, clock, peak, None if number < len(listed) else read)
            del weights
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
