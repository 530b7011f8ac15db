"""dispatch and combine on a GPU that plays 1..8 ranks: bit for bit what the CPU's pure functions say."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from torch import Tensor

from moeloom.backends.sm90.combine import combine
from moeloom.backends.sm90.dispatch import dispatch
from moeloom.backends.sm90.parameters import State
from moeloom.errors import PeerTimeout
from tests.sm90.world import (
    Batch,
    World,
    check_arrived,
    check_sums,
    expected,
    poison,
    poisoned,
    rows_to_combine,
    run,
)

pytestmark = pytest.mark.gpu

each_number_of_ranks = pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])

# tokens of each rank (repeated), and what is special
CASES = {
    "one token": ([1], {}),
    "holes": ([7, 5], {"route": "holes"}),
    "128 tokens": ([128], {}),
    "an idle rank": ([260, 0], {}),
    "the first idle, aligned": ([0, 33], {"alignment": 128}),
    "no tokens": ([0], {}),
    "one token on one rank": ([0, 0, 1], {}),
    "weighted, aligned": ([211, 260], {"weighted": True, "alignment": 16}),
    "all to one expert": ([128], {"route": "one"}),
    "all to one expert, too little room": ([200], {"route": "one", "capacity": 300}),
    "too little room, aligned": ([120, 90], {"capacity": 250, "alignment": 8}),
    "too little room, holes, weighted": ([120, 90], {"capacity": 200, "route": "holes", "weighted": True}),
    "no room": ([9, 3], {"capacity": 0}),
    "batched": ([100], {"order": "batched", "alignment": 8}),
    "batched, too little room": ([100], {"order": "batched", "capacity": 2, "weighted": True}),
    "int64 ids": ([64, 1], {"dtype": torch.int64}),
    "counted on the GPU": ([64, 0, 17], {"counted": True, "dtype": torch.int64, "weighted": True}),
    "an expert twice": ([77], {"route": "repeat", "weighted": True}),
    "an expert twice, three parts": ([77], {"route": "repeat", "parts": 3}),
    "one part": ([77], {"parts": 1}),
}
SHAPES = {
    "K=1, H=2880": {"experts": 5, "topk": 1, "hidden": 2880},
    "K=16, H=2880": {"experts": 38, "topk": 16, "hidden": 2880},
    "K=32": {"experts": 250, "topk": 32, "hidden": 72, "shuffle": True},
    "K=32, most experts": {"experts": 512, "topk": 32, "hidden": 24, "shuffle": True},
    "K=7, rows of FP8 with scales": {"experts": 24, "topk": 7, "hidden": 1024, "row_bytes": 7392},
    "K=8, H=7168": {"experts": 32, "topk": 8, "hidden": 7168},
}


@pytest.fixture(scope="module")
def worlds() -> dict[int, World]:
    """By number of ranks; every case goes on where the last one has left the epochs."""
    return {r: World(r, experts=64, topk=8, tokens=260, hidden=256, row_bytes=736) for r in (1, 2, 3, 4, 8)}


@each_number_of_ranks
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, ranks: int, worlds: dict[int, World]) -> None:
    tokens, how = CASES[name]
    how, world, counts = dict(how), worlds[ranks], (tokens * ranks)[:ranks]
    batch = Batch.make(world, counts, how.pop("route", "uniform"), seed=len(name))
    order = world.order(counts, **{key: how.pop(key) for key in ("order", "alignment", "capacity") if key in how})
    run(world, batch, order, **how)


@each_number_of_ranks
@pytest.mark.parametrize("name", SHAPES)
def test_shape(name: str, ranks: int) -> None:
    shape = SHAPES[name]
    if "most" in name:
        shape = {**shape, "experts": 512 * ranks - 1}
    world = World(ranks, tokens=70, **{"experts": shape["experts"] * ranks, **shape})
    for seed, (tokens, route, weighted) in enumerate(
        [([1], "uniform", False), ([70, 23], "uniform", True), ([33, 0], "holes", False), ([69, 70], "repeat", True)]
    ):
        counts = (tokens * ranks)[:ranks]
        run(world, Batch.make(world, counts, route, seed), world.order(counts, alignment=16), weighted=weighted)


@pytest.mark.parametrize("ranks", [1, 2])
def test_many_tokens(ranks: int) -> None:
    """Full chunks: 4096 pairs each, 64 of each source."""
    world = World(ranks, experts=64, topk=8, tokens=32768, hidden=8)
    counts = [32768, 32001][:ranks]
    run(world, Batch.make(world, counts), world.order(counts))


class HostWords:
    """What kernels tell the host while they run, and what a peer tells them, of every rank of a world.

    problems: `[ranks, 4]`, failures: `[ranks, 2, 4]`, of the host. stop: `[ranks, 2]`, on the GPU.
    """

    def __init__(self, world: World) -> None:
        ranks = len(world.members)
        words = torch.zeros(ranks, 3, 4, dtype=torch.int32, pin_memory=True)
        self.problems, self.failures = words[:, 0], words[:, 1:]
        self.stop = torch.zeros(ranks, 2, dtype=torch.int32, device=world.device)
        self._world, self._stream = world, torch.cuda.Stream()
        self._stop_words = torch.zeros(ranks, 2, dtype=torch.int32, pin_memory=True)  # made now: it waits for kernels
        world.members = [
            dataclasses.replace(member, problems=self.problems[rank], failures=self.failures[rank])
            for rank, member in enumerate(world.members)
        ]
        self.connect()

    def connect(self) -> None:
        """Write the addresses into the states, which `clear` has emptied."""
        for rank, member in enumerate(self._world.members):
            for stage, state in enumerate((member.dispatch_state, member.combine_state)):
                for field, words in ((State.failure, self.failures), (State.stop, self.stop)):
                    address = torch.tensor([words[rank, stage].data_ptr()]).view(torch.int32)
                    state[field.offset // 4 :][:2] = address.to(state.device)

    def tell_to_stop(self, epoch: int) -> None:
        """From another stream, as kernels run."""
        self._stop_words.fill_(epoch)
        with torch.cuda.stream(self._stream):
            self.stop.copy_(self._stop_words, non_blocking=True)
        self._stream.synchronize()

    def failed(self, stage: int, ranks: list[int], seconds: float) -> Tensor:
        """failures once all these ranks have one, without waiting for the GPU; or after so many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.failures[ranks, stage, 0].all():
            time.sleep(0.001)
        return self.failures.clone()


def problems_of(world: World, batch: Batch, order, host: HostWords) -> list[list[int]]:
    """After a dispatch."""
    dispatch(world.members, batch.tokens(world, torch.int64), order)
    torch.cuda.synchronize()
    return host.problems.tolist()


def test_dropped_pairs_reach_the_host() -> None:
    """They add up; a launch that drops none writes nothing."""
    world = World(2, experts=6, topk=2, tokens=8, hidden=64)
    host = HostWords(world)
    batch = Batch.make(world, [8, 8])
    roomy, tight = world.order([8, 8]), world.order([8, 8], capacity=5)
    host.problems[:] = torch.tensor([-77, 0, -78, -79])
    assert problems_of(world, batch, roomy, host) == [[-77, 0, -78, -79]] * 2
    host.problems[:, 0] = 0
    dropped = [each.num_dropped for each in expected(world, batch, tight)]
    assert min(dropped) > 0
    for launches in (1, 2):
        found = problems_of(world, batch, tight, host)
        assert found == [[launches * number, 0, -78, -79] for number in dropped]
    assert problems_of(world, batch, roomy, host) == found


def test_wrong_ids_reach_the_host_and_go_nowhere() -> None:
    """One per launch, kept until the host has taken it."""
    world = World(2, experts=6, topk=2, tokens=8, hidden=64)
    host = HostWords(world)
    batch, order = Batch.make(world, [8, 8]), world.order([8, 8])
    right = batch.ids[1].clone()
    batch.ids[1][5, 1] = 6
    run(world, batch, order, dtype=torch.int64)
    assert host.problems.tolist() == [[0, 0, 0, 0], [0, 6, 1, 6]]
    batch.ids[1] = right.clone()
    batch.ids[1][2, 0] = -7
    assert problems_of(world, batch, order, host)[1] == [0, 6, 1, 6]
    host.problems[1, 1] = 0
    assert problems_of(world, batch, order, host)[1] == [0, 3, 0, -7]
    host.problems[1, 1] = 0
    batch.ids[1] = torch.arange(16).view(8, 2) + (1 << 40) + 6
    _, row, slot, value = problems_of(world, batch, order, host)[1]
    assert 1 <= row <= 8 and value == 2 * (row - 1) + slot + 6, "from different ids"


@each_number_of_ranks
def test_epochs_begin_anew(ranks: int) -> None:
    """After the last, banks still in turn."""
    world = World(ranks, experts=64, topk=8, tokens=20, hidden=64)
    for member in world.members:
        member.dispatch_state[0] = member.combine_state[0] = 0x7FFFFFFF - 2
    for seed in range(5):
        run(world, Batch.make(world, [20 - seed] * ranks, seed=seed), world.order([20] * ranks))
    assert {state.epoch for member in world.members for state in member.states()} == {4}


@each_number_of_ranks
def test_200_calls(ranks: int) -> None:
    """dispatch and combine alternate without a wait between; the numbers of tokens and the payload change."""
    world = World(ranks, experts=64, topk=8, tokens=64, hidden=128)
    for group in range(10):
        done = []
        for i in range(20 * group, 20 * group + 20):
            counts = [(37 * i + 101 * r) % 65 for r in range(ranks)] if i % 3 else [(i + r) % 5 for r in range(ranks)]
            batch = Batch.echoed(world, counts, seed=i)
            order = world.order(counts, alignment=(1, 16, 128)[i % 3])
            done.append((batch, order, batch.tokens(world), poisoned(world, order)))
        sums = []
        for i, (_, order, tokens, arrived) in enumerate(done):
            dispatch(world.members, tokens, order, arrived)
            rows = [each.rows.view(torch.bfloat16) for each in arrived]
            sent = list(zip(tokens, arrived, strict=True))
            sums.append(combine(world.members, sent, rows, weighted=i % 2 == 1, parts=(1, 2, 4)[i % 3]))
        for i, ((batch, order, _, arrived), y) in enumerate(zip(done, sums, strict=True)):
            wanted = expected(world, batch, order)
            check_arrived(world, batch, wanted, arrived)
            check_sums(world, batch, wanted, y, i % 2 == 1)


@each_number_of_ranks
def test_graph(ranks: int) -> None:
    """Captured once, replayed with other routings and numbers of tokens, between calls that are not replayed."""
    world = World(ranks, experts=64, topk=8, tokens=100, hidden=128)
    order = world.order([100] * ranks, alignment=8)
    tokens = Batch.echoed(world, [100] * ranks).tokens(world, counted=True)
    arrived = poisoned(world, order)
    rows = [each.rows.view(torch.bfloat16) for each in arrived]
    y = [row.new_empty(100, 128) for row in rows]

    def step() -> None:
        dispatch(world.members, tokens, order, arrived)
        combine(world.members, list(zip(tokens, arrived, strict=True)), rows, weighted=True, out=y)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for i in range(20):
        batch = Batch.echoed(world, [100 if i % 2 else (5 * i + r) % 100 for r in range(ranks)], seed=i)
        for kept, new in zip(tokens, batch.tokens(world, counted=True), strict=True):
            for name in ("x", "topk_idx", "topk_weights", "num_tokens"):
                getattr(kept, name).copy_(getattr(new, name))
        poison(arrived)
        for each in y:
            each.fill_(float("nan"))
        step() if i % 5 == 4 else graph.replay()
        wanted = expected(world, batch, order)
        check_arrived(world, batch, wanted, arrived)
        check_sums(world, batch, wanted, y, True)


def launch_without(world: World, stage: str, missing: int) -> None:
    """A launch of every rank but one, after one of all."""
    ranks = len(world.members)
    batch, order = Batch.make(world, [20] * ranks), world.order([20] * ranks)
    run(world, batch, order)
    here = [rank for rank in range(ranks) if rank != missing]
    tokens, arrived = batch.tokens(world), poisoned(world, order)
    members = [world.members[rank] for rank in here]
    if stage == "dispatch":
        dispatch(members, [tokens[rank] for rank in here], order, [arrived[rank] for rank in here])
        return
    dispatch(world.members, tokens, order, arrived)
    rows = rows_to_combine(world, batch, expected(world, batch, order))
    torch.cuda.synchronize()
    combine(members, [(tokens[r], arrived[r]) for r in here], [rows[r] for r in here], weighted=False)


def check_failure(world: World, stage: str, ranks: list[int], told: Tensor, why: int) -> None:
    """In states and in what the host was told, of these ranks and of no other."""
    at = ("dispatch", "combine").index(stage)
    for rank, member in enumerate(world.members):
        state = member.states()[at]
        assert [counter.value for counter in state.tickets] == [0] * 4 and state.finished.value == 0
        assert told[rank, 1 - at].tolist() == [0] * 4
        if rank not in ranks:
            assert told[rank, at].tolist() == [0] * 4
            continue
        assert state.aborted == why and state.peer == 1 and state.epoch == 2
        assert state.phase in ((3,) if stage == "combine" else (1, 2))
        assert told[rank, at].tolist() == [why, state.phase, 1, 2]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", ["dispatch", "combine"])
def test_a_missing_peer(stage: str, ranks: int) -> None:
    """The launch ends, says for whom it waited, to the host as well, and the GPU goes on."""
    world = World(ranks, experts=64, topk=8, tokens=20, hidden=64, timeout=0.2)
    host = HostWords(world)
    here = [rank for rank in range(ranks) if rank != 1]
    launch_without(world, stage, missing=1)
    start = time.monotonic()
    told = host.failed(("dispatch", "combine").index(stage), here, seconds=2)
    torch.cuda.synchronize()
    assert time.monotonic() - start < 2
    check_failure(world, stage, here, told, why=1)
    for rank in here:
        with pytest.raises(PeerTimeout, match=rf"{stage} on rank {rank}: rank 1 did not bring .* in 0.2 s"):
            world.members[rank].raise_failure()
    world.clear()
    run(world, Batch.make(world, [20] * ranks, seed=1), world.order([20] * ranks))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", ["dispatch", "combine"])
def test_a_peer_that_takes_no_part(stage: str, ranks: int) -> None:
    """Waits end when it says so, long before the deadline, but not for what it said of an epoch that is over."""
    world = World(ranks, experts=64, topk=8, tokens=20, hidden=64, timeout=30)
    host = HostWords(world)
    here = [rank for rank in range(ranks) if rank != 1]
    launch_without(world, stage, missing=1)
    host.tell_to_stop(1)
    assert not host.failed(("dispatch", "combine").index(stage), here, seconds=0.2).any()
    start = time.monotonic()
    host.tell_to_stop(2)
    told = host.failed(("dispatch", "combine").index(stage), here, seconds=2)
    torch.cuda.synchronize()
    assert time.monotonic() - start < 2
    check_failure(world, stage, here, told, why=2)
    world.clear()
    host.connect()
    host.tell_to_stop(0)
    run(world, Batch.make(world, [20] * ranks, seed=1), world.order([20] * ranks))
