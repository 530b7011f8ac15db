"""The host side of the SM90 backend without a GPU: what is refused, what is kept for graphs, what tensors become."""

from __future__ import annotations

import ctypes
import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moeloom import BF16, FP8, FP32, Experts, Placement, Routing, jit
from moeloom.backends.base import Handle, RowOrder
from moeloom.backends.sm90 import backend as sm90
from moeloom.backends.sm90 import combine, exchange, launch
from moeloom.backends.sm90.backend import Sm90Backend
from moeloom.backends.sm90.dispatch import Arrived, check_tokens, num_rows
from moeloom.backends.sm90.homes import Served
from moeloom.backends.sm90.launch import in_vectors
from moeloom.backends.sm90.news import News
from moeloom.backends.sm90.parameters import State
from moeloom.backends.sm90.spaces import MAX_ROW_BYTES, Sizes, most_tokens
from moeloom.errors import CapabilityError, CapacityError, MoeloomError, PeerTimeout
from moeloom.layout import receive_layout
from moeloom.quantize import quantize, unpack_records
from moeloom.topology import Topology
from moeloom.types import Received

CPU = torch.device("cpu")
RANKS = 2


class Memory:
    """Stands in for `SymmetricMemory`: addresses that nobody uses."""

    def __init__(self) -> None:
        self.made: list[tuple[int, bool]] = []

    def make(self, num_bytes: int, keep: bool) -> list[int]:
        self.made.append((num_bytes, keep))
        return [(2 * len(self.made) + rank) << 40 for rank in range(RANKS)]


class Gpu(Sm90Backend):
    """Rank 1 of two, on no GPU. It can do all that launches nothing."""

    def __init__(self, max_tokens: int | None = 64) -> None:
        self.device, self.rank, self.topology, self.max_tokens = CPU, 1, Topology.split(RANKS, 1), max_tokens
        self.is_capturing = False
        self.told: list[str] = []
        self.control = SimpleNamespace(
            operation=self._operation,
            peers=SimpleNamespace(timeout=1.0, rank=1),
            number=3,
            failure=None,
            agree=self._agree,
        )
        self.memory = Memory()
        words = torch.zeros(4, 4, dtype=torch.int32)
        self.news = SimpleNamespace(
            failures=words[:2], strict=words[2], lenient=words[3], take=lambda: None, raise_failure=lambda: None
        )
        self._base, self._stream = None, None
        self._members, self._served, self._in_graphs = {}, {}, {}
        self._base_is_in_graphs, self._stops = False, []

    @property
    def capturing(self) -> bool:
        return self.is_capturing

    @contextmanager
    def _operation(self, kind: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.told.append(f"{kind}: {error}")
            raise

    def _agree(self, same: dict, own: dict | None = None, error: Exception | None = None) -> list[dict]:
        raise AssertionError("the ranks must not get as far as this")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


EVEN = Placement.even(8, RANKS)
SHAPE = {"num_topk": 4, "max_tokens": 64, "row_bytes": 1024}


class TestGraphs:
    """What a captured call has used must be there whenever it is replayed."""

    def test_memory_that_graphs_use_stays_when_more_is_needed(self) -> None:
        gpu = Gpu()
        gpu.member(gpu.served(EVEN), **SHAPE)
        gpu.is_capturing = True
        captured = weakref.ref(gpu.member(gpu.served(EVEN), **SHAPE).dispatch_state)
        gpu.is_capturing = False
        first = list(gpu._stops)
        gpu.member(gpu.served(EVEN), **{**SHAPE, "row_bytes": 4096})
        gc.collect()
        assert [keep for _, keep in gpu.memory.made] == [False, True]
        assert captured() is not None and len(first) == 1
        assert gpu._stops[:1] == first and len(gpu._stops) == 2, "peers that replay are told to stop too"
        gpu.member(gpu.served(EVEN), **{**SHAPE, "row_bytes": 8192})
        assert [keep for _, keep in gpu.memory.made] == [False, True, False], "no graph has used the second"

    def test_memory_that_no_graph_uses_goes(self) -> None:
        gpu = Gpu()
        gone = weakref.ref(gpu.member(gpu.served(EVEN), **SHAPE).dispatch_state)
        gpu.member(gpu.served(EVEN), **{**SHAPE, "max_tokens": 128})
        gc.collect()
        assert [keep for _, keep in gpu.memory.made] == [False, False] and gone() is None and len(gpu._stops) == 1

    def test_placements_of_graphs_are_kept_however_many_follow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sm90, "MAX_KEPT", 3)
        gpu = Gpu()
        tables = []
        for seed in range(8):
            order = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist()
            placement = Placement.from_slots([order[:4], order[4:]])
            gpu.member(gpu.served(placement), **SHAPE)
            gpu.is_capturing = seed % 2 == 0
            member = gpu.member(gpu.served(placement), **SHAPE)
            tables.append(weakref.ref(member.expert_rank))
            gpu.is_capturing = False
            del member
        gc.collect()
        assert [table() is not None for table in tables[:4]] == [True, False, True, False]

    def test_what_cannot_be_captured_is_refused(self) -> None:
        gpu = Gpu()
        gpu.member(gpu.served(EVEN), **SHAPE)
        gpu.is_capturing = True
        with pytest.raises(CapacityError, match="symmetric memory must grow .* run the layer once before capture"):
            gpu.member(gpu.served(EVEN), **{**SHAPE, "num_topk": 5})
        with pytest.raises(CapabilityError, match="placement is new, .* run once before capture"):
            gpu.served(Placement.even(6, RANKS))
        with pytest.raises(CapabilityError, match="recipe fp32 reads counts on the host"):
            gpu.experts(None, None, FP32)
        gpu.max_tokens = None
        with pytest.raises(CapacityError, match="max_tokens is None; a captured call"):
            dispatch(gpu)


def routing(tokens: int = 5, topk: int = 4) -> Routing:
    ids = torch.rand(tokens, 8, generator=torch.Generator().manual_seed(1))
    ids = ids.topk(min(topk, 8)).indices.repeat(1, -(-topk // 8))[:, :topk].contiguous()
    return Routing(ids, torch.rand(tokens, topk))


def dispatch(gpu: Gpu, hidden: int = 32, given: Routing | Handle | None = None, **order: Any) -> None:
    placement = order.pop("placement", EVEN)
    given = given or routing()
    x = torch.zeros(len(given.topk_idx) if isinstance(given, Routing) else 5, hidden, dtype=torch.bfloat16)
    exchange.dispatch(gpu, x, given, placement, RowOrder(**order), "direct")


@pytest.mark.parametrize(
    "how, message",
    [
        ({"given": routing(topk=33)}, r"num_topk is 33; allowed: 1\.\.32"),
        ({"given": routing(tokens=65)}, None),
        ({"hidden": MAX_ROW_BYTES}, f"row_bytes is {2 * MAX_ROW_BYTES}; allowed"),
        ({"order": "rank", "hidden": MAX_ROW_BYTES // 2}, f"row_bytes is {MAX_ROW_BYTES + 32}; allowed"),
        ({"placement": Placement.even(1026, RANKS)}, r"num_local is 513; allowed: 1\.\.512"),
        ({"alignment": 1 << 17}, r"alignment is 131072; allowed: 1\.\.65536"),
        ({"order": "batched", "capacity": 1 << 30}, "rows for capacity is 4294967296; allowed"),
        ({"placement": Placement.even(8, RANKS, num_identity=1)}, "identity experts"),
    ],
)
def test_limits_are_told_before_ranks_agree(how: dict, message: str | None) -> None:
    """So the Runtime stays usable. `Gpu` has no agreement."""
    gpu = Gpu()
    if message is None:
        gpu.max_tokens = None
        with pytest.raises(AssertionError, match="must not get as far"):
            dispatch(gpu, **how)
        return
    with pytest.raises((ValueError, CapabilityError), match=message):
        dispatch(gpu, **how)
    assert len(gpu.told) == 1 and gpu.told[0].startswith("dispatch: ")


def test_several_nodes_are_refused_before_anything_is_shared() -> None:
    peers: Any = SimpleNamespace(rank=0)
    with pytest.raises(CapabilityError, match="serves the GPUs of one node, up to 8; found: 4 ranks on 2 nodes"):
        Sm90Backend(peers, None, Topology.split(4, 2), None)
    with pytest.raises(CapabilityError, match="found: 9 ranks on 1 nodes"):
        Sm90Backend(peers, None, Topology.split(9, 1), None)


def handle(ids: Tensor) -> Handle:
    empty = [torch.empty(0, dtype=torch.int32) for _ in range(7)]
    stream = SimpleNamespace()
    paths = exchange.Paths(Served(EVEN, 1, CPU), ids, ids, RowOrder(capacity=9), 64, Arrived(*empty), stream)
    return Handle(
        weakref.ref(paths), 7, 5, Routing(ids, torch.ones(5, 4)), EVEN, "direct", RowOrder(), None, None, paths
    )


def test_rows_too_wide_for_combine_are_told_before_ranks_agree() -> None:
    with pytest.raises(ValueError, match=f"bytes of a row is {4 * MAX_ROW_BYTES}"):
        exchange.combine(Gpu(), torch.zeros(1, 2 * MAX_ROW_BYTES).bfloat16(), handle(routing().topk_idx), BF16, False)


@pytest.mark.parametrize("kind", ["plain", "part of a row", "turned", "rows an odd number of bytes", "every other"])
def test_combine_takes_rows_as_they_lie(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launch checks is checked, after ranks have agreed: nothing may be wrong then."""
    launched = []
    monkeypatch.setattr(combine, "launch", lambda declared, params, *rest: launched.append(params[0]))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: sent.paths.stream)
    gpu, rows, ids = Gpu(), lies(kind), routing().topk_idx
    sent = handle(ids)
    table = replace(sent.paths.arrived, row_pair=torch.zeros(len(rows), dtype=torch.int32))
    sent = replace(sent, paths=replace(sent.paths, arrived=table))
    y = exchange._sum(gpu, rows, sent, BF16, weighted=True)
    assert y.shape == (5, rows.shape[1]) and y.is_contiguous()
    assert launched[0].row_bytes == -(-2 * rows.shape[1] // 16) * 16 and launched[0].num_tokens == 5


class Agreeing(Gpu):
    """The other rank wants the same and has 40 tokens; what is launched brings no row to anybody."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_tokens: int | None) -> None:
        super().__init__(max_tokens)
        self.agreed: list[dict] = []
        self.launched: list[str] = []
        self.stream = SimpleNamespace(wait_stream=lambda other: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream)
        monkeypatch.setattr(exchange, "launch_dispatch", self._bring)
        monkeypatch.setattr(exchange, "launch_combine", self._sum)

    def _agree(self, same: dict, own: dict | None = None, error: Exception | None = None) -> list[dict]:
        assert error is None
        self.agreed.append(same)
        return [{"tokens": 40}, own or {}]

    def _bring(self, members: list, tokens: list, order: RowOrder, out: list[Arrived]) -> None:
        check_tokens(members[0].sizes, tokens[0])
        assert len(out[0].rows) == num_rows(members[0].sizes, order)
        self.launched.append("dispatch")
        for tensor in vars(out[0]).values():
            tensor.zero_()
        out[0].row_pair.fill_(-1)
        out[0].pair_row.fill_(-1)

    def _sum(self, members: list, sent: list, rows: list, weighted: bool, reduction: str, out: list[Tensor]) -> None:
        combine._check(members[0], *sent[0], (rows[0], out[0]), weighted, reduction)
        self.launched.append(reduction)
        out[0].fill_(3)


@pytest.mark.parametrize("pipeline", ["split", "decode"])
@pytest.mark.parametrize("slots", [EVEN.slots, ((0, 1, 2, 3), (4, 5, 6, 7, 0))], ids=["even", "with a replica"])
@pytest.mark.parametrize(
    "order",
    [RowOrder(), RowOrder(alignment=8), RowOrder("batched"), RowOrder("batched", capacity=9), RowOrder("rank"),
     RowOrder("rank", capacity=7, overflow="drop"), RowOrder(exact=False)],
    ids=str,
)  # fmt: skip
def test_calls_from_end_to_end(
    order: RowOrder, slots: tuple[tuple[int, ...], ...], pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is launched, with which shapes, and what comes back where no row does."""
    placement = Placement.from_slots(slots)
    gpu = Agreeing(monkeypatch, 64 if pipeline == "decode" else None)
    given, x = routing(), torch.randn(5, 37).bfloat16()
    received, made = exchange.dispatch(gpu, x, given, placement, order, "direct", pipeline)
    first = ["dispatch"] * (2 if order.order == "batched" and order.capacity is None and pipeline == "split" else 1)
    assert gpu.launched == first and made.paths.max_tokens == 64
    num_local = len(placement.slots[1])
    if order.order != "rank" or not order.exact:
        assert received.expert_start.tolist() == [0] * (num_local + 1)
    assert received.num_tokens_per_expert.tolist() == [0] * num_local and not received.rows.any()
    rows = {(True, "split"): 0, (False, "split"): 45 * 4, (False, "decode"): 2 * 64 * 4}.get((order.exact, pipeline))
    if order.capacity is None and order.alignment == 1 and rows is not None:
        assert received.rows.numel() == rows * 37
    again, same = exchange.dispatch(gpu, x.double(), made, placement, order, "direct", pipeline)
    assert same is made and again.rows.shape == received.rows.shape and again.rows.dtype == torch.float64
    for reduction in ("per_rank", "per_slot") if order.order != "rank" else ("per_rank",):
        flat = torch.zeros(received.rows.shape[:-1].numel(), 37).bfloat16()
        y = exchange.combine(gpu, flat, made, BF16.with_reduction(reduction), weighted=order.order != "rank")
        assert y.shape == (5, 37) and bool((y == 3).all()) and gpu.launched[-1] == reduction
    assert gpu.told == [] and len(gpu.agreed) == len(gpu.launched) - len(first) + 1


class Noted(SimpleNamespace):
    """A tensor on a GPU, and the streams for which torch keeps its memory."""

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


def test_what_another_stream_reads_is_kept_for_it() -> None:
    made, other = object(), object()
    tensors = [Noted(streams=[]) for _ in range(9)]
    paths = exchange.Paths(None, *tensors[:2], None, 1, Arrived(*tensors[2:]), made)
    paths.keep_for(made)
    assert not any(tensor.streams for tensor in tensors)
    paths.keep_for(other)
    assert all(tensor.streams == [other] for tensor in tensors)


@pytest.mark.parametrize("topk", [1, 7, 8, 32])
def test_room_grows_in_steps_up_to_what_kernels_can_do(topk: int) -> None:
    most = most_tokens(topk)
    for tokens in (0, 1, 64, 65, most // 2 + 1, most - 1, most, most + 1):
        room = exchange._roomy(tokens, topk)
        assert room >= tokens and (room <= most or tokens > most) and (room == tokens or room >= 64)
    Sizes(2, exchange._roomy(most - 1, topk), topk, 8, 4, 16, 16)


def lies(kind: str) -> Tensor:
    wide = torch.randn(6, 40, generator=torch.Generator().manual_seed(2)).bfloat16()
    return {
        "plain": wide,
        "part of a row": wide[:, 8:16],
        "at an odd place": wide[:, 1:17],
        "turned": wide.t(),
        "every other": wide[:, ::2],
        "one row for all": wide[:1].expand(6, 40),
        "one number for all": wide[:1, :1].expand(6, 40),
        "rows an odd number of bytes": wide[:, :37].contiguous(),
        "one number": wide[:1, :1],
        "one odd row": wide.flatten()[3:19].unsqueeze(0),
        "none": wide[:0],
        "three bytes": wide.view(torch.uint8)[:, :3].contiguous().view(torch.float8_e4m3fn),
    }[kind]


KINDS = (
    "plain", "part of a row", "at an odd place", "turned", "every other", "one row for all", "one number for all",
    "rows an odd number of bytes", "one number", "one odd row", "none", "three bytes",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_rows_become_whole_vectors(kind: str) -> None:
    rows = lies(kind)
    got = exchange._as_bytes(rows)
    size = rows.shape[1] * rows.element_size()
    assert got.dtype == torch.uint8 and got.shape == (len(rows), -(-size // 16) * 16)
    if len(rows):
        assert got.stride(1) == 1 and got.data_ptr() % 16 == 0 and (len(rows) == 1 or got.stride(0) % 16 == 0)
    assert torch.equal(got[:, :size].contiguous(), rows.contiguous().view(torch.uint8))
    copied = kind not in ("plain", "part of a row", "one row for all", "none")
    assert (got.data_ptr() != rows.data_ptr()) == copied or not len(rows)
    assert exchange._as_bytes(rows.contiguous()).view(rows.dtype).is_contiguous(), "combine needs it so"


def test_records_keep_their_rows_whatever_the_strides() -> None:
    for kind in ("turned", "at an odd place", "every other"):
        rows = lies(kind)
        got = in_vectors(rows)
        assert torch.equal(got, rows) and got.stride(1) == 1 and got.data_ptr() % 16 == 0
    rows = lies("plain")
    assert in_vectors(rows) is rows


def test_quantised_rows_that_came_as_records_are_not_copied() -> None:
    x = torch.randn(5, 160).bfloat16()
    packed = exchange._as_bytes(sm90.pack_records(quantize(x)))
    values, scales = unpack_records(packed, 160)
    assert sm90._records(values, scales).data_ptr() == packed.data_ptr()
    apart = quantize(x)
    assert torch.equal(sm90._records(*apart), sm90.pack_records(apart))
    assert sm90._records(values[:0], scales[:0]).shape == (0, sm90.record_bytes(160))


def test_no_row_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8, and no rank has a token."""
    seen = []
    monkeypatch.setattr(sm90.experts, "experts", lambda rows, *rest: seen.append(rows) or rows.new_empty(0, 32))
    monkeypatch.setattr(Gpu, "_tickets", lambda self: None)
    weights = Experts(torch.randn(4, 64, 32).bfloat16(), torch.randn(4, 32, 32).bfloat16()).quantized()
    rows = unpack_records(torch.empty(0, 48, dtype=torch.uint8), 32)
    none = torch.zeros(5, dtype=torch.int32)
    received = Received(rows.values, none[:0], torch.empty(0), none, none[:4], none[0], "expert", rows.scales)
    assert Gpu().experts(received, weights, FP8).shape == (0, 32)
    assert seen[0].shape == (0, sm90.record_bytes(32)) and seen[0].dtype == torch.uint8


def arrived(layout: Any, sizes: Sizes, counts: list[int], rows: Tensor, weights: Tensor) -> Arrived:
    """What the kernel leaves of tokens of all ranks, padding rows poisoned."""
    source = torch.repeat_interleave(torch.tensor(counts))
    token = torch.cat([torch.arange(count) for count in counts])
    at, k = layout.pos_to_token, layout.pos_to_topk
    real = at >= 0
    pair, weight = torch.full_like(at, -1), torch.zeros(len(at))
    pair[real] = (source[at[real]] * sizes.max_tokens + token[at[real]]) * sizes.num_topk + k[real]
    weight[real] = weights[at[real], k[real]]
    out = torch.full((len(at), rows.shape[1]), 0xAB, dtype=torch.uint8)
    out[real] = rows[at[real]]
    pair_row = torch.full((sizes.num_ranks, sizes.max_tokens, sizes.num_topk), -2)
    for s, part in enumerate(layout.token_topk_to_pos.split(counts)):
        pair_row[s, : len(part)] = part
    numbers = (pair, weight, pair_row, layout.expert_start, layout.num_tokens_per_expert, torch.tensor(counts))
    return Arrived(out, *(n if n.is_floating_point() else n.int() for n in numbers))


@pytest.mark.parametrize("order", [RowOrder(), RowOrder(alignment=8), RowOrder("batched", 4), RowOrder(capacity=30)])
def test_what_the_caller_gets_is_what_the_layout_says(order: RowOrder) -> None:
    """Ids, weights and counts of received rows, zeros in padding, and each row's slot, from what the kernel leaves."""
    gpu, counts, hidden = Gpu(), [7, 5], 16
    generator = torch.Generator().manual_seed(4)
    ids = (
        torch.rand(12, 8, generator=generator)
        .topk(4)
        .indices.masked_fill(torch.rand(12, 4, generator=generator) < 0.2, -1)
    )
    x, weights = torch.randn(12, hidden).bfloat16(), torch.rand(12, 4)
    source = torch.repeat_interleave(torch.tensor(counts))
    ranks, slots = EVEN.locate(ids, source, torch.cat([torch.arange(count) for count in counts]))
    slot = torch.where(ranks == gpu.rank, slots, -1)
    layout = receive_layout(slot, 4, order.order, order.alignment, order.capacity)
    sizes = Sizes(RANKS, 64, 4, 8, 4, 32, 32)
    have = arrived(layout, sizes, counts, x.view(torch.uint8), weights)
    num_rows = layout.num_rows
    kept = handle(ids)
    paths = exchange._kept(replace(kept.paths, max_tokens=64), have, order, num_rows)
    seen = exchange.DeviceLayout(num_rows, 4, paths)
    got = exchange._received(gpu, x, have, replace(kept, rows=order, layout=seen, paths=paths))
    assert isinstance(got, Received)
    at, real = layout.pos_to_token, layout.pos_to_token >= 0
    assert torch.equal(seen.pos_to_topk, layout.pos_to_topk)
    assert torch.equal(seen.num_tokens_per_expert.long(), layout.num_tokens_per_expert)
    rows = got.rows.reshape(-1, hidden)
    assert torch.equal(rows[real], x[at[real]]) and not rows[~real].any()
    assert torch.equal(got.expert_start, layout.expert_start) and int(got.num_dropped) == int(layout.num_dropped)
    assert torch.equal(got.num_tokens_per_expert, layout.num_tokens_per_expert)
    wanted = torch.full_like(at, -1)
    wanted[real] = slot[at[real], layout.pos_to_topk[real]]
    assert torch.equal(got.topk_idx.flatten(), wanted)
    assert torch.equal(got.topk_weights.flatten()[real], weights[at[real], layout.pos_to_topk[real]])


def stream(device: torch.device) -> SimpleNamespace:
    return SimpleNamespace(cuda_stream=5, synchronize=lambda: None)


class TestErrors:
    def test_what_fails_in_clean_up_does_not_hide_the_cause(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        gpu = Gpu()
        gpu._stops = [1 << 40]
        monkeypatch.setattr(
            torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
        )

        def broken(*_: Any) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(sm90, "write_word", broken)
        gpu.control.failure = {"error": "MoeloomError", "message": "first"}
        caplog.set_level(logging.WARNING, "moeloom")
        with pytest.raises(MoeloomError, match="first"), gpu.operation("dispatch"):
            raise MoeloomError("first")
        assert "wait until their deadline: CUDA error" in caplog.messages[0]

    def test_all_peers_are_told_to_stop(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu, told = Gpu(), []
        gpu.member(gpu.served(EVEN), **SHAPE)
        size = gpu.memory.made[0][0]
        monkeypatch.setattr(
            torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=5, synchronize=lambda: None)
        )
        monkeypatch.setattr(sm90, "write_word", lambda *args: told.append(args))
        gpu._stop_peers()
        assert told == [((2 << 40) + size - sm90.STOP_BYTES, sm90.STOPPED, 5)], "rank 0, not this rank"

    def test_everything_is_let_go_of_even_if_the_gpu_is_lost(self) -> None:
        gpu, detached = Gpu(), []
        held = weakref.ref(gpu.member(gpu.served(EVEN), **SHAPE).dispatch_state)
        gpu.control.detach = lambda: detached.append(True)

        def lost() -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        gpu.memory.close = lost
        with pytest.raises(RuntimeError, match="illegal memory access"):
            gpu.close()
        gc.collect()
        assert detached == [True] and held() is None and gpu._stops == []

    def test_rows_to_quantise_may_lie_anyhow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sm90.quantize, "quantize_rows", lambda x: x)
        rows = lies("turned")
        got = Gpu().records(rows)
        assert torch.equal(got, rows) and got.stride(1) == 1 and got.data_ptr() % 16 == 0

    def test_rows_that_cannot_be_quantised_are_told(self) -> None:
        """The other ranks are on their way to dispatch."""
        gpu = Gpu()
        with pytest.raises(ValueError, match="x is torch.float64"):
            gpu.records(torch.zeros(3, 16, dtype=torch.float64))
        assert gpu.told == ["dispatch: x is torch.float64 [3, 16] on cpu; allowed: torch.bfloat16 or torch.float32"
                            " with 2 dimensions, on a GPU"]  # fmt: skip


class TestNews:
    @pytest.fixture()
    def news(self, monkeypatch: pytest.MonkeyPatch) -> News:
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **how: zeros(*size, **how))
        peers = SimpleNamespace(rank=1, timeout=2.5, abort=lambda error: error)
        return News(SimpleNamespace(peers=peers, failure=None))

    def test_a_wrong_id_is_told_once_in_the_callers_words(self, news: News) -> None:
        news.given = lambda found: found + 100
        for words in (news.strict, news.lenient):
            words[1:] = torch.tensor([4, 2, 9])
            error = news.take()
            assert isinstance(error, ValueError) and "rank 1: in an earlier call topk_idx[3, 2] was 109" in str(error)
            assert news.take() is None and int(words[1]) == 0

    def test_dropped_rows_count_where_none_may_be(self, news: News) -> None:
        news.lenient[0] = 5
        assert news.take() is None and int(news.lenient[0]) == 5
        news.strict[0] = 7
        error = news.take()
        assert isinstance(error, CapacityError) and "7 rows did not fit" in str(error) and news.take() is None

    def test_a_launch_that_gave_up_ends_the_runtime(self, news: News) -> None:
        news.raise_failure()
        news.failures[1] = torch.tensor([1, 3, 0, 12])
        with pytest.raises(PeerTimeout, match=r"combine on rank 1: rank 0 did not bring its sums in 2\.5 s"):
            news.raise_failure()
        assert news._control.failure is not None


class Kernels:
    """Stands in for a source's kernels on a device of three multiprocessors."""

    def __init__(self) -> None:
        self.launched: list[tuple] = []

    def of(self, declared: jit.Declared, device: int) -> tuple[dict[str, Any], int]:
        def kernel(name: str) -> Any:
            return SimpleNamespace(launch=lambda *args: self.launched.append((name, *args)))

        return {name: kernel(name) for name in declared.source.kernels}, 3


def test_a_launch_is_what_was_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels()
    monkeypatch.setattr(launch, "loaded", kernels.of)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=17))
    one = jit.Declared(jit.Source("one", "", ("a",)), 64, blocks_per_sm=4, shared_bytes=100)
    device, tensor, struct = torch.device("cuda", 0), torch.zeros(3), State(epoch=5)
    launch.launch(one, device, (tensor, struct, None, 7, 0.5))
    name, *rest, args = kernels.launched.pop()
    assert (name, *rest) == ("a", 17, 12, 64, 100)
    assert args == (tensor.data_ptr(), bytes(struct), 0, 7, 0.5) and len(args[1]) == ctypes.sizeof(State)
    several = jit.Declared(jit.Source("two", "", ("a", "b")), 32)
    launch.launch(several, device, (), (2, 5, 1), "b")
    assert kernels.launched == [("b", 17, (2, 5, 1), 32, 0, ())]
    with pytest.raises(ValueError, match="too many values"):
        launch.launch(several, device, ())
