"""Runtimes that adapters share: one per process group, however many layers use it."""

from __future__ import annotations

import weakref

from torch.distributed import ProcessGroup

from moeloom.runtime import Runtime

_runtimes: dict[tuple[int, int | None], Runtime] = {}


def runtime_for(group: ProcessGroup | None, max_tokens: int | None = None) -> Runtime:
    """The Runtime over this group, made on first use; None: this process alone. Collective over the group.

    It is closed with its group, not with its last user: when that goes is up to each rank's garbage collector, and then
    some ranks would make a new one while others still had the old.
    """
    key = (id(group), max_tokens)
    if key not in _runtimes:
        _runtimes[key] = Runtime("self" if group is None else group, max_tokens=max_tokens)
        if group is not None:
            weakref.finalize(group, _close, key)
    return _runtimes[key]


def close_runtimes() -> None:
    """Close what `runtime_for` has made, after a failure for instance: wired again, the adapters get new ones."""
    for key in list(_runtimes):
        _close(key)


def _close(key: tuple[int, int | None]) -> None:
    runtime = _runtimes.pop(key, None)
    if runtime is not None:
        runtime.close()
