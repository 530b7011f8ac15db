"""moeloom: the expert-parallel data flow of mixture-of-experts layers, behind one interface."""

import importlib
from types import ModuleType

# the layer
from moeloom.activation import SwiGLU
from moeloom.config import BF16, FP8, FP32, RECIPES, Recipe
from moeloom.errors import CapabilityError, CapacityError, MoeloomError, PeerTimeout
from moeloom.experts import Experts

# several ranks on this machine
from moeloom.launch import RankPool, launch

# where experts and ranks are
from moeloom.placement import Placement

# the planner
from moeloom.plan.plan import Plan

# routing
from moeloom.route import Router
from moeloom.runtime import Runtime
from moeloom.topology import Topology
from moeloom.types import Quantized, Received, Routing

# what takes long to import comes when it is first named: moeloom.nn, moeloom.checkpoint
_LATER = ("checkpoint", "nn")


def __getattr__(name: str) -> ModuleType:
    if name in _LATER:
        return importlib.import_module(f"moeloom.{name}")
    raise AttributeError(f"module 'moeloom' has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "BF16",
    "FP8",
    "FP32",
    "RECIPES",
    "CapabilityError",
    "CapacityError",
    "Experts",
    "MoeloomError",
    "PeerTimeout",
    "Placement",
    "Plan",
    "Quantized",
    "RankPool",
    "Received",
    "Recipe",
    "Router",
    "Routing",
    "Runtime",
    "SwiGLU",
    "Topology",
    "launch",
]
