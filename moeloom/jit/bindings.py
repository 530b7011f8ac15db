"""NVIDIA's Python bindings, imported when first needed: a machine without a GPU never pays for them."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from moeloom.errors import CapabilityError

INSTALL = "pip install 'moeloom[gpu]'"


@functools.cache
def nvrtc() -> Any:
    """`cuda.bindings.nvrtc`, with its library. Raises CapabilityError if there is none."""
    try:
        module = importlib.import_module("cuda.bindings.nvrtc")
        module.nvrtcVersion()  # loads the library
    except (ImportError, RuntimeError) as error:
        raise CapabilityError(f"kernels are compiled by NVRTC 13, found: {error}; {INSTALL}") from error
    return module


@functools.cache
def driver() -> Any:
    """`cuda.bindings.driver`, with the driver's library. Raises CapabilityError if there is none."""
    try:
        module = importlib.import_module("cuda.bindings.driver")
        module.cuDriverGetVersion()
    except ImportError as error:
        raise CapabilityError(f"kernels are launched through cuda-bindings 13, found: {error}; {INSTALL}") from error
    except RuntimeError as error:
        raise CapabilityError(f"kernels are launched by NVIDIA's driver 580 or newer, found: {error}") from error
    return module
