"""Every launch of a kernel for one device gives it what it takes, in number, kind and size; without a GPU."""

from __future__ import annotations

import struct
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeloom import BF16, FP8, Experts, Recipe, Router, jit
from moeloom.backends.sm90 import experts, experts_backward, launch, quantize, route
from moeloom.backends.sm90.experts_parameters import TensorMap
from tests.support.nvrtc import needs_nvrtc

pytestmark = needs_nvrtc
PROCESSORS = 132


class Launches:
    """Stands in for the driver: checks each launch by what the compiler says of the kernel."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def loaded(self, declared: jit.Declared, device: int) -> tuple[dict[str, Any], int]:
        def kernel(name: str, usage: jit.Usage) -> Any:
            def start(stream: int, grid: Any, block: int, shared_bytes: int, args: tuple) -> None:
                struct.pack("=" + "".join(usage.parameters), *args)
                for code, arg in zip(usage.parameters, args, strict=True):
                    assert not code.endswith("s") or len(arg) == int(code[:-1]), name
                assert block == declared.threads and shared_bytes == declared.shared_bytes
                assert all(size > 0 for size in ([grid] if isinstance(grid, int) else grid)), name
                self.names.append(name.removeprefix("moeloom::"))

            return SimpleNamespace(launch=start)

        kernels = jit.compile(declared.source).kernels
        return {name: kernel(name, usage) for name, usage in kernels.items()}, PROCESSORS


@pytest.fixture()
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    for module in (launch, experts_backward):
        monkeypatch.setattr(module, "loaded", found.loaded)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(experts, "tensor_map", lambda *numbers: TensorMap())
    monkeypatch.setattr(quantize, "_check_numbers", lambda *what: None)
    return found


def weights(on_input: bool = False, biased: bool = True, **options: Any) -> Experts:
    """Of two experts."""
    gate_up, down = torch.randn(2, 96, 32).bfloat16(), torch.randn(2, 32, 48).bfloat16()
    biases = {"gate_up_bias": torch.randn(2, 96), "down_bias": torch.randn(2, 32)} if biased else {}
    return Experts(gate_up, down, weight_on_input=on_input, **biases, **options)


START, COUNT, WEIGHT = torch.tensor([0, 4, 9]).int(), torch.tensor([4, 5]).int(), torch.rand(9)


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("recipe", [BF16, FP8], ids=str)
def test_experts(launches: Launches, recipe: Recipe, on_input: bool) -> None:
    given, rows = weights(on_input), torch.randn(9, 32).bfloat16()
    if recipe.quantized:
        given, rows = given.quantized(), torch.zeros(9, 48, dtype=torch.uint8)
    out = experts.experts(rows, START, COUNT, WEIGHT, given, recipe)
    assert out.shape == (9, 32) and out.dtype == torch.bfloat16
    values = "e4m3" if recipe.quantized else "bf16"
    products = [f"experts_product<moeloom::Values::{values}, moeloom::Phase::{phase}>" for phase in experts.PHASES]
    assert launches.names == ["weigh_rows"] * (on_input and not recipe.quantized) + products


@pytest.mark.parametrize("order", ["gate_first", "interleaved"])
@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("on_input", [False, True])
def test_experts_backward(launches: Launches, on_input: bool, owned: bool, order: Any) -> None:
    given = weights(on_input, gate_up_order=order)
    for tensor in given.tensors().values():
        tensor.requires_grad_()
    rows, d_out = torch.randn(2, 9, 32).bfloat16().unbind(0)
    arguments = (rows, START, COUNT, WEIGHT)
    experts_backward.forward(*arguments, given)
    alternate = "true" if order == "interleaved" else "false"
    weigh = ["weigh_rows"] * on_input
    assert launches.names == [*weigh, f"activation_forward<{alternate}>", "add_bias"]
    launches.names.clear()
    experts_backward.experts_backward(*arguments, d_out, given, owned=owned)
    without_padding = ["zero_padding" if owned else "weigh_rows"] * (2 - on_input)
    behind = ["weigh_rows_backward"] * on_input + ["zero_padding"]
    assert launches.names == [*weigh, f"activation_backward<{alternate}>", *without_padding, *["sum_rows"] * 2, *behind]


@pytest.mark.parametrize(("dtype", "number"), [(torch.bfloat16, "moeloom::u16"), (torch.float32, "float")])
def test_quantize(launches: Launches, dtype: torch.dtype, number: str) -> None:
    quantize.quantize_rows(torch.randn(5, 136).to(dtype), num_tokens=torch.tensor([3]).int())
    given = weights(biased=False)
    got = quantize.quantize_experts(replace(given, gate_up=given.gate_up.to(dtype), down=given.down.to(dtype)))
    assert launches.names == [f"quantize_rows<{number}>"] + [f"quantize_blocks<{number}>"] * 2
    wanted = given.quantized()
    assert [each.shape for each in got.scales or ()] == [each.shape for each in wanted.scales or ()]
    quantize.quantize_rows(torch.randn(0, 136).to(dtype))
    assert len(launches.names) == 3


@pytest.mark.parametrize(("experts", "per_lane"), [(8, 4), (256, 8), (384, 16), (1024, 32)])
def test_route(launches: Launches, experts: int, per_lane: int) -> None:
    router = Router(num_topk=4)
    routing = route._choose(router, torch.randn(5, experts), torch.randn(experts))
    assert routing.topk_idx.shape == (5, 4) and launches.names == [f"route<float, {per_lane}>"]
    route._choose(router, torch.randn(0, experts).bfloat16(), None)
    assert len(launches.names) == 1, "no tokens, no launch"
