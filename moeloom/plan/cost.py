"""Work x machine x efficiency -> seconds: the roofline."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moeloom.plan.efficiency import RESOURCES, Efficiency, Rates
from moeloom.plan.machine import Machine
from moeloom.plan.work import Work

# for a rate that is not known: slow enough that nothing is planned that would need a fast one; said in the explanation
ASSUMED = {
    "flops": 1e12,  # an ordinary server CPU
    "memory_bandwidth": 100e9,  # the same
    "scale_up_bandwidth": 25e9,  # PCIe
    "scale_out_bandwidth": 12.5e9,  # a 100 Gbit/s port
}


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage: on each resource alone, of waits and launches, and in all."""

    stage: str
    compute: float
    memory: float
    scale_up: float
    scale_out: float
    latency: float
    seconds: float

    @property
    def bound(self) -> str:
        """What takes the largest part: a resource, or "latency"."""
        return max((*RESOURCES, "latency"), key=lambda name: getattr(self, name))


def unknown_rates(machine: Machine, recipe_name: str, num_nodes: int, num_ranks: int) -> tuple[str, ...]:
    """The rates that a plan needs and the machine does not know; `ASSUMED` stands in for them."""
    needed = {"memory_bandwidth": machine.memory_bandwidth}
    if num_ranks > num_nodes:
        needed["scale_up_bandwidth"] = machine.scale_up_bandwidth
    if num_nodes > 1:
        needed["scale_out_bandwidth"] = machine.scale_out_bandwidth
    unknown = tuple(name for name, value in needed.items() if value is None)
    return unknown if recipe_name in machine.flops else (f"flops of {recipe_name}", *unknown)


def stage_time(work: Work, machine: Machine, recipe_name: str, efficiency: Efficiency) -> StageTime:
    """max over resources + the exposed share of the others + latency.

    Each resource: work / (machine's rate x share reached).
    Latency: launch + fixed + hops x signal + messages + experts.
    """
    rates = efficiency.rates(work.stage)
    seconds = {
        "compute": work.flops / (_rate(machine.flops.get(recipe_name), "flops") * rates.compute),
        "memory": work.memory_bytes / (_rate(machine.memory_bandwidth, "memory_bandwidth") * rates.memory),
        "scale_up": work.scale_up_bytes / (_rate(machine.scale_up_bandwidth, "scale_up_bandwidth") * rates.scale_up),
        "scale_out": work.scale_out_bytes
        / (_rate(machine.scale_out_bandwidth, "scale_out_bandwidth") * rates.scale_out),
    }
    latency = _latency(work, machine, rates)
    return StageTime(work.stage, **seconds, latency=latency, seconds=overlapped(seconds.values(), efficiency) + latency)


def fused_time(works: Sequence[Work], machine: Machine, recipe_name: str, efficiency: Efficiency) -> StageTime:
    """Stages that run inside each other: their sums on each resource overlap like those of one stage.

    One launch; of the waits, the first stage's and the last one's remain.
    """
    times = [stage_time(work, machine, recipe_name, efficiency) for work in works]
    sums = {name: sum(getattr(time, name) for time in times) for name in RESOURCES}
    latency = sum(time.latency for time in times) - (len(times) - 1) * machine.launch_seconds
    return StageTime("mega", **sums, latency=latency, seconds=overlapped(sums.values(), efficiency) + latency)


def overlapped(seconds: Collection[float], efficiency: Efficiency) -> float:
    """Of the times on each resource, the longest and the exposed share of the others."""
    longest = max(seconds)
    return longest + efficiency.exposed * (sum(seconds) - longest)


def _latency(work: Work, machine: Machine, rates: Rates) -> float:
    hops = work.scale_up_hops * machine.scale_up_latency
    hops += work.scale_out_hops * rates.rounds * machine.scale_out_latency
    posted = work.messages * rates.message_seconds + work.experts * rates.expert_seconds
    return machine.launch_seconds + rates.fixed_seconds + hops + posted


def _rate(known: float | None, name: str) -> float:
    return ASSUMED[name] if known is None else known
