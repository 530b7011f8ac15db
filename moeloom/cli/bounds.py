"""Below what time no stage can be: what it must compute and move, over what the machine gives."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moeloom import machine_cache
from moeloom.config import Recipe
from moeloom.models import ModelShape
from moeloom.placement import Placement
from moeloom.plan.cost import ASSUMED
from moeloom.plan.work import row_bytes, weight_bytes

PRODUCTS = 6  # multiplications and additions of a row by its expert, per H I: three products of 2 H I
BACKWARD_PRODUCTS = 12  # two for each of these: the gradient of its input, and that of its weight


@dataclass(frozen=True)
class Peaks:
    """What one rank's machine gives: FLOP/s of the recipe; bytes per second reading memory, copying within it (read and
    written) and on its link to other ranks. source: where these are from.
    """

    flops: float
    reading: float
    copying: float
    link: float
    source: str


@dataclass(frozen=True)
class Load:
    """Of one rank. tokens: its own. pairs: (token, expert) pairs of its experts. experts_hit: those with any.
    rows_moved: that it sends to other ranks or gets from them, whichever is more, each token once per rank.
    """

    tokens: int
    pairs: int
    experts_hit: int
    rows_moved: int


@dataclass(frozen=True)
class Bound:
    """Seconds, and what they are spent on: "compute", "memory" or "link"."""

    seconds: float
    by: str


def loads(ids: Sequence[Tensor], placement: Placement) -> list[Load]:
    """Of each rank, from all ranks' topk_idx `[T, K]`."""
    num_ranks = placement.num_ranks
    homes = torch.empty(placement.num_experts, dtype=torch.int64)
    for rank, slots in enumerate(placement.slots):
        homes[list(slots)] = rank
    counts = torch.zeros(num_ranks, placement.num_experts, dtype=torch.int64)
    moved = torch.zeros(num_ranks, num_ranks, dtype=torch.int64)  # [from, to] rows
    for source, chosen in enumerate(ids):
        counts[source] = torch.bincount(chosen.flatten().long(), minlength=placement.num_experts)
        goes = torch.zeros(len(chosen), num_ranks, dtype=torch.bool)
        goes.scatter_(1, homes[chosen.long()], True)
        moved[source] = goes.sum(0)
    moved.fill_diagonal_(0)
    of_expert = counts.sum(0)
    return [
        Load(
            tokens=len(ids[rank]),
            pairs=int(of_expert[list(slots)].sum()),
            experts_hit=int((of_expert[list(slots)] > 0).sum()),
            rows_moved=int(max(moved[rank].sum(), moved[:, rank].sum())),
        )
        for rank, slots in enumerate(placement.slots)
    ]


def bounds(shape: ModelShape, recipe: Recipe, peaks: Peaks, load: Load) -> dict[str, Bound]:
    """By stage, of one rank. What a kernel could avoid by doing more at once is not counted.

    experts and layer: 6 H I operations per pair, or reading the weights of the experts hit. backward: 12 H I, or
    reading these weights and writing their gradients. quantise: reading rows and writing them quantised. dispatch:
    reading own rows and writing one per pair, or a row to each rank that needs it; alone: reading rows that are
    quantised already. combine: the way back.
    """
    hidden, itemsize = shape.expert_hidden, recipe.dtype.itemsize
    elements = hidden * shape.intermediate
    weights = load.experts_hit * 3 * elements * weight_bytes(recipe)
    plain, sent = hidden * itemsize, row_bytes(recipe, hidden)

    def either(flops: float, read: float, copied: float, link: float) -> Bound:
        seconds = {
            "compute": flops / peaks.flops,
            "memory": read / peaks.reading + copied / peaks.copying,
            "link": link / peaks.link,
        }
        by = max(seconds, key=lambda name: seconds[name])
        return Bound(seconds[by], by)

    forward = either(PRODUCTS * load.pairs * elements, weights, 0, 0)
    backward = either(BACKWARD_PRODUCTS * load.pairs * elements, 0, 2 * weights, 0)
    return {
        "layer": forward,
        "experts": forward,
        "backward": backward,
        "layer and backward": Bound(forward.seconds + backward.seconds, forward.by),
        "quantise": either(0, 0, load.tokens * (plain + sent), 0),
        "dispatch": either(0, 0, load.tokens * plain + load.pairs * sent, load.rows_moved * sent),
        "dispatch, alone": either(0, 0, (load.tokens + load.pairs) * sent, load.rows_moved * sent),
        "combine": either(0, 0, (load.pairs + load.tokens) * plain, load.rows_moved * plain),
    }


def busiest(shape: ModelShape, recipe: Recipe, peaks: Peaks, ranks: Sequence[Load]) -> dict[str, Bound]:
    """By stage the bound of the rank that has most to do: no slowest rank can be faster."""
    each = [bounds(shape, recipe, peaks, load) for load in ranks]
    return {stage: max((one[stage] for one in each), key=lambda bound: bound.seconds) for stage in each[0]}


def peaks_of_cpu(recipe: Recipe, num_ranks: int) -> Peaks:
    """As `moeloom measure` found them, or built in."""
    found = machine_cache.load("cpu")
    machine = found.for_ranks(num_ranks, machine_cache.cores()).machine
    memory = machine.memory_bandwidth or ASSUMED["memory_bandwidth"]
    link = machine.scale_up_bandwidth or ASSUMED["scale_up_bandwidth"]
    source = f"measured {found.date}" if found.date else "built in, not of this machine: see `moeloom measure`"
    return Peaks(machine.flops.get(recipe.name, ASSUMED["flops"]), memory, memory, link, source)


def peaks_of_gpu(recipe: Recipe, device: torch.device, times: int = 5) -> Peaks:
    """Products and memory as measured now, on this GPU; the link as kept by `moeloom measure`, or the vendor's."""
    from moeloom.backends.sm90.probe import Probe, time_memory, time_products

    probe = Probe(device)
    flops = time_products(probe, times)[recipe.name]
    reading, copying, _ = time_memory(probe, times)
    torch.cuda.empty_cache()
    found = machine_cache.load("sm90")
    link = found.machine.scale_up_bandwidth or ASSUMED["scale_up_bandwidth"]
    source = f"measured in this run; link {f'measured {found.date}' if found.date else 'as the vendor says'}"
    return Peaks(flops, reading, copying, link, source)


def machine_name(device: str) -> str:
    """The GPU's name, or the processor's with its cores."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {machine_cache.cores()} cores"
