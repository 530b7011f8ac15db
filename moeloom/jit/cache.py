"""Bytes by key in the user's cache, shared by all processes: one makes a value, the others wait for it.

A file appears whole or not at all and is checked when read, so no crash, full disk or stray writer can harm a reader.
The lock is the kernel's (flock): it ends with its holder. Where files cannot be written or locked, everything still
works, without a cache. (`cuda.core`'s FileStreamProgramCache writes as safely, but does not check what it reads, does
not keep processes from compiling the same, raises where it cannot write, and refuses name expressions.)
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from moeloom import env

WAIT_SECONDS = 120.0  # for another process's result, before making it here too
POLL_SECONDS = 0.01
MAGIC = b"moeloom 1\n"

log = logging.getLogger("moeloom")
_said: set[str] = set()


def folder() -> Path:
    """Where the files are; it may be deleted at any time."""
    return Path(env.cache_home()) / "moeloom" / "kernels"


def fetch(key: str, make: Callable[[], bytes]) -> bytes:
    """The value of `key`: from its file, or from `make()`, whose result is kept if it can be.

    At most one process of those that share the folder is in `make` for a key, unless it takes over `WAIT_SECONDS`.
    """
    path = folder() / key
    deadline = time.monotonic() + WAIT_SECONDS
    while (found := _read(path)) is None:
        try:
            lock = _try_lock(path)
        except OSError as error:
            _say_once(f"kernels are not cached: {error}")
            return make()
        if lock is not None:
            try:
                return _read(path) or _make(path, make)
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough if this process has forked
                os.close(lock)
        if time.monotonic() > deadline:
            log.warning("another process holds %s.lock for over %g s; not waiting for it", path, WAIT_SECONDS)
            return make()
        time.sleep(POLL_SECONDS)
    return found


def _make(path: Path, make: Callable[[], bytes]) -> bytes:
    """Make a value and try to keep it; the lock is held."""
    for leftover in path.parent.glob(f"{path.name}.*.tmp"):  # of a process that was killed
        leftover.unlink(missing_ok=True)
    value = make()
    try:
        _write(path, value)
        _lock_path(path).unlink(missing_ok=True)  # who locks the deleted file finds the value
    except OSError as error:
        _say_once(f"kernels are not cached: {error}")
    return value


def _digest(path: Path, value: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + value).digest()


def _read(path: Path) -> bytes | None:
    """The value in a file, or None if there is none to be trusted."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    start = len(MAGIC) + hashlib.sha256().digest_size
    value = data[start:]
    if data[:start] == MAGIC + _digest(path, value):
        return value
    _say_once(f"{path} is damaged and is made again")
    return None


def _write(path: Path, value: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(MAGIC + _digest(path, value) + value)
            file.flush()
            os.fsync(file.fileno())  # some file systems tell only now that the quota is used up
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _try_lock(path: Path) -> int | None:
    """The file descriptor that holds the lock, or None while another one does. OSError: there can be no cache."""
    if not path.is_absolute():
        raise FileNotFoundError(f"{path.parent} is not an absolute path")  # no home, or XDG_CACHE_HOME is relative
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        os.close(lock)
        raise
    return lock


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        log.warning(message)
