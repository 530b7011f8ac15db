"""Memory that every rank of the node reads and writes: each rank has a part, on its own GPU.

A part lives until the last rank has let go of it, so nobody writes into memory that is somebody else's by then: the
driver shares it by file descriptors, which counts its users, those killed included.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from typing import Any

import torch

from moeloom.backends.control import Control
from moeloom.errors import CapabilityError, CapacityError, KernelError
from moeloom.jit.bindings import driver

log = logging.getLogger("moeloom")


class SymmetricMemory:
    """This rank's part, and where the parts of all ranks lie in this process."""

    def __init__(self, control: Control, device: torch.device) -> None:
        self._control, self._device = control, device
        self._mapped: list[tuple[int, int]] = []  # address and size of each part
        self._kept: list[tuple[int, int]] = []  # of earlier ones
        self.num_bytes = 0

    def make(self, num_bytes: int, keep: bool = False) -> list[int]:
        """Zeros, instead of what there was, or (keep) beside it. Returns each rank's address. Collective, of equal
        sizes.
        """
        if keep:
            self._kept += self._mapped
            self._mapped = []
        else:
            self._give_back(self._mapped)
        kept_bytes = sum(size for _, size in self._kept) // self._control.peers.num_ranks
        self.num_bytes = kept_bytes
        parts = _Parts(self._device)
        handles: dict[int, Any] = {}
        size = parts.rounded(num_bytes)
        name = self._control.agree({"bytes of symmetric memory": size}, {"name": uuid.uuid4().hex})[0]["name"]
        try:
            self._control.agree({}, error=self._create(parts, handles, size))
            error = self._map_all(parts, handles, size, f"\0moeloom-{name}")
        finally:
            for handle in handles.values():
                parts.release(handle)  # what is mapped stays
        try:
            self._control.agree({}, error=error)  # all are zeros before anybody writes
        except Exception:
            with suppress(KernelError, RuntimeError):  # what was wrong before is raised
                self._give_back(self._mapped)
            raise
        self.num_bytes = kept_bytes + size
        return [address for address, _ in self._mapped]

    def _create(self, parts: _Parts, handles: dict[int, Any], size: int) -> Exception | None:
        """This rank's part. Returns what is wrong, if anything is."""
        peers = self._control.peers
        try:
            handles[peers.rank] = parts.create(size)
        except KernelError as failed:
            free, total = torch.cuda.mem_get_info(self._device)
            return CapacityError(
                f"symmetric memory: {size} bytes needed, {free} of {total} bytes free on {self._device} ({failed});"
                " lower max_tokens, or free memory"
            )
        try:
            if peers.num_ranks > 1:
                os.close(parts.file_of(handles[peers.rank]))  # tried now, so that nobody waits for one that cannot be
        except KernelError as failed:
            return _cannot_share(peers.rank, failed)
        return None

    def _map_all(self, parts: _Parts, handles: dict[int, Any], size: int, name: str) -> Exception | None:
        """The parts of all ranks in this process. Returns what is wrong, if anything is."""
        peers = self._control.peers
        try:
            if peers.num_ranks > 1:
                own = parts.file_of(handles[peers.rank])
                files = _exchange_files(own, name, peers.rank, peers.num_ranks, peers.timeout)
                handles |= _opened(parts, files)
            for rank in range(peers.num_ranks):
                self._mapped.append((parts.map(handles[rank], size), size))
            parts.zero(self._mapped[peers.rank][0], size)
        except (KernelError, OSError) as failed:
            return _cannot_share(peers.rank, failed)
        return None

    def close(self) -> None:
        """Let go, once the GPU is done with it."""
        self.num_bytes = 0
        try:
            self._give_back(self._mapped)
        finally:
            self._give_back(self._kept)

    def _give_back(self, mapped: list[tuple[int, int]]) -> None:
        if mapped:
            torch.cuda.synchronize(self._device)
            parts = _Parts(self._device)
            while mapped:
                parts.unmap(*mapped.pop())


def _cannot_share(rank: int, failed: Exception) -> CapabilityError:
    return CapabilityError(f"rank {rank}: GPUs cannot share memory: {failed}")


def _opened(parts: _Parts, files: dict[int, int]) -> dict[int, Any]:
    """Other ranks' parts by their files, which are closed."""
    handles = {}
    try:
        while files:
            rank, file = files.popitem()
            handles[rank] = parts.opened(file)
    except KernelError:
        for file in files.values():
            os.close(file)
        for handle in handles.values():
            parts.release(handle)
        raise
    return handles


class _Parts:
    """The driver's calls, for memory on one device."""

    def __init__(self, device: torch.device) -> None:
        cuda = self._cuda = driver()
        self._prop = cuda.CUmemAllocationProp()
        self._prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._prop.requestedHandleTypes = self._by_file = (
            cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        self._prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._prop.location.id = device.index

    def rounded(self, num_bytes: int) -> int:
        """The size that a part of num_bytes has."""
        flag = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        step = self._call("cuMemGetAllocationGranularity", self._prop, flag)
        return -(-num_bytes // step) * step

    def create(self, size: int) -> Any:
        return self._call("cuMemCreate", size, self._prop, 0)

    def file_of(self, handle: Any) -> int:
        return int(self._call("cuMemExportToShareableHandle", handle, self._by_file, 0))

    def opened(self, file: int) -> Any:
        try:
            return self._call("cuMemImportFromShareableHandle", file, self._by_file)
        finally:
            os.close(file)

    def map(self, handle: Any, size: int) -> int:
        address = self._call("cuMemAddressReserve", size, 0, 0, 0)
        self._call("cuMemMap", address, size, 0, handle, 0)
        access = self._cuda.CUmemAccessDesc()
        access.location.type, access.location.id = self._prop.location.type, self._prop.location.id
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, size, [access], 1)
        return int(address)

    def zero(self, address: int, size: int) -> None:
        self._call("cuMemsetD8", address, 0, size)
        torch.cuda.synchronize(self._prop.location.id)

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)
        self._call("cuMemAddressFree", address, size)

    def release(self, handle: Any) -> None:
        self._call("cuMemRelease", handle)

    def _call(self, name: str, *args: Any) -> Any:
        status, *values = getattr(self._cuda, name)(*args)
        if int(status):
            raise KernelError(f"{name}: {status.name}")
        return values[0] if values else None


def write_word(address: int, word: int, stream: int) -> None:
    """32 bits, on a raw stream."""
    (status,) = driver().cuMemsetD32Async(address, word, 1, stream)
    if int(status):
        raise KernelError(f"cuMemsetD32Async: {status.name}")


def _exchange_files(own: int, name: str, rank: int, num_ranks: int, seconds: float) -> dict[int, int]:
    """This rank's file to all others, theirs to this one, by rank. own is closed. name: of sockets that only these
    ranks know. Raises OSError if one does not come in time.
    """
    files: dict[int, int] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.settimeout(seconds)
        listener.bind(f"{name}-{rank}")
        listener.listen(num_ranks)

        def serve() -> None:
            with suppress(OSError):  # who has not got the file says so
                for _ in range(num_ranks - 1):
                    connection, _ = listener.accept()
                    with connection:
                        socket.send_fds(connection, [b"."], [own])

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        try:
            for other in range(num_ranks):
                if other != rank:
                    files[other] = _file_from(f"{name}-{other}", seconds)
            server.join(seconds)
        except BaseException:
            for file in files.values():
                os.close(file)
            raise
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # accept then waits no longer
            server.join()
            os.close(own)
    return files


def _file_from(name: str, seconds: float) -> int:
    """The file of a rank that may not listen yet."""
    deadline = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        while True:
            try:
                connection.connect(name)
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    found = f"no rank listens on {name[1:]}"
                    raise TimeoutError(f"{found}; all must be in one network namespace (one container)") from None
                time.sleep(0.01)
        _, files, _, _ = socket.recv_fds(connection, 1, 1)
        if not files:
            raise ConnectionError(f"{name[1:]} sent no file")
        return files[0]


def check_peers(control: Control, device: torch.device) -> None:
    """Raise the same CapabilityError on all ranks unless each GPU reaches each other's memory. Collective."""
    own = str(torch.cuda.get_device_properties(device).uuid)
    with control.operation("construction"):
        gpus = [record["gpu"] for record in control.agree({}, {"gpu": own})]
        if gpus.count(own) > 1:
            sharing = ", ".join(str(rank) for rank, gpu in enumerate(gpus) if gpu == own)
            log.warning(
                "ranks %s share one GPU and take turns, so that each signal takes milliseconds; has each rank called"
                " torch.cuda.set_device before?",
                sharing,
            )
        visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
        error = None
        for rank, gpu in enumerate(gpus):
            # one that this process does not see is shared all the same, if the driver can
            other = visible.get(gpu, device.index)
            if other != device.index and not torch.cuda.can_device_access_peer(device.index, other):
                error = CapabilityError(
                    f"GPU {own} of rank {control.peers.rank} cannot access the memory of GPU {gpu} of rank {rank};"
                    " needed: NVLink, or peer access over PCIe (see `nvidia-smi topo -p2p r`)"
                )
        control.agree({}, error=error)
