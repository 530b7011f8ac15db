"""The whole layer on H100/H200, one rank per GPU: `torchrun --nproc-per-node 2 -m benchmarks.bench_sm90_layer`.

Uniform routing, cold second-level cache, slowest rank, median. `split` is timed as called (launches queue up behind a
sleeping kernel); `decode` as the replay of a graph. Beside each: the bound max(FLOP / peak, bytes of the experts hit /
memory), and the stages by themselves with --stages.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measure import median
from moeloom import BF16, FP8, Experts, Plan, Recipe, Routing, Runtime

SHAPES = {
    "deepseek-v3": (7168, 2048, 256, 8),
    "qwen3-235b": (4096, 1536, 128, 8),
    "v4-flash-like": (4096, 2048, 256, 6),
    "qwen3-30b": (2048, 768, 128, 8),
}
FP8_PEAK, BF16_PEAK, MEMORY = 1500e12, 800e12, 4.3e12
FLUSH_BYTES = 256 << 20
QUIET_CYCLES = 4_000_000  # 2 ms: launches queue up behind
WARM_UP = 3
GRAPH_TOKENS = 64


def make_experts(num_local: int, hidden: int, intermediate: int, quantized: bool, device: torch.device) -> Experts:
    """Random weights on the GPU; FP8 ones with random scales."""
    generator = torch.Generator(device).manual_seed(7)

    def random(*shape: int, scale: float) -> Tensor:
        out = torch.empty(shape, dtype=torch.float8_e4m3fn if quantized else torch.bfloat16, device=device)
        for part in out:
            part.copy_(torch.randn(part.shape, generator=generator, device=device) * (1.0 if quantized else scale))
        return out

    gate_up = random(num_local, 2 * intermediate, hidden, scale=hidden**-0.5)
    down = random(num_local, hidden, intermediate, scale=intermediate**-0.5)
    if not quantized:
        return Experts(gate_up, down)
    groups, hidden_groups = -(-intermediate // 128), -(-hidden // 128)
    scales = (
        torch.rand(num_local, 2 * groups, hidden_groups, generator=generator, device=device) * hidden**-0.5,
        torch.rand(num_local, hidden_groups, groups, generator=generator, device=device) * intermediate**-0.5,
    )
    return Experts(gate_up, down, scales=scales)


def timed(run: Callable[[], object], flush: Tensor, rounds: int) -> float:
    """Microseconds of the slowest rank, median."""
    times, meet = [], torch.zeros(1, device=flush.device)
    for number in range(WARM_UP + rounds):
        torch.cuda._sleep(QUIET_CYCLES)
        flush.fill_(number)
        if dist.is_initialized():
            dist.all_reduce(meet)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    slowest = torch.tensor(times[WARM_UP:], device=flush.device)
    if dist.is_initialized():
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return median(slowest.tolist())


def bound_us(shape: tuple[int, int, int, int], tokens: int, ranks: int, quantized: bool, passes: int = 1) -> float:
    """No layer takes less: products at their peak, or the weights of the experts that are hit."""
    hidden, intermediate, num_experts, topk = shape
    flop = 6 * tokens * topk * hidden * intermediate * passes
    local, pairs = num_experts // ranks, tokens * ranks * topk
    hit = local * (1 - (1 - 1 / num_experts) ** pairs)
    num_bytes = hit * 3 * hidden * intermediate * (1 if quantized else 2)
    return max(flop / (FP8_PEAK if quantized else BF16_PEAK), num_bytes / MEMORY) * 1e6


def stages(
    rt: Runtime, x: Tensor, routing: Routing, experts: Experts, recipe: Recipe, flush: Tensor, rounds: int
) -> str:
    """Each stage of `split` by itself."""
    backend, placement = rt.backend, rt._placement(None, experts.num_local)
    from moeloom.quantize import unpack_received

    payload = backend.records(x) if recipe.quantized else x
    kept: dict = {}

    def bring() -> None:
        received, kept["handle"] = backend.dispatch(payload, routing, placement, backend.layer_rows, "direct")
        kept["received"] = unpack_received(received, x.shape[1]) if recipe.quantized else received

    def compute() -> None:
        kept["rows"] = backend.experts(kept["received"], experts, recipe)

    def back() -> None:
        backend.combine(kept["rows"], kept["handle"], recipe, False)

    def quantise() -> None:
        backend.records(x)

    parts = {"dispatch": bring, "experts": compute, "combine": back}
    if recipe.quantized:
        parts = {"quantize": quantise} | parts
    return ", ".join(f"{name} {timed(run, flush, rounds):.1f}" for name, run in parts.items())


def measure(rt: Runtime, chosen: argparse.Namespace, name: str, experts: Experts, tokens: int, flush: Tensor) -> str:
    """A line."""
    shape = SHAPES[name]
    hidden, _, num_experts, topk = shape
    recipe, device = (FP8 if chosen.recipe == "fp8" else BF16), flush.device
    generator = torch.Generator(device).manual_seed(rt.rank)
    x = torch.randn(tokens, hidden, generator=generator, device=device).bfloat16()
    ids = torch.rand(tokens, num_experts, generator=generator, device=device).topk(topk).indices.int()
    routing = Routing(ids, torch.rand(tokens, topk, generator=generator, device=device))
    ranks = rt.topology.num_ranks
    bound = bound_us(shape, tokens, ranks, recipe.quantized, 3 if chosen.train else 1)
    line = f"{name} {recipe} T={tokens:<5}"
    if chosen.train:
        d_y = torch.randn_like(x)
        x.requires_grad_()
        experts.gate_up.requires_grad_(), experts.down.requires_grad_()
        weights = routing.topk_weights.requires_grad_()

        def step() -> None:
            for leaf in (x, weights, experts.gate_up, experts.down):
                leaf.grad = None
            rt.moe(x, Routing(ids, weights), experts, recipe=recipe).backward(d_y)

        us = timed(step, flush, chosen.rounds)
        rate = 18 * tokens * topk * hidden * shape[1] / us / 1e6
        return f"{line} training step {us:9.1f} us, bound {bound:8.1f}, {bound / us:4.2f} of it, {rate:6.1f} TFLOP/s"
    with torch.no_grad():
        plan = Plan("decode" if tokens <= GRAPH_TOKENS else "split")
        for _ in range(2):
            y = rt.moe(x, routing, experts, recipe=recipe, plan=plan)
        torch.cuda.synchronize()
        assert y.isfinite().all() and y.any(), "y"

        def run() -> object:
            return rt.moe(x, routing, experts, recipe=recipe, plan=plan)

        if plan.pipeline == "decode":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again = run()
            graph.replay()
            assert torch.equal(again, y), "the graph gives other bits"
            run = graph.replay  # type: ignore[assignment]
        us = timed(run, flush, chosen.rounds)
        rate = 6 * tokens * topk * hidden * shape[1] / us / 1e6
        line += f" {plan.pipeline:<6} {us:9.1f} us, bound {bound:8.1f}, {bound / us:4.2f} of it, {rate:6.1f} TFLOP/s"
        if chosen.stages and plan.pipeline == "split":
            line += "\n    " + stages(rt, x, routing, experts, recipe, flush, chosen.rounds)
    return line


def main() -> None:
    """Print a line per number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["deepseek-v3"])
    parser.add_argument("--recipe", choices=["fp8", "bf16"], default="fp8")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--stages", action="store_true")
    chosen = parser.parse_args()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os.environ.update(NCCL_NVLS_ENABLE="0")  # multicast can put shared GPUs out of service
        dist.init_process_group("nccl", device_id=device)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    for shape in chosen.shapes:
        hidden, intermediate, num_experts, _ = SHAPES[shape]
        local = num_experts // int(os.environ.get("WORLD_SIZE", "1"))
        experts = make_experts(local, hidden, intermediate, chosen.recipe == "fp8", device)
        for few in (True, False):
            counts = [t for t in chosen.tokens if (t <= GRAPH_TOKENS) == few]
            if not counts:
                continue
            with Runtime(backend="sm90", max_tokens=max(counts), timeout=20) as rt:
                for tokens in counts:
                    line = measure(rt, chosen, shape, experts, tokens, flush)
                    if rt.rank == 0:
                        print(line, flush=True)
        del experts
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
