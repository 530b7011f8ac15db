"""Source to binary to launch: the shared cache under every mishap, keys, errors, usage, arguments."""

from __future__ import annotations

import ctypes
import enum
import logging
import multiprocessing
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeloom import jit
from moeloom.errors import CapabilityError, KernelError
from moeloom.jit import bindings, build, cache, compiler, kernel
from tests.support.nvrtc import needs_nvrtc

FORK = multiprocessing.get_context("fork")
KEY = "a" * 64
NOBODY = 65534

SCALE = """
#pragma once
#include "factor.cuh"
namespace test {
struct Parameters { const float* x; long long size; int step; };
template <int N>
__global__ void __launch_bounds__(256, 2) scale(const __grid_constant__ Parameters p, float* y, int size, float by) {
    __shared__ float tile[256];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    tile[threadIdx.x] = i < size ? p.x[i] * by * factor(N) : 0.f;
    __syncthreads();
    if (i < size) y[i] = tile[threadIdx.x];
}
}
"""
SPILL = """
extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* p, const float* q) {
    float a[100];
#pragma unroll
    for (int i = 0; i < 100; ++i) a[i] = q[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 100; ++i) p[i * 1024 + threadIdx.x] = a[i] + a[(i * 7) % 100] * a[99 - i];
}
extern "C" __global__ void __launch_bounds__(32) indexed(float* p, int k) {
    float a[100];
    for (int i = 0; i < 100; ++i) a[i] = p[i];
    a[k] = 3;
    float sum = 0;
    for (int i = 0; i < 100; ++i) sum += a[(i * k) % 100];
    p[k] = sum;
}
__noinline__ float apart(float x) { return x * x + 1; }
extern "C" __global__ void __launch_bounds__(32) calls(float* p) { *p = apart(*p); }
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test, and nothing remembered from others."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_said", set())
    monkeypatch.setattr(build, "_compiled", {})
    return tmp_path / "cache"


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    (tmp_path / "scale.cuh").write_text(SCALE)
    (tmp_path / "factor.cuh").write_text("#pragma once\nfloat factor(int n) { return n; }\n")
    (tmp_path / "unreached.cuh").write_text("")
    return tmp_path


def scale(folder: Path, **changes: Any) -> jit.Source:
    given = {"name": "scale", "text": '#include "scale.cuh"\n', "kernels": ("test::scale<3>",), "folder": folder}
    return jit.Source(**{**given, **changes})


def never() -> bytes:
    raise AssertionError("made again")


def files() -> list[str]:
    return sorted(path.name for path in cache.folder().iterdir())


def in_child(function: Callable[[], Any], seconds: float = 60) -> int:
    """Exit code of a forked process that ran a function: 0 if it returned."""
    child = FORK.Process(target=function)
    child.start()
    child.join(seconds)
    assert child.exitcode is not None, "the child is stuck"
    return child.exitcode


class TestCache:
    def test_made_once_then_read(self) -> None:
        assert cache.fetch(KEY, lambda: b"value") == b"value"
        assert cache.fetch(KEY, never) == b"value"
        assert cache.fetch("b" * 64, lambda: b"other") == b"other"
        assert files() == [KEY, "b" * 64]

    def test_failure_to_make_is_not_kept_and_leaves_no_lock(self) -> None:
        for _ in range(2):
            with pytest.raises(AssertionError, match="made again"):
                cache.fetch(KEY, never)
        assert cache.fetch(KEY, lambda: b"value") == b"value"

    @pytest.mark.parametrize("length", [0, 1, 9, 10, 11, 41, 42, 43, 500, 1041])
    def test_truncated(self, length: int) -> None:
        value = bytes(range(250)) * 4
        cache.fetch(KEY, lambda: value)
        path = cache.folder() / KEY
        whole = path.read_bytes()
        assert len(whole) == 1042
        path.write_bytes(whole[:length])
        assert cache.fetch(KEY, lambda: value) == value
        assert path.read_bytes() == whole

    @pytest.mark.parametrize("place", [0, 9, 10, 41, 42, 541, -1])
    def test_corrupt(self, place: int, caplog: pytest.LogCaptureFixture) -> None:
        value = bytes(range(250)) * 4
        cache.fetch(KEY, lambda: value)
        path = cache.folder() / KEY
        whole = bytearray(path.read_bytes())
        whole[place] ^= 1
        path.write_bytes(whole)
        assert cache.fetch(KEY, lambda: value) == value
        assert cache.fetch(KEY, never) == value
        assert "damaged" in caplog.text

    def test_too_long_or_of_another_key(self) -> None:
        cache.fetch(KEY, lambda: b"value")
        path = cache.folder() / KEY
        path.with_name("b" * 64).write_bytes(path.read_bytes())
        path.write_bytes(path.read_bytes() + b"\0")
        assert cache.fetch(KEY, lambda: b"again") == b"again"
        assert cache.fetch("b" * 64, lambda: b"b") == b"b"

    @pytest.mark.parametrize("where", ["/proc/none", "{file}/below", "relative", "~"])
    def test_no_place_to_keep(
        self, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XDG_CACHE_HOME", where.format(file=tmp_path / "file"))
        for value in (b"one", b"two"):
            assert cache.fetch(KEY, lambda value=value: value) == value
        assert caplog.text.count("not cached") == 1
        assert os.listdir(tmp_path) == ["file"]

    def test_no_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "/proc/none")
        assert cache.fetch(KEY, lambda: b"value") == b"value"

    def test_read_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            monkeypatch.setenv("XDG_CACHE_HOME", folder)
            cache.fetch(KEY, lambda: b"value")
            (cache.folder() / KEY).chmod(0o644)
            cache.folder().chmod(stat.S_IRUSR | stat.S_IXUSR | 0o055)

            def as_nobody() -> None:
                if os.geteuid() == 0:
                    os.setresuid(NOBODY, NOBODY, NOBODY)
                assert cache.fetch(KEY, never) == b"value"
                assert cache.fetch("b" * 64, lambda: b"other") == b"other"

            assert in_child(as_nobody) == 0
            assert files() == [KEY]
            cache.folder().chmod(0o755)

    def test_no_room(self) -> None:
        def with_small_files() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
            assert cache.fetch(KEY, lambda: bytes(1000)) == bytes(1000)

        assert in_child(with_small_files) == 0
        assert files() == [f"{KEY}.lock"]
        assert cache.fetch(KEY, lambda: b"value") == b"value"

    @pytest.mark.parametrize("when", ["making", "before the rename"])
    def test_killed(self, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def die(*_: object) -> bytes:
            os.kill(os.getpid(), signal.SIGKILL)
            return b""

        def killed() -> None:
            if when == "making":
                cache.fetch(KEY, die)
            monkeypatch.setattr(os, "replace", die)
            cache.fetch(KEY, lambda: b"unfinished")

        assert in_child(killed) == -signal.SIGKILL
        assert KEY not in files()
        start = time.monotonic()
        assert cache.fetch(KEY, lambda: b"value") == b"value"
        assert time.monotonic() - start < 5, "waited for the dead"
        assert files() == [KEY]

    def test_killed_while_others_wait(self, tmp_path: Path) -> None:
        inside = FORK.Event()

        def victim() -> None:
            cache.fetch(KEY, lambda: inside.set() or time.sleep(60) or b"")

        first = FORK.Process(target=victim)
        first.start()
        assert inside.wait(30)
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(cache.fetch, KEY, lambda i=i: b"%d" % i) for i in range(3)]
            time.sleep(0.2)
            assert not any(future.done() for future in waiting)
            first.kill()
            first.join()
            assert len({future.result(timeout=30) for future in waiting}) == 1

    def test_a_fork_does_not_keep_the_lock(self) -> None:
        """Such as a data loader's worker, started while another thread compiles."""
        child = FORK.Process(target=time.sleep, args=(60,))

        def fork_and_fail() -> bytes:
            child.start()
            raise KernelError("wrong")

        with pytest.raises(KernelError):
            cache.fetch(KEY, fork_and_fail)
        start = time.monotonic()
        assert cache.fetch(KEY, lambda: b"value") == b"value"
        assert time.monotonic() - start < 5
        child.kill()
        child.join()

    def test_the_wait_is_bounded(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setattr(cache, "WAIT_SECONDS", 0.1)
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(cache.fetch, KEY, lambda: time.sleep(1) or b"slow")
            while not cache.folder().is_dir() or not files():
                time.sleep(0.01)
            assert cache.fetch(KEY, lambda: b"own") == b"own"
            assert "not waiting" in caplog.text
            assert slow.result() == b"slow"

    def test_made_by_another_just_before_the_lock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lock = cache._try_lock

        def late(path: Path) -> int | None:
            path.parent.mkdir(parents=True)
            cache._write(path, b"theirs")
            return lock(path)

        monkeypatch.setattr(cache, "_try_lock", late)
        assert cache.fetch(KEY, never) == b"theirs"

    def test_16_processes_make_one(self, tmp_path: Path) -> None:
        made = tmp_path / "made"
        results = together(16, lambda: cache.fetch(KEY, lambda: note(made) or time.sleep(0.2) or os.urandom(1000)))
        assert len(set(results)) == 1 and len(results[0]) == 1000
        assert len(made.read_text()) == 1
        assert files() == [KEY]


def note(path: Path) -> None:
    """One more character in a file, whoever else writes."""
    with path.open("a") as file:
        file.write("x")


def together(count: int, function: Callable[[], bytes]) -> list[bytes]:
    """Results of a function in that many new processes at once."""
    start = FORK.Barrier(count)
    results = FORK.SimpleQueue()

    def run() -> None:
        start.wait(60)
        results.put(function())

    children = [FORK.Process(target=run) for _ in range(count)]
    for child in children:
        child.start()
    found = [results.get() for _ in children]
    for child in children:
        child.join(60)
    return found


def test_the_key_covers_all_that_matters(headers: Path) -> None:
    source = scale(headers)

    def key(source: jit.Source, version: str = "V13") -> str:
        return source.key(source.headers(), version)

    assert list(source.headers()) == ["factor.cuh", "scale.cuh"]
    first = key(source)
    (headers / "unreached.cuh").write_text("// changed")
    assert key(scale(headers, name="another")) == first
    others = [
        key(scale(headers, text=source.text + " ")),
        key(scale(headers, kernels=("test::scale<4>",))),
        key(scale(headers, options=("--generate-line-info",))),
        key(source, "V14"),
    ]
    (headers / "factor.cuh").write_text("#pragma once\nfloat factor(int n) { return n + 1; }\n")
    others.append(key(source))
    assert len({first, *others}) == 6


def test_cuda_is_imported_only_when_needed() -> None:
    """torch may import parts of it by itself."""
    program = "import sys, torch; before = set(sys.modules); import moeloom.jit; print(*set(sys.modules) - before)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "moeloom.jit" in run.stdout, run.stderr
    assert not [name for name in run.stdout.split() if name.split(".")[0] in ("cuda", "nvidia")]


@pytest.mark.parametrize("name", ["nvrtc", "driver"])
def test_missing_bindings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"cuda.bindings.{name}", None)
    with pytest.raises(CapabilityError, match=r"(?s)found.*pip install 'moeloom\[gpu\]'"):
        getattr(bindings, name).__wrapped__()


@needs_nvrtc
class TestCompile:
    def test_compiled_once_then_read(self, headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = jit.compile(scale(headers))
        assert jit.compile(scale(headers)) is first
        monkeypatch.setattr(build, "_compiled", {})
        monkeypatch.setattr(compiler, "run", never)
        assert jit.compile(scale(headers)) == first
        assert first.cubin[:4] == b"\x7fELF"

    def test_usage(self, headers: Path) -> None:
        binary = jit.compile(scale(headers, kernels=("test::scale<3>", "test::scale<4>")))
        assert len(binary.kernels) == 2 and not binary.notes
        usage = binary.kernels["test::scale<3>"]
        assert usage.parameters == ("24s", "q", "i", "f") and usage.parameter_bytes == (24, 8, 4, 4)
        assert (usage.max_threads, usage.min_blocks, usage.shared_bytes) == (256, 2, 1024)
        assert (usage.stack_bytes, usage.spill_store_bytes, usage.spill_load_bytes) == (0, 0, 0)
        assert 4 <= usage.registers <= 128

    def test_spills_and_local_memory_are_seen(self, headers: Path) -> None:
        source = scale(headers, name="bad", text=SPILL, kernels=("spill", "indexed", "calls"))
        binary = jit.compile(source)
        spill, indexed = binary.kernels["spill"], binary.kernels["indexed"]
        assert spill.spill_store_bytes > 0 and spill.spill_load_bytes > 0 and spill.registers == 32
        assert spill.stack_bytes >= spill.spill_store_bytes // 2
        assert indexed.stack_bytes >= 400 and indexed.spill_store_bytes == 0
        assert len(binary.notes) == 1 and "apart" in binary.notes[0] and "not inlined" in binary.notes[0]
        assert jit.Binary.from_bytes(binary.to_bytes()) == binary

    def test_errors_can_be_read(self, headers: Path) -> None:
        text = '#include "scale.cuh"\n#include "nowhere.cuh"\n'
        with pytest.raises(KernelError) as caught:
            jit.compile(scale(headers, text=text))
        message = str(caught.value)
        assert "scale does not compile for sm_90a" in message and 'open source file "nowhere.cuh"' in message
        assert '   2 | #include "nowhere.cuh"' in message and "factor.cuh, scale.cuh" in message
        (headers / "factor.cuh").write_text("#pragma once\nfloat factor(int n) { return m; }\n")
        with pytest.raises(KernelError, match=r'factor.cuh\(2\): error: identifier "m" is undefined'):
            jit.compile(scale(headers))
        with pytest.raises(KernelError, match="test::missing"):
            jit.compile(scale(headers, kernels=("test::missing",)))

    def test_a_changed_header_is_compiled(self, headers: Path) -> None:
        first = jit.compile(scale(headers))
        (headers / "factor.cuh").write_text("#pragma once\nfloat factor(int n) { return n * n + 0.5f; }\n")
        assert jit.compile(scale(headers)).cubin != first.cubin

    def test_nothing_is_fused(self) -> None:
        text = 'extern "C" __global__ void k(float* p) { p[0] = p[1] * p[2] + p[3]; }'
        source = jit.Source("fused", text, ("k",))
        with compiler._Program("fused.cu", text, {}) as program:
            program.compile(source.all_options)
            assert "fma" not in program.ptx()

    def test_16_processes_compile_one(self, headers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made, run = tmp_path / "made", compiler.run
        monkeypatch.setattr(compiler, "run", lambda *args: note(made) or run(*args))
        compiler.version()
        results = together(16, lambda: jit.compile(scale(headers)).to_bytes())
        assert len(set(results)) == 1
        assert len(made.read_text()) == 1

    def test_prewarm(self, headers: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "moeloom")
        sources = [scale(headers, kernels=(f"test::scale<{n}>",)) for n in range(4)]
        binaries = jit.prewarm(sources)
        assert [list(binary.kernels) for binary in binaries] == [list(source.kernels) for source in sources]
        assert caplog.text.count("compiling scale") == 4
        assert [jit.compile(source) for source in sources] == binaries
        with pytest.raises(KernelError, match="test::missing"):
            jit.prewarm([*sources, scale(headers, kernels=("test::missing",))])


class Status(enum.IntEnum):
    OK = 0
    WRONG = 1


class Driver:
    """Stands in for NVIDIA's driver: notes launches as the real one would see them."""

    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4, CU_LAUNCH_ATTRIBUTE_COOPERATIVE=2)
    CUlaunchConfig = SimpleNamespace

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.launches: list[tuple[SimpleNamespace, list[bytes]]] = []
        self.shared: list[int] = []
        self.status = Status.OK

    def CUdevice(self, index: int) -> int:
        return index

    def CUlaunchAttribute(self) -> SimpleNamespace:
        return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def cuLibraryGetKernel(self, library: int, symbol: bytes) -> tuple:
        return Status.OK, 11

    def cuKernelGetFunction(self, handle: int) -> tuple:
        return Status.OK, 12

    def cuFuncLoad(self, function: int) -> tuple:
        return (Status.OK,)

    def cuKernelSetAttribute(self, attribute: int, value: int, handle: int, device: int) -> tuple:
        self.shared.append(value)
        return (Status.OK,)

    def cuLaunchKernelEx(self, config: SimpleNamespace, function: int, addresses: int, extra: int) -> tuple:
        time.sleep(0.0001)  # the real one, too, lets other threads run
        pointers = (ctypes.c_void_p * len(self.sizes)).from_address(addresses)
        self.launches.append((config, [ctypes.string_at(p, n) for p, n in zip(pointers, self.sizes, strict=True)]))
        return (self.status,)


class TestLaunch:
    @pytest.fixture
    def fake(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[jit.Kernel, Driver]]:
        usage = jit.Usage("k", ("24s", "q", "i", "f"), 10, 0, 0, 0, 1024, 256, 1)
        driver = Driver(usage.parameter_bytes)
        monkeypatch.setattr(kernel, "driver", lambda: driver)
        yield jit.Kernel("k", usage, 10, 0), driver

    def test_arguments_arrive(self, fake: tuple[jit.Kernel, Driver]) -> None:
        launched, driver = fake
        block = bytes(range(24))
        launched.launch(7, 132, (256, 1, 1), 0, (block, 1 << 40, -2, 1.5))
        config, seen = driver.launches[0]
        assert seen == [block, (1 << 40).to_bytes(8, "little"), b"\xfe\xff\xff\xff", b"\0\0\xc0\x3f"]
        assert (config.gridDimX, config.gridDimY, config.blockDimX, config.hStream) == (132, 1, 256, 7)
        assert config.numAttrs == 0

    def test_threads_do_not_share_arguments(self, fake: tuple[jit.Kernel, Driver]) -> None:
        launched, driver = fake
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda i: launched.launch(0, 1, 32, 0, (bytes([i] * 24), i, i, 0.0)), range(200)))
        assert sorted(seen[1] for _, seen in driver.launches) == sorted(i.to_bytes(8, "little") for i in range(200))
        assert all(seen[0][:1] == seen[1][:1] == seen[2][:1] for _, seen in driver.launches)

    def test_prepared_once(self, fake: tuple[jit.Kernel, Driver]) -> None:
        launched, driver = fake
        args = (bytes(24), 0, 0, 0.0)
        for shared_bytes in (0, 47 * 1024, 47 * 1024 + 1, 200_000, 200_000, 100_000):
            launched.launch(0, 1, 32, shared_bytes, args, cluster=2, cooperative=True)
        assert driver.shared == [47 * 1024 + 1, 200_000]
        configs = [config for config, _ in driver.launches]
        assert configs[3] is configs[4]
        assert [attribute.id for attribute in configs[0].attrs] == [4, 2] and configs[0].numAttrs == 2
        assert configs[0].attrs[0].value.clusterDim == SimpleNamespace(x=2, y=1, z=1)

    @pytest.mark.parametrize(
        "args",
        [
            (bytes(24), 0, 0),
            (bytes(24), 0, 0, 0.0, 0),
            (bytes(23), 0, 0, 0.0),
            (bytes(25), 0, 0, 0.0),
            (bytes(24), 1 << 63, 0, 0.0),
            (bytes(24), 0, 1 << 31, 0.0),
            (bytes(24), 0, 0.5, 0.0),
            (0, 0, 0, 0.0),
            (bytes(24), None, 0, 0.0),
        ],
    )
    def test_wrong_arguments(self, args: tuple, fake: tuple[jit.Kernel, Driver]) -> None:
        launched, driver = fake
        with pytest.raises(ValueError, match="of k"):
            launched.launch(0, 1, 32, 0, args)
        assert not driver.launches

    def test_refused_by_the_driver(self, fake: tuple[jit.Kernel, Driver]) -> None:
        launched, driver = fake
        driver.status = Status.WRONG
        with pytest.raises(KernelError, match=r"k with grid 1, block 4096, 0 B: WRONG"):
            launched.launch(0, 1, 4096, 0, (bytes(24), 0, 0, 0.0))


@pytest.mark.gpu
def test_a_kernel_runs(headers: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    scaled = jit.load(jit.compile(scale(headers)), device)["test::scale<3>"]
    assert jit.load(jit.compile(scale(headers)), device)["test::scale<3>"] is scaled
    x = torch.randn(100_000, device=device)
    y = torch.empty_like(x)
    parameters = x.data_ptr().to_bytes(8, "little") + bytes(16)
    stream = torch.cuda.current_stream().cuda_stream
    for shared_bytes, cluster in ((0, None), (200_000, None), (0, (2, 1, 1))):
        y.fill_(-1)
        args = (parameters, y.data_ptr(), x.numel(), 0.5)
        scaled.launch(stream, (392, 1, 1), (256, 1, 1), shared_bytes, args, cluster)
        assert torch.equal(y, x * 0.5 * 3)
