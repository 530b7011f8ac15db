"""Nothing is left behind: no file, mapping, descriptor or process. Too little memory is an error, not a crash."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from moeloom import CapabilityError, Runtime, Topology, env
from moeloom.backends.shared_memory import PREFIX, SharedFile
from tests.support.failure import Attempt, attempt, layer_of, works
from tests.support.pool import Ranks, forget_runtimes, group_of
from tests.support.processes import heed_interrupts

ROOT = Path(__file__).parents[2]
FOUR = (0, 1, 2, 3)
DISK_OF_MEMORY = "/dev/shm"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of this test's own for shared memory."""
    with tempfile.TemporaryDirectory(dir=DISK_OF_MEMORY, prefix="test-") as name:
        yield Path(name)


@pytest.fixture
def used_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, for shared memory of this process; not beside ranks: their server would inherit the setting."""
    monkeypatch.setenv(env.SHARED_MEMORY_DIR, str(folder))
    return folder


@pytest.fixture
def small_folder(tmp_path: Path) -> Iterator[Path]:
    """8 MB of shared memory, as in a container."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tmp_path], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"needs to mount a tmpfs: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def shared_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(PREFIX))


# ---- files


def test_creator_sweeps_files_of_the_dead_only(used_here: Path) -> None:
    for name in ("moeloom-dead", "moeloom-held", "other"):
        (used_here / name).touch()
    with open(used_here / "moeloom-held") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        memory = SharedFile.create(4096)
        assert sorted(os.listdir(used_here)) == sorted(["moeloom-held", os.path.basename(memory.path), "other"])
        SharedFile.create(4096).unlink()  # the first one's creator is alive, so its file stays
        assert os.path.exists(memory.path)
        memory.unlink()
        assert shared_files(used_here) == ["moeloom-held"]


def test_failed_creation_leaves_no_file(used_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_address_space(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", no_address_space)
    with pytest.raises(CapabilityError, match="Cannot allocate memory"):
        SharedFile.create(4096)
    assert shared_files(used_here) == []


def test_file_is_private(used_here: Path) -> None:
    memory = SharedFile.create(4096)
    assert os.stat(memory.path).st_mode & 0o777 == 0o600


@contextmanager
def shared_memory_in(folder: str) -> Iterator[None]:
    """On a rank, which lives on with its environment."""
    os.environ[env.SHARED_MEMORY_DIR] = folder
    try:
        yield
    finally:
        del os.environ[env.SHARED_MEMORY_DIR]


def use(folder: str, fail: bool) -> tuple[list[str], Attempt] | None:
    """The names in the folder while a Runtime is in use, and how it ended."""
    group, seen = group_of(FOUR), []
    if group is None:
        return None

    def flow() -> None:
        with Runtime(group, topology=Topology.split(4, 2)) as rt:
            assert works(rt)
            assert works(rt, tokens=200)  # grows
            assert works(rt)  # by now the creator has removed the name
            seen.extend(os.listdir(folder))
            assert works(rt)
            if fail:
                raise RuntimeError("boom")

    with shared_memory_in(folder):
        return seen, attempt(flow)


@pytest.mark.parametrize("fail", [False, True])
def test_no_file_during_and_after_use(ranks: Ranks, folder: Path, fail: bool) -> None:
    for seen, told in ranks.run(use, str(folder), fail)[:4]:
        assert told.text == ("boom" if fail else "") and seen == []
    assert shared_files(folder) == []


# ---- processes


@dataclass
class Program:
    """A program in a session of its own, all of whose processes can be found."""

    process: subprocess.Popen

    def alive(self) -> list[int]:
        """Its processes that have not ended."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                fields = (entry / "stat").read_text().rsplit(") ", 1)[1].split()
            except (OSError, IndexError):
                continue
            if fields[3] == str(self.process.pid) and fields[0] != "Z":
                found.append(int(entry.name))
        return found

    def ended_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self.alive() and time.monotonic() < end:
            self.process.poll()
            time.sleep(0.05)
        return not self.alive()


@pytest.fixture
def program(folder: Path) -> Iterator[Program]:
    """Three ranks on two nodes that call a layer until they are stopped."""
    code = f"from tests.support.failure import launch_endlessly; launch_endlessly(3, 2, {str(folder)!r})"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    settings = {**os.environ, env.SHARED_MEMORY_DIR: str(folder)}
    started = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT, start_new_session=True, preexec_fn=heed_interrupts, env=settings, **quiet,
    )  # fmt: skip
    program = Program(started)
    try:
        end = time.monotonic() + 90
        while len(list(folder.glob("running-*"))) < 3:
            assert time.monotonic() < end and started.poll() is None, "the program does not run"
            time.sleep(0.05)
        yield program
    finally:
        for pid in program.alive():
            os.kill(pid, signal.SIGKILL)
        started.wait()


def test_nothing_left_when_all_are_killed(program: Program, folder: Path) -> None:
    assert len(program.alive()) >= 5  # itself, the server of the ranks, three ranks
    os.killpg(program.process.pid, signal.SIGKILL)
    assert program.ended_within(10)
    assert shared_files(folder) == []


def test_ranks_end_when_the_launching_process_is_killed(program: Program, folder: Path) -> None:
    os.kill(program.process.pid, signal.SIGKILL)
    assert program.ended_within(10), "orphans"
    assert shared_files(folder) == []


def test_ranks_end_on_ctrl_c(program: Program, folder: Path) -> None:
    os.killpg(program.process.pid, signal.SIGINT)  # as a terminal does: to all of them
    assert program.ended_within(10), "orphans"
    assert program.process.returncode == -signal.SIGINT  # ended as interrupted programs do
    assert shared_files(folder) == []


# ---- too little memory


def must_work(rt: Runtime, tokens: int) -> None:
    assert works(rt, tokens=tokens, hidden=64)


def call_in(folder: str, tokens: list[int]) -> list[Attempt] | None:
    """A call for each number of tokens, with shared memory in that folder; or why there is no Runtime."""
    group = group_of(FOUR)
    if group is None:
        return None
    runtimes: list[Runtime] = []
    with shared_memory_in(folder):
        construction = attempt(lambda: runtimes.append(Runtime(group, topology=Topology.split(4, 2))))
        if not runtimes:
            return [construction]
        with runtimes[0] as rt:
            return [attempt(must_work, rt, n) for n in tokens]


def test_call_that_does_not_fit(ranks: Ranks, small_folder: Path) -> None:
    for small, large, again in ranks.run(call_in, str(small_folder), [100, 20000, 100])[:4]:
        assert (small.error, again.error) == ("", "")
        assert large.error == "CapacityError" and "\n" not in large.text
        needed, free = re.search(r"(\d+) bytes needed, (\d+) bytes free", large.text).groups()
        assert int(needed) > 8 << 20 >= int(free) > 0
        assert str(small_folder) in large.text and env.SHARED_MEMORY_DIR in large.text


def test_construction_that_does_not_fit(ranks: Ranks, small_folder: Path) -> None:
    stats = os.statvfs(small_folder)
    with open(small_folder / "filler", "wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, stats.f_bavail * stats.f_frsize - 4096)
    told = [outcome[0] for outcome in ranks.run(call_in, str(small_folder), [1])[:4]]
    assert len({each.text for each in told}) == 1
    assert told[0].error == "CapacityError" and "4096 bytes free" in told[0].text
    (small_folder / "filler").unlink()
    assert [outcome[0].error for outcome in ranks.run(call_in, str(small_folder), [1])[:4]] == [""] * 4


# ---- lifetimes


def held() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later is not a leak
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes": pages * mmap.PAGESIZE,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": Path("/proc/self/maps").read_text().count(PREFIX) + deleted_mappings(),
    }


def deleted_mappings() -> int:
    """Shared memory whose file never had a name that /proc shows."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(f" {DISK_OF_MEMORY}/" in line and PREFIX not in line for line in lines)


def live_and_close(count: int, close: bool) -> tuple[dict[str, int], dict[str, int], list[float], int] | None:
    """Create, use and close (or only drop) Runtimes; what was held before and after, and how long each took."""
    group, seconds, inside = group_of(FOUR), [], 0
    forget_runtimes()
    if group is None:
        return None
    before = held()
    for number in range(count):
        start = time.monotonic()
        rt = Runtime(group, topology=Topology.split(4, 2))
        assert works(rt, tokens=256, hidden=256)
        seconds.append(time.monotonic() - start)
        if number == 0:
            inside = held()["mappings"]
        if close:
            rt.close()
        del rt
        if number == 9:
            before = held()
    return before, held(), seconds, inside


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_rounds_give_everything_back(ranks: Ranks, close: bool) -> None:
    count = 60 if close else 15
    for before, after, seconds, inside in ranks.run(live_and_close, count, close)[:4]:
        assert inside >= before["mappings"] + 2  # flags and rows, as seen by this very measure
        assert after["mappings"] == before["mappings"]
        assert after["descriptors"] <= before["descriptors"] + 2
        assert after["bytes"] < before["bytes"] + (10 << 20)  # a round has 2 MB of rows
        if close:
            assert min(seconds[-20:]) < 2 * min(seconds[:20]) + 0.02


def fail_and_close() -> tuple[dict[str, int], dict[str, int], bool] | None:
    """A Runtime that has failed gives back as much, although its user keeps it."""
    group = group_of(FOUR)
    forget_runtimes()
    if group is None:
        return None
    before = held()
    rt = Runtime(group, topology=Topology.split(4, 2), timeout=3.0)
    works(rt)
    failed = rt.rank == 1 or attempt(works, rt).error == "PeerTimeout"
    rt.close()
    after, end = held(), time.monotonic() + 3
    while after["descriptors"] > before["descriptors"] + 2 and time.monotonic() < end:
        time.sleep(0.05)  # gloo keeps its connections until its own deadline
        after = held()
    with Runtime(group, topology=Topology.split(4, 2)) as next_one:
        return before, after, failed and works(next_one)


def test_failed_runtime_gives_everything_back(ranks: Ranks) -> None:
    for before, after, usable in ranks.run(fail_and_close)[:4]:
        assert after["mappings"] == before["mappings"]
        assert after["descriptors"] <= before["descriptors"] + 2
        assert usable


def refuse_often(count: int) -> tuple[int, bool] | None:
    """How much memory this process has gained by calls that rank 1 refused."""
    group = group_of(FOUR)
    if group is None:
        return None
    with Runtime(group, topology=Topology.split(4, 2), timeout=30.0) as rt:
        mine = layer_of(rt)
        wrong = mine.but(topk_idx=mine.topk_idx + 100) if rt.rank == 1 else mine
        for number in range(count):
            assert attempt(wrong.run, rt).error == "ValueError"
            if number == 50:
                before = held()["bytes"]
        return held()["bytes"] - before, works(rt)


def test_refused_calls_hold_nothing(ranks: Ranks) -> None:
    for gained, usable in ranks.run(refuse_often, 600)[:4]:
        assert gained < 5 << 20 and usable
