"""A file in shared memory that all ranks of a node map, and that no crash leaves behind."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import uuid

import torch
from torch import Tensor

from moeloom import env
from moeloom.errors import CapabilityError, CapacityError

PREFIX = "moeloom-"


class SharedFile:
    """`num_bytes` of shared memory, mapped by this process.

    The creator keeps the name only until every rank has mapped it (`unlink`). Should all ranks be killed in between,
    the next creator finds that nobody holds the file's lock and sweeps it away.
    """

    def __init__(self, path: str, file: int, num_bytes: int) -> None:
        self.path, self.num_bytes = path, num_bytes
        self.map = mmap.mmap(file, num_bytes)

    @classmethod
    def create(cls, num_bytes: int) -> SharedFile:
        """A new file, its memory reserved: without that a full /dev/shm would kill the process with SIGBUS later."""
        folder = env.shared_memory_dir()
        _sweep(folder)
        path = os.path.join(folder, PREFIX + uuid.uuid4().hex)
        file = -1
        try:
            file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
            os.posix_fallocate(file, 0, num_bytes)
            memory = cls(path, file, num_bytes)
            # it gets its name when it is locked and complete; only with a dir_fd does os.link follow the symlink
            os.link(f"/proc/self/fd/{file}", path, src_dir_fd=file)
            return memory
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise CapacityError(
                    f"shared memory: {num_bytes} bytes needed, {_free_bytes(folder)} bytes free in {folder}; enlarge it"
                    f" (docker: --shm-size), set {env.SHARED_MEMORY_DIR} to another folder, or lower max_tokens"
                ) from None
            raise CapabilityError(
                f"shared memory: cannot create a file in {folder} ({error.strerror}); set {env.SHARED_MEMORY_DIR}"
                " to a writable folder, best in memory"
            ) from None
        finally:
            if file >= 0:
                os.close(file)

    @classmethod
    def open(cls, path: str, num_bytes: int) -> SharedFile:
        """Map a file that another rank created."""
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(path, file, num_bytes)
        finally:
            os.close(file)

    def unlink(self) -> None:
        """Remove the name; the memory lives until the last rank unmaps it."""
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
        """A view of the memory from byte `offset` on."""
        count = 1
        for size in shape:
            count *= size
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.map, dtype=dtype, count=count, offset=offset).view(shape)


def _free_bytes(folder: str) -> int:
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def _sweep(folder: str) -> None:
    """Remove files whose creator died before it could: nobody holds their lock any more."""
    try:
        names = [name for name in os.listdir(folder) if name.startswith(PREFIX)]
    except OSError:
        return
    for name in names:
        path = os.path.join(folder, name)
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # gone already, or another user's
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        except OSError:
            pass  # its creator is alive
        finally:
            os.close(file)
