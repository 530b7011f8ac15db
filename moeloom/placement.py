"""Expert -> (rank, slot): where experts live, uneven and redundant placements included."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """Which expert each slot of each rank holds.

    slots: for each rank the global expert ids of its local slots, in slot order. An expert may have several replicas,
    also on one rank: source rank s sends token t to replica (s + t) mod replicas, counted in (rank, slot) order.
    num_experts: E; every expert 0..E-1 must have a slot.
    num_identity: further ids E..E+num_identity-1 that return the token itself, weighted (LongCat's zero-compute
    experts). They have no slot and cause no traffic.

    >>> Placement.even(num_experts=5, num_ranks=2).slots
    ((0, 1, 2), (3, 4))
    """

    slots: tuple[tuple[int, ...], ...]
    num_experts: int
    num_identity: int = 0

    def __post_init__(self) -> None:
        placed = {expert for rank in self.slots for expert in rank}
        wrong = sorted(placed - set(range(self.num_experts)))
        if wrong:
            raise ValueError(f"slots name experts {wrong[:8]}; allowed: 0..{self.num_experts - 1}")
        if self.num_experts < 1:
            raise ValueError(f"num_experts is {self.num_experts}; it must be at least 1")
        missing = sorted(set(range(self.num_experts)) - placed)
        if missing:
            raise ValueError(f"slots leave out experts {missing[:8]}; each of {self.num_experts} needs a slot")
        if self.num_identity < 0:
            raise ValueError(f"num_identity is {self.num_identity}; it must be 0 or more")

    @classmethod
    def even(cls, num_experts: int, num_ranks: int, *, num_identity: int = 0) -> Placement:
        """Consecutive experts, the first ranks one more if it does not divide: 256 on 3 -> 86, 85, 85."""
        if num_experts < 1 or num_ranks < 1:
            raise ValueError(f"num_experts is {num_experts}, num_ranks is {num_ranks}; both must be at least 1")
        share, extra = divmod(num_experts, num_ranks)
        slots, start = [], 0
        for rank in range(num_ranks):
            size = share + (rank < extra)
            slots.append(tuple(range(start, start + size)))
            start += size
        return cls(tuple(slots), num_experts, num_identity)

    @classmethod
    def from_slots(cls, slots: Sequence[Sequence[int]], *, num_identity: int = 0) -> Placement:
        """Any table; E is one more than the largest expert named."""
        table = tuple(tuple(int(expert) for expert in rank) for rank in slots)
        return cls(table, 1 + max((expert for rank in table for expert in rank), default=-1), num_identity)

    @property
    def num_ranks(self) -> int:
        """How many ranks the table is for."""
        return len(self.slots)

    @property
    def num_ids(self) -> int:
        """Valid ids are 0..num_ids-1: experts, then identity experts."""
        return self.num_experts + self.num_identity

    def num_local(self, rank: int) -> int:
        """How many slots a rank has (L)."""
        return len(self.slots[rank])

    @cached_property
    def fingerprint(self) -> int:
        """A number that differs between different placements, equal on all ranks for the same one."""
        return zlib.crc32(repr((self.slots, self.num_experts, self.num_identity)).encode())

    @cached_property
    def replica_period(self) -> int:
        """Tokens this far apart are served by the same replicas: the least common multiple of their numbers."""
        counts = Counter(expert for rank in self.slots for expert in rank)
        return math.lcm(*counts.values())

    @cached_property
    def _replicas(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tables `rank [ids, M]`, `slot [ids, M]` (-1 where there is none) and `count [ids]`; M is the most
        replicas.
        """
        homes: list[list[tuple[int, int]]] = [[] for _ in range(self.num_ids)]
        for rank, experts in enumerate(self.slots):
            for slot, expert in enumerate(experts):
                homes[expert].append((rank, slot))
        most = max(len(home) for home in homes)
        padded = [home + [(-1, -1)] * (most - len(home)) for home in homes]
        table = torch.tensor(padded, dtype=torch.int64).reshape(self.num_ids, most, 2)
        count = torch.tensor([max(len(home), 1) for home in homes], dtype=torch.int64)
        return table[..., 0].contiguous(), table[..., 1].contiguous(), count

    def locate(self, topk_idx: Tensor, source: Tensor | int, token: Tensor) -> tuple[Tensor, Tensor]:
        """Rank and slot that serve each (token, top-k) pair.

        topk_idx: `[N, K]` int64, ids in -1..num_ids-1. source, token: `[N]` (or one source), the token's rank and row.
        Returns rank and slot, both `[N, K]` int64; -1 for unrouted and for identity experts.
        """
        rank_table, slot_table, count = self._replicas
        known = topk_idx.clamp(min=0)
        replica = ((token + source).unsqueeze(1) % count[known]) if rank_table.shape[1] > 1 else torch.zeros_like(known)
        routed = topk_idx >= 0
        nowhere = torch.full_like(known, -1)
        rank = torch.where(routed, rank_table[known, replica], nowhere)
        slot = torch.where(routed, slot_table[known, replica], nowhere)
        return rank, slot

    def is_identity(self, topk_idx: Tensor) -> Tensor:
        """Which of these ids are identity experts."""
        return topk_idx >= self.num_experts
