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


def gloo_interface() -> str | None:
    """The network interface that gloo is told to use, or None."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def cache_home() -> str:
    """The folder for what programs keep and can make again; ~/.cache unless the user chose another."""
    return os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
