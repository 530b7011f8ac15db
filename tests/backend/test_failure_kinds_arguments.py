"""Arguments of the wrong device, dtype or layout: named, or made no difference by."""

from __future__ import annotations

import pytest
import torch

from moeloom import Experts, Plan, Routing, Runtime

GOOD = {"x": torch.randn(3, 8), "topk_idx": torch.tensor([[0, 1]] * 3), "topk_weights": torch.rand(3, 2)}
EXPERTS = Experts(torch.randn(2, 12, 8), torch.randn(2, 8, 6))


def call(rt: Runtime, plan: Plan | None = None, **changed: torch.Tensor) -> torch.Tensor:
    given = GOOD | changed
    return rt.moe(given["x"], Routing(given["topk_idx"], given["topk_weights"]), EXPERTS, plan=plan)


@pytest.mark.parametrize("name", ["x", "topk_idx", "topk_weights"])
def test_another_device_is_named(name: str) -> None:
    with Runtime("self") as rt:
        with pytest.raises(ValueError, match=f"{name} is on meta; the cpu backend needs it on the CPU"):
            call(rt, **{name: GOOD[name].to("meta")})
        assert call(rt).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32, torch.bool])
@pytest.mark.parametrize("pipeline", ["split", "decode"])
def test_another_type_of_ids_is_named(dtype: torch.dtype, pipeline: str) -> None:
    with Runtime("self", max_tokens=4) as rt, pytest.raises(ValueError, match=r"topk_idx has dtype .*int32.*int64"):
        call(rt, Plan(pipeline), topk_idx=GOOD["topk_idx"].to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_router_weights_are_fp32_end_to_end(dtype: torch.dtype) -> None:
    with Runtime("self") as rt, pytest.raises(ValueError, match=r"topk_weights has dtype .*float32"):
        call(rt, topk_weights=GOOD["topk_weights"].to(dtype))


def test_layouts_make_no_difference() -> None:
    """Rows from a permuted buffer, weights the other way round: strides change no bit."""
    with Runtime("self") as rt:
        wanted = call(rt)
        turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (EXPERTS.gate_up, EXPERTS.down)]
        routing = Routing(GOOD["topk_idx"], GOOD["topk_weights"])
        assert torch.equal(rt.moe(GOOD["x"].t().contiguous().t(), routing, Experts(*turned)), wanted)
        received, handle = rt.dispatch(GOOD["x"], routing, 2, order="batched")
        plain = rt.combine(received.rows, handle, weighted=True)
        permuted = received.rows.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        assert torch.equal(rt.combine(permuted, handle, weighted=True), plain)
