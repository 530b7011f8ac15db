"""The measured machine: kept in the user's cache, and shared so that all ranks of a Runtime plan with the same one."""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moeloom import env
from moeloom.backends.base import Backend
from moeloom.plan.cpu import BUILT_IN
from moeloom.plan.efficiencies import GPU
from moeloom.plan.machines import MACHINES, machine_of_gpu
from moeloom.plan.measured import Measured
from moeloom.plan.problem import Domains
from moeloom.plan.strategies import Setting
from moeloom.topology import Topology

log = logging.getLogger("moeloom")
FILES = {"cpu": "machine.json", "sm90": "machine-sm90.json"}  # by backend


def path(backend: str = "cpu") -> Path:
    """Where `moeloom measure` leaves what it finds of the machine that a backend uses."""
    return Path(env.cache_home()) / "moeloom" / FILES[backend]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load(backend: str = "cpu") -> Measured:
    """What was measured, or the built-in numbers if nothing readable was kept, or that of another GPU."""
    kept = path(backend)
    try:
        found = Measured.from_json(json.loads(kept.read_text()))
    except FileNotFoundError:
        return built_in(backend)
    except (OSError, ValueError) as error:
        log.warning("%s is not used: %s; run `moeloom measure` again", kept, error)
        return built_in(backend)
    if backend != "cpu" and found.machine.name != gpu_name():
        log.warning(
            "%s is not used: it is of %s, not of %s; run `moeloom measure` again", kept, found.machine.name, gpu_name()
        )
        return built_in(backend)
    return found


def built_in(backend: str) -> Measured:
    """Numbers without any measurement: of the current GPU's kind if that is known, otherwise of an H100."""
    if backend == "cpu":
        return BUILT_IN
    return Measured(machine_of_gpu(gpu_name()) or MACHINES["h100"], GPU, ranks=1, cores=1)


def gpu_name() -> str:
    """The current GPU's, as CUDA gives it; empty if there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def store(measured: Measured, backend: str = "cpu") -> Path:
    """Keep a measurement; a reader sees the old or the new one, never half. Raises OSError if it cannot."""
    target = path(backend)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(measured.to_json(), file, indent=1)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


def announcement(rank: int, backend: str = "cpu") -> dict[str, Any]:
    """What a rank shows the others at construction: its host and cores; the first one its machine."""
    machine = load(backend).to_json() if rank == 0 else None
    return {"host": socket.gethostname(), "cores": cores(), "machine": machine}


def setting(announced: list[dict[str, Any]], topology: Topology, backend: Backend | None = None) -> Setting:
    """What all ranks plan with: the first rank's machine, shared by as many ranks as are on the fullest host.

    backend: only what it has; None: all that there are efficiencies for.
    """
    ranks_of_host = Counter(record["host"] for record in announced)
    host, ranks = max(ranks_of_host.items(), key=lambda item: (item[1], item[0]))
    cores_there = max(record["cores"] for record in announced if record["host"] == host)
    measured = Measured.from_json(announced[0]["machine"]).for_ranks(ranks, cores_there)
    found = Setting(measured.machine, Domains.of(topology), measured.efficiencies)
    if backend is None:
        return found
    had = {name: efficiency for name, efficiency in measured.efficiencies.items() if name in backend.pipelines}
    return replace(found, efficiencies=had, chunked=backend.overlaps_chunks)
