"""What H100s and H200s give: memory, products, launches, and the link between two of them. For `moeloom measure`.

One process drives both GPUs. Every number is the median of several runs on random bytes, timed by events on the GPU
behind a kernel that rests, so that the host's part is not in it (but for launches, where it is what is asked for).
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from moeloom import jit
from moeloom.backends.sm90.parameters import proof
from moeloom.errors import CapabilityError, KernelError
from moeloom.jit.bindings import driver

THREADS, VECTORS, TILE, STAGES = 1024, 8, 8192, 24
PIECE = THREADS * VECTORS * 16  # bytes that a block reads or copies at once
SHARED_BYTES = STAGES * TILE + 256
WAIT_NS = 1_000_000_000
REST_NS = 400_000  # longer than the host takes to queue what is timed behind it

CAPABILITY = (9, 0)
MEMORY_PIECES = 124  # of each SM: 2 GiB on 132 of them
L2_PASSES = 128  # of a piece of each SM: 17 MB on 132 of them
LINK_BYTES = 512 << 20
LINK_SECONDS = 1.5e-3  # of one timed transfer
SM_COUNTS = (1, 2, 4, 8, 16, 32, 64, 132)
GEMM = {"fp32": (4096, torch.float32), "bf16": (8192, torch.bfloat16), "fp8": (8192, torch.float8_e4m3fn)}
LAUNCHES = 200
ROUNDS = 400


class ProbePassed(ctypes.Structure):
    """What probe_signal leaves behind."""

    _fields_ = [("nanoseconds", ctypes.c_uint64), ("rounds", ctypes.c_uint32), ("unused", ctypes.c_uint32)]


_NUMBERS = {
    "PROBE_THREADS": THREADS,
    "PROBE_VECTORS": VECTORS,
    "PROBE_TILE": TILE,
    "PROBE_STAGES": STAGES,
    "sizeof(ProbeShared)": SHARED_BYTES,
}
_TEXT = f'#include "probe.cuh"\n{proof((ProbePassed,), _NUMBERS)}'
_WIDE = tuple(f"moeloom::probe_{name}" for name in ("nothing", "rest", "read", "copy"))
_NARROW = tuple(f"moeloom::probe_{name}" for name in ("bulk", "signal"))
KERNELS = (
    jit.Declared(jit.Source("probe", _TEXT, _WIDE), THREADS),
    jit.Declared(jit.Source("probe_links", _TEXT, _NARROW), 32, shared_bytes=SHARED_BYTES),
)


def gpus_with_kernels() -> list[int]:
    """The numbers of the GPUs that kernels are written for."""
    if not torch.cuda.is_available():
        return []
    return [gpu for gpu in range(torch.cuda.device_count()) if torch.cuda.get_device_capability(gpu) == CAPABILITY]


def reach(one: int, other: int) -> bool:
    """Whether two GPUs reach each other's memory, by their numbers."""
    return torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one)


def neighbours(gpus: list[int]) -> list[int]:
    """The first GPU that reaches another, and those that it reaches; none if none does."""
    for one in gpus:
        found = [other for other in gpus if other != one and reach(one, other)]
        if found:
            return [one, *found]
    return []


class Probe:
    """The kernels on one GPU; each method launches one on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._kernels: dict[str, jit.Kernel] = {}
        for declared in KERNELS:
            kernels = jit.load(jit.compile(declared.source), device)
            self._kernels |= {expression.split("probe_")[1]: kernel for expression, kernel in kernels.items()}

    def nothing(self) -> None:
        """A kernel that does nothing."""
        self._launch("nothing", 1, 32, 0)

    def launcher_of_nothing(self) -> Callable[[], None]:
        """The bare launch of it, on what is now the current stream of this GPU, which must be the current one."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        return functools.partial(self._kernels["nothing"].launch, stream, 1, 32, 0, ())

    def rest(self, nanoseconds: int = REST_NS) -> None:
        """Keep the stream busy."""
        self._launch("rest", 1, 32, 0, nanoseconds)

    def read(self, start: int, num_bytes: int, passes: int, total: Tensor) -> None:
        """Read whole pieces; total `[1]` int32 is xor-ed with every word, once per pass."""
        self._launch("read", self.num_sms, THREADS, 0, start, _pieces(num_bytes), passes, total.data_ptr())

    def copy(self, to: int, start: int, num_bytes: int, sms: int) -> None:
        """Copy whole pieces by loads and stores of that many SMs."""
        self._launch("copy", sms, THREADS, 0, to, start, _pieces(num_bytes))

    def bulk_copy(self, to: int, start: int, num_bytes: int, sms: int, late: Tensor) -> None:
        """The same through shared memory; late `[1]` int32 becomes 1 if bytes did not come."""
        tiles = _pieces(num_bytes) * (PIECE // TILE)
        self._launch("bulk", sms, 32, SHARED_BYTES, to, start, tiles, WAIT_NS, late.data_ptr())

    def signal(
        self, own: int, theirs: int, begins: bool, first: int, rounds: int, passed: Tensor, wait_ns: int = WAIT_NS
    ) -> None:
        """Pass words first, first + 1, ... to the peer and back. passed: a `ProbePassed`."""
        self._launch("signal", 1, 32, 0, own, theirs, int(begins), first, rounds, wait_ns, passed.data_ptr())

    def _launch(self, name: str, grid: int, block: int, shared_bytes: int, *args: int) -> None:
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream().cuda_stream
            self._kernels[name].launch(stream, grid, block, shared_bytes, args)


def _pieces(num_bytes: int) -> int:
    if num_bytes < 0 or num_bytes % PIECE:
        raise ValueError(f"num_bytes is {num_bytes}; allowed: multiples of {PIECE}")
    return num_bytes // PIECE


class Memory:
    """Memory of a GPU that its peers reach: from the driver, as torch's may be mapped for its own GPU only."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.device, self.num_bytes = device, num_bytes
        with torch.cuda.device(device):
            torch.empty(1, device=device)  # makes the context
            self.address = int(_value(driver().cuMemAlloc(num_bytes), f"{num_bytes} bytes on {device}"))
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3,
        }  # fmt: skip

    def tensor(self) -> Tensor:
        """All of it, `[num_bytes]` uint8."""
        return torch.as_tensor(self, device=self.device)

    def free(self) -> None:
        """Give it back; no tensor of it may be used any more."""
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device):
            _value(driver().cuMemFree(self.address), "freeing memory")


def connect(one: torch.device, other: torch.device) -> None:
    """Let each reach the other's memory. Raises CapabilityError if they cannot."""
    for device, peer in ((one, other), (other, one)):
        if not torch.cuda.can_device_access_peer(device, peer):
            raise CapabilityError(f"{device} cannot reach the memory of {peer}")
        cuda = driver()
        for each in (peer, device):
            torch.empty(1, device=each)
        with torch.cuda.device(device):
            handle = _value(cuda.cuDeviceGet(peer.index), f"{peer}")
            context = _value(cuda.cuDevicePrimaryCtxRetain(handle), f"{peer}")
            (status,) = cuda.cuCtxEnablePeerAccess(context, 0)
            cuda.cuDevicePrimaryCtxRelease(handle)
            if status not in (cuda.CUresult.CUDA_SUCCESS, cuda.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED):
                raise CapabilityError(f"{device} cannot reach the memory of {peer}: {status.name}")


def _value(result: tuple[Any, ...], what: str) -> Any:
    status, *values = result
    if int(status):
        raise KernelError(f"{what}: {status.name}")
    return values[0] if values else None


def time_products(probe: Probe, times: int) -> dict[str, float]:
    """FLOP/s of one large product by dtype, by cuBLAS: fp32 without tensor cores, fp8 with one scale a tensor."""
    one = torch.ones((), device=probe.device)

    def multiply(a: Tensor, b: Tensor) -> None:
        if a.dtype == torch.float8_e4m3fn:
            torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
        else:
            torch.mm(a, b)

    found = {}
    for name, (size, dtype) in GEMM.items():
        a, b = (torch.randn(size, size, device=probe.device).to(dtype) for _ in range(2))
        found[name] = 2 * size**3 / _seconds(probe, functools.partial(multiply, a, b.t()), times)
    return found


def time_memory(probe: Probe, times: int) -> tuple[float, float, float]:
    """Bytes per second: reading memory, copying within it (bytes read and written), reading the second-level cache."""
    cached_bytes = probe.num_sms * PIECE
    num_bytes = MEMORY_PIECES * cached_bytes
    rows = torch.randint(-(1 << 31), 1 << 31, (num_bytes // 4,), dtype=torch.int32, device=probe.device)
    total, copied = rows.new_zeros(1), torch.empty_like(rows)
    reading = _seconds(probe, lambda: probe.read(rows.data_ptr(), num_bytes, 1, total), times)
    copying = _seconds(probe, lambda: copied.copy_(rows), times)
    cached = _seconds(probe, lambda: probe.read(rows.data_ptr(), cached_bytes, L2_PASSES, total), times)
    return num_bytes / reading, 2 * num_bytes / copying, cached_bytes * L2_PASSES / cached


def _seconds(probe: Probe, run: Callable[[], Any], times: int, rest_ns: int = REST_NS) -> float:
    """On the GPU, each run by itself; two more warm up."""
    taken = []
    with torch.cuda.device(probe.device):
        for _ in range(2 + times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            probe.rest(rest_ns)
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end) * 1e-3)
    return median(taken[2:])


@dataclass(frozen=True)
class Launches:
    """Seconds of an empty kernel: the host's part; in a stream, from one to the next; in a CUDA graph, the same; from
    the launch until the host knows that it has run.
    """

    host: float
    in_stream: float
    graph_node: float
    until_done: float


def time_launches(probe: Probe, times: int) -> Launches:
    """Of kernels launched by `jit.Kernel`."""

    def many() -> None:
        for _ in range(LAUNCHES):
            probe.nothing()

    host, done = [], []
    with torch.cuda.device(probe.device):
        launch = probe.launcher_of_nothing()
        for _ in range(2 + times):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(LAUNCHES):
                launch()
            host.append((time.perf_counter() - start) / LAUNCHES)
            torch.cuda.synchronize()
            start = time.perf_counter()
            launch()
            torch.cuda.synchronize()
            done.append(time.perf_counter() - start)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        queueing_ns = REST_NS + int(6e9 * LAUNCHES * median(host[2:]))  # `many` does more than launch
        in_stream, replay = _seconds(probe, many, times, queueing_ns), _seconds(probe, graph.replay, times)
    return Launches(median(host[2:]), in_stream / LAUNCHES, replay / LAUNCHES, median(done[2:]))


@dataclass(frozen=True)
class LinkRate:
    """Bytes per second and direction, by that many SMs of each GPU: one way, and both ways at once."""

    sms: int
    one_way: float
    both_ways: float


@dataclass(frozen=True)
class Link:
    """Between two GPUs of a node.

    rates: by how rows move: "stores", "loads", "bulk stores", "bulk loads"; the first names which end is the peer's.
    engine: the copy engine's; its sms is 0. signal_seconds: one way, a released store until an acquiring load sees it.
    """

    gpus: tuple[int, int]
    rates: dict[str, tuple[LinkRate, ...]] = field(default_factory=dict)
    engine: LinkRate = LinkRate(0, 0.0, 0.0)
    signal_seconds: float = 0.0


WAYS = ("stores", "loads", "bulk stores", "bulk loads")


class Pair:
    """Two GPUs that reach each other: on each a source, a target and a word to wait at."""

    def __init__(self, probes: tuple[Probe, Probe], num_bytes: int = LINK_BYTES) -> None:
        self.probes, self.num_bytes = probes, num_bytes
        self.devices = tuple(probe.device for probe in probes)
        self.memory: list[Memory] = []
        connect(*self.devices)
        self.source, self.target = (self._new(num_bytes) for _ in range(2))
        self.words = self._new(4096)
        for index, device in enumerate(self.devices):
            self.source[index].tensor().view(torch.int32).random_()
            self.words[index].tensor().zero_()
            torch.cuda.synchronize(device)
        self.passed = [torch.zeros(ctypes.sizeof(ProbePassed), dtype=torch.uint8, device=d) for d in self.devices]
        self.late = [torch.zeros(1, dtype=torch.int32, device=device) for device in self.devices]
        self._next_word = 1

    def _new(self, num_bytes: int) -> list[Memory]:
        new = []
        for device in self.devices:
            new.append(Memory(device, num_bytes))
            self.memory.append(new[-1])
        return new

    def close(self) -> None:
        """Give the memory back."""
        while self.memory:
            self.memory.pop().free()

    def move(self, way: str, index: int, sms: int, start: int, num_bytes: int) -> None:
        """GPU `index` moves bytes to (stores, engine) or from (loads) the other's memory, on its current stream."""
        loads = way.endswith("loads")
        to = self.target[index if loads else 1 - index].address + start
        source = self.source[1 - index if loads else index].address + start
        if way == "engine":
            with torch.cuda.device(self.devices[index]):
                stream = torch.cuda.current_stream().cuda_stream
                _value(driver().cuMemcpyDtoDAsync(to, source, num_bytes, stream), "a copy between GPUs")
        elif way.startswith("bulk"):
            self.probes[index].bulk_copy(to, source, num_bytes, sms, self.late[index])
        else:
            self.probes[index].copy(to, source, num_bytes, sms)

    def exchange(self, begins: tuple[bool, bool], rounds: int, wait_ns: int = WAIT_NS) -> None:
        """Launch a signal kernel on both."""
        for index, probe in enumerate(self.probes):
            own, theirs = self.words[index].address, self.words[1 - index].address
            probe.signal(own, theirs, begins[index], self._next_word, rounds, self.passed[index], wait_ns)
        self._next_word += rounds

    def check(self, rounds: int) -> int:
        """Wait for both; the nanoseconds of the last exchange. Raises KernelError if one has given up."""
        for index, device in enumerate(self.devices):
            torch.cuda.synchronize(device)
            passed = ProbePassed.from_buffer_copy(self.passed[index].cpu().numpy().tobytes())
            if passed.rounds != rounds or int(self.late[index]):
                found = f"{passed.rounds} of {rounds} signals, {'not all' if int(self.late[index]) else 'all'} bytes"
                raise KernelError(f"{device} saw {found} of its peer in {WAIT_NS * 1e-9:g} s")
        first = ProbePassed.from_buffer_copy(self.passed[0].cpu().numpy().tobytes())
        return int(first.nanoseconds)

    def seconds(self, way: str, sms: int, num_bytes: int, movers: tuple[int, ...], times: int) -> float:
        """Median of the slower mover. Both begin together, each run with other bytes; one more warms up."""
        taken = []
        for number in range(1 + times):
            start = number * num_bytes % max(PIECE, self.num_bytes - num_bytes + PIECE)
            self.probes[0].rest()
            self.exchange((True, True), 1)
            events = []
            for index in movers:
                with torch.cuda.device(self.devices[index]):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    self.move(way, index, sms, start // PIECE * PIECE, num_bytes)
                    end.record()
                events.append((begin, end))
            self.check(1)
            taken.append(max(begin.elapsed_time(end) for begin, end in events) * 1e-3)
        return median(taken[1:])

    def rate(self, way: str, sms: int, times: int) -> LinkRate:
        """One way and both ways at once."""
        share = max(1, sms) * PIECE  # as much for each SM
        expected = 350e9 if way == "engine" else min(350e9, sms * 40e9)
        wanted = min(expected * LINK_SECONDS, self.num_bytes)
        num_bytes = max(1, int(wanted / share)) * share
        one, both = (num_bytes / self.seconds(way, sms, num_bytes, movers, times) for movers in ((0,), (0, 1)))
        return LinkRate(sms, one, both)

    def signal_seconds(self, times: int) -> float:
        """One way, median of several conversations."""
        taken = []
        for _ in range(1 + times):
            self.exchange((True, False), ROUNDS)
            taken.append(self.check(ROUNDS) * 1e-9 / (2 * (ROUNDS - 1)))
        return median(taken[1:])


@contextmanager
def pair_of(probes: tuple[Probe, Probe]) -> Iterator[Pair]:
    """A `Pair`, closed at the end."""
    pair = Pair(probes)
    try:
        yield pair
    finally:
        pair.close()


def time_link(probes: tuple[Probe, Probe], times: int) -> Link:
    """Everything about the link between two GPUs."""
    with pair_of(probes) as pair:
        most = min(probe.num_sms for probe in probes)
        counts = sorted({min(sms, most) for sms in SM_COUNTS})
        rates = {way: tuple(pair.rate(way, sms, times) for sms in counts) for way in WAYS}
        gpus = (pair.devices[0].index, pair.devices[1].index)
        return Link(gpus, rates, pair.rate("engine", 0, times), pair.signal_seconds(times))
