"""The experts that `moeloom run` runs: made from the seed or read from a checkpoint. Any rank gets any expert again."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moeloom.activation import SwiGLU
from moeloom.checkpoint import load_experts
from moeloom.expert_layout import LAYOUTS
from moeloom.experts import Experts
from moeloom.models import ModelShape
from moeloom.placement import Placement
from moeloom.route import Router

if TYPE_CHECKING:
    from moeloom.cli.run import Settings

# what transformers' configurations call the sizes, in order of preference
SIZES = {
    "hidden": ("hidden_size",),
    "intermediate": ("moe_intermediate_size", "intermediate_size"),
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "num_topk": ("num_experts_per_tok",),
    "num_layers": ("num_hidden_layers",),
}


def one_expert(settings: Settings, expert: int) -> Experts:
    """Expert `expert` alone (L = 1)."""
    if not settings.checkpoint:
        return _make(settings, expert)
    others = [other for other in range(settings.shape.num_experts) if other != expert]
    return _load(settings, Placement.from_slots([[expert], others]), 0)


def local_experts(settings: Settings, rank: int) -> Experts:
    """All experts of one rank."""
    placement = settings.placement
    if settings.checkpoint:
        return _load(settings, placement, rank)
    ones = [_make(settings, expert) for expert in placement.slots[rank]] or [_make(settings, 0)]
    count = placement.num_local(rank)
    tensors: dict[str, Any] = {
        name: torch.cat([one.tensors()[name] for one in ones])[:count] for name in ones[0].tensors()
    }
    experts = Experts(
        **tensors,
        activation=ones[0].activation,
        gate_up_order=ones[0].gate_up_order,
        placement=placement,
        weight_on_input=ones[0].weight_on_input,
    )
    return experts.quantized() if settings.recipe.quantized else experts


def read_shape(folder: str) -> tuple[ModelShape, str]:
    """Shape and layout of a checkpoint, from its config.json. Raises ValueError naming what is missing."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"--checkpoint is {folder!r}; it must be a folder with a config.json ({error})") from None
    kind = config.get("model_type", "")
    if kind not in LAYOUTS:
        raise ValueError(f"--checkpoint {folder}: model_type is {kind!r}; known: {', '.join(sorted(LAYOUTS))}")
    config = config.get("text_config", config)
    found: dict[str, int] = {}
    for size, names in SIZES.items():
        if not any(name in config for name in names):
            raise ValueError(f"--checkpoint {folder}: config.json has none of {', '.join(names)}")
        found[size] = next(config[name] for name in names if name in config)
    limit = config.get("swiglu_limit", 7.0)
    shape = ModelShape(
        name=f"{kind} checkpoint",
        hidden=found["hidden"],
        intermediate=found["intermediate"],
        num_experts=found["num_experts"],
        num_layers=found["num_layers"],
        router=Router(found["num_topk"], normalize=found["num_topk"] > 1),
        activation=SwiGLU(limit, 1.702, 1.0) if kind == "gpt_oss" else SwiGLU(),
        weight_on_input=kind.startswith("llama4"),
        source=f"{folder}/config.json",
    )
    return shape, kind


def random_for(seed: int, what: str, number: int) -> torch.Generator:
    """Random numbers that depend on these three only; a plain sum of them would repeat across seeds."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {what} {number}".encode()))


def _load(settings: Settings, placement: Placement, rank: int) -> Experts:
    shape, layout = read_shape(settings.checkpoint)
    return load_experts(
        settings.checkpoint,
        layout,
        layer=settings.layer,
        placement=placement,
        rank=rank,
        dtype=torch.float8_e4m3fn if settings.recipe.quantized else settings.recipe.dtype,
        activation=shape.activation,
        weight_on_input=shape.weight_on_input,
    )


def _make(settings: Settings, expert: int) -> Experts:
    """A function of seed and id alone. Sizes are such that gate and up reach the clamp, where there is one."""
    shape, dtype = settings.shape, settings.recipe.dtype
    hidden, intermediate = shape.expert_hidden, shape.intermediate
    random = random_for(settings.seed, "expert", expert)
    gain = 1.0 if shape.activation.clamp is None else shape.activation.clamp / 2
    gate_up = torch.randn(1, 2 * intermediate, hidden, generator=random).mul_(gain * hidden**-0.5)
    down = torch.randn(1, hidden, intermediate, generator=random).mul_(intermediate**-0.5)
    gate_up_bias = down_bias = None
    if shape.has_biases:
        gate_up_bias = torch.randn(1, 2 * intermediate, generator=random).to(dtype)
        down_bias = torch.randn(1, hidden, generator=random).to(dtype)
    return Experts(
        gate_up.to(dtype),
        down.to(dtype),
        activation=shape.activation,
        gate_up_order="interleaved" if shape.gate_up_interleaved else "gate_first",
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        weight_on_input=shape.weight_on_input,
    )
