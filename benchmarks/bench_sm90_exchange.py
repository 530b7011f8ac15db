"""dispatch and combine on H100/H200, beside a copy and a fill of as many bytes as the experts' rows have.

One GPU plays the ranks: `python -m benchmarks.bench_sm90_exchange`. One rank per GPU, over torch's symmetric memory:
`torchrun --nproc-per-node 2 -m benchmarks.bench_sm90_exchange`. The second-level cache is cold; slowest rank counts.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measure import median
from moeloom import Placement
from moeloom.backends.base import RowOrder
from moeloom.backends.sm90.combine import combine
from moeloom.backends.sm90.dispatch import Arrived, Tokens, dispatch
from moeloom.backends.sm90.member import Member, play
from moeloom.backends.sm90.spaces import Sizes, default_parts

WARM_UP = 3
FLUSH_BYTES = 256 << 20  # over four times the second-level cache
QUIET_CYCLES = 2_000_000  # so that launches queue up behind, and events time the GPU only


@dataclass
class Case:
    """What the ranks of this process send, and where it goes."""

    members: list[Member]
    tokens: list[Tokens]
    order: RowOrder
    arrived: list[Arrived]
    rows: list[Tensor]
    y: list[Tensor]
    parts: int

    def dispatch(self) -> None:
        dispatch(self.members, self.tokens, self.order, self.arrived)

    def combine(self) -> None:
        sent = list(zip(self.tokens, self.arrived, strict=True))
        combine(self.members, sent, self.rows, weighted=False, parts=self.parts, out=self.y)

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
        for member, y in zip(self.members, self.y, strict=True):
            member.raise_failure()
            assert (y == 0.25 * member.sizes.num_topk).all(), "combine"


def case(members: list[Member], count: int) -> Case:
    """Uniform routing, every rank with as many tokens."""
    sizes, device = members[0].sizes, members[0].peers.device
    rows = count * sizes.num_topk * sizes.num_ranks
    order = RowOrder(capacity=rows if count < 128 else rows // sizes.num_ranks * 5 // 4)
    tokens = []
    for member in members:
        generator = torch.Generator(device).manual_seed(member.rank)
        x = torch.randint(0, 256, (count, sizes.row_bytes), generator=generator, device=device, dtype=torch.uint8)
        scores = torch.rand(count, sizes.num_experts, generator=generator, device=device)
        ids = scores.topk(sizes.num_topk).indices.int()
        tokens.append(Tokens(x, ids, torch.rand(ids.shape, generator=generator, device=device)))
    arrived = [Arrived.empty(sizes, order, device) for _ in members]
    sums = [torch.empty(len(a.rows), sizes.sum_bytes // 2, dtype=torch.bfloat16, device=device) for a in arrived]
    y = [each.new_empty(count, each.shape[1]) for each in sums]
    return Case(members, tokens, order, arrived, sums, y, default_parts(count))


def microseconds(run: Callable[[], object], flush: Tensor, rounds: int) -> float:
    """Median over the rounds of the slowest rank's time on the GPU."""
    times = []
    meet = torch.zeros(1, device=flush.device)
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


def report(measured: Case, flush: Tensor, rounds: int, said: bool) -> None:
    """Check, time, and print a line for dispatch and one for combine."""
    measured.check()
    count, ranks = len(measured.tokens[0].x), measured.members[0].sizes.num_ranks
    written = [sum(int(a.expert_rows.sum()) for a in measured.arrived) * measured.members[0].sizes.row_bytes]
    written.append(sum(int(a.expert_rows.sum()) for a in measured.arrived) * measured.members[0].sizes.sum_bytes)
    buffers = torch.empty(2, max(written), dtype=torch.uint8, device=flush.device)
    for stage, run, num_bytes in (
        ("dispatch", measured.dispatch, written[0]),
        ("combine", measured.combine, written[1]),
    ):
        ours = microseconds(run, flush, rounds)
        copied = microseconds(lambda n=num_bytes: buffers[0, :n].copy_(buffers[1, :n]), flush, rounds)
        filled = microseconds(lambda n=num_bytes: buffers[0, :n].fill_(1), flush, rounds)
        if said:
            print(
                f"{stage:<9}{ranks} ranks, {len(measured.members)} here T={count:<5} {num_bytes / 1e6:8.2f} MB of rows"
                f" | {ours:8.1f} us | copy {copied:8.1f} us, {ours / copied:5.2f} of it"
                f" | fill {filled:8.1f} us, {ours / filled:5.2f} of it",
                flush=True,
            )


def members_of(ranks: int, chosen: argparse.Namespace, device: torch.device) -> tuple[list[Member], object]:
    """All ranks on this GPU, or this process's rank; and what keeps their memory."""
    local = -(-chosen.experts // ranks)
    most = max(chosen.tokens)
    sizes = Sizes(ranks, most, chosen.topk, chosen.experts, local, chosen.row_bytes, 2 * chosen.hidden)
    placement = Placement.even(chosen.experts, ranks)
    if not dist.is_initialized():
        return play(sizes, placement, chosen.timeout, device)
    import torch.distributed._symmetric_memory as symmetric

    memory = symmetric.empty(sizes.num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(memory, dist.group.WORLD)
    memory.zero_()
    torch.cuda.synchronize()
    dist.barrier()
    rank = dist.get_rank()
    return [Member.make(sizes, placement, rank, list(handle.buffer_ptrs), chosen.timeout, device)], (memory, handle)


def main() -> None:
    """Print two lines per number of ranks and tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 128, 4096, 8192])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="played on one GPU")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--row-bytes", type=int, default=7392, help="FP8 values with their scales")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--timeout", type=float, default=10.0)
    chosen = parser.parse_args()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if processes > 1:
        # multicast over NVLink can put a host's GPUs out of service where they are shared
        os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")
        dist.init_process_group("nccl", device_id=device)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    for ranks in [processes] if processes > 1 else chosen.ranks:
        members, memory = members_of(ranks, chosen, device)
        for count in chosen.tokens:
            report(case(members, count), flush, chosen.rounds, said=members[0].rank == 0)
        del members, memory
    if processes > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
