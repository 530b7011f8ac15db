"""The presets: complete, honest about their sources, and equal to the configurations they claim to come from."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from moeloom.models import MODELS, ModelShape, find_model
from moeloom.route import Router

CLAIM = re.compile(r"transformers (5\.24) (\w+) defaults(?: for ([\w, ]+))?(?:;|$)")
CLAIMING = [name for name, shape in MODELS.items() if CLAIM.match(shape.source)]


def test_there_are_enough_models_and_keys_are_plain() -> None:
    assert len(MODELS) >= 26
    for key, shape in MODELS.items():
        assert key == shape.name
        assert re.fullmatch(r"[a-z0-9.]+(-[a-z0-9.]+)*", key)
    for name in ("deepseek-v3", "gpt-oss-120b", "qwen3-30b-a3b", "mixtral-8x7b", "llama-4-scout", "longcat-flash"):
        assert name in MODELS


def test_the_presets_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        MODELS["mine"] = MODELS["deepseek-v3"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        MODELS["deepseek-v3"].hidden = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", MODELS)
def test_every_preset_names_a_source_and_routes(name: str) -> None:
    shape = MODELS[name]
    assert CLAIM.match(shape.source) or shape.source.startswith("reported, not verified: ")
    routing = shape.router(torch.randn(3, shape.num_choices))
    assert routing.topk_idx.shape == (3, shape.num_topk)
    assert shape.expert_hidden <= shape.hidden
    assert shape.num_dense_layers < shape.num_layers
    assert shape.weights in ("bf16", "fp8-128x128", "mxfp4")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("factor", [1, 8, 64, 100_000])
def test_scaled_shapes_are_legal(name: str, factor: int) -> None:
    shape = MODELS[name]
    small = shape.scaled(factor)
    for field in ("hidden", "intermediate", "shared_intermediate", "routed_hidden"):
        before, after = getattr(shape, field), getattr(small, field)
        assert (before is None) == (after is None)
        if before is not None:
            assert after >= 16 and after % 16 == 0
            assert after == 16 or abs(after - before / factor) <= 8
    assert small.name == f"{name}/{factor}"
    widths = {
        "name": name,
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "shared_intermediate": shape.shared_intermediate,
        "routed_hidden": shape.routed_hidden,
    }
    assert dataclasses.replace(small, **widths) == shape


def test_scaled_by_one_keeps_the_published_widths() -> None:
    for shape in MODELS.values():
        assert dataclasses.replace(shape.scaled(1), name=shape.name) == shape


@pytest.mark.parametrize("factor", [0, -2, 1.5, True])
def test_scaled_names_a_wrong_factor(factor: Any) -> None:
    with pytest.raises(ValueError, match="^factor is"):
        MODELS["mixtral-8x7b"].scaled(factor)


def test_find_model() -> None:
    assert find_model("deepseek-v3") is MODELS["deepseek-v3"]
    with pytest.raises(ValueError) as caught:
        find_model("DeepSeek-V3-Base")
    message = str(caught.value)
    assert "'DeepSeek-V3-Base'" in message and "close: deepseek-v3" in message
    assert all(name in message for name in MODELS)
    with pytest.raises(ValueError, match="known: "):
        find_model("")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"hidden": 0}, "hidden"),
        ({"routed_hidden": 0}, "routed_hidden"),
        ({"num_shared_experts": -1}, "num_shared_experts"),
        ({"num_dense_layers": 99}, "num_dense_layers"),
        ({"router": Router(9)}, "router"),
    ],
)
def test_shapes_that_fit_no_model_are_refused(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} "):
        dataclasses.replace(MODELS["mixtral-8x7b"], **changes)


def test_identity_experts_are_choices_without_weights() -> None:
    shape = MODELS["longcat-flash"]
    assert (shape.num_experts, shape.num_choices) == (512, 768)


def first_of(config: Any, *names: str) -> Any:
    """The first of these fields that the config has, or None."""
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)


def facts_of(config: Any) -> dict[str, Any]:
    """What a transformers config says, by the names of `ModelShape` and `Router`; None where it says nothing."""
    layer_kinds = getattr(config, "mlp_layer_types", None) or []
    moe_start = getattr(config, "moe_layer_start_index", None)
    score = {"sqrtsoftplus": "sqrt_softplus"}.get(getattr(config, "scoring_func", None) or "")
    shared_width = first_of(config, "shared_expert_intermediate_size", "share_expert_dim", "shared_intermediate_size")
    return {
        "hidden": config.hidden_size,
        "expert_hidden": first_of(config, "moe_hidden_size", "hidden_size"),
        "intermediate": first_of(config, "moe_intermediate_size", "intermediate_size"),
        "num_experts": first_of(config, "n_routed_experts", "num_local_experts", "num_experts"),
        "num_identity_experts": first_of(config, "zero_expert_num"),
        "num_topk": first_of(config, "num_experts_per_tok", "moe_topk"),
        "num_layers": first_of(config, "num_layers", "num_hidden_layers"),
        "num_dense_layers": layer_kinds.count("dense")
        if layer_kinds
        else first_of(config, "first_k_dense_replace") or moe_start,
        "num_hash_layers": layer_kinds.count("hash_moe") if layer_kinds else None,
        "num_shared_experts": first_of(config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
        or (1 if shared_width else None),
        "shared_width": shared_width,
        "num_groups": first_of(config, "n_group"),
        "num_topk_groups": first_of(config, "topk_group"),
        "normalize": first_of(config, "norm_topk_prob"),
        "scale": first_of(config, "routed_scaling_factor", "router_scaling_factor", "moe_router_scaling_factor"),
        "score": score,
        "clamp": first_of(config, "swiglu_limit"),
        "alpha": first_of(config, "swiglu_alpha"),
    }


def facts_of_shape(shape: ModelShape) -> dict[str, Any]:
    router, activation = shape.router, shape.activation
    own = (
        "hidden",
        "expert_hidden",
        "intermediate",
        "num_experts",
        "num_identity_experts",
        "num_topk",
        "num_layers",
        "num_dense_layers",
        "num_hash_layers",
        "num_shared_experts",
    )
    return {name: getattr(shape, name) for name in own} | {
        "shared_width": shape.shared_intermediate or shape.intermediate,
        "num_groups": router.num_groups,
        "num_topk_groups": router.num_topk_groups,
        "normalize": router.normalize,
        "scale": router.scale,
        "score": router.score,
        "clamp": activation.clamp,
        "alpha": activation.alpha,
    }


def test_enough_presets_claim_a_configuration() -> None:
    assert len(CLAIMING) >= 20


@pytest.mark.parametrize("name", CLAIMING)
def test_presets_equal_the_configurations_they_claim(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers' config defaults")
    claim = CLAIM.match(MODELS[name].source)
    assert claim is not None
    release, class_name, fields = claim.groups()
    if not transformers.__version__.startswith(f"{release}."):
        pytest.skip(f"the claim is about transformers {release}, here is {transformers.__version__}")
    theirs = facts_of(getattr(transformers, class_name)())
    ours = facts_of_shape(MODELS[name])
    compared = fields.split(", ") if fields else [key for key, value in theirs.items() if value is not None]
    assert {"hidden", "intermediate", "num_experts", "num_topk"} <= set(compared)
    assert {key: ours[key] for key in compared} == {key: theirs[key] for key in compared}
