"""How we time kernels: launches queue up behind a kernel that rests, the second-level cache is cold, events, median."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.measure import WARM_UP, median

FLUSH_BYTES = 256 << 20  # over four times the second-level cache
QUIET_CYCLES = 2_000_000  # so that launches queue up behind, and events time the GPU only


class GpuClock:
    """Times calls that launch kernels on one GPU. Collective where there are several ranks: the slowest one counts."""

    def __init__(self, device: torch.device | str, rounds: int) -> None:
        self.count = WARM_UP + rounds
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._meet = torch.zeros(1, device=device)

    def microseconds(self, *runs: Callable[[], object]) -> list[float]:
        """Of each of what runs one after the other: the median over the rounds."""
        return [self.of_slowest(times[WARM_UP:]) for times in zip(*self.rounds(*runs), strict=True)]

    def rounds(self, *runs: Callable[[], object]) -> list[list[float]]:
        """On this rank: of each round, those to warm up first, the microseconds of each run."""
        times = []
        for number in range(self.count):
            torch.cuda._sleep(QUIET_CYCLES)
            events = []
            for run in runs:
                self.flush.fill_(number)
                if dist.is_initialized():
                    dist.all_reduce(self._meet)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                events.append((begin, end))
            torch.cuda.synchronize()
            times.append([begin.elapsed_time(end) * 1e3 for begin, end in events])
        return times

    def of_slowest(self, times: tuple[float, ...] | list[float]) -> float:
        """The median of the slowest rank's times."""
        slowest = torch.tensor(times, device=self.flush.device)
        if dist.is_initialized():
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return median(slowest.tolist())
