"""Memory that every rank of the node reads and writes: each rank has a part, on its own GPU.

A part lives until the last rank has let go of it, so nobody writes into memory that is somebody else's by then: the
driver shares it by file descriptors, which counts its users, those killed included.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from typing import Any

import torch

from moeloom.backends.control import Control
from moeloom.errors import CapabilityError, CapacityError, KernelError
from moeloom.jit.bindings import driver


class SymmetricMemory:
    """This rank's part, and where the parts of all ranks lie in this process."""

    def __init__(self, control: Control, device: torch.device) -> None:
        self._control, self._device = control, device
        self._mapped: list[tuple[int, int]] = []  # address and size of each part
        self.num_bytes = 0

    def make(self, num_bytes: int) -> list[int]:
        """Zeros, instead of what there was. Returns each rank's address. Collective, of equal sizes."""
        self.close()
        peers, parts = self._control.peers, _Parts(self._device)
        error: Exception | None = None
        size = parts.rounded(num_bytes)
        name = self._control.agree({"bytes of symmetric memory": size}, {"name": uuid.uuid4().hex})[0]["name"]
        try:
            own = parts.create(size)
        except KernelError as failed:
            free, total = torch.cuda.mem_get_info(self._device)
            error = CapacityError(
                f"symmetric memory: {size} bytes needed, {free} of {total} bytes free on {self._device} ({failed});"
                " lower max_tokens, or free memory"
            )
        self._control.agree({}, error=error)
        handles = {peers.rank: own}
        try:
            if peers.num_ranks > 1:
                files = _exchange_files(parts.file_of(own), f"\0moeloom-{name}", peers.rank, peers.num_ranks)
                handles |= {rank: parts.opened(file) for rank, file in files.items()}
            for rank in range(peers.num_ranks):
                self._mapped.append((parts.map(handles[rank], size), size))
            parts.zero(self._mapped[peers.rank][0], size)
        except (KernelError, OSError) as failed:
            error = CapabilityError(f"rank {peers.rank}: GPUs cannot share memory: {failed}")
        finally:
            for handle in handles.values():
                parts.release(handle)  # what is mapped stays
        self._control.agree({}, error=error)  # all are zeros before anybody writes
        self.num_bytes = size
        return [address for address, _ in self._mapped]

    def close(self) -> None:
        """Let go, once the GPU is done with it."""
        if self._mapped:
            torch.cuda.synchronize(self._device)
            parts = _Parts(self._device)
            for address, size in self._mapped:
                parts.unmap(address, size)
        self._mapped, self.num_bytes = [], 0


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


def _exchange_files(own: int, name: str, rank: int, num_ranks: int, seconds: float = 60.0) -> dict[int, int]:
    """This rank's file to all others, theirs to this one, by rank. name: of sockets that only these ranks know."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.settimeout(seconds)
        listener.bind(f"{name}-{rank}")
        listener.listen(num_ranks)

        def serve() -> None:
            for _ in range(num_ranks - 1):
                connection, _ = listener.accept()
                with connection:
                    socket.send_fds(connection, [b"."], [own])

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        files = {}
        for other in range(num_ranks):
            if other == rank:
                continue
            with _connected(f"{name}-{other}", seconds) as connection:
                _, (file, *_), _, _ = socket.recv_fds(connection, 1, 1)
                files[other] = file
        server.join(seconds)
        os.close(own)
    return files


def _connected(name: str, seconds: float) -> socket.socket:
    """To a rank that may not listen yet."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(seconds)
    for _ in range(int(seconds * 100)):
        try:
            connection.connect(name)
            return connection
        except ConnectionRefusedError:
            threading.Event().wait(0.01)
    raise TimeoutError(f"no rank listens on {name[1:]}")


def check_peers(control: Control, device: torch.device) -> None:
    """Raise the same CapabilityError on all ranks unless each GPU reaches each other's memory. Collective."""
    own = str(torch.cuda.get_device_properties(device).uuid)
    with control.operation("construction"):
        gpus = [record["gpu"] for record in control.agree({}, {"gpu": own})]
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
