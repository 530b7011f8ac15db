"""How we time: variants interleaved in one run, barrier before each, slowest rank, median over the rounds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

WARM_UP = 3


def interleaved(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant on this rank, round by round. Runs on a rank; collective if there are several."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(WARM_UP + rounds):
        for name, run in variants.items():
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            run()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def slowest_rank_median(ranks: list[dict[str, list[float]]]) -> dict[str, float]:
    """Of each variant: the slowest rank of every round, then the median over the rounds."""
    return {name: median([max(times) for times in zip(*(r[name] for r in ranks), strict=True)]) for name in ranks[0]}


def median(values: list[float]) -> float:
    """The middle value (the upper one of an even number)."""
    return sorted(values)[len(values) // 2]
