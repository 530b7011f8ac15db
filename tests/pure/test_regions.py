"""Sizes of the symmetric buffer, in closed form; its regions never overlap."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeloom.backends.cpu.buffers import SymmetricBuffer
from moeloom.regions import (
    ALIGNMENT_BYTES,
    MIN_TOKENS,
    Region,
    TokenSpace,
    combine_lanes,
    combine_regions,
    dispatch_regions,
    next_step,
    routing_words,
    total_bytes,
)


def test_a_region_ends_at_a_cache_line() -> None:
    assert [Region("r", rows, 3).num_bytes for rows in (0, 1, 21, 22, 43)] == [0, 64, 64, 128, 192]


def test_the_buffer_of_a_known_case() -> None:
    space = TokenSpace(128, num_forwarded_sources=2)
    assert space.rows == 384
    regions = dispatch_regions(space, hidden=7168, num_topk=8, itemsize=2)
    assert regions == (Region("routing", 384, 4 * 17), Region("payload", 384, 14336))
    assert total_bytes(regions) == 384 * 68 + 384 * 14336
    assert combine_regions(space, 7168, 4, 2) == (Region("returned", 4 * 384, 14336),)
    assert total_bytes(combine_regions(space, 7168, 4, 2)) == 4 * 384 * 14336


@pytest.mark.parametrize("num_topk", [1, 8, 16])
def test_routing_words_are_a_row_and_two_words_for_each_k(num_topk: int) -> None:
    assert routing_words(num_topk) == 1 + num_topk + num_topk


def test_lanes_are_as_many_as_contributions_can_come() -> None:
    assert combine_lanes("per_slot", 8, 4) == 8
    assert combine_lanes("per_rank", 8, 4) == 4
    assert combine_lanes("per_rank", 2, 4) == 2


class Recorder:
    """Stands for the node's memory: notes which bytes a view covers."""

    def tensor(self, dtype: torch.dtype, shape: tuple[int, int], offset: int) -> tuple[int, int]:
        return offset, offset + shape[0] * shape[1] * dtype.itemsize


def spans(regions: tuple[Region, ...], num_local: int) -> list[tuple[int, int]]:
    """First and last byte of each region in the memory of a node."""
    buffer = SymmetricBuffer(SimpleNamespace(local_ranks=tuple(range(num_local))))  # type: ignore[arg-type]
    buffer._memory = Recorder()  # type: ignore[assignment]
    return [buffer.view(regions, region.name, torch.uint8) for region in regions]  # type: ignore[misc]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 1 << 22), st.integers(1, 1 << 14)), min_size=1, max_size=5), st.integers(1, 8))
def test_regions_are_disjoint_and_within_the_total(sizes: list[tuple[int, int]], num_local: int) -> None:
    regions = tuple(Region(str(number), *size) for number, size in enumerate(sizes))
    placed = spans(regions, num_local)
    for region, (begin, end) in zip(regions, placed, strict=True):
        assert begin % ALIGNMENT_BYTES == 0
        assert end - begin == num_local * region.rows * region.row_bytes
    for (_, end), (begin, _) in itertools.pairwise(placed):
        assert begin >= end
    assert placed[-1][1] <= num_local * total_bytes(regions)


def test_sizes_beyond_31_bits_are_exact() -> None:
    space = TokenSpace(1 << 20, num_forwarded_sources=7)
    regions = dispatch_regions(space, hidden=7168, num_topk=8, itemsize=2)
    assert regions[1].num_bytes == (1 << 23) * 14336 > 1 << 31
    routing, payload = spans(regions, 8)
    assert routing[1] <= payload[0] and payload[1] == 8 * ((1 << 23) * 68 + (1 << 23) * 14336)


@given(st.integers(0, 1 << 40))
def test_next_step_is_the_least_power_of_two_that_is_enough(num_tokens: int) -> None:
    step = next_step(num_tokens)
    assert step >= num_tokens and step >= MIN_TOKENS and step.bit_count() == 1
    assert step == MIN_TOKENS or step // 2 < num_tokens


def test_next_step_at_its_edges() -> None:
    assert [next_step(n) for n in (0, 1, 64, 65, 128, 129)] == [64, 64, 64, 128, 128, 256]
