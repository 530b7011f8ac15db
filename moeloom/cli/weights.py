"""The experts that `moeloom run` runs: made from the seed or read from a checkpoint. Any rank gets any expert again."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moeloom.activation import SwiGLU
from moeloom.checkpoint import load_experts
from moeloom.expert_layout import LAYOUTS
from moeloom.experts import Experts
from moeloom.models import ModelShape
from moeloom.placement import Placement
from moeloom.quantize import E4M3_MAX, num_groups
from moeloom.route import Router

if TYPE_CHECKING:
    from moeloom.cli.run import Settings

VALUE_SIZE = E4M3_MAX / 4.5  # rms of E4M3 values whose largest in a block of 128 x 128 is about 448, if they are normal
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
    slots = placement.slots[rank]
    like = _make(settings, slots[0] if slots else 0)
    count = len(slots)
    # slot by slot: beside the weights themselves there is room for those of one expert only
    tensors: dict[str, Any] = {name: one.new_empty(count, *one.shape[1:]) for name, one in like.tensors().items()}
    scales: Any = like.scales and tuple(scale.new_empty(count, *scale.shape[1:]) for scale in like.scales)
    for slot, expert in enumerate(slots):
        one = like if slot == 0 else _make(settings, expert)
        for name, tensor in one.tensors().items():
            tensors[name][slot] = tensor[0]
        for whole, scale in zip(scales or (), one.scales or (), strict=True):
            whole[slot] = scale[0]
    return replace(like, **tensors, scales=scales, placement=placement)


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


def random_for(seed: int, what: str, number: int, device: str = "cpu") -> torch.Generator:
    """Random numbers that depend on these three only, and on the kind of device; a plain sum would repeat across seeds.

    device: "cpu", or "cuda" for the current GPU.
    """
    where = "cpu" if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    return torch.Generator(where).manual_seed(zlib.crc32(f"{seed} {what} {number}".encode()))


def _load(settings: Settings, placement: Placement, rank: int) -> Experts:
    shape, layout = read_shape(settings.checkpoint)
    experts = load_experts(
        settings.checkpoint,
        layout,
        layer=settings.layer,
        placement=placement,
        rank=rank,
        dtype=torch.float8_e4m3fn if settings.recipe.quantized else settings.recipe.dtype,
        activation=shape.activation,
        weight_on_input=shape.weight_on_input,
    )
    tensors: dict[str, Any] = {name: tensor.to(settings.device) for name, tensor in experts.tensors().items()}
    scales: Any = experts.scales and tuple(scale.to(settings.device) for scale in experts.scales)
    return replace(experts, **tensors, scales=scales)


def _make(settings: Settings, expert: int) -> Experts:
    """A function of seed, id and kind of device. Gate and up are large enough to reach the clamp, if there is one."""
    shape, dtype = settings.shape, settings.recipe.dtype
    hidden, intermediate = shape.expert_hidden, shape.intermediate
    random = random_for(settings.seed, "expert", expert, settings.device)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, device=random.device)

    gain = 1.0 if shape.activation.clamp is None else shape.activation.clamp / 2
    gate_up, down = normal(1, 2 * intermediate, hidden), normal(1, hidden, intermediate)
    sizes = (gain * hidden**-0.5, intermediate**-0.5)
    scales = None
    if settings.recipe.quantized:
        groups, hidden_groups = num_groups(intermediate), num_groups(hidden)
        shapes = ((1, 2 * groups, hidden_groups), (1, hidden_groups, groups))
        blocks = [
            torch.rand(*blocks, generator=random, device=random.device).mul_(0.5).add_(0.75).mul_(size / VALUE_SIZE)
            for blocks, size in zip(shapes, sizes, strict=True)
        ]
        scales = (blocks[0], blocks[1])
        values = [w.mul_(VALUE_SIZE).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn) for w in (gate_up, down)]
        gate_up, down = values
    else:
        gate_up, down = (w.mul_(size).to(dtype) for w, size in zip((gate_up, down), sizes, strict=True))
    gate_up_bias = down_bias = None
    if shape.has_biases:
        gate_up_bias, down_bias = normal(1, 2 * intermediate).to(dtype), normal(1, hidden).to(dtype)
    return Experts(
        gate_up,
        down,
        scales=scales,
        activation=shape.activation,
        gate_up_order="interleaved" if shape.gate_up_interleaved else "gate_first",
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        weight_on_input=shape.weight_on_input,
    )
