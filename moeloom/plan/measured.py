"""A machine as it was measured, and what a CPU gives to each rank when ranks share its cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from moeloom.plan.efficiency import Efficiency, Rates
from moeloom.plan.machine import Machine
from moeloom.plan.plan import PIPELINES, PipelineName


@dataclass(frozen=True)
class Measured:
    """One rank's machine and efficiencies, measured while `ranks` ranks were busy on `cores` cores.

    On GPUs, `ranks` is how many were seen; each rank has one of its own.

    date: of the measurement, for people; empty for the built-in numbers.
    """

    machine: Machine
    efficiencies: Mapping[PipelineName, Efficiency]
    ranks: int
    cores: int
    date: str = ""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.cores < 1:
            raise ValueError(f"ranks is {self.ranks}, cores is {self.cores}; both must be at least 1")

    def for_ranks(self, ranks: int, cores: int) -> Measured:
        """What one of `ranks` ranks gets: rates shrink and waits grow as ranks outnumber cores; not on GPUs."""
        if self.machine.num_sms is not None:
            return replace(self, ranks=ranks, cores=cores)
        factor = max(1.0, ranks / cores) / max(1.0, self.ranks / self.cores)
        efficiencies = {name: _slower(efficiency, factor) for name, efficiency in self.efficiencies.items()}
        busy = {name: replace(e, moving_computes=ranks >= cores) for name, e in efficiencies.items()}
        return Measured(_shared(self.machine, factor), busy, ranks, cores, self.date)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "machine": self.machine.to_json(),
            "efficiencies": {name: asdict(efficiency) for name, efficiency in self.efficiencies.items()},
            "ranks": self.ranks,
            "cores": self.cores,
            "date": self.date,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measured:
        """The inverse of `to_json`. Raises ValueError for data of another form."""
        try:
            known = dict(data["efficiencies"].items())
            efficiencies = {name: Efficiency.from_json(known[name]) for name in PIPELINES if name in known}
            machine = Machine.from_json(data["machine"])
            return cls(machine, efficiencies, int(data["ranks"]), int(data["cores"]), str(data["date"]))
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"a measured machine lacks or has too much: {error!r}") from None


def _shared(machine: Machine, factor: float) -> Machine:
    def less(rate: float | None) -> float | None:
        return None if rate is None else rate / factor

    return replace(
        machine,
        flops={name: rate / factor for name, rate in machine.flops.items()},
        memory_bandwidth=less(machine.memory_bandwidth),
        scale_up_bandwidth=less(machine.scale_up_bandwidth),
        scale_out_bandwidth=less(machine.scale_out_bandwidth),
        scale_up_latency=machine.scale_up_latency * factor,
        scale_out_latency=machine.scale_out_latency * factor,
        launch_seconds=machine.launch_seconds * factor,
    )


def _slower(efficiency: Efficiency, factor: float) -> Efficiency:
    def waits(rates: Rates) -> Rates:
        names = ("fixed_seconds", "expert_seconds", "message_seconds")
        return replace(rates, **{name: factor * getattr(rates, name) for name in names})

    return replace(efficiency, stages={name: waits(rates) for name, rates in efficiency.stages.items()})
