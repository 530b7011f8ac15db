"""Where experts live, as kernels take it: an id per slot of any rank, and its rank and slot there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeloom.placement import Placement


class Homes:
    """A placement on a device, as rank `rank` sees it.

    expert_rank, expert_slot: `[E]` int32. num_local: the most slots of any rank; an exchange of rows by rank (order
    "rank") sees each rank as one expert with one slot.
    """

    def __init__(self, homes: Sequence[tuple[int, int]], device: torch.device) -> None:
        table = torch.tensor(homes, dtype=torch.int32).reshape(-1, 2)
        self.num_experts = len(homes)
        self.num_local = 1 + max(slot for _, slot in homes)
        self.expert_rank, self.expert_slot = table.t().contiguous().to(device).unbind(0)

    def given(self, found: int) -> int:
        """The caller's id, from one that the kernel has refused."""
        return found


class Served(Homes):
    """The experts of a placement. `ids` says by which of these ids each (token, slot) pair is served.

    With one slot per expert and no identity experts, ids are what the caller gave. Otherwise every slot of every rank
    has an id, in (rank, slot) order: replicas are chosen here, and identity experts are nowhere.
    """

    def __init__(self, placement: Placement, rank: int, device: torch.device) -> None:
        slots = [(r, slot, e) for r, held in enumerate(placement.slots) for slot, e in enumerate(held)]
        self.placement, self.rank = placement, rank
        self.plain = len(slots) == placement.num_experts and not placement.num_identity
        if self.plain:
            slots.sort(key=lambda home: home[2])
        super().__init__([(r, slot) for r, slot, _ in slots], device)
        self.ranks = Ranks(self, placement.num_ranks, device)
        self._served: Tensor | None = None
        if not self.plain:
            of_expert: list[list[int]] = [[] for _ in range(placement.num_experts)]
            for i, (_, _, expert) in enumerate(slots):
                of_expert[expert].append(i)
            self._count = torch.tensor([len(served) for served in of_expert], device=device)
            most = max(map(len, of_expert))
            padded = [served + [-1] * (most - len(served)) for served in of_expert]
            self._served = torch.tensor(padded, dtype=torch.int32, device=device)

    def ids(self, topk_idx: Tensor) -> Tensor:
        """`[T, K]`, int32 or int64. Those out of range stay out of range: the kernel finds and reports them."""
        if self._served is None:
            return topk_idx.contiguous()
        experts, topk_idx = self.placement.num_experts, topk_idx.long()
        known = topk_idx.clamp(0, experts - 1)
        token = torch.arange(len(topk_idx), device=topk_idx.device).unsqueeze(1) + self.rank
        served = self._served[known, token % self._count[known]]
        identity = (topk_idx >= experts) & (topk_idx < self.placement.num_ids)
        too_large = topk_idx - self.placement.num_ids + self.num_experts
        other = torch.where(identity, -1, torch.where(topk_idx < 0, topk_idx, too_large))
        return torch.where((topk_idx >= 0) & (topk_idx < experts), served, _narrow(other))

    def given(self, found: int) -> int:
        """See `Homes.given`."""
        return found if self.plain or found < 0 else found - self.num_experts + self.placement.num_ids


class Ranks(Homes):
    """Each rank as one expert, for rows that serve all slots of a token on a rank (order "rank")."""

    def __init__(self, served: Served, num_ranks: int, device: torch.device) -> None:
        super().__init__([(rank, 0) for rank in range(num_ranks)], device)
        self.served = served

    def ids(self, served: Tensor) -> Tensor:
        """From ids of `Served`: the rank of each pair's expert, -1 for a token's later slots on the same rank."""
        known = (served >= 0) & (served < self.served.num_experts)
        ranks = torch.where(known, self.served.expert_rank[served.clamp(0, self.served.num_experts - 1)], -1)
        later = (ranks.unsqueeze(2) == ranks.unsqueeze(1)).tril(-1).any(2)
        served = served.long()
        wrong = torch.where(served < 0, served, served - self.served.num_experts + self.num_experts)
        return torch.where(known, ranks.masked_fill(later, -1), _narrow(wrong))

    def given(self, found: int) -> int:
        """See `Homes.given`."""
        return self.served.given(found if found < 0 else found - self.num_experts + self.served.num_experts)


def _narrow(ids: Tensor) -> Tensor:
    """int32; what does not fit must not become an id that is valid."""
    return ids.clamp(-(1 << 31), (1 << 31) - 1).int()
