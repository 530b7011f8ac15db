"""A plan: the choice, as frozen data that can be printed, compared, stored and passed in by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeloom.config import Recipe
from moeloom.types import ExchangeName

Phase = Literal["train", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("train", "prefill", "decode")
PipelineName = Literal["split", "decode"]
PIPELINES: tuple[PipelineName, ...] = ("split", "decode")
EXCHANGES: tuple[ExchangeName, ...] = ("direct", "hybrid")


@dataclass(frozen=True)
class Problem:
    """One MoE layer's work on each rank."""

    num_tokens: int | None
    hidden: int
    num_experts: int
    num_topk: int
    recipe: Recipe
    phase: Phase = "prefill"

    def __str__(self) -> str:
        tokens = "any number of" if self.num_tokens is None else str(self.num_tokens)
        return (
            f"{tokens} tokens per rank, hidden {self.hidden}, {self.num_experts} experts, top-{self.num_topk},"
            f" recipe {self.recipe}"
        )


@dataclass(frozen=True)
class Candidate:
    """One way to run a problem, and what it is expected to put on the wires of one rank, per layer."""

    pipeline: PipelineName
    exchange: ExchangeName
    scale_out_bytes: float
    scale_up_bytes: float
    microseconds: float
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """What `Runtime` runs. `candidates` and `reason` say why; plans are equal if they run the same."""

    pipeline: PipelineName = "split"
    exchange: ExchangeName = "direct"
    reason: str = "given by the caller"
    candidates: tuple[Candidate, ...] = ()

    def __post_init__(self) -> None:
        if self.pipeline not in PIPELINES:
            raise ValueError(f"pipeline is {self.pipeline!r}; allowed: {', '.join(PIPELINES)}")
        if self.exchange not in EXCHANGES:
            raise ValueError(f"exchange is {self.exchange!r}; allowed: {', '.join(EXCHANGES)}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and (self.pipeline, self.exchange) == (other.pipeline, other.exchange)

    def __hash__(self) -> int:
        return hash((self.pipeline, self.exchange))

    def __str__(self) -> str:
        return f"{self.pipeline}, {self.exchange}"

    def explain(self) -> str:
        """All candidates with their expected traffic and communication time, and why this one was taken."""
        lines = [f"plan: {self} ({self.reason})"]
        for candidate in self.candidates:
            chosen = (candidate.pipeline, candidate.exchange) == (self.pipeline, self.exchange)
            lines.append(
                f"  {'*' if chosen else ' '} {candidate.pipeline} {candidate.exchange:<7}"
                f" between nodes {candidate.scale_out_bytes / 1e6:9.3f} MB"
                f"  within {candidate.scale_up_bytes / 1e6:9.3f} MB"
                f"  ~{candidate.microseconds:8.1f} us  {candidate.note}".rstrip()
            )
        return "\n".join(lines)
