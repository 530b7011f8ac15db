"""combine on a GPU that plays 1..8 ranks: both reductions, bf16 and fp32; bit for bit what torch says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moeloom.backends.sm90.combine import combine
from moeloom.backends.sm90.dispatch import Arrived, Tokens, dispatch
from moeloom.backends.sm90.member import play
from moeloom.errors import PeerTimeout
from tests.sm90.world import Batch, Expected, World, expected, poisoned

pytestmark = pytest.mark.gpu

each_number_of_ranks = pytest.mark.parametrize("ranks", [1, 2, 3, 8])
each_reduction = pytest.mark.parametrize("reduction", ["per_rank", "per_slot"])
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])

MANY = 260
# tokens of each rank (repeated), and what is special
CASES = {
    "one token": ([1], {}),
    "128 tokens": ([128, 127], {"weighted": True}),
    "few here, many there": ([MANY, 3], {}),
    "many": ([MANY], {"weighted": True}),
    "an idle rank": ([256, 0], {"ids": torch.int64}),
    "holes": ([77, MANY], {"route": "holes", "weighted": True}),
    "an expert twice": ([MANY, 20], {"route": "repeat", "parts": 3}),
    "all to one expert, too little room": ([40, 31], {"route": "one", "capacity": 60}),
    "too little room": ([MANY, 90], {"capacity": 200, "route": "holes"}),
    "too little room, weighted": ([120, MANY], {"capacity": 200, "weighted": True}),
    "no room": ([9, MANY], {"capacity": 0}),
    "counted on the GPU": ([64, 0, MANY], {"counted": True, "ids": torch.int64, "weighted": True}),
    "batched": ([100], {"order": "batched", "capacity": 20}),
}
SHAPES = {
    "K=1, rows of one vector": {"experts": 5, "topk": 1, "vectors": 1},
    "K=3, rows of three vectors": {"experts": 6, "topk": 3, "vectors": 3},
    "K=32": {"experts": 64, "topk": 32, "vectors": 35},
    "K=16, long rows": {"experts": 38, "topk": 16, "vectors": 360},
    "K=8, longer": {"experts": 32, "topk": 8, "vectors": 896},
}


def make_world(ranks: int, *, width: int, experts: int, topk: int, tokens: int = MANY, timeout: float = 20.0) -> World:
    """Room for `width` fp32 elements of every slot; dispatch brings rows of 32 bytes."""
    world = World(ranks, experts=experts, topk=topk, tokens=tokens, hidden=16, shuffle=True, timeout=timeout)
    world.sizes = replace(world.sizes, sum_bytes=4 * width, slots_travel=True)
    world.members, world.memory = play(world.sizes, world.placement, timeout, world.device)
    return world


class Call:
    """One dispatch, done on the GPU, and rows to combine."""

    def __init__(self, world, counts, *, dtype, width, seed=0, weighted=False, reduction="per_rank", **how) -> None:
        self.world, self.weighted, self.reduction = world, weighted, reduction
        self.parts, ids = how.pop("parts", None), how.pop("ids", torch.int32)
        counted = how.pop("counted", False)
        self.batch = Batch.make(world, counts, how.pop("route", "uniform"), seed)
        generator = torch.Generator().manual_seed(seed + 1)
        shape = (world.sizes.num_topk, width)
        self.values = [torch.randn(count, *shape, generator=generator).to(dtype) for count in counts]
        for value in self.values:
            value[..., : width // 4] = -0.0  # only a term of zeros changes their sum
        self.order = world.order(counts, **how)
        self.tokens: list[Tokens] = self.batch.tokens(world, ids, counted)
        self.arrived: list[Arrived] = poisoned(world, self.order)
        self.wanted: list[Expected] = expected(world, self.batch, self.order)
        self.rows = [self._rows(want).to(world.device) for want in self.wanted]
        self.y = [row.new_full((len(t.topk_idx), width), -77) for row, t in zip(self.rows, self.tokens, strict=True)]
        dispatch(world.members, self.tokens, self.order, self.arrived)

    def _rows(self, want: Expected) -> Tensor:
        """Each pair's value where dispatch has put its row; NaN elsewhere."""
        rows = self.values[0].new_full((len(want.row_pair), self.values[0].shape[2]), float("nan"))
        pairs = self.world.sizes.pairs
        for source, value in enumerate(self.values):
            here = (want.row_pair >= source * pairs) & (want.row_pair < (source + 1) * pairs)
            rows[here] = value.flatten(0, 1)[want.row_pair[here] - source * pairs]
        return rows

    def combine(self, ranks=None, **how) -> None:
        chosen = range(len(self.rows)) if ranks is None else ranks
        combine(
            [self.world.members[r] for r in chosen],
            [(self.tokens[r], self.arrived[r]) for r in chosen],
            [self.rows[r] for r in chosen],
            **{"weighted": self.weighted, "reduction": self.reduction, "parts": self.parts, **how},
            out=[self.y[r] for r in chosen],
        )

    def check(self) -> None:
        for member in self.world.members:
            member.raise_failure()
        for source, y in enumerate(self.y):
            want = self.sums(source).to(y.device)
            bits = torch.int16 if y.dtype == torch.bfloat16 else torch.int32
            assert torch.equal(y[: len(want)].view(bits), want.view(bits)), f"y of rank {source}"
            assert (y[len(want) :] == -77).all(), "a token that is not there"

    def sums(self, source: int) -> Tensor:
        """y of a rank: a row that was dropped counts as zeros, per_rank only if the rank has kept none."""
        values, weights, dtype = self.values[source].float(), self.batch.weights[source], self.values[source].dtype
        places = torch.stack([want.pair_row[source] for want in self.wanted])  # [ranks, T, K]
        kept, asked = places >= 0, places != -1
        terms = torch.where(kept.any(0).unsqueeze(2), values, 0.0)
        terms = terms * weights.unsqueeze(2) if self.weighted else terms
        if self.reduction == "per_slot":
            return summed(terms, asked.any(0)).to(dtype)
        rounded = [summed(terms, of_rank).to(dtype).float() for of_rank in kept]
        return summed(torch.stack(rounded, 1), asked.any(2).t()).to(dtype)


def summed(terms: Tensor, present: Tensor) -> Tensor:
    """Left to right over dimension 1 of `[T, N, H]`, those that are present; the first is not added to zeros."""
    total, begun = torch.zeros_like(terms[:, 0]), torch.zeros_like(present[:, :1])
    for term, here in zip(terms.unbind(1), present.unsqueeze(2).unbind(1), strict=True):
        total = torch.where(here, torch.where(begun, total + term, term), total)
        begun = begun | here
    return total


def words_on_their_way(world: World) -> bool:
    """Whether any rank's memory still has something that was sent."""
    space, sizes = world.sizes.combine_space, world.sizes
    sums = [
        (space.sums + rank * space.sender_bytes, sizes.max_tokens * sizes.sum_bytes) for rank in range(sizes.num_ranks)
    ]
    regions = [*sums, (space.slots, sizes.pairs * sizes.sum_bytes)]
    banks = (0, space.bank_bytes)
    return any(bool(m[begin + b :][:size].any()) for m in world.memory for begin, size in regions for b in banks)


@pytest.fixture(scope="module")
def worlds() -> dict[int, World]:
    """By number of ranks; every case goes on where the last one has left the epochs and the words."""
    return {ranks: make_world(ranks, width=136, experts=24, topk=6) for ranks in (1, 2, 3, 8)}


@each_dtype
@each_reduction
@each_number_of_ranks
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, ranks: int, reduction: str, dtype: torch.dtype, worlds: dict[int, World]) -> None:
    tokens, how = CASES[name]
    counts = (tokens * ranks)[:ranks]
    call = Call(worlds[ranks], counts, dtype=dtype, width=136, seed=len(name), reduction=reduction, **how)
    call.combine()
    call.check()


@each_dtype
@each_reduction
@each_number_of_ranks
@pytest.mark.parametrize("name", SHAPES)
def test_shape(name: str, ranks: int, reduction: str, dtype: torch.dtype) -> None:
    shape = SHAPES[name]
    width, most = shape["vectors"] * 16 // dtype.itemsize, MANY if shape["vectors"] < 100 else 30
    world = make_world(
        ranks, tokens=most, width=shape["vectors"] * 4, experts=shape["experts"] * ranks, topk=shape["topk"]
    )
    for counts in ([30, 7], [1, 0], [most, 2]):
        call = Call(world, (counts * ranks)[:ranks], dtype=dtype, width=width, reduction=reduction, weighted=True)
        call.combine()
        call.check()


@each_number_of_ranks
def test_calls_of_all_kinds_in_turn(ranks: int) -> None:
    """None waits for the one before; widths, dtypes, reductions and parts change. No word is left behind."""
    world = make_world(ranks, width=264, experts=24, topk=4)
    for group in range(4):
        calls = []
        for i in range(10 * group, 10 * group + 10):
            counts = [(253 + 5 * i + 2 * r) % MANY if i % 3 else (i + r) % 9 for r in range(ranks)]
            dtype, width = ((torch.bfloat16, 264), (torch.float32, 4), (torch.float32, 264), (torch.bfloat16, 40))[
                i % 4
            ]
            how = {"reduction": ("per_rank", "per_rank", "per_slot")[i % 3], "parts": (None, 1, 32, 5)[i % 4]}
            calls.append(Call(world, counts, dtype=dtype, width=width, seed=i, weighted=i % 2 == 1, **how))
        for call in calls:
            call.combine()
        for call in calls:
            call.check()
        assert not words_on_their_way(world)


@each_reduction
@pytest.mark.parametrize("sms", [3, 7, 60])
def test_few_multiprocessors(sms: int, reduction: str, worlds: dict[int, World]) -> None:
    call = Call(worlds[3], [MANY, 60, 7], dtype=torch.bfloat16, width=136, reduction=reduction)
    call.combine(sms=sms)
    call.check()


@each_reduction
@each_dtype
@each_number_of_ranks
def test_graph(ranks: int, dtype: torch.dtype, reduction: str) -> None:
    """Captured once for the most tokens; replayed for other numbers of them and another routing."""
    world = make_world(ranks, width=40, experts=24, topk=5)
    how = {"dtype": dtype, "width": 40, "counted": True, "weighted": True, "reduction": reduction, "parts": None}
    kept = Call(world, [MANY] * ranks, **how)
    kept.combine()
    kept.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept.combine()
    for i in range(8):
        counts = [MANY if (i + r) % 2 else (61 * i + r) % MANY for r in range(ranks)]
        call = Call(world, counts, seed=i, capacity=len(kept.rows[0]), **how)
        for name in ("topk_idx", "topk_weights"):
            for mine, other in zip(kept.tokens, call.tokens, strict=True):
                getattr(mine, name).copy_(getattr(other, name))
        for name in ("pair_row", "row_weight", "tokens_of_rank"):
            for mine, other in zip(kept.arrived, call.arrived, strict=True):
                getattr(mine, name).copy_(getattr(other, name))
        for mine, other in zip([*kept.rows, *kept.y], [*call.rows, *call.y], strict=True):
            mine.copy_(other)
        graph.replay()
        for into, y in zip(call.y, kept.y, strict=True):
            into.copy_(y)
        call.check()


@each_reduction
@pytest.mark.parametrize("tokens", [20, MANY])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_a_missing_peer_owes_is_nan(ranks: int, tokens: int, reduction: str) -> None:
    world = make_world(ranks, width=64, experts=24, topk=6, timeout=0.2)
    call = Call(world, [tokens] * ranks, dtype=torch.bfloat16, width=64, reduction=reduction)
    for member in world.members:
        member.raise_failure()
    here = [rank for rank in range(ranks) if rank != 1]
    call.combine(here)
    for rank in here:
        with pytest.raises(PeerTimeout, match=rf"combine on rank {rank}: rank 1 did not bring its sums in 0\.2 s"):
            world.members[rank].raise_failure()
        owed = (call.wanted[1].pair_row[rank] != -1).any(1).to(world.device)
        assert owed.any() and call.y[rank][owed].isnan().all()
    world.clear()
    again = Call(world, [tokens] * ranks, dtype=torch.bfloat16, width=64, reduction=reduction, seed=1)
    again.combine()
    again.check()


@pytest.mark.parametrize(
    "change, how, message",
    [
        (lambda rows: rows, {"reduction": "per_token"}, "reduction is 'per_token'; allowed: per_rank, per_slot"),
        (lambda rows: rows, {"parts": 33}, r"parts is 33; allowed: 1\.\.32"),
        (lambda rows: rows, {"sms": 0}, r"sms is 0; allowed: 2\.\."),
        (lambda rows: rows.half(), {}, "rows have dtype torch.float16; allowed: torch.bfloat16, torch.float32"),
        (
            lambda rows: rows[:, :12].contiguous(),
            {},
            "rows of rank 0 have 24 bytes; allowed: multiples of 16, up to 256",
        ),
        (lambda rows: rows.repeat(1, 3), {}, "rows of rank 0 have 384 bytes"),
        (lambda rows: rows[1:], {}, "rows of rank 0 is .* allowed: contiguous"),
        (lambda rows: rows[:, ::2], {}, "rows of rank 0 is .* allowed: contiguous"),
    ],
)
def test_wrong_arguments(change, how, message) -> None:
    world = make_world(2, width=64, experts=24, topk=6)
    call = Call(world, [9, 9], dtype=torch.bfloat16, width=64)
    call.rows = [change(row) for row in call.rows]
    call.y = [row.new_empty(len(y), row.shape[1]) for row, y in zip(call.rows, call.y, strict=True)]
    with pytest.raises(ValueError, match=message):
        call.combine(**how)


def test_slots_travel_only_where_there_is_room() -> None:
    world = World(2, experts=24, topk=6, tokens=9, hidden=64)
    call = Call(world, [9, 9], dtype=torch.bfloat16, width=64, reduction="per_slot")
    with pytest.raises(ValueError, match="reduction is 'per_slot'; allowed without Sizes.slots_travel: per_rank"):
        call.combine()
