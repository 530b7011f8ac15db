"""quantize and route on H100/H200, beside a copy that moves as many bytes: `python -m benchmarks.bench_sm90_small`.

The time is a kernel's own on the GPU, without what events and launches add, median; the second-level cache is cold.
"share" is the copy's time over ours: 1 is as fast as the copy. Each is checked before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_clock import FLUSH_BYTES
from benchmarks.measure import WARM_UP, median
from moeloom.backends.sm90.quantize import quantize_blocks, quantize_rows
from moeloom.backends.sm90.route import route
from moeloom.quantize import pack_records, quantize, record_bytes
from moeloom.quantize import quantize_blocks as quantize_block_by_block
from moeloom.route import Router
from moeloom.types import Routing

ROUTERS = {
    "softmax 8 of 128": (128, Router(8)),
    "sigmoid 8 of 256, 4 of 8 groups": (256, Router(8, "sigmoid", 8, 4, scale=2.5)),
    "sigmoid 8 of 384": (384, Router(8, "sigmoid", scale=2.5)),
    "softmax 32 of 1024": (1024, Router(32)),
}


@dataclass(frozen=True)
class Case:
    """What is timed. num_bytes: read and written. torch_run: the same by PyTorch's functions on the GPU."""

    name: str
    run: Callable[[], object]
    torch_run: Callable[[], object]
    num_bytes: int


def device_microseconds(run: Callable[[], object], flush: Tensor, rounds: int) -> float:
    """Median over the rounds of the time that the run's kernels and copies take on the GPU. flush: of int16."""
    for _ in range(WARM_UP):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for number in range(rounds):
            flush.fill_(number)
            run()
        torch.cuda.synchronize()
    times: list[float] = []
    for event in sorted(trace.events(), key=lambda event: event.time_range.start):
        if event.device_type != DeviceType.CUDA:
            continue
        if "FillFunctor<short>" in event.name:
            times.append(0.0)  # the flush, the only fill of int16: a round begins
        elif times:
            times[-1] += event.time_range.elapsed_us()
    assert len(times) == rounds, f"{len(times)} rounds are seen, {rounds} were run"
    return median(times)


def of_rows(count: int, hidden: int, dtype: torch.dtype) -> Case:
    """Rows to records."""
    x = torch.randn(count, hidden, device="cuda").to(dtype)
    out = torch.empty(count, record_bytes(hidden), dtype=torch.uint8, device="cuda")
    assert torch.equal(quantize_rows(x, out=out), pack_records(quantize(x)))
    name = f"quantize {str(dtype)[6:]} [{count}, {hidden}]"
    run, torch_run = lambda: quantize_rows(x, out=out), lambda: pack_records(quantize(x))
    return Case(name, run, torch_run, x.nbytes + out.nbytes)


def of_blocks(slots: int, rows: int, columns: int) -> Case:
    """Weights in blocks."""
    weight = torch.randn(slots, rows, columns, device="cuda").bfloat16()
    got = quantize_blocks(weight)
    values, scales = quantize_block_by_block(weight[-1])
    assert torch.equal(got.values[-1].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(got.scales[-1], scales)
    name = f"quantize blocks [{slots}, {rows}, {columns}]"
    num_bytes = weight.nbytes + got.values.nbytes + got.scales.nbytes
    return Case(name, lambda: quantize_blocks(weight), lambda: [quantize_block_by_block(w) for w in weight], num_bytes)


def of_router(name: str, count: int, dtype: torch.dtype) -> Case:
    """Logits to a routing."""
    num_experts, router = ROUTERS[name]
    logits = torch.randn(count, num_experts, device="cuda").to(dtype)
    bias = torch.randn(num_experts, device="cuda") * 0.1 if router.score == "sigmoid" else None
    got, wanted = route(router, logits, bias), router(logits, bias)
    assert share_equal(got, wanted) > 0.99
    num_bytes = logits.nbytes + got.topk_idx.nbytes + got.topk_weights.nbytes
    run, torch_run = lambda: route(router, logits, bias), lambda: router(logits, bias)
    return Case(f"route {name}, {str(dtype)[6:]} T={count}", run, torch_run, num_bytes)


def share_equal(got: Routing, wanted: Routing) -> float:
    """Rows with the same choice: scores of both differ in their last bits, so that near ties may be turned."""
    return float((got.topk_idx == wanted.topk_idx).all(1).float().mean())


def report(case: Case, flush: Tensor, rounds: int) -> None:
    """Time and print one line."""
    source, target = torch.randint(0, 256, (2, case.num_bytes // 2), dtype=torch.uint8, device="cuda")
    copied = device_microseconds(lambda: target.copy_(source), flush, rounds)
    ours = device_microseconds(case.run, flush, rounds)
    by_torch = device_microseconds(case.torch_run, flush, max(3, rounds // 4))
    print(
        f"{case.name:<58} {case.num_bytes / 1e6:8.2f} MB | {ours:8.2f} us | copy {copied:8.2f} us, share "
        f"{copied / ours:5.2f} | PyTorch {by_torch:9.2f} us",
        flush=True,
    )


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 128, 1024, 8192])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    flush = torch.empty(FLUSH_BYTES // 2, dtype=torch.int16, device="cuda")
    for count in chosen.tokens:
        report(of_rows(count, chosen.hidden, torch.bfloat16), flush, chosen.rounds)
    report(of_rows(max(chosen.tokens), chosen.hidden, torch.float32), flush, chosen.rounds)
    report(of_blocks(8, 4096, chosen.hidden), flush, chosen.rounds)
    for name in ROUTERS:
        for count in chosen.tokens:
            report(of_router(name, count, torch.float32), flush, chosen.rounds)
    report(of_router("softmax 8 of 128", max(chosen.tokens), torch.bfloat16), flush, chosen.rounds)


if __name__ == "__main__":
    main()
