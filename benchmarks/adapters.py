"""Adapters to other systems, which `moeloom bench` times beside ours where they are installed. Never a dependency."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeloom.cli.run import Settings
from moeloom.experts import Experts
from moeloom.quantize import GROUP, quantize
from moeloom.types import Routing

ALLOWED_DIFFERENCE = 0.1  # rms, relative: roundings differ, the work must not


@dataclass(frozen=True)
class Peer:
    """One call of another system."""

    name: str
    stage: str
    run: Callable[[], object]


class FusedDeepGemm:
    """The fused kernel of `deep_gemm` for SM90: FP8, x quantised before."""

    name = "deep_gemm"
    remark = "its layer takes rows that are quantised already"

    def __init__(self, settings: Settings, experts: Experts) -> None:
        self._module, self._settings = importlib.import_module("deep_gemm"), settings
        assert experts.scales is not None
        transform = self._module.transform_weights_for_mega_moe_sm90
        self._weights = transform((experts.gate_up, experts.scales[0]), (experts.down, experts.scales[1]))
        self._buffer: Any = None

    def calls(self, x: Tensor, routing: Routing, y: Tensor) -> list[Peer]:
        """The whole layer."""
        shape, tokens = self._settings.shape, len(x)
        if self._buffer is not None:
            self._buffer.destroy()
        self._buffer = self._module.get_symm_buffer_for_mega_moe(
            dist.group.WORLD, shape.num_experts, tokens, routing.num_topk, shape.expert_hidden, shape.intermediate
        )
        buffer, rows, out = self._buffer, quantize(x), torch.full_like(x, torch.nan)
        buffer.x[:tokens].copy_(rows.values)
        buffer.x_sf[:tokens].copy_(rows.scales)
        buffer.topk_idx[:tokens].copy_(routing.topk_idx)
        buffer.topk_weights[:tokens].copy_(routing.topk_weights)
        clamp = shape.activation.clamp
        run = lambda: self._module.fp8_mega_moe(out, *self._weights, buffer, activation_clamp=clamp)  # noqa: E731
        run()
        difference = float((out.float() - y.float()).norm() / y.float().norm())
        if not difference < ALLOWED_DIFFERENCE:
            raise ValueError(f"its result differs from ours by {difference:.2g}")
        return [Peer(self.name, "layer", run)]


class ElasticDeepEp:
    """The exchange of `deep_ep` alone: expert-major rows, without a wait of the host."""

    name = "deep_ep"
    remark = "its dispatch takes rows that are quantised already; both by themselves, not within a layer"

    def __init__(self, settings: Settings, experts: Experts) -> None:
        self._module, self._settings = importlib.import_module("deep_ep"), settings

    def calls(self, x: Tensor, routing: Routing, y: Tensor) -> list[Peer]:
        """dispatch in the recipe's dtype (quantised before), combine in bf16."""
        recipe, shape, tokens = self._settings.recipe, self._settings.shape, len(x)
        buffer = self._module.ElasticBuffer(
            dist.group.WORLD, num_max_tokens_per_rank=tokens, hidden=shape.expert_hidden, num_topk=routing.num_topk,
            use_fp8_dispatch=recipe.quantized, allow_hybrid_mode=False,
        )  # fmt: skip
        payload: Any = tuple(quantize(x)) if recipe.quantized else x
        ids = routing.topk_idx.to(self._module.topk_idx_t)
        options = {"num_experts": shape.num_experts, "expert_alignment": 128, "do_cpu_sync": False, "do_expand": True}

        def dispatch() -> Any:
            return buffer.dispatch(payload, topk_idx=ids, topk_weights=routing.topk_weights, **options)

        received, _, _, handle, _ = dispatch()
        rows = received[0] if recipe.quantized else received
        back = torch.randn(rows.shape, device=x.device, dtype=torch.bfloat16)
        return [
            Peer(self.name, "dispatch", dispatch),
            Peer(self.name, "combine", lambda: buffer.combine(back, handle=handle)),
        ]


ADAPTERS = {"deep_gemm": FusedDeepGemm, "deep_ep": ElasticDeepEp}


def importable(name: str, settings: Settings) -> None:
    """Raise, saying why, unless the system is here and has what these settings ask for."""
    shape, placement = settings.shape, settings.placement
    importlib.import_module(name)
    if shape.num_experts % placement.num_ranks:
        raise ValueError(f"{placement.num_ranks} ranks do not divide {shape.num_experts} experts")
    if settings.num_ranks > torch.cuda.device_count():
        raise ValueError("ranks share GPUs")
    if name != "deep_gemm":
        return
    if not settings.recipe.quantized:
        raise ValueError(f"its fused kernel is for fp8, the recipe is {settings.recipe.name}")
    if shape.has_biases or shape.gate_up_interleaved or shape.weight_on_input:
        raise ValueError("it has no biases, no interleaved weights and no weight on the input")
    if shape.expert_hidden % GROUP or shape.intermediate % GROUP or shape.intermediate > 4096:
        raise ValueError("it needs widths that are multiples of 128, of experts up to 4096")
