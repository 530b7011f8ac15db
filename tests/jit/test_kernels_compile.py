"""Every kernel that a module declares compiles for the GPU, without spills, local memory or warnings; no GPU needed."""

from __future__ import annotations

from pathlib import Path

import pytest

import moeloom.backends
from moeloom import jit
from moeloom.jit.source import KERNELS
from tests.support.nvrtc import needs_nvrtc

pytestmark = needs_nvrtc

DECLARED = jit.declared_in(moeloom.backends)
HEADERS = sorted(KERNELS.glob("*.cuh"))


@pytest.mark.parametrize("declared", DECLARED, ids=lambda declared: declared.source.name)
def test_declared(declared: jit.Declared) -> None:
    assert declared.source.kernels, "declares no kernel"
    assert not jit.problems(declared, jit.compile(declared.source))


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_each_header_stands_alone(header: Path) -> None:
    """Includes what it uses, and holds nothing that NVRTC cannot read."""
    jit.compile(jit.Source(header.name, f'#include "{header.name}"\n', ()))


def wrong(text: str, threads: int, **limits: int) -> str:
    declared = jit.Declared(jit.Source("probe", text, ("k",)), threads, **limits)
    return "; ".join(jit.problems(declared, jit.compile(declared.source)))


def test_the_check_can_fail() -> None:
    head = 'extern "C" __global__ void __launch_bounds__'
    fine = head + "(256) k(float* p) { p[threadIdx.x] += 1; }"
    assert wrong(fine, 256) == ""
    assert "launch bound of 256 threads, launched with 384" in wrong(fine, 384)
    assert "launch bound of 0" in wrong('extern "C" __global__ void k() {}', 32)
    assert "232449 B of shared memory in a block" in wrong(fine, 256, shared_bytes=227 * 1024 + 1)
    assert "of shared memory in an SM" in wrong(fine, 256, shared_bytes=114 * 1024, blocks_per_sm=2)
    assert "registers in an SM" in wrong(fine, 256, blocks_per_sm=64)
    local = head + "(32) k(float* p, int i) { float a[64]; for (int j = 0; j < 64; ++j) a[j] = p[j]; a[i] = 1;"
    local += "float sum = 0; for (int j = 0; j < 64; ++j) sum += a[(j * i) % 64]; p[i] = sum; }"
    assert "B of local memory" in wrong(local, 32)
    loop = "\n#pragma unroll\nfor (int i = 0; i < 64; ++i) "
    spills = f"(1024, 2) k(float* p) {{ float a[64];{loop}a[i] = p[i * 1024]; __syncthreads();"
    spills += f"{loop}p[i * 999] = a[i] * a[63 - i] + a[i / 2]; }}"
    assert "B of spill stores" in wrong(head + spills, 1024, blocks_per_sm=2)
    assert "declared but never referenced" in wrong(head + "(32) k() { int unused; }", 32)
