"""Surroundings that are not kind: no home, no temporary folder, little memory, few cores, signals, forks, no file."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from moeloom import CapacityError, Experts, RankPool, Router, Runtime, env, launch
from moeloom.launch import RankFailed
from tests.support.failure import die

ROOT = Path(__file__).parent.parent
PROGRAM = "import moeloom; from tests.test_hostile import layer; print(moeloom.launch(layer, 2, 2))"


def call(rt: Runtime, x: torch.Tensor) -> bool:
    """A layer of two experts per rank; whether its result is one."""
    experts = Experts(torch.ones(2, 16, x.shape[1]) / 8, torch.ones(2, x.shape[1], 8) / 8)
    with torch.no_grad():
        y = rt.moe(x, Router(num_topk=2)(torch.randn(len(x), 2 * rt.topology.num_ranks)), experts)
    return y.shape == x.shape and bool(y.isfinite().all())


def layer(times: int = 1) -> bool:
    with Runtime(timeout=60) as rt:
        return all(call(rt, torch.ones(6, 16)) for _ in range(times))


def python(*arguments: str, **settings: str | None) -> subprocess.CompletedProcess[str]:
    """Run Python without a terminal. settings: environment variables to set, or (None) to take away."""
    bare = {**os.environ, **{name: value for name, value in settings.items() if value is not None}}
    for name in [name for name, value in settings.items() if value is None]:
        bare.pop(name, None)
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=bare, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=120, start_new_session=True,
    )  # fmt: skip


# ---- the machine


@pytest.mark.parametrize(
    "settings",
    [
        {"HOME": None, "TMPDIR": "/nonexistent", "LC_ALL": "C"},
        {"HOME": "/nonexistent", "TMPDIR": "/proc", "PYTHONIOENCODING": "ascii", "TERM": None},
    ],
    ids=["no home, no temporary folder", "missing home, read-only temporary folder"],
)
def test_without_home_and_temporary_folder(settings: dict[str, str | None]) -> None:
    done = python("-m", "moeloom", "run", "--ranks", "2", "--nodes", "2", "--scale", "32", "--tokens", "8", **settings)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.isascii() and "check passed" in done.stdout


def test_temporary_folder_of_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    done = python("-c", PROGRAM, TMPDIR=str(folder))
    assert done.returncode == 1
    assert "CapabilityError: cannot start ranks: AF_UNIX path too long; set TMPDIR to" in done.stderr


@pytest.fixture
def small_folder(tmp_path: Path) -> Iterator[Path]:
    """64 MB of shared memory, what docker gives."""
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "moeloom-test", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not permitted: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def layers_in(folder: str) -> tuple[list[bool], str]:
    """A layer that fits before and after one that does not; whether they work, and what the other said."""
    os.environ[env.SHARED_MEMORY_DIR] = folder
    try:
        with Runtime(timeout=60) as rt:
            fits = [call(rt, torch.ones(100, 512))]
            with pytest.raises(CapacityError) as caught:
                call(rt, torch.ones(20000, 512))
            return [*fits, call(rt, torch.ones(100, 512))], str(caught.value)
    finally:
        del os.environ[env.SHARED_MEMORY_DIR]


def test_64_mb_of_shared_memory(small_folder: Path) -> None:
    outcomes = launch(layers_in, 3, 2, (str(small_folder),), timeout=60)
    assert all(works == [True, True] for works, _ in outcomes)
    assert len({said for _, said in outcomes}) == 1 and f"bytes free in {small_folder}" in outcomes[0][1]
    assert "--shm-size" in outcomes[0][1] and list(small_folder.iterdir()) == []


def test_sixteen_ranks_on_few_cores() -> None:
    begin = time.monotonic()
    with RankPool(16, 2) as pool:
        assert pool.run(layer, 3, timeout=60) == [True] * 16
    assert time.monotonic() - begin < 60


# ---- signals


def processes_of(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = entry.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(entry.parent.name))
    return found


def test_sigterm_to_the_launching_process(tmp_path: Path) -> None:
    """As a batch system or `docker stop` sends it: to the first process only."""
    code = f"from tests.support.failure import launch_endlessly; launch_endlessly(3, 2, {str(tmp_path)!r})"
    folder = {**os.environ, env.SHARED_MEMORY_DIR: str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=folder, start_new_session=True) as process:
        try:
            end = time.monotonic() + 60
            while len(list(tmp_path.glob("running-*"))) < 3 and time.monotonic() < end:
                time.sleep(0.05)
            process.terminate()
            assert process.wait(10) == -signal.SIGTERM
            end = time.monotonic() + 10
            while processes_of(process.pid) and time.monotonic() < end:
                time.sleep(0.05)
            assert processes_of(process.pid) == [], "orphans"
        finally:
            for pid in processes_of(process.pid):
                os.kill(pid, signal.SIGKILL)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("moeloom-")] == []


def layers_for(seconds: float) -> int:
    """Calls until all ranks have seen that the time is over."""
    with Runtime(timeout=30) as rt:
        end, calls = time.monotonic() + seconds, 0
        while True:
            assert call(rt, torch.ones(6, 16))
            calls += 1
            over = torch.tensor(time.monotonic() > end)
            dist.all_reduce(over, dist.ReduceOp.MIN)
            if over:
                return calls


def test_stopped_and_continued() -> None:
    with RankPool(3, 2) as pool:
        pool.run(layer, timeout=60)
        pid = pool.processes[1].pid
        assert pid is not None
        timers = [
            threading.Timer(0.3, os.kill, (pid, signal.SIGSTOP)),
            threading.Timer(1.8, os.kill, (pid, signal.SIGCONT)),
        ]
        for timer in timers:
            timer.start()
        calls = pool.run(layers_for, 2.5, timeout=60)
        for timer in timers:
            timer.join()
        assert len(set(calls)) == 1 and calls[0] > 1


# ---- forks


def fork_beside_a_runtime(how: str) -> bool:
    with Runtime(timeout=20) as rt:
        assert call(rt, torch.ones(6, 16))
        pid = os.fork()
        if pid == 0:
            if how == "close":
                rt.close()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        return status == 0 and all(call(rt, torch.ones(300 * n, 16)) for n in range(1, 6))


@pytest.mark.parametrize("how", ["exit", "close"])
def test_fork_beside_a_runtime(how: str) -> None:
    assert launch(fork_beside_a_runtime, 3, 2, (how,), timeout=60) == [True] * 3


def die_with_a_child() -> None:
    """The child holds all that the rank had open."""
    if dist.get_rank() == 1:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        die()


def test_a_rank_that_dies_is_noticed_though_its_child_lives() -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailed, match="the process of rank 1 ended with exit code -9"):
        launch(die_with_a_child, 2, timeout=60)
    assert time.monotonic() - begin < 25


def layers_with_a_loader() -> list[bool]:
    rows = DataLoader(torch.randn(24, 16), batch_size=6, num_workers=2)
    with Runtime(timeout=60) as rt:
        return [call(rt, batch) for _ in range(2) for batch in rows]


def test_data_loader_with_workers_beside_a_runtime() -> None:
    assert launch(layers_with_a_loader, 2, 2, timeout=60) == [[True] * 8] * 2


def launch_from_a_rank() -> list[bool]:
    return launch(layer, 2, 2, timeout=60)


def test_launch_from_a_rank() -> None:
    assert launch(launch_from_a_rank, 2, timeout=60) == [[True, True]] * 2


# ---- programs


def test_program_on_the_command_line() -> None:
    """Its `__main__` has no file, as that of a notebook."""
    done = python("-c", PROGRAM)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[True, True]\n", "")


def test_function_of_a_program_without_a_file() -> None:
    done = python("-c", "import moeloom\ndef mine(): return 1\nmoeloom.launch(mine, 2)")
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("moeloom.launch.RankFailed: ")
    assert "Can't get attribute 'mine'" in done.stderr and "take functions of a module, or of a script" in done.stderr


def test_program_on_standard_input() -> None:
    done = subprocess.run([sys.executable, "-"], input=PROGRAM, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "without a file (<stdin>); save it to one" in done.stderr.splitlines()[-1]


def test_script_without_a_guard(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text("import moeloom\ndef mine(): return 1\nmoeloom.launch(mine, 2)\n")
    done = python(str(script), PYTHONPATH=str(ROOT))
    assert done.returncode == 1 and done.stderr.rstrip().endswith('guarded by `if __name__ == "__main__"`')


def test_function_that_cannot_be_sent() -> None:
    lock = threading.Lock()
    before = multiprocessing.active_children()  # other tests' ranks may be alive

    def inner() -> None: ...

    with RankPool(2) as pool:
        for fn, args, name in ((inner, (), "inner"), (lambda: 1, (), "<lambda>"), (layer, (lock,), "layer")):
            with pytest.raises(ValueError, match=f"{name} or its arguments cannot be sent to ranks .*`if __name__"):
                pool.run(fn, *args)
        assert pool.run(layer, timeout=60) == [True, True]
    assert set(multiprocessing.active_children()) <= set(before)
