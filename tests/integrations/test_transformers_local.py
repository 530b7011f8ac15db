"""`experts_implementation="moeloom"`: all experts in one process, computed by moeloom."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from moeloom import CapabilityError
from tests.integrations.test_transformers_cases import (
    adapter,
    build,
    call_experts,
    distance,
    distances,
    experts_module,
    load,
    reference,
)


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss", "DeepseekV3"])
def test_model_as_with_eager_experts(tmp_path: Path, name: str) -> None:
    adapter.register()
    build(name, str(tmp_path))
    wanted, found = (reference(str(tmp_path), 2, experts_implementation=which) for which in ("eager", "moeloom"))
    assert torch.equal(found["tokens"], wanted["tokens"])
    assert max(map(distance, found["logits"], wanted["logits"])) <= 1e-5
    assert max(distances(found["grads"], wanted["grads"]).values()) <= 1e-5
    assert max(distances(found["change"], wanted["change"]).values()) <= 1e-3


def test_unrouted_tokens() -> None:
    adapter.register()
    ids = [[8, 3], [8, 8], [5, 8]]
    wanted, found = (
        call_experts(experts_module("Qwen3Moe", which), ids, torch.float32) for which in ("eager", "moeloom")
    )
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=1e-4, atol=1e-4), name


@pytest.mark.parametrize("name, found", [("NemotronH", "has_gate=False"), ("MuseSpark", "has_post_expert_norm=True")])
def test_what_it_cannot_compute_is_refused(name: str, found: str) -> None:
    adapter.register()
    with pytest.raises(CapabilityError, match=f"{name}Experts .*{found}"):
        call_experts(experts_module(name, "moeloom"), [[0, 1]], torch.float32)


def test_replaced_modules(tmp_path: Path) -> None:
    adapter.register()
    adapter.register()
    build("Qwen3Moe", str(tmp_path))
    model = load(str(tmp_path), experts_implementation="moeloom")
    assert adapter.replaced_modules(model) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    with pytest.raises(ValueError, match="no module of Qwen3MoeForCausalLM runs through moeloom"):
        adapter.replaced_modules(load(str(tmp_path)))
    with pytest.raises(ValueError, match="experts modules found: none"):
        adapter.replaced_modules(torch.nn.Linear(2, 2))


def test_nothing_is_left_of_a_model() -> None:
    adapter.register()
    kept: list[Any] = []
    for _ in range(2):
        experts = experts_module("Qwen3Moe", "moeloom")
        call_experts(experts, [[0, 1]], torch.float32)
        kept.append(len(adapter._local))
        del experts
        gc.collect()
    assert kept == [1, 1] and len(adapter._local) == 0
