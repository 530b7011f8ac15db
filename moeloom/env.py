"""The only reader and writer of environment variables."""

from __future__ import annotations

import os

SHARED_MEMORY_DIR = "MOELOOM_SHM_DIR"  # where the CPU backend puts its shared memory; default /dev/shm
NODE = "MOELOOM_NODE"  # declares this rank's node by any name, so that several nodes fit on one machine


def shared_memory_dir() -> str:
    """The folder for shared memory files."""
    return os.environ.get(SHARED_MEMORY_DIR, "/dev/shm")


def declared_node() -> str | None:
    """The node that this rank says it is on, or None to ask the machine."""
    return os.environ.get(NODE)


def declare_node(name: str) -> None:
    """Put this process on the node `name`."""
    os.environ[NODE] = name


def use_loopback() -> None:
    """Keep gloo on the loopback interface (ranks of one machine), unless the user chose an interface."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def is_torchrun() -> bool:
    """Whether a launcher such as torchrun has given this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
