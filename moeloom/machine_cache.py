"""The measured machine: kept in the user's cache, and shared so that all ranks of a Runtime plan with the same one."""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from moeloom import env
from moeloom.plan.cpu import BUILT_IN
from moeloom.plan.measured import Measured
from moeloom.plan.problem import Domains
from moeloom.plan.strategies import Setting
from moeloom.topology import Topology

log = logging.getLogger("moeloom")


def path() -> Path:
    """Where `moeloom measure` leaves what it finds."""
    return Path(env.cache_home()) / "moeloom" / "machine.json"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> Measured:
    """What was measured, or the built-in numbers if nothing readable was kept."""
    try:
        return Measured.from_json(json.loads(path().read_text()))
    except FileNotFoundError:
        return BUILT_IN
    except (OSError, ValueError) as error:
        log.warning("%s is not used: %s; run `moeloom measure` again", path(), error)
        return BUILT_IN


def store(measured: Measured) -> Path:
    """Keep a measurement; a reader sees the old or the new one, never half. Raises OSError if it cannot."""
    target = path()
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


def announcement(rank: int) -> dict[str, Any]:
    """What a rank shows the others at construction: its host and cores; the first one its machine."""
    return {"host": socket.gethostname(), "cores": cores(), "machine": load().to_json() if rank == 0 else None}


def setting(announced: list[dict[str, Any]], topology: Topology) -> Setting:
    """What all ranks plan with: the first rank's machine, shared by as many ranks as are on the fullest host."""
    ranks_of_host = Counter(record["host"] for record in announced)
    host, ranks = max(ranks_of_host.items(), key=lambda item: (item[1], item[0]))
    cores_there = max(record["cores"] for record in announced if record["host"] == host)
    measured = Measured.from_json(announced[0]["machine"]).for_ranks(ranks, cores_there)
    return Setting(measured.machine, Domains.of(topology), measured.efficiencies)
