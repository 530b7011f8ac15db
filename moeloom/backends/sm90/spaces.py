"""The symmetric memory of a rank: what fits, where each region lies, how large all is. Pure numbers.

Dispatch and combine have two banks each: a rank may be one launch ahead of another, never two. Within a bank there is
a part for each other rank that writes there, so no two write to the same place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moeloom.backends.sm90.parameters import CombineSpace, DispatchSpace

# as in the headers; the kernels do not compile with others
LIMITS = {
    "MAX_RANKS": 8,
    "MAX_TOPK": 32,
    "MAX_CHUNKS": 64,
    "MAX_CHUNK_PAIRS": 4096,
    "MIN_CHUNK": 8,
    "MAX_LOCAL": 512,
    "MAX_EXPERTS": 4096,
    "WORD_COUNTS": 6,
}
MAX_ROW_BYTES = 1 << 20
MAX_PARTS = 32  # of a token's row in combine
NUM_BANKS = 2
ALIGNMENT_BYTES = 256
VECTOR_BYTES = 16  # rows move in units of these


def chunk_tokens(num_tokens: int) -> int:
    """Tokens whose routing a rank shows at once: an even number, so that there are at most MAX_CHUNKS chunks."""
    size = -(-num_tokens // LIMITS["MAX_CHUNKS"])
    return max(LIMITS["MIN_CHUNK"], -(-size // 2) * 2)


def most_tokens(num_topk: int) -> int:
    """The largest max_tokens: a chunk's (token, slot) pairs must fit into a block's shared memory."""
    return LIMITS["MAX_CHUNKS"] * (LIMITS["MAX_CHUNK_PAIRS"] // num_topk // 2 * 2)


@dataclass(frozen=True)
class Sizes:
    """What all ranks of an exchange agree on. Raises ValueError for what the kernels cannot do.

    max_tokens: of any rank. num_local: the most experts of any rank. row_bytes: of a row that dispatch brings.
    sum_bytes: of a row that combine brings back, at most. within: the memory's, of which this exchange uses a part:
    regions keep their places, because a word of an older launch must not look like one of this. slots_travel: there is
    room for every row of combine's reduction per_slot.
    """

    num_ranks: int
    max_tokens: int
    num_topk: int
    num_experts: int
    num_local: int
    row_bytes: int
    sum_bytes: int
    within: Sizes | None = None
    slots_travel: bool = False

    def __post_init__(self) -> None:
        between("num_ranks", self.num_ranks, 1, LIMITS["MAX_RANKS"])
        between("num_topk", self.num_topk, 1, LIMITS["MAX_TOPK"])
        between("max_tokens", self.max_tokens, 1, most_tokens(self.num_topk), f" for top-k {self.num_topk}")
        between("num_experts", self.num_experts, 1, LIMITS["MAX_EXPERTS"])
        between("num_local", self.num_local, 1, LIMITS["MAX_LOCAL"])
        if self.num_experts > self.num_ranks * self.num_local:
            raise ValueError(
                f"num_experts is {self.num_experts}; {self.num_ranks} ranks with at most {self.num_local} local experts"
                f" allow {self.num_ranks * self.num_local}"
            )
        for name in ("row_bytes", "sum_bytes"):
            size = getattr(self, name)
            between(name, size, VECTOR_BYTES, MAX_ROW_BYTES)
            if size % VECTOR_BYTES:
                raise ValueError(f"{name} is {size}; allowed: multiples of {VECTOR_BYTES}")
        if self.within is not None and not self.within.holds(self):
            raise ValueError(f"sizes are {self}; allowed: at most those of the memory, {self.within}")

    def holds(self, other: Sizes) -> bool:
        """Whether memory of these sizes has room for an exchange of the other's."""
        names = ("max_tokens", "num_topk", "num_local", "row_bytes", "sum_bytes", "slots_travel")
        enough = all(getattr(self, name) >= getattr(other, name) for name in names)
        return enough and self.num_ranks == other.num_ranks

    @property
    def pairs(self) -> int:
        """(token, slot) pairs of one rank, at most."""
        return self.max_tokens * self.num_topk

    @cached_property
    def dispatch_space(self) -> DispatchSpace:
        """Offsets of dispatch's regions; they are first."""
        if self.within is not None:
            return self.within.dispatch_space
        line = -(-self.num_local // LIMITS["WORD_COUNTS"]) * VECTOR_BYTES
        offsets, size = _place(
            shown=8,
            counts=LIMITS["MAX_CHUNKS"] * line,
            pairs=(self.pairs + 1) // 2 * VECTOR_BYTES,
            places=self.pairs * 8,
            arrived=self.max_tokens * 4,
            staging=self.max_tokens * self.row_bytes,
        )
        return DispatchSpace(bank_bytes=size * self.num_ranks, source_bytes=size, **offsets)

    @cached_property
    def combine_space(self) -> CombineSpace:
        """Offsets of combine's regions, behind dispatch's."""
        if self.within is not None:
            return self.within.combine_space
        before = NUM_BANKS * self.dispatch_space.bank_bytes
        offsets, size = _place(begun=8, sums=self.max_tokens * self.sum_bytes)
        shifted = {name: before + offset for name, offset in offsets.items()}
        slots = self.num_ranks * size
        slot_bytes = _place(slots=self.pairs * self.sum_bytes)[1] if self.slots_travel else 0
        return CombineSpace(bank_bytes=slots + slot_bytes, sender_bytes=size, slots=before + slots, **shifted)

    @property
    def num_bytes(self) -> int:
        """Symmetric memory of one rank. It must be zeros before the first launch of any rank."""
        return NUM_BANKS * (self.dispatch_space.bank_bytes + self.combine_space.bank_bytes)


def between(name: str, value: int, least: int, most: int, where: str = "") -> None:
    """Raise ValueError unless least <= value <= most."""
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; allowed{where}: {least}..{most}")


def _place(**num_bytes: int) -> tuple[dict[str, int], int]:
    """Each region's offset, one after the other, and the size of all."""
    offsets, end = {}, 0
    for name, size in num_bytes.items():
        offsets[name] = end
        end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end
