"""Symmetric memory between processes, on files of the host in the place of a GPU's memory."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from moeloom.backends.sm90 import memory
from moeloom.backends.sm90.memory import SymmetricMemory, check_peers
from moeloom.errors import CapabilityError, CapacityError, KernelError
from tests.support.pool import Ranks, runtime_of

BYTES, STEP = 5000, 4096
RANKS = (0, 1, 2)


class HostParts:
    """What `_Parts` does by the driver. fails: the call that does on this rank; the second one, of several."""

    fails = ""
    opened_files = 0
    mapped: dict[int, tuple[mmap.mmap, Any]] = {}

    def __init__(self, device: torch.device) -> None:
        pass

    def _try(self, name: str) -> None:
        if self.fails == name:
            raise KernelError(f"{name}: CUDA_ERROR_OUT_OF_MEMORY")

    def rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // STEP) * STEP

    def create(self, size: int) -> int:
        self._try("create")
        file = os.memfd_create("part")
        os.truncate(file, size)
        os.pwrite(file, b"\xab" * size, 0)
        return file

    def file_of(self, handle: int) -> int:
        self._try("file_of")
        return os.dup(handle)

    def opened(self, file: int) -> int:
        HostParts.opened_files += 1
        if self.fails == "opened" and self.opened_files == 2:
            os.close(file)
            self._try("opened")
        return file

    def map(self, handle: int, size: int) -> int:
        self._try("map")
        memory = mmap.mmap(handle, size)
        first = ctypes.c_char.from_buffer(memory)
        self.mapped[ctypes.addressof(first)] = memory, first
        return ctypes.addressof(first)

    def zero(self, address: int, size: int) -> None:
        ctypes.memset(address, 0, size)

    def unmap(self, address: int, size: int) -> None:
        memory, first = self.mapped.pop(address)
        del first
        memory.close()

    def release(self, handle: int) -> None:
        os.close(handle)


@contextmanager
def on_host(fails: str = "") -> Iterator[None]:
    """No GPU is needed inside, and no file and no memory is left behind. Of a rank's process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_Parts", HostParts)
        patch.setattr(HostParts, "fails", fails)
        patch.setattr(HostParts, "opened_files", 0)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 11))
        files = os.listdir("/proc/self/fd")
        yield
        assert not HostParts.mapped
        assert len(os.listdir("/proc/self/fd")) == len(files), "files are left open"


def shared(members: tuple[int, ...]) -> list[str]:
    """Every rank writes into every part; parts grow, with and without the one before."""
    rt = runtime_of(members, 1)
    if rt is None:
        return []
    control, wrong = rt.backend.control, []
    with on_host():
        symmetric, kept = SymmetricMemory(control, torch.device("cpu")), []
        for number, keep in enumerate([False, True, False]):
            with control.operation("test"):
                addresses = symmetric.make(BYTES * (1 + number), keep)
                size = HostParts.rounded(None, BYTES * (1 + number))
                if any(ctypes.string_at(address, size).strip(b"\0") for address in addresses):
                    wrong.append("not zeros")
                control.agree({})
                for address in addresses:
                    ctypes.memset(address + rt.rank * 16, 10 * number + rt.rank + 1, 16)
                control.agree({})
            found = ctypes.string_at(addresses[rt.rank], 16 * len(members))
            if found != b"".join(bytes([10 * number + rank + 1]) * 16 for rank in range(len(members))):
                wrong.append(f"in part {number}: {found!r}")
            if keep and ctypes.string_at(kept[-1], 16) != bytes([1]) * 16:
                wrong.append("what was there is not kept")
            kept.append(addresses[rt.rank])
            held = [STEP * 2, STEP * 2 + STEP * 3, STEP * 2 + STEP * 4][number]
            if symmetric.num_bytes != held:
                wrong.append(f"num_bytes is {symmetric.num_bytes}, wanted {held}")
        symmetric.close()
        symmetric.close()
        if symmetric.num_bytes:
            wrong.append("closed, but bytes are left")
    return [f"rank {rt.rank}: {line}" for line in wrong]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_rank_writes_into_every_part(ranks: Ranks, number: int) -> None:
    wrong = [line for lines in ranks.run(shared, RANKS[:number]) for line in lines]
    assert not wrong, "\n".join(wrong)


def failing(call: str) -> list[str]:
    """On rank 1 alone; all must say so, soon, and be able to try again."""
    rt = runtime_of(RANKS, 1)
    if rt is None:
        return []
    control, wrong = rt.backend.control, []
    wanted: tuple[type[Exception], str] = (CapabilityError, f"rank 1: GPUs cannot share memory: {call}: CUDA_ERROR")
    if call == "create":
        wanted = CapacityError, "rank 1: symmetric memory: 8192 bytes needed, 7 of 11 bytes free"
    with on_host(call if rt.rank == 1 else ""):
        symmetric = SymmetricMemory(control, torch.device("cpu"))
        start = time.monotonic()
        try:
            with control.operation("test"):
                symmetric.make(BYTES)
            wrong.append("no error")
        except wanted[0] as error:
            wrong += [] if wanted[1] in str(error) else [str(error)]
        if time.monotonic() - start > 20 or symmetric.num_bytes:
            wrong.append(f"{time.monotonic() - start:.1f} s, {symmetric.num_bytes} bytes")
    with on_host():
        with control.operation("test"):
            symmetric.make(BYTES)
        symmetric.close()
    return [f"rank {rt.rank}: {line}" for line in wrong]


@pytest.mark.parametrize("call", ["create", "file_of", "opened", "map"])
def test_what_fails_on_one_rank_is_an_error_on_all(ranks: Ranks, call: str) -> None:
    wrong = [line for lines in ranks.run(failing, call) for line in lines]
    assert not wrong, "\n".join(wrong)


def test_a_rank_that_does_not_come_for_its_file() -> None:
    """In time, with its name and what may be the cause; the file is closed."""
    own = os.memfd_create("own")
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no rank listens on moeloom-test-.*-1; .* network namespace"):
        memory._exchange_files(own, f"\0moeloom-test-{os.getpid()}", 0, 2, 0.2)
    assert time.monotonic() - start < 5
    with pytest.raises(OSError):
        os.fstat(own)


class Rounds:
    """Stands in for `Control`, where every rank shows the same kind of record."""

    def __init__(self, shown: list[dict]) -> None:
        self.peers = type("Peers", (), {"rank": 0, "num_ranks": len(shown)})()
        self.shown = shown

    @contextmanager
    def operation(self, kind: str) -> Iterator[None]:
        yield

    def agree(self, same: dict, own: dict | None = None, error: Exception | None = None) -> list[dict]:
        if error is not None:
            raise error
        return self.shown


@pytest.fixture()
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], bool]:
    """What this process sees. Which reach each other is up to the test."""
    reach: dict[tuple[int, int], bool] = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    names = {0: "GPU-a", 1: "GPU-b"}
    by_device = lambda d: names[d if isinstance(d, int) else d.index]  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: type("P", (), {"uuid": by_device(d)})())
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reach.get((one, other), True))
    return reach


def test_gpus_without_peer_access_are_named(two_gpus: dict[tuple[int, int], bool]) -> None:
    """Before anything is allocated. A GPU that only its own process sees is tried all the same."""
    device = torch.device("cuda", 0)
    check_peers(Rounds([{"gpu": "GPU-a"}, {"gpu": "GPU-b"}, {"gpu": "GPU-unseen"}]), device)
    two_gpus[0, 1] = False
    with pytest.raises(CapabilityError, match=r"GPU-a of rank 0 cannot access the memory of GPU GPU-b of rank 1.*topo"):
        check_peers(Rounds([{"gpu": "GPU-a"}, {"gpu": "GPU-b"}]), device)


def test_ranks_on_one_gpu_are_warned(two_gpus: dict[tuple[int, int], bool], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "moeloom"):
        check_peers(Rounds([{"gpu": "GPU-a"}, {"gpu": "GPU-b"}]), torch.device("cuda", 0))
        assert not caplog.messages
        check_peers(Rounds([{"gpu": "GPU-a"}, {"gpu": "GPU-b"}, {"gpu": "GPU-a"}]), torch.device("cuda", 0))
    assert "ranks 0, 2 share one GPU" in caplog.messages[0] and "set_device" in caplog.messages[0]
