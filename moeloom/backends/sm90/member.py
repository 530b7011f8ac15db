"""A rank's end of the exchange: what stays on its GPU between launches; and the launch of one or several of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeloom import jit
from moeloom.backends.sm90.homes import Served
from moeloom.backends.sm90.launch import loaded
from moeloom.backends.sm90.parameters import State
from moeloom.backends.sm90.spaces import LIMITS, Sizes, between
from moeloom.errors import PeerTimeout
from moeloom.placement import Placement

# what a kernel that gave up was waiting for: `State.phase`
PHASES = {1: "its routing", 2: "its rows", 3: "its sums"}
STAGES = ("dispatch", "combine")


@dataclass(frozen=True, eq=False)
class Member:
    """One rank, on the device of its tensors.

    peers: `[ranks]` int64, where each rank's symmetric memory lies in this process. expert_rank, expert_slot: `[E]`
    int32. dispatch_state, combine_state: a `State` each. problems: `[4]` int32, see `DispatchParams`. failures:
    `[2, 4]` int32 of the host, where kernels say that they gave up: see `State`; None: only the states tell.
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
    failures: Tensor | None = None
    stop: int = 0

    @classmethod
    def make(
        cls,
        sizes: Sizes,
        placement: Placement,
        rank: int,
        addresses: Sequence[int],
        timeout: float,
        device: torch.device,
        failures: Tensor | None = None,
        stop: int = 0,
    ) -> Member:
        """addresses: of each rank's symmetric memory, `sizes.num_bytes` zeros each. timeout: seconds. stop: address of
        a word that ends this rank's waits (see `State`), or 0.
        """
        _check(sizes, placement, rank, addresses, timeout)
        homes = Served(placement, rank, device)
        states = _new_states(failures, stop).to(device)
        return cls(
            sizes=sizes,
            rank=rank,
            timeout_ns=int(timeout * 1e9),
            peers=torch.tensor(list(addresses), dtype=torch.int64, device=device),
            expert_rank=homes.expert_rank,
            expert_slot=homes.expert_slot,
            dispatch_state=states[0],
            combine_state=states[1],
            problems=torch.zeros(4, dtype=torch.int32, device=device),
            failures=failures,
            stop=stop,
        )

    def params(self, topk_idx: Tensor) -> dict[str, Any]:
        """What dispatch and combine take alike, for `topk_idx [T, K]`."""
        sizes = self.sizes
        return {
            "topk_idx": topk_idx.data_ptr(),
            "ids_are_64": topk_idx.dtype == torch.int64,
            "num_tokens": len(topk_idx),
            "expert_rank": self.expert_rank.data_ptr(),
            "peers": self.peers.data_ptr(),
            "timeout_ns": self.timeout_ns,
            "max_tokens": sizes.max_tokens,
            "num_topk": sizes.num_topk,
            "num_experts": sizes.num_experts,
            "num_ranks": sizes.num_ranks,
            "rank": self.rank,
        }

    def states(self) -> tuple[State, State]:
        """Of dispatch and of combine, as they are once the GPU is done. Waits for it."""
        words = torch.stack([self.dispatch_state, self.combine_state]).cpu()
        dispatch, combine = (State.from_buffer_copy(bytearray(each.numpy().tobytes())) for each in words)
        return dispatch, combine

    def raise_failure(self) -> None:
        """Raise PeerTimeout if a launch gave up waiting; every later one is void until `clear`. Waits for the GPU."""
        for stage, state in zip(STAGES, self.states(), strict=True):
            if state.aborted:
                raise given_up(stage, self.rank, state.peer, state.phase, self.timeout_ns / 1e9)

    def clear(self) -> None:
        """Begin anew after a failure, together with all ranks, each of whose symmetric memory must be zeros again."""
        fresh = _new_states(self.failures, self.stop)
        self.dispatch_state.copy_(fresh[0])
        self.combine_state.copy_(fresh[1])
        for words in (self.problems, self.failures):
            if words is not None:
                words.zero_()


def given_up(stage: str, rank: int, peer: int, phase: int, seconds: float) -> PeerTimeout:
    """The error of a launch that waited in vain."""
    return PeerTimeout(f"{stage} on rank {rank}: rank {peer} did not bring {PHASES[phase]} in {seconds:g} s")


def _new_states(failures: Tensor | None, stop: int) -> Tensor:
    """`[2, words]` int32: the states of dispatch and combine before their first launch."""
    told = [0 if failures is None else failures[i].data_ptr() for i in range(len(STAGES))]
    states = [State(failure=address, stop=stop) for address in told]
    return torch.stack([torch.frombuffer(bytearray(state), dtype=torch.int32) for state in states])


def play(
    sizes: Sizes, placement: Placement, timeout: float, device: torch.device, ranks: Sequence[int] | None = None
) -> tuple[list[Member], Tensor]:
    """All ranks (or some) on one GPU, for tests and benchmarks, and their symmetric memory, `[ranks, bytes]` uint8."""
    memory = torch.zeros(sizes.num_ranks, sizes.num_bytes, dtype=torch.uint8, device=device)
    addresses = [part.data_ptr() for part in memory]
    played = range(sizes.num_ranks) if ranks is None else ranks
    return [Member.make(sizes, placement, rank, addresses, timeout, device) for rank in played], memory


def launch(
    declared: tuple[jit.Declared, jit.Declared],
    params: Sequence[ctypes.Structure],
    device: torch.device,
    sms: int | None = None,
) -> None:
    """Launch on the device's current stream: the first of `declared` for one rank, the second for several.

    sms: the multiprocessors to use, None: all. Several ranks share them, so that each rank's blocks find a place beside
    those of the others.
    """
    if len(params) > LIMITS["MAX_RANKS"] or not params:
        raise ValueError(f"members are {len(params)}; allowed: 1..{LIMITS['MAX_RANKS']}")
    chosen = declared[len(params) > 1]
    kernels, processors = loaded(chosen, device.index)
    (kernel,) = kernels.values()
    if sms is not None:
        between("sms", sms, len(params), processors)
        processors = sms
    (size,) = kernel.usage.parameter_bytes
    block = b"".join(bytes(each) for each in params).ljust(size, b"\0")
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        grid = (processors // len(params), len(params), 1)
        kernel.launch(stream, grid, chosen.threads, chosen.shared_bytes, (block,))


def declared(
    stage: str, threads: int, shared_bytes: int, proof: str, arguments: str = ""
) -> tuple[jit.Declared, jit.Declared]:
    """A stage's kernel for one rank and one for several on a GPU, whose blocks `[:, r]` are the r-th.

    arguments: of the kernel's template, such as "<Fp32, true>".
    """
    include = f'#include "{stage}.cuh"\n{proof}'
    params = f"{stage.capitalize()}Params"
    several = f"""
namespace moeloom {{
struct Several {{
    {params} ranks[MAX_RANKS];
}};
__global__ void __launch_bounds__({threads}, 1) {stage}_several(const __grid_constant__ Several p) {{
    run_{stage}{arguments}(p.ranks[blockIdx.y]);
}}
}}
"""
    sources = (
        jit.Source(f"{stage}{arguments}", include, (f"moeloom::{stage}{arguments}",)),
        jit.Source(f"{stage}_several{arguments}", include + several, (f"moeloom::{stage}_several",)),
    )
    one, more = (jit.Declared(source, threads, shared_bytes=shared_bytes) for source in sources)
    return one, more


def _check(sizes: Sizes, placement: Placement, rank: int, addresses: Sequence[int], timeout: float) -> None:
    most = max(placement.num_local(r) for r in range(placement.num_ranks))
    found = (placement.num_ranks, placement.num_experts, most)
    allowed = (sizes.num_ranks, sizes.num_experts, sizes.num_local)
    if found != allowed:
        raise ValueError(f"placement has (ranks, experts, most local) {found}; allowed: {allowed}")
    if sum(map(len, placement.slots)) != placement.num_experts or placement.num_identity:
        raise ValueError("placement has replicas or identity experts; allowed: one slot for each expert")
    if not 0 <= rank < sizes.num_ranks:
        raise ValueError(f"rank is {rank}; allowed: 0..{sizes.num_ranks - 1}")
    if len(addresses) != sizes.num_ranks:
        raise ValueError(f"addresses are {len(addresses)}; allowed: {sizes.num_ranks}, one of each rank")
    if not 0 < timeout < 1e9:
        raise ValueError(f"timeout is {timeout}; allowed: seconds above 0")
