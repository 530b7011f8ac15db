"""dispatch and combine on H100/H200: time of the kernel on the device, and of events around its launch.

One GPU plays the ranks: `python -m benchmarks.bench_sm90_exchange`. One rank per GPU, over torch's symmetric memory:
`torchrun --nproc-per-node 2 -m benchmarks.bench_sm90_exchange`. The second-level cache is cold; slowest rank counts.
Beside each a copy (and, with `--beside copy fill`, a fill) of as many bytes as the experts' rows have.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_clock import GpuClock
from benchmarks.measure import WARM_UP
from moeloom import Placement
from moeloom.backends.base import RowOrder
from moeloom.backends.sm90.combine import combine
from moeloom.backends.sm90.dispatch import Arrived, Tokens, dispatch
from moeloom.backends.sm90.member import Member, play
from moeloom.backends.sm90.spaces import Sizes
from moeloom.quantize import record_bytes


@dataclass
class Case:
    """What the ranks of this process send, and where it goes."""

    members: list[Member]
    tokens: list[Tokens]
    order: RowOrder
    arrived: list[Arrived]
    rows: list[Tensor]
    y: list[Tensor]
    parts: int | None = None
    sms: int | None = None

    def dispatch(self) -> None:
        dispatch(self.members, self.tokens, self.order, self.arrived, sms=self.sms)

    def combine(self) -> None:
        sent = list(zip(self.tokens, self.arrived, strict=True))
        combine(self.members, sent, self.rows, weighted=False, parts=self.parts, out=self.y, sms=self.sms)

    def check(self) -> None:
        """Rows are those of their tokens, and equal rows of K experts, in numbers of few bits, sum up exactly."""
        self.dispatch()
        for member, tokens, arrived, rows in zip(self.members, self.tokens, self.arrived, self.rows, strict=True):
            pair = arrived.row_pair.long()
            own = (pair >= 0) & (pair // member.sizes.pairs == member.rank)
            token = pair[own] % member.sizes.pairs // member.sizes.num_topk
            assert torch.equal(arrived.rows[own], tokens.x[token]), "dispatch"
            assert int((pair >= 0).sum()) == int(arrived.expert_rows.sum()), "dispatch"
            rows.fill_(0.25)
        self.combine()
        for member, y, rows in zip(self.members, self.y, self.rows, strict=True):
            member.raise_failure()
            assert (y == 0.25 * member.sizes.num_topk).all(), "combine"
            rows.normal_()


def case(members: list[Member], count: int, skew: float) -> Case:
    """Every rank with as many tokens. skew: the share of all pairs that rank 0 serves; 0: uniform routing."""
    sizes, device = members[0].sizes, members[0].peers.device
    rows = count * sizes.num_topk * sizes.num_ranks
    share = max(skew, 1 / sizes.num_ranks) * 5 / 4
    order = RowOrder(capacity=rows if count < 128 else min(rows, int(rows * share)))
    tokens = []
    for member in members:
        generator = torch.Generator(device).manual_seed(member.rank)
        x = torch.randint(0, 256, (count, sizes.row_bytes), generator=generator, device=device, dtype=torch.uint8)
        ids = draw_ids(sizes, count, skew, generator)
        tokens.append(Tokens(x, ids, torch.rand(ids.shape, generator=generator, device=device)))
    arrived = [Arrived.empty(sizes, order, device) for _ in members]
    sums = [torch.empty(len(a.rows), sizes.sum_bytes // 2, dtype=torch.bfloat16, device=device) for a in arrived]
    y = [each.new_empty(count, each.shape[1]) for each in sums]
    return Case(members, tokens, order, arrived, sums, y)


def draw_ids(sizes: Sizes, count: int, skew: float, generator: torch.Generator) -> Tensor:
    """`[T, K]` int32, different experts in a row."""

    def some(experts: int) -> Tensor:
        scores = torch.rand(count, experts, generator=generator, device=generator.device)
        return scores.topk(sizes.num_topk).indices

    if not skew:
        return some(sizes.num_experts).int()
    on_first = some(sizes.num_local)
    elsewhere = some(sizes.num_experts - sizes.num_local) + sizes.num_local
    drawn = torch.rand(on_first.shape, generator=generator, device=generator.device)
    return torch.where(drawn < skew, on_first, elsewhere).int()


@dataclass(frozen=True)
class Times:
    """Microseconds, median over the rounds of the slowest rank. kernel: on the device, None if not asked for."""

    events: float
    kernel: float | None = None


def measured(run: Callable[[], object], clock: GpuClock, kernel: str | None = None) -> Times:
    """kernel: part of the name of the one kernel that `run` launches."""
    (events,) = clock.microseconds(run)
    if kernel is None:
        return Times(events)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        clock.rounds(run)
    found = [event for event in profile.events() if kernel in event.name and event.time_range.elapsed_us() > 0]
    found.sort(key=lambda event: event.time_range.start)
    assert len(found) == clock.count, [event.name for event in found]
    return Times(events, clock.of_slowest([event.time_range.elapsed_us() for event in found][WARM_UP:]))


def report(chosen: argparse.Namespace, case: Case, clock: GpuClock, said: bool) -> None:
    """Check, time, and print a line for each stage and number of multiprocessors."""
    case.check()
    sizes, count = case.members[0].sizes, len(case.tokens[0].x)
    rows = sum(int(arrived.expert_rows.sum()) for arrived in case.arrived)
    widths = {"dispatch": sizes.row_bytes, "combine": sizes.sum_bytes}
    for stage, sms in product(chosen.stages, chosen.sms or [None]):
        variant = replace(case, sms=sms)
        num_bytes = rows * widths[stage]
        ours = measured(getattr(variant, stage), clock, stage)
        line = f"{stage:<9}{sizes.num_ranks} ranks, {len(case.members)} here T={count:<5} K={sizes.num_topk:<2}"
        line += f" H={sizes.sum_bytes // 2} SMs={sms or 'all':<4}{num_bytes / 1e6:8.2f} MB of rows"
        line += f" | kernel {ours.kernel:7.1f} us, events {ours.events:7.1f} us"
        for name in chosen.beside:
            into, out_of = torch.empty(2, num_bytes, dtype=torch.uint8, device=clock.flush.device)
            runs = {"copy": lambda a=into, b=out_of: a.copy_(b), "fill": lambda a=into: a.fill_(1)}
            other = measured(runs[name], clock)
            line += f" | {name} {other.events:7.1f} us, {ours.events / other.events:5.2f} of it"
        if said:
            print(line, flush=True)


def members_of(ranks: int, sizes: Sizes, timeout: float, device: torch.device) -> tuple[list[Member], object]:
    """All ranks on this GPU, or this process's rank; and what keeps their memory."""
    placement = Placement.even(sizes.num_experts, ranks)
    if not dist.is_initialized():
        return play(sizes, placement, timeout, device)
    import torch.distributed._symmetric_memory as symmetric

    memory = symmetric.empty(sizes.num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(memory, dist.group.WORLD)
    memory.zero_()
    torch.cuda.synchronize()
    dist.barrier()
    rank = dist.get_rank()
    return [Member.make(sizes, placement, rank, list(handle.buffer_ptrs), timeout, device)], (memory, handle)


def options(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What to measure; given: instead of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 128, 4096, 8192])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="played on one GPU")
    parser.add_argument("--hidden", type=int, nargs="+", default=[7168])
    parser.add_argument("--row-bytes", type=int, help="that dispatch brings; default: FP8 values with their scales")
    parser.add_argument("--topk", type=int, nargs="+", default=[8])
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--skew", type=float, default=0.0, help="share of pairs that rank 0 serves; 0: uniform")
    parser.add_argument("--stages", nargs="+", default=["dispatch", "combine"], choices=["dispatch", "combine"])
    parser.add_argument("--sms", type=int, nargs="+", help="multiprocessors to use; default: all")
    parser.add_argument("--parts", type=int, nargs="+", default=[0], help="of a row in combine; 0: as the kernel likes")
    parser.add_argument("--beside", nargs="*", default=["copy"], choices=["copy", "fill"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--timeout", type=float, default=10.0)
    return parser.parse_args(given)


def measure(chosen: argparse.Namespace, device: torch.device) -> None:
    """Print a line per stage and combination of what was chosen."""
    processes = dist.get_world_size() if dist.is_initialized() else 1
    clock = GpuClock(device, chosen.rounds)
    for ranks, hidden, topk in product([processes] if processes > 1 else chosen.ranks, chosen.hidden, chosen.topk):
        local, row_bytes = -(-chosen.experts // ranks), chosen.row_bytes or record_bytes(hidden)
        sizes = Sizes(ranks, max(chosen.tokens), topk, chosen.experts, local, row_bytes, 2 * hidden)
        members, memory = members_of(ranks, sizes, chosen.timeout, device)
        for count, parts in product(chosen.tokens, chosen.parts):
            built = replace(case(members, count, chosen.skew), parts=parts or None)
            report(chosen, built, clock, said=members[0].rank == 0)
        del members, memory, built


def main() -> None:
    """Measure what the command line asks for."""
    chosen = options()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        # multicast over NVLink can put a host's GPUs out of service where they are shared
        os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")
        dist.init_process_group("nccl", device_id=device)
    measure(chosen, device)
    if several:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
