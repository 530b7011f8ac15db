"""Ranks played on one GPU, inputs for them, and what must come out: positions by `receive_layout`, sums by torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeloom import Placement
from moeloom.backends.base import RowOrder
from moeloom.backends.sm90.combine import combine
from moeloom.backends.sm90.dispatch import Arrived, Tokens, dispatch, num_rows
from moeloom.backends.sm90.member import play
from moeloom.backends.sm90.spaces import Sizes
from moeloom.layout import receive_layout

POISON = 0xAB
NEGATIVE_ZEROS = slice(0, 8)  # columns of every contribution: only a term of zeros changes their sum


class World:
    """All ranks of an exchange on the current GPU."""

    def __init__(self, ranks, *, experts, topk, tokens, hidden, row_bytes=None, shuffle=False, timeout=20.0) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.placement = Placement.even(experts, ranks)
        if shuffle:
            order = torch.randperm(experts, generator=torch.Generator().manual_seed(3)).tolist()
            self.placement = Placement.from_slots([[order[e] for e in held] for held in self.placement.slots])
        local = max(map(len, self.placement.slots))
        self.sizes = Sizes(ranks, tokens, topk, experts, local, row_bytes or 2 * hidden, 2 * hidden)
        self.members, self.memory = play(self.sizes, self.placement, timeout, self.device)

    def clear(self) -> None:
        """Begin anew after a failure."""
        self.memory.zero_()
        for member in self.members:
            member.clear()

    def order(self, counts, order="expert", alignment=1, capacity=None) -> RowOrder:
        """With room for every row that can come, unless a capacity is given."""
        if capacity is None:
            rows = sum(counts) * self.sizes.num_topk
            capacity = rows + self.sizes.num_local * alignment if order == "expert" else rows // alignment * alignment
        return RowOrder(order, alignment, capacity)


@dataclass
class Batch:
    """Inputs of all ranks, on the CPU. values: `[T, K, H]` bf16, what each pair brings back to combine."""

    x: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]
    values: list[Tensor]

    @classmethod
    def make(cls, world: World, counts, route="uniform", seed=0) -> Batch:
        sizes, generator = world.sizes, torch.Generator().manual_seed(seed)
        shape = [(count, sizes.num_topk) for count in counts]
        ids = [draw_ids(route, *s, sizes.num_experts, generator) for s in shape]
        weights = [torch.rand(s, generator=generator) for s in shape]
        values = [torch.randn(*s, sizes.sum_bytes // 2, generator=generator).bfloat16() for s in shape]
        for value in values:
            value[..., NEGATIVE_ZEROS] = -0.0
        x = [torch.randint(0, 256, (c, sizes.row_bytes), generator=generator, dtype=torch.uint8) for c in counts]
        return cls(x, ids, weights, values)

    @classmethod
    def echoed(cls, world: World, counts, seed=0) -> Batch:
        """A batch whose experts return what they get."""
        batch = cls.make(world, counts, seed=seed)
        rows = [value[:, 0] for value in batch.values]
        batch.x = [row.contiguous().view(torch.uint8) for row in rows]
        batch.values = [row.unsqueeze(1).expand(-1, world.sizes.num_topk, -1) for row in rows]
        return batch

    @property
    def counts(self) -> list[int]:
        return [len(x) for x in self.x]

    def tokens(self, world: World, dtype=torch.int32, counted=False) -> list[Tokens]:
        """On the GPU. counted: at the front of max_tokens rows, their number in a tensor."""
        device, most = world.device, world.sizes.max_tokens
        result = []
        for x, ids, weights in zip(self.x, self.ids, self.weights, strict=True):
            count = torch.tensor([len(x)], dtype=torch.int32, device=device) if counted else None
            rows = most if counted else len(x)
            tables = [t.new_full((rows, t.shape[1]), 3) for t in (x, ids.to(dtype), weights)]
            for table, given in zip(tables, (x, ids, weights), strict=True):
                table[: len(x)] = given
            result.append(Tokens(*(table.to(device) for table in tables), count))
        return result


def draw_ids(route, count, topk, experts, generator) -> Tensor:
    """int64 ids: "one" expert for all, "repeat" lets a token name one twice, "holes" leaves slots unrouted."""
    if route == "one":
        return torch.full((count, topk), experts // 2)
    if route == "repeat":
        return torch.randint(0, experts, (count, topk), generator=generator)
    ids = torch.rand(count, experts, generator=generator).topk(topk).indices
    return ids.masked_fill(torch.rand(count, topk, generator=generator) < 0.4, -1) if route == "holes" else ids


@dataclass
class Expected:
    """What dispatch must leave on a rank, as `Arrived` has it; token: of each row, in all ranks' tokens, or -1."""

    token: Tensor
    row_pair: Tensor
    row_weight: Tensor
    pair_row: list[Tensor]
    expert_start: Tensor
    expert_rows: Tensor
    num_dropped: int


def expected(world: World, batch: Batch, order: RowOrder) -> list[Expected]:
    """Of every rank."""
    sizes, counts = world.sizes, batch.counts
    source = torch.repeat_interleave(torch.tensor(counts))
    token = torch.cat([torch.arange(count) for count in counts])
    ids, weights = torch.cat(batch.ids), torch.cat(batch.weights)
    known = ids.masked_fill(ids >= sizes.num_experts, -1)
    ranks, slots = world.placement.locate(known, source, token)
    result = []
    for rank in range(sizes.num_ranks):
        slot = torch.where(ranks == rank, slots, -1)
        layout = receive_layout(slot, sizes.num_local, order.order, order.alignment, order.capacity)
        at, k, real = layout.pos_to_token, layout.pos_to_topk, layout.pos_to_token >= 0
        first = source * sizes.max_tokens + token
        pair, weight = torch.full_like(at, -1), torch.zeros(len(at))
        pair[real] = first[at[real]] * sizes.num_topk + k[real]
        weight[real] = weights[at[real], k[real]]
        dropped = (slot >= 0) & (layout.token_topk_to_pos < 0)
        pair_row = torch.where(dropped, -2, layout.token_topk_to_pos).split(counts)
        counted = layout.num_tokens_per_expert
        result.append(Expected(at, pair, weight, list(pair_row), layout.expert_start, counted, int(layout.num_dropped)))
    return result


def poisoned(world: World, order: RowOrder) -> list[Arrived]:
    outputs = [Arrived.empty(world.sizes, order, world.device) for _ in world.members]
    poison(outputs)
    return outputs


def poison(outputs: Sequence[Arrived]) -> None:
    for output in outputs:
        for tensor in vars(output).values():
            tensor.fill_(POISON if tensor.dtype == torch.uint8 else -77)


def check_arrived(world: World, batch: Batch, wanted: list[Expected], got: Sequence[Arrived]) -> None:
    """Bit for bit, on the GPU; problems and states too."""
    device = world.device
    every = torch.cat(batch.x).to(device)
    for want, have in zip(wanted, got, strict=True):
        for name in ("row_pair", "row_weight", "expert_start", "expert_rows"):
            found = getattr(have, name)
            assert torch.equal(found, getattr(want, name).to(device, found.dtype)), name
        assert have.tokens_of_rank.tolist() == batch.counts
        for source, pair_row in enumerate(want.pair_row):
            assert torch.equal(have.pair_row[source, : len(pair_row)], pair_row.to(device, torch.int32)), source
            assert (have.pair_row[source, len(pair_row) :] == -77).all(), "a token that is not there"
        token = want.token.to(device)
        real = token >= 0
        assert torch.equal(have.rows[real], every[token[real]]), "rows"
        assert (have.rows[~real] == POISON).all(), "padding is not written"


def rows_to_combine(world: World, batch: Batch, wanted: list[Expected]) -> list[Tensor]:
    """Each rank's rows, NaN where there is no pair."""
    values = torch.cat([value.flatten(0, 1) for value in batch.values]).to(world.device)
    first = torch.tensor(batch.counts).cumsum(0) - torch.tensor(batch.counts)
    result = []
    for want in wanted:
        pairs = world.sizes.pairs
        source, pair = want.row_pair.clamp(min=0) // pairs, want.row_pair.clamp(min=0) % pairs
        index = (first[source] * world.sizes.num_topk + pair).to(world.device)
        real = (want.row_pair >= 0).to(world.device)
        rows = torch.full((len(real), values.shape[1]), float("nan"), dtype=torch.bfloat16, device=world.device)
        rows[real] = values[index[real]]
        result.append(rows)
    return result


def expected_sums(world: World, batch: Batch, wanted: list[Expected], source: int, weighted: bool) -> Tensor:
    """y of a rank: fp32 in slot order, rounded, then in rank order, rounded. A rank that dropped all brings zeros."""
    values, weights = batch.values[source], batch.weights[source]
    total, begun = torch.zeros(len(values), values.shape[2]), torch.zeros(len(values), dtype=torch.bool)
    for want in wanted:
        pair_row = want.pair_row[source]
        part, started = torch.zeros_like(total), torch.zeros_like(begun)
        for k in range(pair_row.shape[1]):
            at = (pair_row[:, k] >= 0).nonzero().squeeze(1)
            value = values[at, k].float() * weights[at, k, None] if weighted else values[at, k].float()
            part[at] = torch.where(started[at, None], part[at] + value, value)
            started[at] = True
        at = (pair_row != -1).any(1).nonzero().squeeze(1)
        value = part[at].bfloat16().float()
        total[at] = torch.where(begun[at, None], total[at] + value, value)
        begun[at] = True
    return total.bfloat16()


def check_sums(world: World, batch: Batch, wanted: list[Expected], got: Sequence[Tensor], weighted: bool) -> None:
    for source, y in enumerate(got):
        want = expected_sums(world, batch, wanted, source, weighted).to(world.device)
        assert torch.equal(y[: len(want)].view(torch.int16), want.view(torch.int16)), f"y of rank {source}"
        assert y[len(want) :].isnan().all()


def run(
    world: World, batch: Batch, order: RowOrder, *, dtype=torch.int32, counted=False, weighted=False, parts=None
) -> None:
    """Dispatch, then combine of the batch's values, both checked."""
    tokens = batch.tokens(world, dtype, counted)
    arrived, wanted = poisoned(world, order), expected(world, batch, order)
    assert len(arrived[0].rows) == num_rows(world.sizes, order)
    for member in world.members:
        member.problems.zero_()
    dispatch(world.members, tokens, order, arrived)
    for member, want in zip(world.members, wanted, strict=True):
        member.raise_failure()
        assert int(member.problems[0]) == want.num_dropped
    check_arrived(world, batch, wanted, arrived)
    rows = rows_to_combine(world, batch, wanted)
    y = [row.new_full((len(sent.x), row.shape[1]), float("nan")) for row, sent in zip(rows, tokens, strict=True)]
    combine(world.members, list(zip(tokens, arrived, strict=True)), rows, weighted=weighted, parts=parts, out=y)
    for member in world.members:
        member.raise_failure()
    check_sums(world, batch, wanted, y, weighted)
