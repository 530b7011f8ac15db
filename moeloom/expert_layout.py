"""How checkpoints store experts: names, order of gate and up, which way round. All explicit, nothing guessed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from moeloom.experts import GATE_UP_ORDERS, GateUpOrder


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """How a checkpoint stores the experts of a layer. Nothing is guessed from a shape.

    The names are patterns with "{layer}" and, if each expert has its own tensors, "{expert}". Without "{expert}" the
    tensors are stacked: one more dimension, of size E, in front.

    down: `[H, I]`. gate and up: `[I, H]` each; or gate_up: `[2I, H]`, the rows ordered as gate_up_order says. Give
        either gate and up or gate_up.
    transposed: these matrices are stored the other way round (`x @ weight` instead of `x @ weight.T`).
    gate_up_bias `[2I]`, ordered like gate_up, and down_bias `[H]`: both or neither, and only with gate_up.

    Raises ValueError for what does not fit together.
    """

    down: str
    gate: str | None = None
    up: str | None = None
    gate_up: str | None = None
    gate_up_order: GateUpOrder = "gate_first"
    transposed: bool = False
    gate_up_bias: str | None = None
    down_bias: str | None = None

    def __post_init__(self) -> None:
        if self.gate_up_order not in GATE_UP_ORDERS:
            raise ValueError(f"gate_up_order is {self.gate_up_order!r}; allowed: {', '.join(GATE_UP_ORDERS)}")
        separate = self.gate is not None and self.up is not None
        if (self.gate is None) != (self.up is None) or separate == (self.gate_up is not None):
            raise ValueError(
                f"gate is {self.gate!r}, up is {self.up!r}, gate_up is {self.gate_up!r}; give either gate "
                "and up or gate_up"
            )
        if separate and self.gate_up_order != "gate_first":
            raise ValueError(
                f"gate_up_order is {self.gate_up_order!r}; where gate and up are tensors of their own it "
                "must be gate_first"
            )
        if (self.gate_up_bias is None) != (self.down_bias is None) or (separate and self.down_bias is not None):
            raise ValueError(
                f"gate_up_bias is {self.gate_up_bias!r}, down_bias is {self.down_bias!r}; give both, "
                "together with gate_up, or neither"
            )
        for part, pattern in self.patterns().items():
            if "{layer}" not in pattern or ("{expert}" in pattern) == self.stacked:
                raise ValueError(f"{part} is {pattern!r}; every name needs {{layer}}, and all or none need {{expert}}")

    @property
    def stacked(self) -> bool:
        """Whether one tensor holds all experts."""
        return "{expert}" not in self.down

    def patterns(self) -> dict[str, str]:
        """The names that there are, by field name."""
        named = {part: getattr(self, part) for part in ("gate", "up", "gate_up", "down", "gate_up_bias", "down_bias")}
        return {part: pattern for part, pattern in named.items() if pattern is not None}

    def name(self, part: str, layer: int, expert: int) -> str:
        """The tensor in which that part of an expert is."""
        return str(getattr(self, part)).replace("{layer}", str(layer)).replace("{expert}", str(expert))

    def shape(self, part: str, hidden: int, intermediate: int) -> tuple[int, ...]:
        """One expert's shape as stored, without the stacked dimension."""
        shape: tuple[int, ...] = {
            "gate": (intermediate, hidden),
            "up": (intermediate, hidden),
            "gate_up": (2 * intermediate, hidden),
            "down": (hidden, intermediate),
            "gate_up_bias": (2 * intermediate,),
            "down_bias": (hidden,),
        }[part]
        return shape[::-1] if self.transposed else shape


def _separate(prefix: str, gate: str, up: str, down: str) -> ExpertLayout:
    stem = prefix + ".experts.{expert}."
    return ExpertLayout(gate=f"{stem}{gate}.weight", up=f"{stem}{up}.weight", down=f"{stem}{down}.weight")


_MLP = _separate("model.layers.{layer}.mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL = _separate("model.layers.{layer}.block_sparse_moe", "w1", "w3", "w2")
_STACK = "model.layers.{layer}.mlp.experts."
_LLAMA = "model.layers.{layer}.feed_forward.experts."
_GRANITE = "model.layers.{layer}.block_sparse_moe."
_STACKED = ExpertLayout(gate_up=_STACK + "gate_up_proj", down=_STACK + "down_proj")

LAYOUTS: Mapping[str, ExpertLayout] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "deepseek_v2",
                "deepseek_v3",
                "deepseek_v32",
                "ernie4_5_moe",
                "glm4_moe",
                "glm4_moe_lite",
                "glm_moe_dsa",
                "hunyuan_v1_moe",
                "hy_v3",
                "mimo_v2_flash",
                "olmoe",
                "qwen2_moe",
                "qwen3_5_moe_text",
                "qwen3_moe",
                "qwen3_next",
                "solar_open",
            ),
            _MLP,
        ),
        **dict.fromkeys(("kimi_linear", "minimax_m2", "mixtral", "phimoe"), _MIXTRAL),
        "gpt_oss": ExpertLayout(
            gate_up=_STACK + "gate_up_proj",
            down=_STACK + "down_proj",
            gate_up_order="interleaved",
            transposed=True,
            gate_up_bias=_STACK + "gate_up_proj_bias",
            down_bias=_STACK + "down_proj_bias",
        ),
        "granitemoe": ExpertLayout(gate_up=_GRANITE + "input_linear.weight", down=_GRANITE + "output_linear.weight"),
        "llama4_text": ExpertLayout(gate_up=_LLAMA + "gate_up_proj", down=_LLAMA + "down_proj", transposed=True),
        "llama4": ExpertLayout(
            gate_up=f"language_model.{_LLAMA}gate_up_proj",
            down=f"language_model.{_LLAMA}down_proj",
            transposed=True,
        ),
        **dict.fromkeys(("hy_v4", "minimax_m3_vl_text", "transformers_stacked"), _STACKED),
    }
)
"""Layouts by the `model_type` of config.json: what `save_pretrained` of transformers 5.24 writes, which
tests/pure/test_checkpoint.py compares. "transformers_stacked" is what it writes with `save_original_format=False` for
models that it holds as `mlp.experts`, whatever their original format."""


def reorder_gate_up(
    tensor: Tensor, from_order: GateUpOrder, to_order: GateUpOrder, dim: int, *, block: int = 1
) -> Tensor:
    """The same gate and up rows in another order.

    tensor: size 2I along dim. block: "interleaved" means this many gate rows, then as many up rows, and so on (kernels
    want 8 or 32; checkpoints and `Experts` 1). Returns a new tensor, or the same one if the orders are equal.
    Raises ValueError for unknown orders, an odd size, or an I that block does not divide.

    >>> reorder_gate_up(torch.tensor([1, 2, 3, -1, -2, -3]), "gate_first", "interleaved", 0)
    tensor([ 1, -1,  2, -2,  3, -3])
    """
    for name, order in (("from_order", from_order), ("to_order", to_order)):
        if order not in GATE_UP_ORDERS:
            raise ValueError(f"{name} is {order!r}; allowed: {', '.join(GATE_UP_ORDERS)}")
    dim = dim % tensor.dim()
    size = tensor.shape[dim]
    needs = 2 * block if "interleaved" in (from_order, to_order) else 2
    if block < 1 or size % needs:
        raise ValueError(
            f"tensor has size {size} along dim {dim} and block is {block}; the size must be a multiple of "
            f"2, where an order is interleaved of 2 * block, and block at least 1"
        )
    if from_order == to_order:
        return tensor
    if from_order == "interleaved":
        gate, up = (half.flatten(dim, dim + 1) for half in tensor.unflatten(dim, (-1, 2, block)).unbind(dim + 1))
    else:
        first, second = tensor.chunk(2, dim)
        gate, up = (first, second) if from_order == "gate_first" else (second, first)
    if to_order == "interleaved":
        blocks = [half.unflatten(dim, (-1, block)) for half in (gate, up)]
        return torch.stack(blocks, dim + 1).flatten(dim, dim + 2)
    return torch.cat((gate, up) if to_order == "gate_first" else (up, gate), dim)


def find_layout(layout: str | ExpertLayout) -> ExpertLayout:
    """The layout of that name, or the one given. Raises ValueError, with close names, if there is none."""
    if isinstance(layout, ExpertLayout):
        return layout
    if layout in LAYOUTS:
        return LAYOUTS[layout]
    close = difflib.get_close_matches(layout.lower().replace("-", "_"), LAYOUTS)
    hint = f"; close: {', '.join(close)}" if close else ""
    raise ValueError(
        f"layout is {layout!r}, which is no known model type{hint}; known: {', '.join(sorted(LAYOUTS))}, "
        "or give an ExpertLayout"
    )
