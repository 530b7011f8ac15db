"""Ranks kept alive across tests: one pool of six processes; a test uses as many of them as it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from moeloom import RankPool, Runtime, Topology

NUM_RANKS = 6

_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # of a rank's process
_runtimes: dict[tuple, Runtime] = {}


class Ranks:
    """The pool, started anew if a test has broken it."""

    def __init__(self, device: str = "cpu") -> None:
        self._pool: RankPool | None = None
        self._device = device

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """`fn(*args)` on all six ranks, results in rank order; raises the first rank's failure."""
        if self._pool is None or not self._pool.processes:
            self._pool = RankPool(NUM_RANKS, device=self._device)
        return self._pool.run(fn, *args, timeout=timeout)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def group_of(members: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The process group of these world ranks; None if this rank is not in it. All ranks of the pool must call it.

    torch names a group after how many groups a rank has made before, so groups that only their members make hang as
    soon as these numbers differ.
    """
    if members not in _groups:
        _groups[members] = dist.new_group(list(members))
    return _groups[members] if dist.get_rank() in members else None


def runtime_of(members: tuple[int, ...], nodes: int, timeout: float = 30.0, backend: str = "auto") -> Runtime | None:
    """A Runtime over these world ranks, declared to be on `nodes` nodes; made on first use, then kept."""
    group = group_of(members)
    if group is None:
        return None
    key = (members, nodes, timeout, backend)
    if key not in _runtimes:
        topology = Topology.split(len(members), nodes)
        _runtimes[key] = Runtime(group, topology=topology, timeout=timeout, backend=backend)
    return _runtimes[key]


def forget_runtimes() -> None:
    """Close every kept Runtime of this rank."""
    while _runtimes:
        _runtimes.popitem()[1].close()
