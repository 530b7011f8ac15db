"""One rank's device and links as numbers, each with its source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

MUST_BE_KNOWN = ("scale_up_latency", "scale_out_latency", "launch_seconds", "ranks_per_domain")
MAY_BE_NONE = (
    "memory_bytes",
    "memory_bandwidth",
    "scale_up_bandwidth",
    "scale_out_bandwidth",
    "num_sms",
    "nics_per_rank",
    "l2_bytes",
)
NUMBERS = (*MUST_BE_KNOWN, *MAY_BE_NONE)
MAY_BE_ZERO = ("scale_up_latency", "scale_out_latency", "launch_seconds", "nics_per_rank")
WHOLE = ("ranks_per_domain", "num_sms")


@dataclass(frozen=True)
class Machine:
    """One rank's device and its links. Rates are peaks (vendor) or what was measured; `sources` says which.

    flops: FLOP/s, dense, by recipe name ("fp32", "bf16", "fp8"); a missing one is not known.
    memory_bytes: capacity. memory_bandwidth: B/s, reads and writes together.
    scale_up_bandwidth, scale_out_bandwidth: B/s per rank and direction, inside a scale-up domain and between domains
    (the rank's share of the NICs). scale_up_latency: seconds of one signal, one way. scale_out_latency: of one message.
    launch_seconds: of one kernel (or stage) launch from the host. ranks_per_domain: how many a domain usually has.
    num_sms: None on CPUs. nics_per_rank: may be a fraction. l2_bytes: of the cache that all SMs share.
    sources: where a number comes from, by field name, or "flops.fp8". A number that is None is not known.
    Raises ValueError for a number that cannot be, or a source of none.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: float | None
    memory_bandwidth: float | None
    scale_up_bandwidth: float | None
    scale_out_bandwidth: float | None
    scale_up_latency: float
    scale_out_latency: float
    launch_seconds: float
    ranks_per_domain: int
    num_sms: int | None
    nics_per_rank: float | None
    l2_bytes: float | None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name is ''; a machine needs one")
        for name in NUMBERS:
            _check(name, getattr(self, name))
        for recipe, rate in self.flops.items():
            _check(f"flops.{recipe}", rate)
        unknown = sorted(set(self.sources) - self.numbers)
        if unknown:
            raise ValueError(f"sources has {', '.join(unknown)}; allowed: {', '.join(sorted(self.numbers))}")

    @property
    def numbers(self) -> set[str]:
        """The names that `sources` may have: number fields, and "flops.<recipe>" for each recipe."""
        return {*NUMBERS, *(f"flops.{recipe}" for recipe in self.flops)}

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        return data | {"flops": dict(self.flops), "sources": dict(self.sources)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Machine:
        """The inverse of `to_json`. Raises ValueError for data of another form."""
        if not isinstance(data, Mapping):
            raise ValueError(f"machine is {data!r}; it must be a mapping")
        names = {f.name for f in fields(cls)}
        if set(data) != names:
            raise ValueError(f"machine has {sorted(data)}; it must have {sorted(names)}")
        for name in ("flops", "sources"):
            if not isinstance(data[name], Mapping):
                raise ValueError(f"{name} is {data[name]!r}; it must be a mapping")
        return cls(**{**data, "flops": dict(data["flops"]), "sources": dict(data["sources"])})


def _check(name: str, value: Any) -> None:
    if value is None and name in MAY_BE_NONE:
        return
    zero, whole = name in MAY_BE_ZERO, name in WHOLE
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and (value > 0 or (zero and value == 0)):
        return
    allowed = f"a {'whole' if whole else 'finite'} number {'of 0 or more' if zero else 'above 0'}"
    raise ValueError(f"{name} is {value!r}; it must be {allowed}{', or None if not known' * (name in MAY_BE_NONE)}")
