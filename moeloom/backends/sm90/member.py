"""A rank's end of the exchange: what stays on its GPU between launches; and the launch of one or several of them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeloom import jit
from moeloom.backends.sm90.parameters import State
from moeloom.backends.sm90.spaces import LIMITS, Sizes
from moeloom.errors import PeerTimeout
from moeloom.placement import Placement

# what a kernel that gave up was waiting for: `State.phase`
PHASES = {1: "its routing", 2: "its rows", 3: "its sums"}


@dataclass(frozen=True, eq=False)
class Member:
    """One rank, on the device of its tensors.

    peers: `[ranks]` int64, where each rank's symmetric memory lies in this process. expert_rank, expert_slot: `[E]`
    int32. dispatch_state, combine_state: a `State` each. problems: `[4]` int32, see `DispatchParams`.
    """

    sizes: Sizes
    rank: int
    timeout_ns: int
    peers: Tensor
    expert_rank: Tensor
    expert_slot: Tensor
    dispatch_state: Tensor
    combine_state: Tensor
    problems: Tensor

    @classmethod
    def make(
        cls,
        sizes: Sizes,
        placement: Placement,
        rank: int,
        addresses: Sequence[int],
        timeout: float,
        device: torch.device,
    ) -> Member:
        """addresses: of each rank's symmetric memory, `sizes.num_bytes` zeros each. timeout: seconds."""
        _check(sizes, placement, rank, addresses, timeout)
        homes = {expert: (home_rank, slot) for home_rank, slot, expert in _homes(placement)}
        table = torch.tensor([homes[expert] for expert in range(sizes.num_experts)], dtype=torch.int32)
        expert_rank, expert_slot = table.t().contiguous().to(device).unbind(0)
        words = ctypes.sizeof(State) // 4
        state = torch.zeros(2, words, dtype=torch.int32, device=device)
        return cls(
            sizes=sizes,
            rank=rank,
            timeout_ns=int(timeout * 1e9),
            peers=torch.tensor(list(addresses), dtype=torch.int64, device=device),
            expert_rank=expert_rank,
            expert_slot=expert_slot,
            dispatch_state=state[0],
            combine_state=state[1],
            problems=torch.zeros(4, dtype=torch.int32, device=device),
        )

    def states(self) -> tuple[State, State]:
        """Of dispatch and of combine, as they are once the GPU is done. Waits for it."""
        words = torch.stack([self.dispatch_state, self.combine_state]).cpu()
        dispatch, combine = (State.from_buffer_copy(bytearray(each.numpy().tobytes())) for each in words)
        return dispatch, combine

    def raise_failure(self) -> None:
        """Raise PeerTimeout if a launch gave up waiting; every later one is void until `clear`. Waits for the GPU."""
        for stage, state in zip(("dispatch", "combine"), self.states(), strict=True):
            if state.aborted:
                seconds, phase = self.timeout_ns / 1e9, PHASES[state.phase]
                raise PeerTimeout(
                    f"{stage} on rank {self.rank}: rank {state.peer} did not bring {phase} in {seconds:g} s"
                )

    def clear(self) -> None:
        """Begin anew after a failure, together with all ranks, each of whose symmetric memory must be zeros again."""
        for tensor in (self.dispatch_state, self.combine_state, self.problems):
            tensor.zero_()


def play(
    sizes: Sizes, placement: Placement, timeout: float, device: torch.device, ranks: Sequence[int] | None = None
) -> tuple[list[Member], Tensor]:
    """All ranks (or some) on one GPU, for tests and benchmarks, and their symmetric memory, `[ranks, bytes]` uint8."""
    memory = torch.zeros(sizes.num_ranks, sizes.num_bytes, dtype=torch.uint8, device=device)
    addresses = [part.data_ptr() for part in memory]
    played = range(sizes.num_ranks) if ranks is None else ranks
    return [Member.make(sizes, placement, rank, addresses, timeout, device) for rank in played], memory


def launch(
    declared: tuple[jit.Declared, jit.Declared], params: Sequence[ctypes.Structure], device: torch.device
) -> None:
    """Launch on the device's current stream: the first of `declared` for one rank, the second for several.

    Several share the GPU's multiprocessors, so that each rank's blocks find a place beside those of the others.
    """
    if len(params) > LIMITS["MAX_RANKS"] or not params:
        raise ValueError(f"members are {len(params)}; allowed: 1..{LIMITS['MAX_RANKS']}")
    chosen = declared[len(params) > 1]
    kernel, processors = _kernel(chosen, device.index)
    (size,) = kernel.usage.parameter_bytes
    block = b"".join(bytes(each) for each in params).ljust(size, b"\0")
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        grid = (processors // len(params), len(params), 1)
        kernel.launch(stream, grid, chosen.threads, chosen.shared_bytes, (block,))


def declared(stage: str, threads: int, shared_bytes: int, proof: str) -> tuple[jit.Declared, jit.Declared]:
    """A stage's kernel for one rank and one for several on a GPU, whose blocks `[:, r]` are the r-th."""
    include = f'#include "{stage}.cuh"\n{proof}'
    params = f"{stage.capitalize()}Params"
    several = f"""
namespace moeloom {{
struct Several {{
    {params} ranks[MAX_RANKS];
}};
__global__ void __launch_bounds__({threads}, 1) {stage}_several(const __grid_constant__ Several p) {{
    run_{stage}(p.ranks[blockIdx.y]);
}}
}}
"""
    sources = (
        jit.Source(stage, include, (f"moeloom::{stage}",)),
        jit.Source(f"{stage}_several", include + several, (f"moeloom::{stage}_several",)),
    )
    one, more = (jit.Declared(source, threads, shared_bytes=shared_bytes) for source in sources)
    return one, more


@functools.cache
def _kernel(chosen: jit.Declared, device: int) -> tuple[jit.Kernel, int]:
    """A declaration's kernel on a device, and that device's number of multiprocessors."""
    kernels = jit.load(jit.compile(chosen.source), torch.device("cuda", device))
    (kernel,) = kernels.values()
    return kernel, torch.cuda.get_device_properties(device).multi_processor_count


def _homes(placement: Placement) -> list[tuple[int, int, int]]:
    """Rank, slot and expert of every slot."""
    return [(rank, slot, e) for rank, held in enumerate(placement.slots) for slot, e in enumerate(held)]


def _check(sizes: Sizes, placement: Placement, rank: int, addresses: Sequence[int], timeout: float) -> None:
    most = max(placement.num_local(r) for r in range(placement.num_ranks))
    found = (placement.num_ranks, placement.num_experts, most)
    allowed = (sizes.num_ranks, sizes.num_experts, sizes.num_local)
    if found != allowed:
        raise ValueError(f"placement has (ranks, experts, most local) {found}; allowed: {allowed}")
    if len(_homes(placement)) != placement.num_experts or placement.num_identity:
        raise ValueError("placement has replicas or identity experts; allowed: one slot for each expert")
    if not 0 <= rank < sizes.num_ranks:
        raise ValueError(f"rank is {rank}; allowed: 0..{sizes.num_ranks - 1}")
    if len(addresses) != sizes.num_ranks:
        raise ValueError(f"addresses are {len(addresses)}; allowed: {sizes.num_ranks}, one of each rank")
    if not 0 < timeout < 1e9:
        raise ValueError(f"timeout is {timeout}; allowed: seconds above 0")
