"""What implementations reach of a machine's rates, and what they cost beside moving and computing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

MAX_TILE_ROWS = 1 << 16
RESOURCES = ("compute", "memory", "scale_up", "scale_out")


@dataclass(frozen=True)
class Rates:
    """One stage of one implementation.

    compute, memory, scale_up, scale_out: share of the machine's rate that it reaches when nothing else limits it.
    fixed_seconds: per call, whatever its size: agreement, waits, kernels beyond the first. expert_seconds: for
    each expert with rows. message_seconds: for each message posted to another node. rounds: between nodes, how
    often it waits for the other side one after the other.
    """

    compute: float = 1.0
    memory: float = 1.0
    scale_up: float = 1.0
    scale_out: float = 1.0
    fixed_seconds: float = 0.0
    expert_seconds: float = 0.0
    message_seconds: float = 0.0
    rounds: float = 1.0

    def __post_init__(self) -> None:
        for name in RESOURCES:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; a share of the machine's rate must be positive")
        for name in ("fixed_seconds", "expert_seconds", "message_seconds", "rounds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")


@dataclass(frozen=True)
class Efficiency:
    """One pipeline of one backend.

    stages: Rates by stage name. exposed: of the time on all resources but the busiest, the share that the busiest one
    does not hide: 0 is perfect overlap inside a stage (mega: inside the layer), 1 is none. tile_rows: an expert's rows
    are computed in multiples of it. fixed_shapes: work does not shrink with the rows that are there (an expert has
    room for every token of all ranks). exchange_apart: what hybrid sends between nodes is a task of its own, beside
    what moves within them. moving_computes: moving rows also takes the time of what computes (CPU ranks with a core
    each). others: they are of somebody else's implementation, as moeloom has none of its own yet. source: where the
    numbers come from.
    """

    stages: Mapping[str, Rates] = field(default_factory=dict)
    exposed: float = 0.0
    tile_rows: int = 1
    fixed_shapes: bool = False
    exchange_apart: bool = False
    moving_computes: bool = False
    others: bool = False
    source: str = "ideal"

    def __post_init__(self) -> None:
        if not 0 <= self.exposed <= 1:
            raise ValueError(f"exposed is {self.exposed}; allowed: 0..1")
        if not isinstance(self.tile_rows, int) or not 1 <= self.tile_rows <= MAX_TILE_ROWS:
            raise ValueError(f"tile_rows is {self.tile_rows!r}; it must be a whole number, 1..{MAX_TILE_ROWS}")
        for name, kind, allowed in (("others", bool, "True, False"), ("source", str, "a text")):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {allowed}")

    def rates(self, stage: str) -> Rates:
        """Of a stage; one that is not listed is ideal."""
        return self.stages.get(stage, IDEAL_RATES)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Efficiency:
        """The inverse of `to_json`. Raises ValueError for data of another form."""
        names = {f.name for f in fields(cls)}
        if not isinstance(data, Mapping) or not set(data) <= names:
            raise ValueError(f"efficiency has {sorted(data)}; allowed: {sorted(names)}")
        stages = {name: Rates(**rates) for name, rates in data.get("stages", {}).items()}
        return cls(**{**data, "stages": stages})


IDEAL_RATES = Rates()
