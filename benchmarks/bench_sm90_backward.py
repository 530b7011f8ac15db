"""The experts' backward on H100/H200 and its parts: products beside cuBLAS, kernels beside a copy of as many bytes.

`python -m benchmarks.bench_sm90_backward`. The second-level cache is cold; medians; FLOP/s and bytes of true rows only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_clock import GpuClock
from moeloom import Experts
from moeloom.backends.base import ExpertGrads
from moeloom.backends.sm90 import grouped
from moeloom.backends.sm90.experts_backward import Stage, experts_backward, forward

SQUARE = 8192  # of the product by cuBLAS that others are compared with


@dataclass
class Case:
    """Rows of each expert and what belongs to them."""

    rows: Tensor
    start: Tensor
    count: Tensor
    weight: Tensor
    d_out: Tensor
    experts: Experts
    num_rows: int  # without padding

    @classmethod
    def make(cls, chosen: argparse.Namespace, counts: list[int], room: float) -> Case:
        """room: rows allocated for each one that there is."""
        generator = torch.Generator("cuda").manual_seed(1)
        total, local, hidden, width = sum(counts), len(counts), chosen.hidden, chosen.intermediate
        allocated = int(total * room)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16).mul_(scale)

        starts = [sum(counts[:slot]) for slot in range(local + 1)]
        return cls(
            rows=normal(allocated, hidden),
            start=torch.tensor(starts, dtype=torch.int32, device="cuda"),
            count=torch.tensor(counts, dtype=torch.int32, device="cuda"),
            weight=torch.rand(allocated, generator=generator, device="cuda"),
            d_out=normal(allocated, hidden),
            experts=Experts(
                normal(local, 2 * width, hidden, scale=hidden**-0.5).requires_grad_(),
                normal(local, hidden, width, scale=width**-0.5).requires_grad_(),
                gate_up_order=chosen.gate_up_order,
            ),
            num_rows=total,
        )

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.rows, self.start, self.count, self.weight


class Clock(GpuClock):
    """Prints times, beside those of a copy and of cuBLAS in the same run."""

    def __init__(self, rounds: int) -> None:
        super().__init__("cuda", rounds)
        a, b = (torch.randn(SQUARE, SQUARE, device="cuda").bfloat16() for _ in range(2))
        self.peak = 2 * SQUARE**3 / self.microseconds(lambda: a @ b.t())[0] / 1e6
        print(f"cuBLAS bf16 {SQUARE}^3: {self.peak:.0f} TFLOP/s", flush=True)

    def product(self, name: str, operations: float, run: Callable[[], object]) -> None:
        """Print a line."""
        (us,) = self.microseconds(run)
        rate = operations / us / 1e6
        print(f"  {name:<34} {us:9.1f} us {rate:7.0f} TFLOP/s {rate / self.peak:5.2f} of cuBLAS", flush=True)

    def moved(self, name: str, num_bytes: int, run: Callable[[], object]) -> None:
        """Print a line. num_bytes: read and written."""
        a, b = torch.empty(2, num_bytes // 2, dtype=torch.uint8, device="cuda")
        us, copied = self.microseconds(run, lambda: a.copy_(b))
        rate = num_bytes / us / 1e6
        print(f"  {name:<34} {us:9.1f} us {rate:7.2f} TB/s    {us / copied:5.2f} of a copy's time", flush=True)


def backward(case: Case, experts: Experts, owned: bool = True, **options: Any) -> ExpertGrads:
    """As a Runtime calls it."""
    return experts_backward(*case.inputs, case.d_out, experts, owned, **options)


def check(case: Case, slot: int) -> None:
    """One expert's gradients are about those of plain PyTorch; the tests say how near."""
    begin, end = case.start.tolist()[slot : slot + 2]
    mine = slice(begin, end)
    tensors = [t.detach()[slot].float().requires_grad_() for t in (case.experts.gate_up, case.experts.down)]
    rows, weight = (t[mine].float().requires_grad_() for t in (case.rows, case.weight))
    hidden = case.experts.activation(*case.experts.split_gate_up(rows @ tensors[0].t())) * weight.unsqueeze(1)
    out = hidden @ tensors[1].t()
    wanted = torch.autograd.grad(out, [rows, weight, *tensors], case.d_out[mine].float())
    grads = backward(case, case.experts)
    result = forward(*case.inputs, case.experts)[mine]
    got = [grads.rows[mine], grads.row_weights[mine], *(grad[slot] for grad in grads.weights.values())]
    for ours, theirs in zip([result, *got], [out.detach(), *wanted], strict=True):
        assert (ours - theirs).square().mean() < 1e-4 * theirs.square().mean(), "wrong"


def parts(case: Case, clock: Clock) -> None:
    """A line for each product and each kernel."""
    stage, hidden, width = Stage.make(*case.inputs, case.experts), case.experts.hidden, case.experts.intermediate
    ends, count = stage.ends, case.num_rows
    one = 2.0 * count * hidden * width
    both = grouped.times_weights(case.rows, stage.gate_up, ends)
    act = grouped.times_weights(case.d_out, stage.down.transpose(1, 2), ends)
    clock.product("gate_up", 2 * one, lambda: grouped.times_weights(case.rows, stage.gate_up, ends))
    clock.product("down", one, lambda: grouped.times_weights(act, stage.down, ends))
    clock.product("d_hidden", one, lambda: grouped.times_weights(case.d_out, stage.down.transpose(1, 2), ends))
    clock.product("d_rows", 2 * one, lambda: grouped.times_weights(both, stage.gate_up.transpose(1, 2), ends))
    clock.product("gradient of gate_up", 2 * one, lambda: grouped.by_group(both, case.rows, ends))
    clock.product("gradient of down", one, lambda: grouped.by_group(case.d_out, act, ends))
    d_weight, sums = torch.empty_like(case.weight), torch.empty(len(case.count), hidden, device="cuda")
    spare = torch.empty_like(case.rows)
    own, swiglu, pair = stage.own, stage.activation, 2 * count * width  # bytes of a bf16 column for each of I

    def backward_kernel() -> None:
        stage.launch(stage.kernel("activation_backward"), own, swiglu, both, act, None, None, None, hidden, d_weight)

    clock.moved("activation_backward", 6 * pair, backward_kernel)
    clock.moved(
        "activation_forward",
        3 * pair,
        lambda: stage.launch(stage.kernel("activation_forward"), own, swiglu, both, None, act),
    )
    line = 2 * count * hidden
    clock.moved("weigh_rows", 2 * line, lambda: stage.launch("weigh_rows", own, case.rows, hidden, spare))
    weigh = ("weigh_rows_backward", own, case.rows, hidden, spare, d_weight)
    clock.moved("weigh_rows_backward", 3 * line, lambda: stage.launch(*weigh))
    bias = torch.zeros(len(case.count), hidden, device="cuda")
    clock.moved("add_bias", 2 * line, lambda: stage.launch("add_bias", own, bias, hidden, spare))
    clock.moved("sum_rows", line + sums.nbytes, lambda: stage.sums(case.d_out, own))
    (us,) = clock.microseconds(lambda: stage.launch("zero_padding", own, spare, hidden, 1))
    print(f"  {'zero_padding':<34} {us:9.1f} us for {len(case.rows) - count} rows behind the last expert's", flush=True)


def whole(case: Case, clock: Clock) -> None:
    """Forward and backward (its recomputation not counted as work), and what the latter holds beside its inputs."""
    one = 2.0 * case.num_rows * case.experts.hidden * case.experts.intermediate
    biased = replace(
        case.experts,
        gate_up_bias=torch.rand(case.experts.gate_up.shape[:2], device="cuda").bfloat16().requires_grad_(),
        down_bias=torch.rand(case.experts.down.shape[:2], device="cuda").bfloat16().requires_grad_(),
    )
    runs: dict[str, tuple[float, Callable[[], object]]] = {
        "forward": (3 * one, lambda: forward(*case.inputs, case.experts)),
        "backward": (6 * one, lambda: backward(case, case.experts)),
        "backward, tail unwritten": (6 * one, lambda: backward(case, case.experts, zero_tail=False)),
        "backward, biases": (6 * one, lambda: backward(case, biased)),
        "backward, rows not owned": (6 * one, lambda: backward(case, case.experts, owned=False)),
    }
    for name, (operations, run) in runs.items():
        clock.product(name, operations, run)
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        launched = time.perf_counter() - start
        torch.cuda.synchronize()
        print(f"  {'':<34} {launched * 1e6:9.1f} us of the host", flush=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = backward(case, case.experts)
    most, left = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    given = sum(t.nbytes for t in (grads.rows, grads.row_weights, *grads.weights.values()))
    print(f"  backward holds {most / 1e6:.0f} MB at most, {left / 1e6:.0f} MB at the end; results {given / 1e6:.0f} MB")


def main() -> None:
    """Print a table for equal and one for drawn counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--local", type=int, default=64, help="experts")
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 1024], help="of each expert, on average")
    parser.add_argument("--room", type=float, default=2.0, help="rows allocated for each, where counts are drawn")
    parser.add_argument("--gate-up-order", default="gate_first")
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    clock = Clock(chosen.rounds)
    for rows in chosen.rows:
        total = rows * chosen.local
        drawn = torch.bincount(torch.randint(0, chosen.local, (total,)), minlength=chosen.local).tolist()
        for name, counts, room in (("equal", [rows] * chosen.local, 1.0), ("drawn", drawn, chosen.room)):
            case = Case.make(chosen, counts, room)
            check(case, chosen.local // 2)
            print(
                f"H {chosen.hidden} I {chosen.intermediate}, {chosen.local} experts, {total} rows, {name} counts"
                f" ({min(counts)}..{max(counts)}), {len(case.rows)} allocated, {chosen.gate_up_order}"
            )
            parts(case, clock)
            whole(case, clock)
            del case


if __name__ == "__main__":
    main()
