"""A decode loop: few tokens, fixed shapes, sequences that come and go, and a caller's own work between the halves.

python examples/decode_loop.py --ranks 4 --steps 50
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

import moeloom

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, SLOTS = 128, 64, 16, 2, 8


def decode(steps: int) -> Iterator[str]:
    """Runs on every rank, which serves up to SLOTS sequences; a slot without one is a row of -1."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    plan, placement = moeloom.Plan("decode", "direct"), moeloom.Placement.even(EXPERTS, num_ranks)
    gate, router = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(0)), moeloom.Router(TOPK)
    with moeloom.Runtime(max_tokens=SLOTS) as rt:
        state, start, bytes_before = torch.randn(SLOTS, HIDDEN), time.perf_counter(), 0
        for step in range(steps):
            active = torch.arange(SLOTS) < 1 + (step + rank) % SLOTS  # sequences come and go
            routing = router(state @ gate.t())
            ids = torch.where(active.unsqueeze(1), routing.topk_idx, -1)
            sent = rt.dispatch(state, moeloom.Routing(ids, routing.topk_weights), placement, plan=plan, async_op=True)
            own = torch.tanh(
                state
            )  # a shared expert, attention of another batch: anything, while rows are on their way
            received, handle = sent.wait()
            rows = torch.tanh(received.rows)  # the experts; any function of rows
            state = 0.5 * own + rt.combine(rows, handle, weighted=True)
            if step == 1:
                bytes_before = rt.symmetric_bytes()
        per_step = (time.perf_counter() - start) / steps
        grown = rt.symmetric_bytes() - bytes_before
        yield f"{steps} steps, {per_step * 1e3:.2f} ms each, buffers grown by {grown} bytes since the second"


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    chosen = parser.parse_args()
    with moeloom.RankPool(chosen.ranks) as pool:
        for text in pool.stream(decode, chosen.steps):
            print(text)


if __name__ == "__main__":
    main()
