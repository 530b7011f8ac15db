"""dispatch and combine for long, beside other work, replayed in any order, above 2^31 bytes, and with a late peer.

A few small cases for the memory and race checkers, which know the addresses of tensors only if torch does not reuse
memory:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    for tool in memcheck synccheck racecheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 python3 -m pytest -m gpu tests/sm90/test_endurance.py -k small
    done
"""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import Tensor

from moeloom.backends.sm90.combine import combine
from moeloom.backends.sm90.dispatch import Arrived, Tokens, dispatch
from tests.sm90.world import Batch, World, check_arrived, check_sums, expected, poison, poisoned, run

pytestmark = pytest.mark.gpu


class Marked:
    """Inputs whose rows are all 0 or all 1, drawn anew each time, and a check on the GPU that waits for nothing."""

    def __init__(self, world: World, counts: list[int], seed: int) -> None:
        self.world, self.counts = world, counts
        batch = Batch.echoed(world, counts, seed=seed)
        self.order = world.order(counts, alignment=(1, 8)[seed % 2])
        self.tokens = batch.tokens(world)
        self.arrived = poisoned(world, self.order)
        self.rows = [each.rows.view(torch.bfloat16) for each in self.arrived]
        token_of_row = [want.token.to(world.device) for want in expected(world, batch, self.order)]
        self.real = [(of_row >= 0).unsqueeze(1) for of_row in token_of_row]
        self.token_of_row = [of_row.clamp(min=0) for of_row in token_of_row]
        self.slots = [(ids >= 0).sum(1, keepdim=True).to(world.device) for ids in batch.ids]
        self.wrong = torch.zeros((), dtype=torch.int64, device=world.device)

    def step(self) -> None:
        """dispatch, combine, and what is wrong in them added to `wrong`."""
        members = self.world.members
        marks = torch.randint(0, 2, (sum(self.counts), 1), device=self.world.device).bfloat16()
        for tokens, mark in zip(self.tokens, marks.split(self.counts), strict=True):
            tokens.x.view(torch.bfloat16).copy_(mark.expand(-1, tokens.x.shape[1] // 2))
        dispatch(members, self.tokens, self.order, self.arrived)
        sent = list(zip(self.tokens, self.arrived, strict=True))
        sums = combine(members, sent, self.rows, weighted=False)
        for rows, real, of_row in zip(self.rows, self.real, self.token_of_row, strict=True):
            self.wrong += ((rows != marks[of_row]) & real).sum()
        for y, mark, slots in zip(sums, marks.split(self.counts), self.slots, strict=True):
            self.wrong += (y != mark * slots).sum()


class Noise:
    """Work on another stream that never ends: it takes multiprocessors, memory and time from the exchange."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._factors = torch.randn(2, 2048, 2048, device=device).bfloat16()
        self._bytes = torch.zeros(2, 64 << 20, dtype=torch.uint8, device=device)
        self._queued: list[torch.cuda.Event] = []

    def go_on(self) -> None:
        """Queue some more, unless enough is queued."""
        self._queued = [event for event in self._queued if not event.query()]
        with torch.cuda.stream(self._stream):
            while len(self._queued) < 4:
                for _ in range(8):
                    self._factors[0] @ self._factors[1]
                    self._bytes[0].copy_(self._bytes[1])
                self._queued.append(self._stream.record_event())


@pytest.mark.parametrize("ranks, repeats", [(2, 10_000), (8, 2000)])
def test_repeats_beside_other_work(ranks: int, repeats: int) -> None:
    """Rows of the launch before, or of two before, would have other marks; numbers of tokens change all the time."""
    world = World(ranks, experts=32, topk=4, tokens=40, hidden=512)
    generator = random.Random(5)
    inputs = [Marked(world, [generator.randint(0, 40) for _ in range(ranks)], seed) for seed in range(8)]
    noise = Noise(world.device)
    start = time.monotonic()
    for number in range(repeats):
        if number % 8 == 0:
            noise.go_on()
        generator.choice(inputs).step()
    torch.cuda.synchronize()
    assert time.monotonic() - start < 40
    for member in world.members:
        member.raise_failure()
        assert [state.epoch for state in member.states()] == [repeats] * 2
    assert [int(each.wrong) for each in inputs] == [0] * len(inputs)


class Kept:
    """A step on tensors that stay where they are, eagerly or as a graph."""

    def __init__(self, world: World, seed: int) -> None:
        ranks, tokens = len(world.members), world.sizes.max_tokens
        self.world, self.weighted = world, seed % 2 == 1
        self.order = world.order([tokens] * ranks, alignment=(1, 16, 128)[seed % 3])
        self.tokens = Batch.echoed(world, [tokens] * ranks, seed=seed).tokens(world, counted=True)
        self.arrived = poisoned(world, self.order)
        self.rows = [each.rows.view(torch.bfloat16) for each in self.arrived]
        self.y = [row.new_empty(tokens, row.shape[1]) for row in self.rows]
        self.step()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def step(self) -> None:
        dispatch(self.world.members, self.tokens, self.order, self.arrived)
        sent = list(zip(self.tokens, self.arrived, strict=True))
        combine(self.world.members, sent, self.rows, weighted=self.weighted, out=self.y)

    def fill(self, batch: Batch) -> None:
        for kept, new in zip(self.tokens, batch.tokens(self.world, counted=True), strict=True):
            for name in ("x", "topk_idx", "topk_weights", "num_tokens"):
                getattr(kept, name).copy_(getattr(new, name))
        poison(self.arrived)
        for y in self.y:
            y.fill_(float("nan"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_graphs_in_any_order(ranks: int) -> None:
    """Three graphs and eager calls share epochs and banks, two steps between any two looks."""
    world = World(ranks, experts=48, topk=6, tokens=50, hidden=128)
    every, generator = [Kept(world, seed) for seed in range(3)], random.Random(ranks)
    for i in range(30):
        chosen = generator.sample(every, 2)
        batches = []
        for kept in chosen:
            batches.append(Batch.echoed(world, [generator.randint(0, 50) for _ in range(ranks)], seed=100 + i))
            kept.fill(batches[-1])
        for kept in chosen:
            kept.graph.replay() if generator.random() < 0.7 else kept.step()
        for kept, batch in zip(chosen, batches, strict=True):
            wanted = expected(world, batch, kept.order)
            check_arrived(world, batch, wanted, kept.arrived)
            check_sums(world, batch, wanted, kept.y, kept.weighted)


def test_above_2_gib() -> None:
    """Rows that arrive, what a source has staged, and what a rank has sent back: each more than 2^31 bytes."""
    count, columns = 2100, 1 << 19
    world = World(2, experts=8, topk=2, tokens=count, hidden=columns)
    generator = torch.Generator(world.device).manual_seed(1)
    tokens = []
    for _ in range(2):
        x = torch.randint(-128, 128, (count, columns), generator=generator, device=world.device, dtype=torch.int8)
        ids = torch.rand(count, 8, generator=generator, device=world.device).topk(2).indices.int()
        weights = torch.rand(count, 2, generator=generator, device=world.device)
        tokens.append(Tokens(x.bfloat16(), ids, weights))
    order = world.order([count, count])
    arrived = dispatch(world.members, tokens, order)
    assert arrived[0].rows.numel() > 1 << 31 and world.sizes.dispatch_space.source_bytes > 1 << 31
    assert world.sizes.combine_space.sender_bytes > 1 << 31
    check_large(world, tokens, arrived)
    rows = [each.rows.view(torch.bfloat16) for each in arrived]
    sums = combine(world.members, list(zip(tokens, arrived, strict=True)), rows, weighted=False)
    for member, sent, y in zip(world.members, tokens, sums, strict=True):
        member.raise_failure()
        assert torch.equal(y, 2 * sent.x)


def check_large(world: World, tokens: list[Tokens], arrived: list[Arrived]) -> None:
    """Every row is that of its pair, and every pair of this rank's experts has one; on the GPU, piece by piece."""
    most, topk = world.sizes.max_tokens, world.sizes.num_topk
    for rank, have in enumerate(arrived):
        real = (have.row_pair >= 0).nonzero().squeeze(1)
        wanted = sum(int((each.topk_idx // world.sizes.num_local == rank).sum()) for each in tokens)
        pair = have.row_pair[real].long()
        assert len(pair) == wanted and len(pair.unique()) == wanted
        for source, sent in enumerate(tokens):
            of_source = pair // topk // most == source
            for rows, pairs in zip(real[of_source].split(256), pair[of_source].split(256), strict=True):
                assert torch.equal(have.rows[rows].view(torch.bfloat16), sent.x[pairs // topk % most])


def test_a_late_peer() -> None:
    """Two launches, one for each rank on half of the GPU, two seconds apart."""
    world = World(2, experts=64, topk=8, tokens=100, hidden=128)
    batch, order = Batch.echoed(world, [100, 77]), world.order([100, 77])
    tokens, arrived, wanted = batch.tokens(world), poisoned(world, order), expected(world, batch, order)
    half = torch.cuda.get_device_properties(world.device).multi_processor_count // 2
    streams: list[torch.cuda.Stream] = [torch.cuda.Stream() for _ in range(2)]
    sums: dict[int, Tensor] = {}
    torch.cuda.synchronize()
    for stage, late in (("dispatch", 1), ("combine", 0)):
        for rank in (1 - late, late):
            member, sent, into = world.members[rank], tokens[rank], arrived[rank]
            with torch.cuda.stream(streams[rank]):
                if stage == "dispatch":
                    dispatch([member], [sent], order, [into], sms=half)
                else:
                    rows = into.rows.view(torch.bfloat16)
                    (sums[rank],) = combine([member], [(sent, into)], [rows], weighted=True, sms=half)
            if rank != late:
                time.sleep(2)
                assert not streams[rank].query(), "it waits"
        torch.cuda.synchronize()
        for member in world.members:
            member.raise_failure()
    check_arrived(world, batch, wanted, arrived)
    check_sums(world, batch, wanted, [sums[0], sums[1]], True)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "how", [{}, {"route": "holes", "weighted": True}, {"capacity": 20, "alignment": 4}, {"order": "batched"}]
)
def test_small(how: dict, ranks: int) -> None:
    """For the memory and race checkers."""
    how = dict(how)
    world = World(ranks, experts=9 * ranks, topk=3, tokens=12, hidden=4000, timeout=200)
    counts = [12, 5][:ranks]
    batch = Batch.make(world, counts, how.pop("route", "uniform"))
    kind = {key: how.pop(key) for key in ("order", "alignment", "capacity") if key in how}
    run(world, batch, world.order(counts, **kind), **how)
