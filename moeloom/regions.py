"""The symmetric buffer, declared once: which regions an operation needs, how large, at which offset.

Every rank holds rows for its own tokens and, in the hybrid exchange, for those it forwards; so the buffer's size does
not depend on how unevenly the experts are chosen. A region is laid out for all ranks of a node together, rank by rank,
so that one index reaches any row of the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeloom.types import ReductionName

ALIGNMENT_BYTES = 64  # a cache line: rows of different regions never share one
MIN_TOKENS = 64  # first step of a growing buffer


@dataclass(frozen=True)
class Region:
    """`rows` rows of `row_bytes` on each rank."""

    name: str
    rows: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes on one rank, as placed: a multiple of `ALIGNMENT_BYTES`."""
        return -(-self.rows * self.row_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class TokenSpace:
    """How many token rows a rank's buffer has room for: its own, and those of the sources it forwards for."""

    max_tokens: int
    num_forwarded_sources: int = 0

    @property
    def rows(self) -> int:
        """Token rows on each rank."""
        return self.max_tokens * (1 + self.num_forwarded_sources)


def routing_words(num_topk: int) -> int:
    """int32 words that describe one token's routing on the wire: its row at the source, K ids, K fp32 weights."""
    return 1 + 2 * num_topk


def dispatch_regions(space: TokenSpace, hidden: int, num_topk: int, itemsize: int) -> tuple[Region, ...]:
    """What `dispatch` needs: each token's routing and its payload row."""
    return (
        Region("routing", space.rows, 4 * routing_words(num_topk)),
        Region("payload", space.rows, hidden * itemsize),
    )


def combine_lanes(reduction: ReductionName, num_topk: int, num_ranks: int) -> int:
    """How many contributions one token can get: one from each of its ranks, or one from each slot.

    num_ranks: ranks that write into the same buffer row: all (direct), or those of the node (hybrid, per_rank).
    """
    return num_topk if reduction == "per_slot" else min(num_topk, num_ranks)


def combine_regions(space: TokenSpace, hidden: int, lanes: int, itemsize: int) -> tuple[Region, ...]:
    """What `combine` needs: a row for each contribution to each token."""
    return (Region("returned", space.rows * lanes, hidden * itemsize),)


def total_bytes(regions: Sequence[Region]) -> int:
    """Bytes of symmetric memory on one rank."""
    return sum(region.num_bytes for region in regions)


def next_step(num_tokens: int) -> int:
    """The size to which a buffer grows for `num_tokens`: the next power of two, at least `MIN_TOKENS`."""
    return max(MIN_TOKENS, 1 << max(num_tokens - 1, 0).bit_length())
