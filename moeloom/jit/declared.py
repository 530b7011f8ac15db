"""Kernels that modules declare, so that a test and `prewarm` find every one of them."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from types import ModuleType

from moeloom.jit.binary import Binary
from moeloom.jit.source import Source

REGISTERS_PER_SM = 65536
SHARED_BYTES_PER_BLOCK = 227 * 1024
SHARED_BYTES_PER_SM = 228 * 1024
SHARED_BYTES_RESERVED = 1024  # by the system, of each block


@dataclass(frozen=True)
class Declared:
    """A source, and how its kernels are launched at most.

    A module that launches kernels has a tuple of these named `KERNELS`. threads: of a block. blocks_per_sm: how many
    must fit at once. shared_bytes: dynamic, of a block.
    """

    source: Source
    threads: int
    blocks_per_sm: int = 1
    shared_bytes: int = 0


def declared_in(package: ModuleType) -> list[Declared]:
    """Everything in the `KERNELS` of a package's modules."""
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return [kernel for name in names for kernel in getattr(importlib.import_module(name), "KERNELS", ())]


def problems(declared: Declared, binary: Binary) -> list[str]:
    """What is wrong with a compiled declaration: spills, local memory, bounds that do not hold, warnings."""
    found = [f"{declared.source.name}: {note}" for note in binary.notes]
    for expression, usage in binary.kernels.items():
        threads = -(-declared.threads // 32) * 32
        registers = -(-usage.registers // 8) * 8 * threads * declared.blocks_per_sm
        shared = usage.shared_bytes + declared.shared_bytes
        per_sm = (shared + SHARED_BYTES_RESERVED) * declared.blocks_per_sm
        checks = {
            f"{usage.spill_store_bytes} B of spill stores": usage.spill_store_bytes,
            f"{usage.spill_load_bytes} B of spill loads": usage.spill_load_bytes,
            f"{usage.stack_bytes} B of local memory": usage.stack_bytes,
            f"launch bound of {usage.max_threads} threads, launched with {declared.threads}": (
                usage.max_threads < declared.threads
            ),
            f"{registers} registers in an SM of {REGISTERS_PER_SM}": registers > REGISTERS_PER_SM,
            f"{shared} B of shared memory in a block": shared > SHARED_BYTES_PER_BLOCK,
            f"{per_sm} B of shared memory in an SM": per_sm > SHARED_BYTES_PER_SM,
        }
        found += [f"{expression}: {text}" for text, wrong in checks.items() if wrong]
    return found
