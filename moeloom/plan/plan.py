"""A plan: the choice, as frozen data that can be printed, compared, stored and passed in by hand."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from moeloom.plan.cost import StageTime
from moeloom.plan.efficiency import RESOURCES
from moeloom.schedule.chunk_graph import Stage, layer_graph
from moeloom.schedule.simulate import best_order
from moeloom.schedule.tasks import TaskGraph
from moeloom.types import ExchangeName

PipelineName = Literal["split", "mega", "decode"]
PIPELINES: tuple[PipelineName, ...] = ("split", "mega", "decode")
WORDS = {"scale_up": "scale-up", "scale_out": "scale-out", "latency": "waits"}  # for people
MAX_WIDTH = 160  # of a line of `Plan.explain`
EXCHANGES: tuple[ExchangeName, ...] = ("direct", "hybrid")


@dataclass(frozen=True)
class Candidate:
    """One way to run a problem, and what it is expected to take: one layer's forward on the busiest rank.

    seconds: predicted; None if it cannot run, then `note` says why. stages: of the whole layer. tasks: the stages of
    one chunk, for the graph. scale_up_bytes, scale_out_bytes: on the rank's links. memory_bytes: beside the weights.
    num_comm_sms: SMs of a GPU that keep up with its links.
    """

    pipeline: PipelineName
    exchange: ExchangeName
    chunks: int = 1
    seconds: float | None = None
    stages: tuple[StageTime, ...] = ()
    tasks: tuple[Stage, ...] = ()
    scale_up_bytes: float = 0.0
    scale_out_bytes: float = 0.0
    memory_bytes: float = 0.0
    num_comm_sms: int = 0
    note: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return _name(self.pipeline, self.exchange, self.chunks)

    @property
    def graph(self) -> TaskGraph:
        """The tasks of the layer, with predicted times."""
        return best_order(layer_graph(self.tasks, self.chunks))

    def on(self, resource: str) -> float:
        """Seconds of all stages on one resource, or of "latency"."""
        return sum(getattr(stage, resource) for stage in self.stages)

    @property
    def bound(self) -> str:
        """The resource (or "latency") that takes the largest part."""
        return max((*RESOURCES, "latency"), key=self.on)


@dataclass(frozen=True)
class Plan:
    """What `Runtime` runs. The rest says why; plans are equal if they run the same.

    chunks: parts into which the batch is cut; the exchange of one part overlaps the experts of another.
    reason: why it was taken. candidates: all that were looked at. context: lines about problem and machine.
    roofline: seconds below which no implementation can be on this machine, and by what.
    """

    pipeline: PipelineName = "split"
    exchange: ExchangeName = "direct"
    chunks: int = 1
    reason: str = "given by the caller"
    candidates: tuple[Candidate, ...] = ()
    context: tuple[str, ...] = ()
    roofline: tuple[float, str] | None = None

    def __post_init__(self) -> None:
        if self.pipeline not in PIPELINES:
            raise ValueError(f"pipeline is {self.pipeline!r}; allowed: {', '.join(PIPELINES)}")
        if self.exchange not in EXCHANGES:
            raise ValueError(f"exchange is {self.exchange!r}; allowed: {', '.join(EXCHANGES)}")
        if not isinstance(self.chunks, int) or self.chunks < 1:
            raise ValueError(f"chunks is {self.chunks!r}; it must be an integer of at least 1")
        if self.chunks > 1 and self.pipeline == "decode":
            raise ValueError(f"chunks is {self.chunks}; the decode pipeline has fixed shapes and takes 1")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._runs == other._runs

    def __hash__(self) -> int:
        return hash(self._runs)

    @property
    def _runs(self) -> tuple[str, str, int]:
        return self.pipeline, self.exchange, self.chunks

    def __str__(self) -> str:
        return _name(*self._runs)

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that runs; None if the plan was not made by the planner."""
        return next((c for c in self.candidates if (c.pipeline, c.exchange, c.chunks) == self._runs), None)

    @property
    def seconds(self) -> float | None:
        """Predicted time of one layer's forward."""
        return self.chosen.seconds if self.chosen else None

    def explain(self) -> str:
        """Why this plan: the limit of the machine, and every candidate's time, its parts, and why it lost."""
        lines = [f"plan: {self} ({self.reason})", *(f"  {line}" for line in self.context)]
        if self.roofline and self.seconds:
            limit, by = self.roofline
            share = f"predicted {_time(self.seconds)}, {limit / self.seconds:.0%} of it"
            lines.append(f"  roofline: {_time(limit)} by {_words(by)}; {share}")
        if self.candidates:
            parts = "".join(f"{_words(name):>11}" for name in (*RESOURCES, "latency"))
            lines.append(f"  {'candidate':<26}{'time':>11}{parts}{'memory':>11}")
        for candidate in self.candidates:
            lines.append(self._line(candidate))
        return "\n".join(textwrap.fill(line, MAX_WIDTH, subsequent_indent=" " * 8) for line in lines)

    def _line(self, candidate: Candidate) -> str:
        if candidate.seconds is None:
            return f"  {candidate.name:<26}cannot: {candidate.note}"
        chosen = candidate is self.chosen
        parts = "".join(f"{_time(candidate.on(name)):>11}" for name in (*RESOURCES, "latency"))
        best = self.seconds or candidate.seconds
        if chosen:
            why = f"bound by {_words(candidate.bound)}"
        else:
            why = f"{candidate.seconds / best:.2f} x as long, {_words(candidate.bound)}" if best else ""
        note = f"; {candidate.note}" if candidate.note else ""
        memory = f"{candidate.memory_bytes / 1e6:.1f} MB"
        mark = "*" if chosen else " "
        return f"{mark} {candidate.name:<26}{_time(candidate.seconds):>11}{parts}{memory:>11}  {why}{note}"

    def to_json(self) -> dict[str, Any]:
        """As plain data, candidates included."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of `to_json`. Raises ValueError for data of another form."""
        names = {f.name for f in fields(cls)}
        if not isinstance(data, Mapping) or not set(data) <= names:
            found = sorted(data) if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"plan has {found}; allowed: {sorted(names)}")
        try:
            roofline = data.get("roofline")
            known = {
                "candidates": tuple(_candidate(entry) for entry in data.get("candidates", ())),
                "context": tuple(str(line) for line in data.get("context", ())),
                "roofline": None if roofline is None else (float(roofline[0]), str(roofline[1])),
            }
        except (TypeError, AttributeError, LookupError) as error:
            raise ValueError(f"the plan's data does not fit this version: {error}") from None
        return cls(**{**data, **known})


def _candidate(data: Mapping[str, Any]) -> Candidate:
    stages = tuple(StageTime(**entry) for entry in data.get("stages", ()))
    tasks = tuple(Stage(**entry) for entry in data.get("tasks", ()))
    return Candidate(**{**data, "stages": stages, "tasks": tasks})


def _name(pipeline: str, exchange: str, chunks: int) -> str:
    return f"{pipeline}, {exchange}" + (f", {chunks} chunks" if chunks > 1 else "")


def _words(name: str) -> str:
    return WORDS.get(name, name)


def _time(seconds: float) -> str:
    """Three digits or more: 4.7 us, 812.0 us, 12.30 ms, 1.500 s."""
    if seconds < 1e-2:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.3f} s"
