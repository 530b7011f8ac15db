"""What `moeloom doctor` looks at: whether Runtimes work on this machine and, if not, what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import moeloom.backends
from moeloom import env, jit
from moeloom.backends.shared_memory import SharedFile
from moeloom.backends.sm90.probe import gpus_with_kernels, reach
from moeloom.errors import MoeloomError
from moeloom.experts import Experts
from moeloom.jit import compiler
from moeloom.jit.bindings import INSTALL
from moeloom.jit.source import ARCHITECTURE
from moeloom.launch import RankPool
from moeloom.route import Router
from moeloom.runtime import Runtime
from moeloom.topology import Topology

MIN_PYTHON, MIN_TORCH, MIN_TRANSFORMERS = (3, 11), (2, 11), (5, 23)
MIN_DRIVER = 580  # of CUDA 13
MIN_SHARED_BYTES = 64 << 20  # what docker gives without --shm-size
TEST_BYTES = 1 << 20
MAX_TEMPORARY_PATH = 107 - len("/pymp-12345678/listener-12345678")  # what multiprocessing puts behind it
LAYER_SECONDS = 30.0
IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
DRIVER = Path("/proc/driver/nvidia/version")
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. note: good to know; problem: Runtimes of several ranks do not work so."""

    name: str
    state: State
    found: str
    advice: str = ""


def examine(ranks: int = 2) -> list[Finding]:
    """Everything, in the order in which a reader should mend it. ranks: how many will run on this machine."""
    basics = [check_python(), check_torch(), check_platform(), check_cores(ranks)]
    basics += [check_shared_memory(), check_temporary_folder(), check_host(), check_interface()]
    first = next((finding for finding in basics if finding.state == "problem"), None)
    tried = Finding("ranks", "note", f"not tried: see {first.name}") if first else check_ranks()
    accelerators = [check_gpus(), *check_peer_access(), *check_driver(), check_nvrtc(), *check_kernels(), check_nccl()]
    findings = [*basics, tried, *accelerators, check_cache(), *check_extras()]
    return [*findings, check_backend(findings)]


def works(findings: list[Finding]) -> bool:
    """Whether nothing is in the way of a Runtime."""
    return all(finding.state != "problem" for finding in findings)


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    """The interpreter."""
    found = ".".join(map(str, version))
    if version < MIN_PYTHON:
        return Finding("python", "problem", found, f"install Python {_dotted(MIN_PYTHON)} or newer")
    return Finding("python", "ok", found)


def check_torch(version: str = torch.__version__) -> Finding:
    """torch, how it was built and what its kernels use."""
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    mkl = torch.backends.mkl.is_available()
    found = f"{version}, {build}, {'MKL' if mkl else 'no MKL'}, {torch.backends.cpu.get_cpu_capability()}"
    if _numbers(version) < MIN_TORCH:
        return Finding("torch", "problem", found, f"pip install 'torch>={_dotted(MIN_TORCH)}'")
    if not mkl:
        advice = "equal bits for any number of rows were measured with MKL; run tests/backend/test_experts.py here"
        return Finding("torch", "note", found, advice)
    return Finding("torch", "ok", found)


def check_platform(system: str = sys.platform, machine: str = platform.machine()) -> Finding:
    """Operating system and processor."""
    found = f"{system} on {machine}"
    if (system, machine) != ("linux", "x86_64"):
        return Finding(
            "platform", "problem", f"{found}: several ranks are refused, one rank is untested", "use Linux on x86-64"
        )
    return Finding("platform", "ok", f"{found}, kernel {platform.release()}")


def check_cores(ranks: int) -> Finding:
    """Cores that this process may use, and what `ranks` ranks make of them."""
    cores, threads = num_cores(), torch.get_num_threads()
    if not cores:
        return Finding("cores", "note", "the system does not say which cores this process may use", "see `taskset -p`")
    found = f"{cores:g} core(s), {threads} torch thread(s)"
    if ranks > cores:
        return Finding(
            "cores", "note", f"{found}: {ranks} ranks will take turns", f"start {max(1, int(cores))} rank(s) or fewer"
        )
    if ranks * threads > cores:
        advice = f"moeloom.launch shares them out; under other launchers set OMP_NUM_THREADS={int(cores / ranks)}"
        return Finding("cores", "note", f"{found}: too many threads for {ranks} ranks", advice)
    return Finding("cores", "ok", found)


def num_cores() -> float:
    """Cores by affinity, or the container's share of them if that is less; 0 if unknown."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 0)
    try:
        quota, period = CPU_LIMIT.read_text().split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


def check_shared_memory() -> Finding:
    """The folder for shared memory, by making a file in it as the ranks of a node do."""
    folder = env.shared_memory_dir()
    elsewhere = f"set {env.SHARED_MEMORY_DIR} to a writable folder, best in memory"
    name = "shared memory"
    if not os.path.isdir(folder):
        return Finding(name, "problem", f"{folder} is not a folder", elsewhere)
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding(name, "problem", f"{folder} is not writable", elsewhere)
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600))
    except OSError as error:
        return Finding(name, "problem", f"{folder} takes no O_TMPFILE ({error.strerror})", elsewhere)
    stats, kind = os.statvfs(folder), file_system(folder)
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    found = f"{folder} ({kind}), {_size(size)}, {_size(free)} free"
    enlarge = f"enlarge it (docker: --shm-size), or {elsewhere}"
    try:
        _use_a_file()
    except Exception as error:
        return Finding(name, "problem", f"{found}: {_one_line(error)}", enlarge)
    if free < MIN_SHARED_BYTES:
        return Finding(name, "note", f"{found}: little for real layers", enlarge)
    if kind not in IN_MEMORY:
        return Finding(name, "note", f"{found}: not in memory, so slower", f"set {env.SHARED_MEMORY_DIR} to a tmpfs")
    return Finding(name, "ok", f"{found}, a test file works")


def _use_a_file() -> None:
    """Raise unless what one process writes another mapping shows."""
    created = SharedFile.create(TEST_BYTES)
    try:
        created.tensor(torch.uint8, (TEST_BYTES,), 0).fill_(7)
        if not bool((SharedFile.open(created.path, TEST_BYTES).tensor(torch.uint8, (TEST_BYTES,), 0) == 7).all()):
            raise OSError("a second mapping does not show what was written")
    finally:
        created.unlink()


def file_system(folder: str, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The kind of file system that a folder is on."""
    best, kind, real = "", "unknown", os.path.realpath(folder)
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        _, point, this, *_ = line.split()
        if (real + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind = point, this
    return kind


def check_temporary_folder() -> Finding:
    """Where the server that ranks start from has its socket, whose path the system limits to 107 bytes."""
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        advice = "set TMPDIR to a writable folder; ranks start from a socket there"
        return Finding("temporary folder", "problem", _one_line(error), advice)
    if len(os.fsencode(folder)) > MAX_TEMPORARY_PATH:
        advice = "set TMPDIR to a folder of a shorter path"
        return Finding("temporary folder", "problem", f"{folder}: too long a path for a socket", advice)
    return Finding("temporary folder", "ok", folder)


def check_host() -> Finding:
    """Whether this machine's name leads to an address, which gloo uses between machines."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        advice = "only for several machines: set GLOO_SOCKET_IFNAME (see `ip -br addr`), or add the name to /etc/hosts"
        return Finding("host name", "note", f"{name} does not resolve ({error.strerror})", advice)
    return Finding("host name", "ok", f"{name}: {', '.join(addresses)}")


def check_interface() -> Finding:
    """The network interface that gloo is told to use."""
    chosen, there = env.gloo_interface(), [name for _, name in socket.if_nameindex()]
    if chosen is None:
        return Finding("interface", "ok", f"{', '.join(there)}; ranks of moeloom.launch use loopback")
    if missing := [name for name in chosen.split(",") if name not in there]:
        advice = f"unset it, or set it to one of {', '.join(there)}"
        return Finding("interface", "problem", f"GLOO_SOCKET_IFNAME names {missing[0]}, which is not there", advice)
    return Finding("interface", "ok", f"{chosen}, by GLOO_SOCKET_IFNAME")


def check_ranks(seconds: float = LAYER_SECONDS) -> Finding:
    """Start two ranks and run a small layer on them: over shared memory on one node, over gloo on two."""
    try:
        with RankPool(2, 2) as pool:
            pool.run(run_small_layers, timeout=seconds)
    except Exception as error:
        advice = "`moeloom run --ranks 2 --nodes 2 --debug` shows where; unset GLOO_SOCKET_IFNAME, look at firewalls"
        return Finding("ranks", "problem", f"two ranks cannot run a layer: {_one_line(error)}", advice)
    return Finding("ranks", "ok", "two ranks ran a layer over shared memory and over gloo")


def run_small_layers() -> None:
    """On each rank of `check_ranks`."""
    for nodes in (1, 2):
        topology = Topology.split(2, nodes)
        with Runtime(topology=topology, backend="cpu", timeout=LAYER_SECONDS / 2) as rt, torch.no_grad():
            x = torch.ones(4, 16)
            experts = Experts(torch.ones(1, 16, 16), torch.ones(1, 16, 8))
            y = rt.moe(x, Router(num_topk=2)(torch.zeros(4, 2)), experts)
            if not bool(y.isfinite().all() and (y > 0).all()):
                raise ArithmeticError(f"on {nodes} node(s) the layer's result is wrong")


def check_gpus() -> Finding:
    """GPUs, and whether kernels are written for them."""
    if torch.cuda.is_available():
        kinds = Counter(_kind_of_gpu(gpu) for gpu in range(torch.cuda.device_count()))
        found = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        if gpus_with_kernels():
            return Finding("gpus", "ok", found)
        advice = f"nothing: the CPU is used; kernels are written for {ARCHITECTURE}, an H100 or H200"
        return Finding("gpus", "note", f"{found}: none that has kernels", advice)
    driver = driver_version()
    if not driver:
        return Finding("gpus", "note", "none: no NVIDIA driver; none needed")
    if not torch.version.cuda:
        advice = "if its GPUs are to be used, install a CUDA build of torch; PyPI's for Linux is one"
        return Finding("gpus", "note", f"driver {driver} is there, but torch is a CPU build", advice)
    advice = f"see `nvidia-smi`; torch's CUDA {torch.version.cuda} may need a newer driver, a container --gpus all"
    return Finding("gpus", "note", f"driver {driver} is there, but torch cannot use it", advice)


def _kind_of_gpu(gpu: int) -> str:
    properties = torch.cuda.get_device_properties(gpu)
    return f"{properties.name} (sm_{properties.major}{properties.minor}, {_size(properties.total_memory)})"


def check_peer_access() -> list[Finding]:
    """Which GPUs cannot reach each other's memory."""
    gpus = gpus_with_kernels()
    if len(gpus) < 2:
        return []
    apart = [f"{one}-{other}" for one in gpus for other in gpus if one < other and not reach(one, other)]
    if apart:
        advice = "kernels need NVLink or peer access over PCIe; see `nvidia-smi topo -p2p r`, and IOMMU or ACS settings"
        return [Finding("peer access", "note", f"missing between GPUs {', '.join(apart)}", advice)]
    return [Finding("peer access", "ok", f"between all {len(gpus)} GPUs")]


def driver_version(file: Path | None = None) -> str:
    """NVIDIA's driver, such as "580.159.04"; empty if there is none."""
    try:
        return re.findall(r"\d+(?:\.\d+)+", (file or DRIVER).read_text())[0]
    except (OSError, IndexError):
        return ""


def check_driver() -> list[Finding]:
    """NVIDIA's driver, where there are GPUs with kernels."""
    version = driver_version()
    if not gpus_with_kernels() or not version:
        return []
    if _numbers(version)[0] < MIN_DRIVER:
        return [Finding("driver", "note", version, f"kernels need CUDA 13: install driver {MIN_DRIVER} or newer")]
    return [Finding("driver", "ok", version)]


def check_nvrtc() -> Finding:
    """NVIDIA's Python bindings and NVRTC, which compile and launch kernels."""
    bindings, wanted = package_version("cuda-bindings"), bool(gpus_with_kernels())
    try:
        found = f"{compiler.version()}, cuda-bindings {bindings or 'of unknown version'}"
    except MoeloomError as error:
        advice = f"{INSTALL}: it lets kernels run on the GPUs here" if wanted else f"only for GPUs: {INSTALL}"
        return Finding("nvrtc", "note", f"cuda-bindings {bindings or 'is not installed'}: {_one_line(error)}", advice)
    return Finding("nvrtc", "ok", found)


def check_kernels() -> list[Finding]:
    """Compile every kernel and load it on each GPU, where there are GPUs with kernels."""
    gpus = gpus_with_kernels()
    if not gpus:
        return []
    start = time.perf_counter()
    try:
        binaries = jit.prewarm(declared.source for declared in jit.declared_in(moeloom.backends))
        compiled = time.perf_counter() - start
        for gpu in gpus:
            for binary in binaries:
                jit.load(binary, torch.device("cuda", gpu))
    except Exception as error:
        advice = f"see nvrtc and driver above; {INSTALL}; until then only backend='cpu' works"
        kind = "" if isinstance(error, MoeloomError) else f"{type(error).__name__}: "
        return [Finding("kernels", "note", f"do not run: {kind}{_one_line(error)}", advice)]
    number = sum(len(binary.kernels) for binary in binaries)
    return [Finding("kernels", "ok", f"{number} compiled (or found compiled) in {compiled:.1f} s, loaded on all GPUs")]


def check_nccl() -> Finding:
    """NCCL, as torch brings it."""
    if not torch.version.cuda or not torch.distributed.is_nccl_available():
        return Finding("nccl", "note", "not in this torch; only for groups of ranks on GPUs")
    return Finding("nccl", "ok", f"{_dotted(torch.cuda.nccl.version())}: for groups of ranks on GPUs; moves no rows")


def check_cache() -> Finding:
    """Where compiled kernels and the measured machine are kept."""
    folder = env.cache_home()
    there = folder
    while not os.path.exists(there) and os.path.dirname(there) != there:
        there = os.path.dirname(there)
    if there == "/" or not os.path.isabs(folder) or not os.access(there, os.W_OK):
        advice = "set XDG_CACHE_HOME or HOME; until then `moeloom measure` keeps nothing and each process compiles"
        return Finding("cache folder", "note", f"{folder} cannot be made or written", advice)
    return Finding("cache folder", "ok", f"{folder}: for compiled kernels and the measured machine")


def check_extras() -> list[Finding]:
    """Packages that are optional."""
    findings = []
    for name, use in (("transformers", "its adapter"), ("accelerate", "transformers"), ("matplotlib", "plots")):
        version = package_version(name)
        if version is None:
            findings.append(Finding(name, "note", f"not installed; only for {use}", f"pip install {name}"))
        elif name == "transformers" and _numbers(version) < MIN_TRANSFORMERS:
            newer = f"pip install 'transformers>={_dotted(MIN_TRANSFORMERS)}'"
            findings.append(Finding(name, "note", f"{version}: too old for the adapter", newer))
        else:
            findings.append(Finding(name, "ok", version))
    return findings


def package_version(name: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_backend(findings: list[Finding]) -> Finding:
    """What a Runtime runs on that is not told its backend, by all that was found before."""
    if not works(findings):
        return Finding("backend", "note", "none with several ranks, because of the above; Runtime('self') may work")
    gpus = gpus_with_kernels()
    if not gpus:
        return Finding("backend", "ok", "cpu: torch sees no H100 or H200")
    kinds = " and ".join(sorted({torch.cuda.get_device_properties(gpu).name for gpu in gpus}))
    found = f"sm90 on GPU {', '.join(map(str, gpus))} ({kinds}); cpu in groups without NCCL"
    if any(finding.name == "kernels" and finding.state != "ok" for finding in findings):
        return Finding("backend", "note", f"{found}; but kernels do not run", "see kernels, or pass backend='cpu'")
    if len(gpus) < torch.cuda.device_count():
        return Finding("backend", "ok", f"{found}; cpu where a rank's current GPU is another", "torch.cuda.set_device")
    return Finding("backend", "ok", found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
