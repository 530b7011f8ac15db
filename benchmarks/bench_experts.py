"""experts, beside the same products by plain matmul: what share of this machine's matmul rate the whole stage keeps."""

from __future__ import annotations

import argparse

import torch

from benchmarks.measure import interleaved, median
from moeloom import RECIPES, Experts, Routing, Runtime
from moeloom.backends.base import RowOrder
from moeloom.placement import Placement


def main() -> None:
    """Print one line per recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="rows in all: tokens times top-k of one rank's share")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=1024)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8, help="local experts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    for name in RECIPES:
        print(line(name, chosen))


def line(recipe_name: str, chosen: argparse.Namespace) -> str:
    """Measure one recipe."""
    recipe = RECIPES[recipe_name]
    torch.manual_seed(0)
    x = torch.randn(chosen.tokens, chosen.hidden).to(recipe.dtype)
    topk_idx = torch.rand(chosen.tokens, chosen.experts).topk(chosen.topk).indices
    routing = Routing(topk_idx, torch.rand(chosen.tokens, chosen.topk))
    gate_up = (torch.randn(chosen.experts, 2 * chosen.intermediate, chosen.hidden) / 32).to(recipe.dtype)
    down = (torch.randn(chosen.experts, chosen.hidden, chosen.intermediate) / 32).to(recipe.dtype)
    weights = Experts(gate_up, down)
    with Runtime("self", backend="cpu") as rt:
        placement = Placement.even(chosen.experts, 1)
        received, _ = rt.backend.dispatch(x, routing, placement, RowOrder(), "direct")
        counts = received.num_tokens_per_expert.tolist()
        products = [
            (torch.randn(n, chosen.hidden), gate_up[e].float(), torch.randn(n, chosen.intermediate), down[e].float())
            for e, n in enumerate(counts)
        ]

        def plain() -> None:
            for rows, up, hidden, out in products:
                rows @ up.t()
                hidden @ out.t()

        measured = interleaved(
            {"experts": lambda: rt.backend.experts(received, weights, recipe), "matmul": plain}, chosen.rounds
        )
    ours, plain_seconds = median(measured["experts"]), median(measured["matmul"])
    flops = 6 * sum(counts) * chosen.hidden * chosen.intermediate
    shape = f"{sum(counts)} rows H={chosen.hidden} I={chosen.intermediate} L={chosen.experts} {recipe_name}"
    return (
        f"experts            {shape} {chosen.threads} threads | {ours * 1e3:8.2f} ms {flops / ours / 1e9:6.1f} GFLOP/s"
        f" | matmul {flops / plain_seconds / 1e9:6.1f} GFLOP/s | share {plain_seconds / ours:5.2f}"
    )


if __name__ == "__main__":
    main()
