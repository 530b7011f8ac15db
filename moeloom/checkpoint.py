"""The experts of Hugging Face checkpoints: one rank's share of a layer, read from safetensors files and written back.

experts = load_experts(folder, "qwen3_moe", layer=0, placement=placement, rank=rank)     # every rank
save_experts(target, "qwen3_moe", layer=0, experts=experts, placement=placement, rank=rank)
stack_shards(target, "gpt_oss", layer=0)     # one rank, after all have saved; only for layouts that are `stacked`
write_index(target)                          # one rank, at the end, with all other weights in place
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moeloom.activation import Activation, SwiGLU
from moeloom.errors import CapabilityError, MoeloomError
from moeloom.expert_layout import ExpertLayout, find_layout, reorder_gate_up
from moeloom.experts import Experts
from moeloom.placement import Placement

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_METADATA = "moeloom"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTISED = ("_scale_inv", "_scale", "_scales", "_blocks", "_packed", "_scale_2")
"""What follows the name of a weight where quantised checkpoints keep scales or codes."""
_SWIGLU = SwiGLU()


def load_experts(
    folder: str | Path,
    layout: str | ExpertLayout,
    *,
    layer: int,
    placement: Placement,
    rank: int,
    dtype: torch.dtype | None = None,
    activation: Activation = _SWIGLU,
    weight_on_input: bool = False,
) -> Experts:
    """This rank's experts of one layer, on the CPU, slot by slot as the placement says.

    Reads only the bytes of this rank's experts; files that hold none of them need not be there. Replicas on one rank
    are read once.

    folder: with model.safetensors or else, as in transformers, model.safetensors.index.json and the files it names.
    layout: a key of `moeloom.expert_layout.LAYOUTS`, or one of your own. The order of gate and up is kept
        (`Experts.gate_up_order`).
    dtype: what to convert to; None: as stored.
    activation, weight_on_input: the model's, which no tensor tells: `find_model` has them, e.g.
        `find_model("gpt-oss-20b").activation`; Llama-4 needs `weight_on_input=True`.

    Raises ValueError for arguments that do not fit the checkpoint (a layer without experts, another number of experts,
    several stored dtypes and no dtype given), MoeloomError for a checkpoint that is broken (files or tensors that the
    index names missing, wrong shapes) and CapabilityError for a quantised one.
    """
    layout = find_layout(layout)
    slots = _slots_by_expert(placement, rank)
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}; it must be a floating point type")
    with ExitStack() as stack:
        checkpoint = _Checkpoint(Path(folder), stack)
        _check_names(checkpoint, layout, layer, placement.num_experts)
        # a rank without slots still needs the sizes, and every checkpoint has expert 0
        views = {
            (part, expert): checkpoint.view(layout.name(part, layer, expert))
            for part in layout.patterns()
            for expert in slots or (0,)
        }
        hidden, intermediate = _check_views(checkpoint, layout, views, layer, placement.num_experts)
        tensors = _empty(layout, placement.num_local(rank), hidden, intermediate, dtype or _one_dtype(layer, views))
        targets = {**tensors, "gate": tensors["gate_up"][:, :intermediate], "up": tensors["gate_up"][:, intermediate:]}
        for (part, expert), view in views.items():
            if expert in slots:
                # this refers to the mapped file: it must be copied, and is paged in only where it is copied
                stored = view[expert] if layout.stacked else view[:]
                for slot in slots[expert]:
                    targets[part][slot].copy_(stored.mT if layout.transposed and stored.dim() == 2 else stored)
    return Experts(
        tensors["gate_up"],
        tensors["down"],
        activation=activation,
        gate_up_order=layout.gate_up_order,
        gate_up_bias=tensors.get("gate_up_bias"),
        down_bias=tensors.get("down_bias"),
        placement=placement,
        weight_on_input=weight_on_input,
    )


def save_experts(
    folder: str | Path, layout: str | ExpertLayout, *, layer: int, experts: Experts, placement: Placement, rank: int
) -> Path:
    """Write this rank's experts of one layer in a checkpoint's layout, as they are (no dtype conversion).

    Every rank calls this, also one without slots. Of an expert's replicas the lowest (rank, slot) is written. The file
    is experts-layer{layer}-rank{rank}.safetensors; for a stacked layout .part, which `stack_shards` joins. It appears
    only when complete. Returns its path. Raises ValueError where experts, placement and layout do not fit together.
    """
    layout = find_layout(layout)
    slots = _slots_by_expert(placement, rank)
    experts.check(placement.num_local(rank), experts.gate_up.shape[-1])
    if (experts.down_bias is None) != (layout.down_bias is None):
        raise ValueError(
            "experts have "
            + (
                "no biases, which the layout has"
                if experts.down_bias is None
                else "biases, for which the layout has no name"
            )
        )
    elsewhere = {expert for others in placement.slots[:rank] for expert in others}
    tensors: dict[str, Tensor] = {}
    for expert, (slot, *_) in slots.items():
        if expert not in elsewhere:
            for part, tensor in _stored_form(layout, experts, slot).items():
                name = layout.name(part, layer, expert)
                tensors[f"{name}.{expert}" if layout.stacked else name] = tensor
    about = {"num_ranks": placement.num_ranks, "num_experts": placement.num_experts, "placement": placement.fingerprint}
    suffix = ".part" if layout.stacked else ".safetensors"
    path = Path(folder) / f"experts-layer{layer}-rank{rank}{suffix}"
    return _write(path, tensors, {_METADATA: json.dumps(about)})


def stack_shards(folder: str | Path, layout: str | ExpertLayout, *, layer: int) -> Path:
    """Join the .part files of one layer into experts-layer{layer}.safetensors, then remove them. Returns its path.

    For one rank to call, when all have saved; holds the layer in memory once. Raises ValueError for a layout that is
    not stacked, MoeloomError if a rank or an expert is missing or files of different saves are mixed.
    """
    layout, folder = find_layout(layout), Path(folder)
    if not layout.stacked:
        raise ValueError("layout has tensors for each expert; only stacked layouts have shards to join")
    with ExitStack() as stack:
        parts = {path: _open(path, stack) for path in sorted(folder.glob(f"experts-layer{layer}-rank*.part"))}
        about = _check_complete(folder, layer, {path: file.metadata() for path, file in parts.items()})
        where = {name: file for file in parts.values() for name in _names(file)}
        tensors = {}
        for part in layout.patterns():
            name = layout.name(part, layer, 0)
            wanted = [f"{name}.{expert}" for expert in range(about["num_experts"])]
            if lost := [name for name in wanted if name not in where]:
                raise MoeloomError(f"{folder}, layer {layer}: no .part file has {lost[0]}; save with this layout again")
            tensors[name] = torch.stack([where[name].get_tensor(name) for name in wanted])
        joined = _write(folder / f"experts-layer{layer}.safetensors", tensors, {})
    for path in parts:
        path.unlink()
    return joined


def write_index(folder: str | Path) -> Path:
    """Write model.safetensors.index.json over all .safetensors files of a folder, which transformers then loads.

    Raises ValueError if there are none, if .part files were not joined, or if there is a model.safetensors among others
    (transformers would read that alone: rename it); MoeloomError if a tensor is in two files, or some rank's file of
    `save_experts` is missing or from another save.
    """
    folder = Path(folder)
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"folder is {folder}; it has no .safetensors file")
    if parts := sorted(folder.glob("experts-layer*-rank*.part")):
        raise ValueError(f"{parts[0]} is only a part; call stack_shards for its layer first")
    if len(paths) > 1 and folder / _SINGLE in paths:
        raise ValueError(f"{folder / _SINGLE} would be read alone, without {paths[0].name}; give it another name")
    names: dict[Path, list[str]] = {}
    saved: dict[int, dict[Path, Any]] = {}
    for path in paths:
        with ExitStack() as stack:
            file = _open(path, stack)
            names[path] = _names(file)
            if match := re.fullmatch(r"experts-layer(\d+)-rank\d+\.safetensors", path.name):
                saved.setdefault(int(match[1]), {})[path] = file.metadata()
    for layer, files in saved.items():
        _check_complete(folder, layer, files)
    weight_map: dict[str, str] = {}
    for path in paths:
        for name in names[path]:
            if name in weight_map:
                raise MoeloomError(f"{folder}: {name} is both in {weight_map[name]} and in {path.name}; keep one")
            weight_map[name] = path.name
    index = {"metadata": {"total_size": sum(map(_payload, paths))}, "weight_map": dict(sorted(weight_map.items()))}
    draft = folder / f"{_INDEX}.tmp"
    draft.write_text(json.dumps(index, indent=2) + "\n")
    return draft.replace(folder / _INDEX)


class _Checkpoint:
    """The tensors of a folder, by name. Files are mapped into memory when first needed, until `stack` closes."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self._opened: dict[str, Any] = {}
        if (folder / _SINGLE).is_file():
            self.files = dict.fromkeys(_names(_open(folder / _SINGLE, stack)), _SINGLE)
        elif (folder / _INDEX).is_file():
            try:
                self.files = dict(json.loads((folder / _INDEX).read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise MoeloomError(f"{folder / _INDEX} is not an index with a weight_map: {error!r}") from error
        else:
            raise ValueError(f"folder is {folder}; it has neither {_SINGLE} nor {_INDEX}")

    def view(self, name: str) -> Any:
        """A tensor of which nothing is read before it is indexed."""
        file = self.files[name]
        if file not in self._opened:
            if Path(file).name != file:
                raise MoeloomError(f"{self.folder / _INDEX} names {file!r} for {name}; it must be a file beside it")
            self._opened[file] = _open(self.folder / file, self._stack)
        try:
            return self._opened[file].get_slice(name)
        except SafetensorError as error:
            raise MoeloomError(f"{self.folder / file} has no {name}, which {_INDEX} places there") from error


def _open(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: no address space to map it
        raise MoeloomError(f"{path} cannot be opened as a safetensors file: {error}") from error


def _names(file: Any) -> list[str]:
    return list(file.keys())


def _slots_by_expert(placement: Placement, rank: int) -> dict[int, list[int]]:
    if not 0 <= rank < placement.num_ranks:
        raise ValueError(f"rank is {rank}; allowed: 0..{placement.num_ranks - 1}, the ranks of the placement")
    slots: dict[int, list[int]] = {}
    for slot, expert in enumerate(placement.slots[rank]):
        slots.setdefault(expert, []).append(slot)
    return slots


def _check_names(checkpoint: _Checkpoint, layout: ExpertLayout, layer: int, num_experts: int) -> None:
    """Raise unless the layer has this layout's tensors, unquantised, for exactly `num_experts` experts."""
    here, files = f"{checkpoint.folder}, layer {layer}", checkpoint.files
    count = 1 if layout.stacked else num_experts
    names = [layout.name(part, layer, expert) for expert in range(count) for part in layout.patterns()]
    for name in names:
        for other in (*(name + suffix for suffix in _QUANTISED), name.removesuffix("weight") + "qweight"):
            if other in files:
                raise CapabilityError(
                    f"{here}: {other} is of a quantised checkpoint; only {', '.join(_DTYPES)} "
                    "weights can be loaded: convert it first"
                )
    lost = [name for name in names if name not in files]
    if len(lost) == len(names):
        layers = [str(other) for other in range(len(files)) if layout.name("down", other, 0) in files]
        near = next((name for name in files if f"layers.{layer}." in name and "experts." in name), None)
        raise ValueError(
            f"{here} has no experts in this layout, such as {lost[0]}; layers that have: "
            f"{', '.join(layers) or 'none'}" + (f"; this one has {near}" if near else "")
        )
    if lost:
        raise ValueError(
            f"placement has {num_experts} experts, but {here} lacks {len(lost)} of their {len(names)} "
            f"tensors: {', '.join(lost[:4])}{', ...' if lost[4:] else ''}"
        )
    if not layout.stacked and layout.name("down", layer, num_experts) in files:
        raise ValueError(
            f"placement has {num_experts} experts, but {here} has more: {layout.name('down', layer, num_experts)}"
        )


def _check_views(
    checkpoint: _Checkpoint, layout: ExpertLayout, views: Mapping[tuple[str, int], Any], layer: int, num_experts: int
) -> tuple[int, int]:
    """H and I of the down product, after every other tensor was found to fit them."""
    sizes = None
    for part, expert in sorted(views, key=lambda key: key[0] != "down"):
        name, view = layout.name(part, layer, expert), views[part, expert]
        where = f"{checkpoint.folder / checkpoint.files[name]}: {name}"
        shape = tuple(view.get_shape())
        if layout.stacked and shape[:1] != (num_experts,):
            raise ValueError(f"placement has {num_experts} experts; {where} is {list(shape)}, the experts first")
        one = shape[1:] if layout.stacked else shape
        if sizes is None:
            if len(one) != 2 or 0 in one:
                raise MoeloomError(f"{where} is {list(shape)}; a non-empty matrix per expert was expected")
            sizes = (one[1], one[0]) if layout.transposed else (one[0], one[1])
        wanted = shape[: len(shape) - len(one)] + layout.shape(part, *sizes)
        if shape != wanted:
            raise MoeloomError(
                f"{where} is {list(shape)}; with hidden {sizes[0]} and intermediate {sizes[1]}, from "
                f"{layout.down}, it must be {list(wanted)}"
            )
        if view.get_dtype() not in _DTYPES:
            raise CapabilityError(f"{where} is {view.get_dtype()}; only {', '.join(_DTYPES)} weights can be loaded")
    assert sizes is not None
    return sizes


def _one_dtype(layer: int, views: Mapping[tuple[str, int], Any]) -> torch.dtype:
    kinds = sorted({view.get_dtype() for view in views.values()})
    if len(kinds) > 1:
        raise ValueError(f"dtype is None, but the tensors of layer {layer} are {', '.join(kinds)}; give one of them")
    return _DTYPES[kinds[0]]


def _empty(
    layout: ExpertLayout, num_local: int, hidden: int, intermediate: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "gate_up": (num_local, 2 * intermediate, hidden),
        "down": (num_local, hidden, intermediate),
    }
    if layout.down_bias is not None:
        shapes |= {"gate_up_bias": (num_local, 2 * intermediate), "down_bias": (num_local, hidden)}
    return {part: torch.empty(shape, dtype=dtype) for part, shape in shapes.items()}


def _stored_form(layout: ExpertLayout, experts: Experts, slot: int) -> dict[str, Tensor]:
    """One slot's tensors, contiguous, as the layout stores them."""
    tensors = {part: tensor[slot].detach() for part, tensor in experts.tensors().items()}
    for part in tensors.keys() & {"gate_up", "gate_up_bias"}:
        tensors[part] = reorder_gate_up(tensors[part], experts.gate_up_order, layout.gate_up_order, 0)
    if layout.gate_up is None:
        tensors["gate"], tensors["up"] = tensors.pop("gate_up").chunk(2)
    return {
        part: (tensor.mT if layout.transposed and tensor.dim() == 2 else tensor).contiguous()
        for part, tensor in tensors.items()
    }


def _check_complete(folder: Path, layer: int, files: Mapping[Path, Any]) -> dict[str, int]:
    """What all files of one layer say of their save. Raises MoeloomError unless it is one save, with all its ranks."""
    told = {path: (metadata or {}).get(_METADATA) for path, metadata in files.items()}
    if len(set(told.values())) != 1 or None in told.values():
        names = ", ".join(path.name for path in files) or f"no experts-layer{layer}-rank*.part"
        raise MoeloomError(f"{folder}, layer {layer}: {names}: not the files of one save with one placement")
    about: dict[str, int] = json.loads(next(iter(told.values())) or "")
    ranks = {int(re.sub(r".*-rank(\d+)\.\w+", r"\1", path.name)) for path in files}
    if lost := sorted(set(range(about["num_ranks"])) - ranks):
        raise MoeloomError(f"{folder}, layer {layer}: {about['num_ranks']} ranks save; the files of {lost} are missing")
    return about


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> Path:
    """Under another name first: a file that was cut off never carries the final one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    save_file(tensors, draft, metadata={"format": "pt", **metadata})  # older transformers refuse a file without
    os.replace(draft, path)
    return path


def _payload(path: Path) -> int:
    """Bytes of tensors: what follows the header, whose length the first eight bytes tell."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
