"""`moeloom.layout` against plain loops over (token, k) pairs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeloom.layout import (
    Layout,
    align,
    check_order,
    first_bad_id,
    hits,
    lanes,
    pack_left,
    pairs_by,
    receive_layout,
)

Table = list[list[int]]
Row = tuple[int, int] | None  # (token, k), or None for padding


def tensor(table: Table, num_topk: int) -> Tensor:
    return torch.tensor(table, dtype=torch.int64).reshape(-1, num_topk)


def rows_of(
    table: Table, num_local: int, order: str, alignment: int, capacity: int | None
) -> tuple[list[Row], list[int]]:
    """Every row, and where each expert's begin, as if there were no capacity ("batched": with it)."""
    groups: list[list[Row]] = [
        [(token, k) for token, row in enumerate(table) for k, slot in enumerate(row) if slot == expert]
        for expert in range(num_local)
    ]
    depth = max((-(-len(group) // alignment) * alignment for group in groups), default=0)
    if capacity is not None:
        depth = capacity
    rows, starts = [], [0]
    for group in groups:
        size = depth if order == "batched" else -(-len(group) // alignment) * alignment
        rows += (group + [None] * size)[:size]
        starts.append(len(rows))
    return rows, starts


def check(layout: Layout, table: Table, num_local: int, order: str, alignment: int, capacity: int | None) -> None:
    """Everything a layout says, from the rows alone."""
    num_topk = layout.token_topk_to_pos.shape[1]
    if order == "rank":
        rows: list[Row] = [(token, 0) for token in range(len(table))]
        starts = [0] * (num_local + 1)
    else:
        rows, starts = rows_of(table, num_local, order, alignment, capacity)
    if capacity is not None and order != "batched":
        rows = (rows + [None] * capacity)[:capacity]
        starts = [min(start, capacity) for start in starts]
    kept = {row: pos for pos, row in enumerate(rows) if row is not None}
    if order == "rank":
        served = [slot for token, _ in kept for slot in table[token] if slot >= 0]
    else:
        served = [table[token][k] for token, k in kept]

    assert layout.num_rows == len(rows)
    assert layout.pos_to_token.tolist() == [-1 if row is None else row[0] for row in rows]
    assert layout.pos_to_topk.tolist() == [-1 if row is None else row[1] for row in rows]
    assert layout.expert_start.tolist() == starts
    assert layout.num_tokens_per_expert.tolist() == [served.count(expert) for expert in range(num_local)]
    assert layout.num_dropped == sum(slot >= 0 for row in table for slot in row) - len(served)
    wanted = [[kept.get((token, k), -1) for k in range(num_topk)] for token in range(len(table))]
    assert layout.token_topk_to_pos.tolist() == wanted
    for name in ("expert_start", "num_tokens_per_expert", "pos_to_token", "pos_to_topk", "token_topk_to_pos"):
        assert getattr(layout, name).dtype == torch.int64, name


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Table, int, int, str, int, int | None]:
    num_local, num_topk = draw(st.integers(0, 6)), draw(st.integers(1, 16))
    order = draw(st.sampled_from(["expert", "rank", "batched"]))
    row = st.lists(st.integers(-1, num_local - 1), min_size=num_topk, max_size=num_topk)
    if order == "rank":  # only tokens with a slot here have a row
        row = row.filter(lambda slots: max(slots) >= 0)
    table = draw(st.lists(row, max_size=0 if order == "rank" and not num_local else 12))
    alignment = 1 if order == "rank" else draw(st.sampled_from([1, 2, 3, 8, 128]))
    capacity = draw(st.none() | st.integers(0, 40))
    if order == "batched" and capacity is not None:
        capacity = capacity // 8 * alignment
    return table, num_local, num_topk, order, alignment, capacity


@settings(max_examples=400, deadline=None, derandomize=True)
@given(layouts())
def test_receive_layout_is_what_loops_say(case: tuple[Table, int, int, str, int, int | None]) -> None:
    table, num_local, num_topk, order, alignment, capacity = case
    check_order(order, alignment, capacity)
    layout = receive_layout(tensor(table, num_topk), num_local, order, alignment, capacity)
    check(layout, table, num_local, order, alignment, capacity)


@pytest.mark.parametrize("num_topk", range(1, 17))
@pytest.mark.parametrize("order", ["expert", "batched"])
def test_every_top_k_with_duplicates(num_topk: int, order: str) -> None:
    generator = torch.Generator().manual_seed(num_topk)
    slot = torch.randint(-1, 3, (50, num_topk), generator=generator)
    slot[7] = 1  # the same slot K times: K rows
    layout = receive_layout(slot, 3, order, 4)
    check(layout, slot.tolist(), 3, order, 4, None)
    assert (layout.pos_to_token == 7).sum() == num_topk


def test_the_example_of_the_docstring() -> None:
    layout = receive_layout(torch.tensor([[1, 0], [0, -1]]), 2, "expert")
    assert layout.pos_to_token.tolist() == [0, 1, 0]
    assert layout.token_topk_to_pos.tolist() == [[2, 0], [1, -1]]


@pytest.mark.parametrize("order", ["expert", "rank", "batched"])
@pytest.mark.parametrize("num_local", [0, 3])
def test_no_tokens(order: str, num_local: int) -> None:
    layout = receive_layout(torch.empty(0, 2, dtype=torch.int64), num_local, order)
    assert layout.num_rows == 0 and layout.num_dropped == 0
    assert layout.expert_start.tolist() == [0] * (num_local + 1)
    assert layout.num_tokens_per_expert.tolist() == [0] * num_local
    assert layout.token_topk_to_pos.shape == (0, 1 if order == "rank" else 2)


@pytest.mark.parametrize("order", ["expert", "rank", "batched"])
def test_capacity_zero_drops_every_pair(order: str) -> None:
    layout = receive_layout(torch.tensor([[0, 1], [1, 1], [-1, 0]]), 2, order, capacity=0)
    assert layout.num_rows == 0 and layout.num_dropped == 5
    assert layout.num_tokens_per_expert.tolist() == [0, 0]
    assert (layout.token_topk_to_pos == -1).all()


def test_capacity_larger_than_the_rows_only_adds_padding() -> None:
    slot = torch.tensor([[0], [2], [0]])
    tight, wide = receive_layout(slot, 3, "expert"), receive_layout(slot, 3, "expert", capacity=9)
    assert wide.num_rows == 9 and wide.num_dropped == 0
    assert wide.pos_to_token.tolist() == tight.pos_to_token.tolist() + [-1] * 6
    assert wide.expert_start.tolist() == tight.expert_start.tolist()


def test_in_order_rank_a_dropped_token_drops_all_its_pairs() -> None:
    layout = receive_layout(torch.tensor([[0, 1, -1], [1, 1, 0], [0, -1, -1]]), 2, "rank", capacity=1)
    assert layout.num_dropped == 4
    assert layout.token_topk_to_pos.tolist() == [[0], [-1], [-1]]
    assert layout.num_tokens_per_expert.tolist() == [1, 1]


tables = st.integers(1, 5).flatmap(
    lambda width: st.tuples(
        st.just(width), st.lists(st.lists(st.integers(-1, 4), min_size=width, max_size=width), max_size=6)
    )
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(tables)
def test_hits_lanes_pack_left_and_pairs_by_are_what_loops_say(case: tuple[int, Table]) -> None:
    width, table = case
    index = tensor(table, width)
    named = hits(index, 5)
    assert named.tolist() == [[column in row for column in range(5)] for row in table]
    mask = index >= 0
    seen = [[k for k, value in enumerate(row) if value >= 0] for row in table]
    assert lanes(mask).tolist() == [[ks.index(k) if k in ks else -1 for k in range(width)] for ks in seen]
    packed = [[row[k] for k in ks] + [-1] * (width - len(ks)) for row, ks in zip(table, seen, strict=True)]
    assert pack_left(index, mask).tolist() == packed
    pairs, count = pairs_by(index, 5)
    wanted = sorted((value, i, k) for i, row in enumerate(table) for k, value in enumerate(row) if value >= 0)
    assert pairs.tolist() == [i * width + k for _, i, k in wanted]
    assert count.tolist() == [sum(value == column for value, _, _ in wanted) for column in range(5)]


def test_pack_left_keeps_the_dtype_and_values_of_weights() -> None:
    values = torch.tensor([[0.5, 2.0, 0.25], [1.0, 3.0, 4.0]])
    mask = torch.tensor([[False, True, True], [False, False, False]])
    assert torch.equal(pack_left(values, mask), torch.tensor([[2.0, 0.25, -1.0], [-1.0, -1.0, -1.0]]))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_empty_inputs_of_the_small_functions(shape: tuple[int, int]) -> None:
    index = torch.empty(shape, dtype=torch.int64)
    assert hits(index, 4).tolist() == [[False] * 4] * shape[0]
    assert lanes(index >= 0).shape == shape
    assert pack_left(index, index >= 0).shape == shape
    pairs, count = pairs_by(index, 4)
    assert pairs.tolist() == [] and count.tolist() == [0] * 4


def test_align() -> None:
    assert align(torch.tensor([0, 1, 8, 9]), 8).tolist() == [0, 8, 8, 16]
    assert align(torch.tensor([0, 1, 7]), 1).tolist() == [0, 1, 7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("token", 1, None), "order is 'token'; allowed: expert, rank, batched"),
        (("expert", 0, None), "alignment is 0; it must be at least 1"),
        (("expert", 1, -1), "capacity is -1; it must be 0 or more, or None"),
        (("rank", 8, None), "alignment is 8; rows of order 'rank' belong to no single expert, so it must be 1"),
        (("batched", 8, 12), "capacity is 12; order 'batched' needs a multiple of alignment 8"),
    ],
)
def test_check_order_names_what_is_wrong(arguments: tuple[str, int, int | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_order(*arguments)


@pytest.mark.parametrize("arguments", [("expert", 128, 5), ("rank", 1, 0), ("batched", 8, 0), ("batched", 8, 24)])
def test_check_order_accepts(arguments: tuple[str, int, int | None]) -> None:
    check_order(*arguments)


@pytest.mark.parametrize(("value", "is_bad"), [(-1, False), (0, False), (7, False), (8, True), (-2, True)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_first_bad_id(value: int, is_bad: bool, dtype: torch.dtype) -> None:
    ids = torch.zeros(4, 3, dtype=dtype)
    ids[2, 1] = ids[3, 0] = value
    assert first_bad_id(ids, 8) == ((2, 1, value) if is_bad else None)
    assert first_bad_id(ids[:0], 8) is None
