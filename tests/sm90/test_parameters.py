"""What the host side gives to kernels, without a GPU: structs, symmetric memory, limits."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import pytest
import torch

from moeloom import Placement, jit
from moeloom.backends.base import RowOrder
from moeloom.backends.sm90 import combine, dispatch, parameters
from moeloom.backends.sm90.dispatch import Tokens, check_tokens, num_rows
from moeloom.backends.sm90.member import Member
from moeloom.backends.sm90.parameters import CombineParams, DispatchParams, DispatchSpace, State, proof
from moeloom.backends.sm90.spaces import LIMITS, Sizes, chunk_tokens, most_tokens
from moeloom.errors import KernelError, PeerTimeout
from tests.support.nvrtc import needs_nvrtc

CPU = torch.device("cpu")
FITS = {
    "num_ranks": 2,
    "max_tokens": 32,
    "num_topk": 4,
    "num_experts": 7,
    "num_local": 4,
    "row_bytes": 128,
    "sum_bytes": 256,
}


# 8192 tokens of each of 8 ranks
DEEPSEEK = {
    "num_ranks": 8,
    "max_tokens": 8192,
    "num_topk": 8,
    "num_experts": 256,
    "num_local": 32,
    "row_bytes": 7392,
    "sum_bytes": 14784,
}


@needs_nvrtc
class TestStructs:
    """Every declared kernel proves sizes, offsets and constants when it is compiled; here, that the proof can fail."""

    @pytest.mark.parametrize("stage, params", [(dispatch, DispatchParams), (combine, CombineParams)])
    def test_the_kernels_take_them(self, stage, params) -> None:
        for declared in stage.KERNELS:
            (usage,) = jit.compile(declared.source).kernels.values()
            ranks = LIMITS["MAX_RANKS"] if "several" in declared.source.name else 1
            assert usage.parameter_bytes == (ranks * ctypes.sizeof(params),)

    def test_another_size_does_not_compile(self) -> None:
        class State(ctypes.Structure):
            _fields_ = [("epoch", ctypes.c_uint32)]  # the rest is left out

        with pytest.raises(KernelError, match="768 == 4"):
            compile_proof((State,), {})

    def test_another_order_does_not_compile(self) -> None:
        class DispatchSpace(ctypes.Structure):
            first, second, *rest = parameters.DispatchSpace._fields_
            _fields_ = [second, first, *rest]

        with pytest.raises(KernelError, match="order"):
            compile_proof((DispatchSpace,), {})

    def test_another_constant_does_not_compile(self) -> None:
        compile_proof((DispatchSpace, State), {"MAX_TOPK": 32})
        with pytest.raises(KernelError, match="32 == 31"):
            compile_proof((DispatchSpace, State), {"MAX_TOPK": 31})


def compile_proof(structs, numbers) -> None:
    jit.compile(jit.Source("proof", '#include "dispatch.cuh"\n' + proof(structs, numbers), ()))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_ranks": 8, "num_experts": 4096, "num_local": 512, "num_topk": 32, "max_tokens": 8192},
        {"num_ranks": 1, "num_experts": 4, "num_topk": 1, "max_tokens": 1, "row_bytes": 16, "sum_bytes": 16},
        {"num_topk": 7, "max_tokens": 33, "row_bytes": 7392},
        {"num_topk": 7, "max_tokens": 333, "slots_travel": True},
        {**DEEPSEEK, "slots_travel": True},
    ],
)
def test_regions_do_not_meet(change: dict) -> None:
    sizes = Sizes(**{**FITS, **change})
    d, c, tokens, pairs = sizes.dispatch_space, sizes.combine_space, sizes.max_tokens, sizes.pairs
    line = -(-sizes.num_local // 6) * 16
    in_dispatch = [
        (d.shown, 8),
        (d.counts, 64 * line),
        (d.pairs, -(-pairs // 2) * 16),
        (d.places, 8 * pairs),
        (d.arrived, 4 * tokens),
        (d.staging, tokens * sizes.row_bytes),
    ]
    in_combine = [
        (c.begun, 8),
        (c.sums, tokens * sizes.sum_bytes),
    ]
    slots = [(c.slots + bank * c.bank_bytes, sizes.slots_travel * pairs * sizes.sum_bytes) for bank in range(2)]
    spans = [
        (offset + bank * space + part * stride, size)
        for regions, space, stride in (
            (in_dispatch, d.bank_bytes, d.source_bytes),
            (in_combine, c.bank_bytes, c.sender_bytes),
        )
        for offset, size in regions
        for bank in range(2)
        for part in range(sizes.num_ranks)
    ]
    spans = [*sorted(spans + slots), (sizes.num_bytes, 0)]
    assert all(begin % 128 == 0 for begin, _ in spans)
    assert all(begin + size <= following for (begin, size), (following, _) in pairwise(spans))


def test_sizes_beyond_32_bits() -> None:
    """In closed form: lines of 256 bytes are the only difference."""
    sizes = Sizes(**DEEPSEEK, slots_travel=True)
    one_bank = 8 * 8192 * (7392 + 14784 + 8 * 16 + 4) + 8192 * 8 * 14784
    assert 0 < sizes.num_bytes - 2 * one_bank < 2 * 8 * (64 * 6 * 16 + 8 * 256)
    assert sizes.num_bytes > 1 << 32 and sizes.combine_space.slots + sizes.combine_space.bank_bytes > 1 << 31


def test_an_exchange_within_larger_memory() -> None:
    """Regions keep their places, whatever is used of them; more than there is is refused."""
    memory = Sizes(**DEEPSEEK)
    part = Sizes(**{**DEEPSEEK, "max_tokens": 5, "num_topk": 3, "num_local": 16, "num_experts": 100}, within=memory)
    for name in ("dispatch_space", "combine_space"):
        assert bytes(getattr(part, name)) == bytes(getattr(memory, name))
    assert part.num_bytes == memory.num_bytes and part.pairs == 15
    for name, value in (("max_tokens", 8194), ("num_topk", 9), ("num_local", 33), ("row_bytes", 7408),
                        ("sum_bytes", 14800), ("slots_travel", True), ("num_ranks", 7)):  # fmt: skip
        with pytest.raises(ValueError, match="allowed: at most those of the memory"):
            Sizes(**{**DEEPSEEK, "num_experts": 100, name: value}, within=memory)


@pytest.mark.parametrize("topk", range(1, 33))
def test_chunks_fit(topk: int) -> None:
    most = most_tokens(topk)
    for tokens in {*range(1, min(most, 3000)), most - 1, most}:
        assert chunk_tokens(tokens) * topk <= 4096 and -(-tokens // chunk_tokens(tokens)) <= 64
    assert chunk_tokens(most + 1) * topk > 4096


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_ranks": 9}, r"num_ranks is 9; allowed: 1\.\.8"),
        ({"num_topk": 33}, r"num_topk is 33; allowed: 1\.\.32"),
        ({"num_topk": 0}, r"num_topk is 0; allowed: 1\.\.32"),
        ({"max_tokens": 65537}, r"max_tokens is 65537; allowed for top-k 4: 1\.\.65536"),
        ({"max_tokens": 37377, "num_topk": 7}, r"max_tokens is 37377; allowed for top-k 7: 1\.\.37376"),
        ({"num_local": 513}, r"num_local is 513; allowed: 1\.\.512"),
        ({"num_experts": 9}, "num_experts is 9; 2 ranks with at most 4 local experts allow 8"),
        ({"row_bytes": 100}, "row_bytes is 100; allowed: multiples of 16"),
        ({"row_bytes": 0}, r"row_bytes is 0; allowed: 16\.\."),
        ({"sum_bytes": 24}, "sum_bytes is 24; allowed: multiples of 16"),
    ],
)
def test_limits(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sizes(**{**FITS, **change})


@pytest.mark.parametrize(
    "order, message",
    [
        (RowOrder("rank", capacity=9), "order is 'rank'"),
        (RowOrder(), "capacity None; allowed: 'expert' or 'batched' with a capacity"),
        (RowOrder(capacity=-1), "capacity is -1"),
        (RowOrder(capacity=9, alignment=0), "alignment is 0"),
        (RowOrder(capacity=9, alignment=1 << 17), r"alignment is 131072; allowed: 1\.\.65536"),
        (RowOrder("batched", capacity=1 << 30), "rows for capacity is 4294967296"),
    ],
)
def test_orders(order: RowOrder, message: str) -> None:
    assert num_rows(Sizes(**FITS), RowOrder(capacity=9)) == 9
    assert num_rows(Sizes(**FITS), RowOrder("batched", capacity=9)) == 36
    with pytest.raises(ValueError, match=message):
        num_rows(Sizes(**FITS), order)


X, IDS, WEIGHTS = torch.zeros(5, 64, dtype=torch.bfloat16), torch.zeros(5, 4, dtype=torch.int64), torch.zeros(5, 4)


@pytest.mark.parametrize(
    "tokens, message",
    [
        (Tokens(X[:, :32], IDS, WEIGHTS), "x is .*; allowed: contiguous rows of 128 bytes"),
        (Tokens(torch.zeros(33, 64).bfloat16(), IDS, WEIGHTS), r"tokens of x is 33; allowed: 0\.\.32"),
        (Tokens(torch.zeros(5, 65).bfloat16()[:, 1:], IDS, WEIGHTS), "x has rows 130 bytes apart"),
        (Tokens(torch.zeros(1, 65).bfloat16()[:, 1:], IDS[:1], WEIGHTS[:1]), "x has rows 130 bytes apart, at 0x.*2;"),
        (Tokens(X, IDS.short(), WEIGHTS), "topk_idx has dtype torch.int16"),
        (Tokens(X, IDS[:, :3], WEIGHTS), "topk_idx is "),
        (Tokens(X, IDS, WEIGHTS.double()), "topk_weights has dtype torch.float64"),
        (Tokens(X, IDS, WEIGHTS.t().contiguous().t()), "topk_weights is "),
        (Tokens(X, IDS, WEIGHTS, torch.tensor([5])), "num_tokens is .* for 5 tokens"),
    ],
)
def test_tokens(tokens: Tokens, message: str) -> None:
    check_tokens(Sizes(**FITS), Tokens(X, IDS, WEIGHTS))
    check_tokens(Sizes(**FITS), Tokens(X[:0], IDS[:0].int(), WEIGHTS[:0]))
    with pytest.raises(ValueError, match=message):
        check_tokens(Sizes(**FITS), tokens)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"placement": Placement.even(6, 2)}, r"placement has .* \(2, 6, 3\); allowed: \(2, 7, 4\)"),
        ({"placement": Placement.from_slots([[0, 1, 2, 3], [4, 5, 6, 0]])}, "placement has replicas"),
        ({"rank": 2}, r"rank is 2; allowed: 0\.\.1"),
        ({"addresses": [0]}, "addresses are 1; allowed: 2"),
        ({"timeout": 0.0}, "timeout is 0.0"),
    ],
)
def test_members(change: dict, message: str) -> None:
    fits = {
        "placement": Placement.from_slots([[6, 0, 1], [4, 5, 3, 2]]),
        "rank": 1,
        "addresses": [0, 0],
        "timeout": 0.5,
    }
    member = Member.make(Sizes(**FITS), device=CPU, **fits)
    assert member.expert_rank.tolist() == [0, 0, 1, 1, 1, 1, 0] and member.expert_slot.tolist() == [1, 2, 3, 2, 0, 1, 0]
    with pytest.raises(ValueError, match=message):
        Member.make(Sizes(**FITS), device=CPU, **{**fits, **change})


def test_failures_are_read() -> None:
    member = Member.make(Sizes(**FITS), Placement.even(7, 2), 1, [0, 0], 0.5, CPU)
    member.raise_failure()
    member.combine_state[:4] = torch.tensor([7, 1, 3, 0])
    with pytest.raises(PeerTimeout, match=r"combine on rank 1: rank 0 did not bring its sums in 0\.5 s"):
        member.raise_failure()
    member.clear()
    member.raise_failure()
