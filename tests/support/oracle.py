"""What an exchange must bring, said with loops and lists: slow, and independent of the package's index arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from moeloom import Placement, Topology

Row = tuple[int, int, int, int]  # (local slot, source rank, source token, k)


def home(placement: Placement, expert: int, source: int, token: int) -> tuple[int, int] | None:
    """The (rank, slot) that serves an expert for a token; None for identity experts and -1."""
    homes = [(r, s) for r, experts in enumerate(placement.slots) for s, held in enumerate(experts) if held == expert]
    return homes[(source + token) % len(homes)] if homes else None


class World:
    """All ranks' inputs of one case, and what follows from them."""

    def __init__(
        self, xs: list[Tensor], ids: list[list[list[int]]], weights: list[Tensor], placement: Placement
    ) -> None:
        self.xs, self.ids, self.weights, self.placement = xs, ids, weights, placement
        self.homes = [
            [[home(placement, e, source, token) for e in row] for token, row in enumerate(table)]
            for source, table in enumerate(ids)
        ]

    def rows_of(self, rank: int) -> list[Row]:
        """The (slot, source, token, k) that reach a rank, in the contract's order."""
        return sorted(
            (place[1], source, token, k)
            for source, table in enumerate(self.homes)
            for token, row in enumerate(table)
            for k, place in enumerate(row)
            if place is not None and place[0] == rank
        )

    def received(self, rank: int, order: str, alignment: int) -> tuple[Tensor, list, Tensor, list[int], list[int]]:
        """Rows, local ids, weights, expert_start and counts as `dispatch` must deliver them."""
        num_local = self.placement.num_local(rank)
        wanted = self.rows_of(rank)
        counts = [sum(row[0] == slot for row in wanted) for slot in range(num_local)]
        if order == "rank":
            return self._received_by_token(rank, counts)
        padded = [-(-count // alignment) * alignment for count in counts]
        if order == "batched":
            padded = [max(padded, default=0)] * num_local
        rows, ids, weights = [], [], []
        for slot in range(num_local):
            mine = [row for row in wanted if row[0] == slot]
            rows += [self.xs[source][token] for _, source, token, _ in mine]
            ids += [slot] * len(mine)
            weights += [self.weights[source][token, k] for _, source, token, k in mine]
            padding = padded[slot] - len(mine)
            rows += [torch.zeros_like(self.xs[0][:1].sum(0))] * padding
            ids += [-1] * padding
            weights += [torch.tensor(0.0)] * padding
        starts = [sum(padded[:slot]) for slot in range(num_local + 1)]
        return self._stack(rows), ids, torch.stack(weights) if weights else torch.zeros(0), starts, counts

    def _received_by_token(self, rank: int, counts: list[int]) -> tuple[Tensor, list, Tensor, list[int], list[int]]:
        tokens = sorted({(source, token) for _, source, token, _ in self.rows_of(rank)})
        ids, weights = [], []
        for source, token in tokens:
            places = self.homes[source][token]
            here = [place is not None and place[0] == rank for place in places]
            ids.append([place[1] if mine else -1 for place, mine in zip(places, here, strict=True)])
            weights.append(torch.where(torch.tensor(here), self.weights[source][token], 0.0))
        rows = self._stack([self.xs[source][token] for source, token in tokens])
        stacked = torch.stack(weights) if weights else torch.zeros(0, self.weights[0].shape[1])
        return rows, ids, stacked, [0] * (len(counts) + 1), counts

    def _stack(self, rows: list[Tensor]) -> Tensor:
        return torch.stack(rows) if rows else self.xs[0].new_zeros(0, self.xs[0].shape[1])

    def combined(self, source: int, expert_fn, topology: Topology, **how) -> Tensor:
        """y of a rank: `expert_fn(x_row, expert) -> row` per (token, k), summed as the contract says."""
        out = [self._token(source, token, expert_fn, topology, **how) for token in range(len(self.ids[source]))]
        return self._stack(out)

    def _token(self, source, token, expert_fn, topology, *, exchange, reduction, weighted, order):
        x, dtype = self.xs[source][token], self.xs[source].dtype
        parts: list[tuple[int, Tensor]] = []  # (rank, fp32 value) in slot order
        identity: list[Tensor] = []
        for k, (expert, place) in enumerate(zip(self.ids[source][token], self.homes[source][token], strict=True)):
            weight = self.weights[source][token, k]
            if expert >= self.placement.num_experts:
                identity.append((x.float() * weight).to(dtype).float())
            elif place is not None:
                value = expert_fn(x, expert).float()
                parts.append((place[0], value * weight if weighted else value))
        if order == "rank" and parts:  # one row per rank, made of the token alone
            parts = [(rank, expert_fn(x, 0).float()) for rank in sorted({rank for rank, _ in parts})]
        if reduction == "per_slot":
            terms = [value for _, value in parts]
        else:
            terms = self._per_rank(parts, dtype)
            if exchange == "hybrid":
                by_node = [(topology.node_of_rank[rank], value) for rank, value in terms]
                terms = self._per_rank(by_node, dtype)
            terms = [value for _, value in terms]
        if identity:
            term = left_to_right(identity)
            total = left_to_right(terms) if terms else torch.zeros_like(term)
            return (total + (term if reduction == "per_slot" else term.to(dtype).float())).to(dtype)
        return left_to_right(terms).to(dtype) if terms else torch.zeros_like(x)

    @staticmethod
    def _per_rank(parts: list[tuple[int, Tensor]], dtype: torch.dtype) -> list[tuple[int, Tensor]]:
        groups = sorted({key for key, _ in parts})
        sums = [(key, left_to_right([value for other, value in parts if other == key])) for key in groups]
        return [(key, total.to(dtype).float()) for key, total in sums]


def left_to_right(values: list[Tensor]) -> Tensor:
    """Sum in order, starting with the first."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
