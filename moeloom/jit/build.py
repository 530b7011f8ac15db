"""Compile, by way of this process's memory and the user's cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from moeloom.jit import cache, compiler
from moeloom.jit.binary import FORMAT, Binary
from moeloom.jit.source import Source

log = logging.getLogger("moeloom")
_compiled: dict[str, Binary] = {}


def compile(source: Source) -> Binary:
    """The machine code of a source: compiled once per process, and once per user where the cache can be written.

    Needs no GPU. Raises KernelError with the compiler's log and the generated lines, CapabilityError without NVRTC.
    """
    headers = source.headers()
    key = source.key(headers, f"{compiler.version()}; {FORMAT}")

    def make() -> bytes:
        log.info("compiling %s", source.name)
        return compiler.run(source, headers).to_bytes()

    if key not in _compiled:
        _compiled[key] = Binary.from_bytes(cache.fetch(key, make))
    return _compiled[key]


def prewarm(sources: Iterable[Source]) -> list[Binary]:
    """Compile all, in parallel, before anything runs: a rank that compiles late keeps its peers waiting."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(cores, thread_name_prefix="moeloom-jit") as pool:
        return list(pool.map(compile, sources))
