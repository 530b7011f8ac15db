"""Other systems that `moeloom bench` times beside: adapters of a source checkout, for what happens to be installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import moeloom
from moeloom.cli.run import Settings
from moeloom.experts import Experts
from moeloom.types import Routing

ADAPTERS = Path(moeloom.__file__).parents[1] / "benchmarks" / "adapters.py"


class Peer(Protocol):
    """One call of another system. stage: what it does, in our words; of that stage our bound is shown too."""

    name: str
    stage: str
    run: Callable[[], object]


class Adapter(Protocol):
    """One other system on this rank, with the same experts. Made once; collective, as `calls` is.

    remark: what people should know who compare.
    """

    name: str
    remark: str

    def calls(self, x: Tensor, routing: Routing, y: Tensor) -> Sequence[Peer]:
        """What to time for these tokens, checked: y is what the layer makes of them."""


class OtherSystems:
    """Those that work here, on all ranks."""

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self._adapters = adapters

    def at(self, x: Tensor, routing: Routing, y: Tensor) -> tuple[list[Peer], list[str]]:
        """All calls for these tokens; y: what the layer makes of them. And a line for each peer that failed."""
        found: list[Peer] = []
        notes = []
        for adapter in self._adapters:
            calls, why = None, "another rank cannot"
            try:
                calls = adapter.calls(x, routing, y)
            except Exception as error:
                why = _said(error)
            if all_ranks(calls is not None) and calls is not None:
                found += calls
            else:
                notes.append(f"{adapter.name}: not measured with {len(x)} tokens: {why}")
        return found, notes


def find(settings: Settings, experts: Experts) -> tuple[OtherSystems | None, list[str]]:
    """Collective. The peers, None if there are none; and a line for each."""
    if settings.device == "cpu":
        return None, []
    if not ADAPTERS.is_file():
        return None, ["peers: not measured; their adapters are in the source, not in the package"]
    spec = importlib.util.spec_from_file_location("moeloom_adapters", ADAPTERS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: list[Adapter] = []
    notes: list[str] = []
    for name, make in module.ADAPTERS.items():
        adapter, why = None, ""
        try:
            module.importable(name, settings)
        except Exception as error:  # a peer may fail in any way
            why = _said(error)
        if all_ranks(not why):  # from here on it is collective
            try:
                adapter = make(settings, experts)
            except Exception as error:
                why = _said(error)
        if all_ranks(adapter is not None) and adapter is not None:
            found.append(adapter)
            notes.append(f"{name}: {adapter.remark}")
        else:
            notes.append(f"{name}: not measured: {why or 'another rank cannot'}")
    return OtherSystems(found) if found else None, notes


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ImportError | ValueError) and text else f"{type(error).__name__}: {text}"


def all_ranks(yes: bool) -> bool:
    """Whether it is so on every rank. Collective."""
    if not dist.is_initialized():
        return yes
    votes = torch.tensor(int(yes))
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return bool(votes)
