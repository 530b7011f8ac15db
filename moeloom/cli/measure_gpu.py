"""`moeloom measure` on H100s and H200s: what one of them gives, and the link between the first two that have one."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from moeloom import machine_cache
from moeloom.backends.sm90.probe import (
    GEMM,
    WAYS,
    Launches,
    Link,
    LinkRate,
    Probe,
    gpus_with_kernels,
    neighbours,
    time_launches,
    time_link,
    time_memory,
    time_products,
)
from moeloom.cli.report import is_plain
from moeloom.plan.efficiencies import GPU
from moeloom.plan.efficiency import Efficiency, Rates
from moeloom.plan.machine import Machine
from moeloom.plan.machines import MACHINES, machine_of_gpu
from moeloom.plan.measured import Measured

SCALE_OUT = ("scale_out_bandwidth", "scale_out_latency", "nics_per_rank")  # nothing here measures them


@dataclass(frozen=True)
class GpuProbes:
    """What was seen. gpus: how many reach each other. Bytes per second, FLOP/s, bytes, seconds.

    memory_read, l2_read: reading only. memory_copy: bytes read and written. link: None on one GPU, or where none
    reaches another.
    """

    gpu: str
    gpus: int
    num_sms: int
    memory_bytes: int
    l2_bytes: int
    flops: Mapping[str, float]
    memory_read: float
    memory_copy: float
    l2_read: float
    launches: Launches
    link: Link | None = None


@dataclass(frozen=True)
class GpuFound:
    """The machine, and the probes that it was made of."""

    measured: Measured
    probes: GpuProbes

    def to_json(self) -> dict[str, Any]:
        """The machine as `Measured` has it, and the probes beside it."""
        return self.measured.to_json() | {"probes": asdict(self.probes)}


def run_measure_gpu(console: Console, times: int) -> GpuFound:
    """`measure_gpu`, saying on the console what it does."""
    with console.status("measuring") as status:
        for event in measure_gpu(times):
            if isinstance(event, GpuFound):
                return event
            status.update(event)
    raise AssertionError("measure_gpu yields what was found last")


def measure_gpu(times: int = 9) -> Iterator[str | GpuFound]:
    """Yields what it is doing; last, what was found. times: how often each thing is timed.

    Raises CapabilityError without NVIDIA's bindings.
    """
    gpus = gpus_with_kernels()
    connected = neighbours(gpus)
    one, *others = [torch.device("cuda", gpu) for gpu in connected or gpus[:1]]
    yield "compiling"
    probe = Probe(one)
    yield "products"
    flops = time_products(probe, times)
    yield "memory"
    memory_read, memory_copy, l2_read = time_memory(probe, times)
    torch.cuda.empty_cache()
    yield "launches"
    launches = time_launches(probe, times)
    link = None
    if others:
        yield f"the link between {one} and {others[0]}"
        link = time_link((probe, Probe(others[0])), times)
    properties = torch.cuda.get_device_properties(one)
    probes = GpuProbes(
        gpu=properties.name, gpus=1 + len(others), num_sms=probe.num_sms, memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size, flops=flops, memory_read=memory_read, memory_copy=memory_copy,
        l2_read=l2_read, launches=launches, link=link,
    )  # fmt: skip
    yield GpuFound(solve(probes), probes)


def solve(probes: GpuProbes) -> Measured:
    """What plans are made of. What was not measured is the known machine's of that name; its waits, an H200's."""
    known = machine_of_gpu(probes.gpu)
    found = f"measured on {f'{probes.gpus} x ' * (probes.gpus > 1)}{probes.gpu}"
    best = best_way(probes.link) if probes.link else None
    numbers: dict[str, tuple[Any, str]] = {name: _known(known, name) for name in SCALE_OUT}
    numbers |= {
        "memory_bytes": (float(probes.memory_bytes), "CUDA"),
        "memory_bandwidth": (probes.memory_copy, f"{found}: a copy, bytes read and written"),
        "scale_up_bandwidth": _known(known, "scale_up_bandwidth"),
        "scale_up_latency": _known(known, "scale_up_latency"),
        "launch_seconds": (probes.launches.host, f"{found}: an empty kernel's, on the host"),
        "ranks_per_domain": (probes.gpus, f"{found}: GPUs that reach each other"),
        "num_sms": (probes.num_sms, "CUDA"),
        "l2_bytes": (float(probes.l2_bytes), "CUDA"),
    }
    if probes.link and best:
        way, rate = best
        numbers["scale_up_bandwidth"] = (rate.both_ways, f"{found}: {way} by {rate.sms} SMs, both ways at once")
        signal = "a released store until an acquiring load sees it"
        numbers["scale_up_latency"] = (probes.link.signal_seconds, f"{found}: {signal}")
    products = {name: f"{found}: cuBLAS, {size}^3" for name, (size, _) in GEMM.items()}
    machine = Machine(
        name=probes.gpu, flops=dict(probes.flops), **{name: value for name, (value, _) in numbers.items()},
        sources={name: source for name, (_, source) in numbers.items()}
        | {f"flops.{name}": products[name] for name in probes.flops},
    )  # fmt: skip
    efficiencies = {name: of_measured(efficiency, known, machine) for name, efficiency in GPU.items()}
    today = datetime.date.today().isoformat()
    return Measured(machine, efficiencies, probes.gpus, machine_cache.cores(), today)


def best_way(link: Link) -> tuple[str, LinkRate]:
    """What moves most, both ways at once; by the fewest SMs of those within 1 % of it."""
    every = [(way, rate) for way, rates in link.rates.items() for rate in rates]
    most = max(rate.both_ways for _, rate in every)
    return min((each for each in every if each[1].both_ways >= 0.99 * most), key=lambda each: each[1].sms)


def _known(known: Machine | None, name: str) -> tuple[Any, str]:
    if known:
        return getattr(known, name), known.sources[name]
    if name.endswith("latency"):
        return getattr(MACHINES["h200"], name), f"as of H200: {MACHINES['h200'].sources[name]}"
    return None, "not measured"


def of_measured(efficiency: Efficiency, known: Machine | None, measured: Machine) -> Efficiency:
    """Shares of what was measured instead of shares of what is promised: the seconds of a stage stay the same.

    compute is one share for all dtypes; it was fitted to FP8.
    """
    if known is None:
        return efficiency

    def factor(promised: float | None, found: float | None) -> float:
        return promised / found if promised and found else 1.0

    compute = factor(known.flops.get("fp8"), measured.flops.get("fp8"))
    memory = factor(known.memory_bandwidth, measured.memory_bandwidth)
    scale_up = factor(known.scale_up_bandwidth, measured.scale_up_bandwidth)

    def rescaled(rates: Rates) -> Rates:
        shares = {"compute": rates.compute * compute, "memory": rates.memory * memory}
        return replace(rates, **shares, scale_up=rates.scale_up * scale_up)

    stages = {stage: rescaled(rates) for stage, rates in efficiency.stages.items()}
    return replace(efficiency, stages=stages, source=f"{efficiency.source}; as shares of what was measured here")


def print_gpu(console: Console, found: GpuFound) -> None:
    """The numbers for people."""
    probes = found.probes
    many = f"{probes.gpus} x " if probes.gpus > 1 else ""
    console.print(
        f"{many}{probes.gpu}, {probes.num_sms} SMs, {probes.memory_bytes / 1e9:.0f} GB,"
        f" second-level cache {probes.l2_bytes / 2**20:.0f} MiB"
    )
    style = box.ASCII if is_plain(console) else box.ROUNDED
    console.print(_numbers_table(probes, style))
    if probes.link:
        one, other = probes.link.gpus
        console.print(f"GPU {one} and GPU {other}, GB/s per direction: one way | both ways at once")
        console.print(_link_table(probes.link, style))


def _numbers_table(probes: GpuProbes, style: box.Box) -> Table:
    """One GPU's numbers and the link's best, beside what the built-in table has."""
    known = machine_of_gpu(probes.gpu)
    table = Table(box=style, header_style="bold")
    table.add_column("")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("built in", justify="right", no_wrap=True)
    table.add_column("of it", justify="right", no_wrap=True)

    def row(name: str, value: float, unit: str, scale: float, promised: float | None = None) -> None:
        beside = [f"{promised / scale:.5g}", f"{value / promised:.0%}"] if promised else ["", ""]
        table.add_row(name, f"{value / scale:.4g} {unit}", *beside)

    for name, (size, _) in GEMM.items():
        row(f"products {name}, {size}^3", probes.flops[name], "TFLOP/s", 1e12, known.flops.get(name) if known else None)
    table.add_section()
    bandwidth = known.memory_bandwidth if known else None
    row("memory, reading", probes.memory_read, "TB/s", 1e12, bandwidth)
    row("memory, copying (read and written)", probes.memory_copy, "TB/s", 1e12, bandwidth)
    row("second-level cache, reading", probes.l2_read, "TB/s", 1e12)
    table.add_section()
    launches = probes.launches
    row("a launch, on the host", launches.host, "us", 1e-6, known.launch_seconds if known else None)
    row("a launch until the host knows", launches.until_done, "us", 1e-6)
    row("an empty kernel in a stream", launches.in_stream, "us", 1e-6)
    row("an empty kernel in a CUDA graph", launches.graph_node, "us", 1e-6)
    if probes.link:
        table.add_section()
        promised = known.scale_up_bandwidth if known else None
        way, rate = best_way(probes.link)
        row(f"link, {way} by {rate.sms} SMs, both ways", rate.both_ways, "GB/s", 1e9, promised)
        row("link, copy engine, one way", probes.link.engine.one_way, "GB/s", 1e9, promised)
        row("link, copy engine, both ways", probes.link.engine.both_ways, "GB/s", 1e9, promised)
        row("a signal, one way", probes.link.signal_seconds, "us", 1e-6, known.scale_up_latency if known else None)
    return table


def _link_table(link: Link, style: box.Box) -> Table:
    """By SMs and how rows move: one way, and both ways at once."""
    table = Table(box=style, header_style="bold")
    table.add_column("SMs", justify="right")
    for way in WAYS:
        table.add_column(way, justify="right", no_wrap=True)
    for number, first in enumerate(link.rates[WAYS[0]]):
        rates = [link.rates[way][number] for way in WAYS]
        cells = [f"{rate.one_way / 1e9:.0f} | {rate.both_ways / 1e9:>3.0f}" for rate in rates]
        table.add_row(str(first.sms), *cells)
    return table
