"""What has to be done: one MoE layer's work on each rank, and where the ranks are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeloom.config import Recipe
from moeloom.topology import Topology

Phase = Literal["train", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("train", "prefill", "decode")
UNKNOWN_TOKENS = 4096  # a training or prefill batch
INTERMEDIATE_OF_HIDDEN = 0.25  # where I is not known: between DeepSeek-V3 (0.29) and Qwen3-30B (0.38), V4 (0.5)


@dataclass(frozen=True)
class Problem:
    """One MoE layer's work on each rank.

    num_tokens: per rank, None if not known. intermediate: I; None if not known. phase: "train" counts the forward and
    needs a pipeline that has a backward; "decode" means few tokens, often.
    """

    num_tokens: int | None
    hidden: int
    num_experts: int
    num_topk: int
    recipe: Recipe
    phase: Phase = "prefill"
    intermediate: int | None = None

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"phase is {self.phase!r}; allowed: {', '.join(PHASES)}")
        if self.num_tokens is not None and self.num_tokens < 0:
            raise ValueError(f"num_tokens is {self.num_tokens}; it must be 0 or more, or None if not known")
        for name, value in (("hidden", self.hidden), ("num_experts", self.num_experts), ("num_topk", self.num_topk)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.intermediate is not None and self.intermediate < 1:
            raise ValueError(f"intermediate is {self.intermediate}; it must be at least 1, or None if not known")

    @property
    def tokens(self) -> int:
        """Tokens per rank to plan for."""
        return UNKNOWN_TOKENS if self.num_tokens is None else self.num_tokens

    @property
    def width(self) -> int:
        """I to plan for."""
        return self.intermediate or max(1, round(self.hidden * INTERMEDIATE_OF_HIDDEN))

    def __str__(self) -> str:
        tokens = "any number of" if self.num_tokens is None else str(self.num_tokens)
        inner = "" if self.intermediate is None else f", intermediate {self.intermediate}"
        return (
            f"{tokens} tokens per rank, hidden {self.hidden}{inner}, {self.num_experts} experts, top-{self.num_topk},"
            f" recipe {self.recipe}, {self.phase}"
        )


@dataclass(frozen=True)
class Domains:
    """How many ranks there are and how many of them share a scale-up domain, as evenly as can be.

    >>> Domains.of(Topology.split(16, 2))
    Domains(num_ranks=16, num_nodes=2)
    """

    num_ranks: int
    num_nodes: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= self.num_ranks:
            raise ValueError(f"num_nodes is {self.num_nodes}; allowed with {self.num_ranks} ranks: 1..{self.num_ranks}")

    @classmethod
    def of(cls, topology: Topology) -> Domains:
        """The numbers of a topology."""
        return cls(topology.num_ranks, topology.num_nodes)

    @property
    def rank_bounds(self) -> list[int]:
        """For each node the rank after its last one: `Topology.split`."""
        return bounds(self.num_ranks, self.num_nodes)

    def expert_bounds(self, num_experts: int) -> list[int]:
        """For each rank the expert after its last one: `Placement.even`."""
        return bounds(num_experts, self.num_ranks)


def bounds(total: int, parts: int) -> list[int]:
    """The ends of `parts` consecutive shares of `total`, the first ones one larger if it does not divide.

    >>> bounds(5, 2)
    [3, 5]
    """
    share, extra = divmod(total, parts)
    return [share * (part + 1) + min(part + 1, extra) for part in range(parts)]
