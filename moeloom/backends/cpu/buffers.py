"""The node's symmetric buffer: every rank's rows, mapped by every rank of the node."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from moeloom.backends.control import Control
from moeloom.backends.shared_memory import SharedFile
from moeloom.errors import MoeloomError
from moeloom.regions import Region, total_bytes

PAGE_BYTES = 4096

log = logging.getLogger("moeloom")


class SymmetricBuffer:
    """Grows when all ranks agree that an operation needs more; never shrinks before `close`."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._local_ranks = control.local_ranks
        self._memory: SharedFile | None = None
        self.bytes_per_rank = 0

    def ensure(self, regions: Sequence[Region]) -> None:
        """Make room for `regions` on every rank. Collective: all ranks must ask for the same."""
        needed = -(-total_bytes(regions) // PAGE_BYTES) * PAGE_BYTES
        if needed <= self.bytes_per_rank:
            return
        self._memory = None  # give the old memory back first: two at once may be more than there is
        self.bytes_per_rank = 0
        self._memory = share(self._control, needed * len(self._local_ranks))
        self.bytes_per_rank = needed
        log.debug("symmetric buffer: %d bytes on each of %d ranks", needed, len(self._local_ranks))

    def view(self, regions: Sequence[Region], name: str, dtype: torch.dtype) -> Tensor:
        """One region of all ranks of the node, `[local ranks * rows, row elements]`, rank by rank."""
        assert self._memory is not None
        offset = 0
        for region in regions:
            if region.name == name:
                elements = region.row_bytes // dtype.itemsize
                return self._memory.tensor(dtype, (len(self._local_ranks) * region.rows, elements), offset)
            offset += region.num_bytes * len(self._local_ranks)
        raise KeyError(name)

    def close(self) -> None:
        """Unmap."""
        self._memory, self.bytes_per_rank = None, 0


def share(control: Control, num_bytes: int) -> SharedFile:
    """Memory that every rank of this node maps; the node's first rank creates it.

    Two rounds: the path, or why there is none, goes to all ranks of all nodes; then nobody needs the name any more.
    """
    created, error = None, None
    if control.peers.rank == control.local_ranks[0]:
        try:
            created = SharedFile.create(num_bytes)
        except MoeloomError as failed:
            error = failed
    try:
        records = control.agree({}, {"path": created.path if created else None}, error)
        memory = created or SharedFile.open(records[control.local_ranks[0]]["path"], num_bytes)
        control.agree({})
        return memory
    finally:
        if created is not None:
            created.unlink()
