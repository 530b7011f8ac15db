"""The decode pipeline beside split for few tokens: where fixed shapes pay on this machine."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from benchmarks.measure import interleaved, slowest_rank_median
from moeloom import Experts, Placement, Plan, RankPool, Routing, Runtime


def main() -> None:
    """Print a line per number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--exchange", choices=("direct", "hybrid"), default="direct")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=256)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    chosen = parser.parse_args()
    with RankPool(chosen.ranks, chosen.nodes) as pool:
        for tokens in map(int, chosen.tokens.split(",")):
            seconds = slowest_rank_median(pool.run(_on_rank, chosen, tokens))
            print(line(chosen, tokens, seconds["decode"], seconds["split"]), flush=True)


def _on_rank(chosen: argparse.Namespace, tokens: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    placement = Placement.even(chosen.experts, chosen.ranks)
    local, hidden, intermediate = placement.num_local(dist.get_rank()), chosen.hidden, chosen.intermediate
    experts = Experts(
        torch.randn(local, 2 * intermediate, hidden, generator=generator) * hidden**-0.5,
        torch.randn(local, hidden, intermediate, generator=generator) * intermediate**-0.5,
        placement=placement,
    )
    scores = torch.rand(tokens, chosen.experts, generator=generator)
    routing = Routing(scores.topk(chosen.topk).indices, torch.rand(tokens, chosen.topk, generator=generator))
    x = torch.randn(tokens, hidden, generator=generator)
    with Runtime(max_tokens=tokens, backend="cpu", timeout=60) as rt:

        def run(pipeline: str) -> torch.Tensor:
            return rt.moe(x, routing, experts, plan=Plan(pipeline, chosen.exchange))

        if not torch.equal(run("decode"), run("split")):
            raise AssertionError("decode and split differ")
        return interleaved({name: lambda name=name: run(name) for name in ("decode", "split")}, chosen.rounds)


def line(chosen: argparse.Namespace, tokens: int, decode: float, split: float) -> str:
    """One result."""
    ranks = f"{chosen.ranks} ranks {chosen.nodes} nodes {chosen.exchange}"
    shape = f"{ranks} T={tokens:<3} H={chosen.hidden} I={chosen.intermediate} E={chosen.experts} K={chosen.topk}"
    return (
        f"decode {shape} | {decode * 1e3:8.2f} ms | split {split * 1e3:8.2f} ms | {split / decode:5.2f} times as fast"
    )


if __name__ == "__main__":
    main()
