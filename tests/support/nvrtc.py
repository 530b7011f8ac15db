"""Tests that compile for a GPU need NVIDIA's compiler, though no GPU."""

from __future__ import annotations

import pytest

from moeloom.errors import CapabilityError
from moeloom.jit import bindings


def _missing() -> str:
    try:
        bindings.nvrtc()
    except CapabilityError as error:
        return str(error)
    return ""


needs_nvrtc = pytest.mark.skipif(bool(_missing()), reason=_missing())
