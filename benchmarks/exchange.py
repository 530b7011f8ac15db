"""dispatch and combine beside the gloo baseline, in one run: what bench_dispatch and bench_combine report on."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from benchmarks.gloo_baseline import GlooExchange
from benchmarks.measure import interleaved, slowest_rank_median
from moeloom import RankPool, Routing, Runtime


def options(description: str) -> argparse.Namespace:
    """The command line of both benchmarks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args()


def times(chosen: argparse.Namespace) -> dict[str, float]:
    """Median seconds of the slowest rank, per stage and variant."""
    with RankPool(chosen.ranks, chosen.nodes) as pool:
        return slowest_rank_median(pool.run(_on_rank, chosen))


def _on_rank(chosen: argparse.Namespace) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    scores = torch.rand(chosen.tokens, chosen.experts, generator=generator)
    routing = Routing(scores.topk(chosen.topk).indices, torch.rand(chosen.tokens, chosen.topk, generator=generator))
    x = torch.randn(chosen.tokens, chosen.hidden, generator=generator).to(getattr(torch, chosen.dtype))
    with Runtime(backend="cpu", timeout=60) as rt:
        gloo = GlooExchange(routing, chosen.experts)
        received, handle = rt.dispatch(x, routing, chosen.experts)
        ours, theirs = rt.combine(received.rows, handle, weighted=True), gloo.combine(gloo.dispatch(x), len(x))
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
        rows = gloo.dispatch(x)
        return interleaved(
            {
                "dispatch": lambda: rt.dispatch(x, routing, chosen.experts),
                "gloo dispatch": lambda: gloo.dispatch(x),
                "combine": lambda: rt.combine(received.rows, handle, weighted=True),
                "gloo combine": lambda: gloo.combine(rows, len(x)),
            },
            chosen.rounds,
        )


def line(stage: str, chosen: argparse.Namespace, ours: float, theirs: float) -> str:
    """One result, as benchmarks print it."""
    ranks = f"{chosen.ranks} ranks {chosen.nodes} nodes"
    shape = f"{ranks} T={chosen.tokens} H={chosen.hidden} E={chosen.experts} K={chosen.topk}"
    return (
        f"{stage:<18} {shape} {chosen.dtype} | {ours * 1e3:8.2f} ms | gloo {theirs * 1e3:8.2f} ms"
        f" | {theirs / ours:5.2f} times as fast"
    )
