"""A layer of a published model's shape, scaled down, on several ranks of this machine.

python examples/forward.py --ranks 4 --nodes 2
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

import moeloom
from moeloom.models import find_model


def forward(model: str, tokens: int) -> str:
    """Runs on every rank: its own tokens, its own experts."""
    shape = find_model(model).scaled(16)
    torch.manual_seed(dist.get_rank())
    with moeloom.Runtime() as rt:
        placement = moeloom.Placement.even(shape.num_experts, rt.topology.num_ranks)
        local = placement.num_local(rt.rank)
        experts = moeloom.Experts(
            torch.randn(local, 2 * shape.intermediate, shape.hidden) * shape.hidden**-0.5,
            torch.randn(local, shape.hidden, shape.intermediate) * shape.intermediate**-0.5,
            placement=placement,
            activation=shape.activation,
        )
        x = torch.randn(tokens, shape.hidden)
        routing = shape.router(torch.randn(tokens, shape.num_experts))
        y = rt.moe(x, routing, experts)
        rows = rt.stats()["dispatch"].rows
        return f"rank {rt.rank}: {len(y)} tokens out, {rows} rows computed here for all ranks' tokens"


def main() -> None:
    """Start the ranks and print what each says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deepseek-v3")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    chosen = parser.parse_args()
    print(*moeloom.launch(forward, chosen.ranks, chosen.nodes, (chosen.model, chosen.tokens)), sep="\n")


if __name__ == "__main__":
    main()
