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
from dataclasses import dataclass, replace
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
from moeloom.quantize import GROUP, num_groups
from moeloom.stored import DTYPES, FP8, MXFP4, MXFP4_BLOCKS, Stored, find_stored, is_stored, plain, refuse_other_formats
from moeloom.types import Quantized

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_METADATA = "moeloom"
_SWIGLU = SwiGLU()
_Views = Mapping[tuple[str, int], Stored]


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
    dtype: what to convert to; None: as stored. FP8 with scales for blocks of 128 x 128 (DeepSeek-V3, MiniMax-M2, Qwen3)
        and MXFP4 (gpt-oss) are dequantised; torch.float8_e4m3fn keeps FP8 as it is, with `Experts.scales`, and
        quantises anything else.
    activation, weight_on_input: the model's, which no tensor tells: `find_model` has them, e.g.
        `find_model("gpt-oss-20b").activation`; Llama-4 needs `weight_on_input=True`.

    Raises ValueError for arguments that do not fit the checkpoint (a layer without experts, another number of experts,
    several stored dtypes and no dtype given), MoeloomError for a checkpoint that is broken (files or tensors that the
    index names missing, wrong shapes) and CapabilityError for one that is quantised in another way.
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
            (part, expert): checkpoint.find(layout, part, layer, expert)
            for part in layout.patterns()
            for expert in slots or (0,)
        }
        sizes = _check_views(checkpoint, layout, views, layer, placement.num_experts)
        kept = _kept_dtype(layout, views, layer, dtype, sizes[1])
        target = _Target.empty(layout, placement.num_local(rank), sizes, kept, _bias_dtype(views, kept))
        for (part, expert), view in views.items():
            if expert in slots:
                # this refers to the mapped file: it must be copied, and is paged in only where it is copied
                stored = view.read(expert if layout.stacked else None)
                for slot in slots[expert]:
                    target.fill(part, slot, stored, layout.transposed)
    experts = target.experts(
        activation=activation,
        gate_up_order=layout.gate_up_order,
        placement=placement,
        weight_on_input=weight_on_input,
    )
    return experts.quantized() if dtype == torch.float8_e4m3fn else experts


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
    if experts.scales is not None:
        raise CapabilityError(
            "experts have scales; only unquantised ones can be saved: keep the checkpoint they are of"
        )
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

    def file_of(self, stored: Stored) -> str:
        """The file that has it."""
        return self.files.get(stored.name) or self.files[stored.name + MXFP4_BLOCKS]

    def find(self, layout: ExpertLayout, part: str, layer: int, expert: int) -> Stored:
        """A tensor in whatever format it is stored; nothing of it is read."""
        where, name = f"{self.folder}, layer {layer}", layout.name(part, layer, expert)
        return find_stored(where, name, self.files, self.view, layout.transposed)

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
    """Raise unless the layer has this layout's tensors, in known formats, for exactly `num_experts` experts."""
    here, files = f"{checkpoint.folder}, layer {layer}", checkpoint.files
    count = 1 if layout.stacked else num_experts
    names = [layout.name(part, layer, expert) for expert in range(count) for part in layout.patterns()]
    for name in names:
        refuse_other_formats(here, name, files)
    lost = [name for name in names if not is_stored(name, files)]
    if len(lost) == len(names):
        layers = [str(other) for other in range(len(files)) if is_stored(layout.name("down", other, 0), files)]
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
    checkpoint: _Checkpoint, layout: ExpertLayout, views: _Views, layer: int, num_experts: int
) -> tuple[int, int]:
    """H and I of the down product, after every other tensor was found to fit them."""
    sizes = None
    for part, expert in sorted(views, key=lambda key: key[0] != "down"):
        name, view = layout.name(part, layer, expert), views[part, expert]
        where, shape = f"{checkpoint.folder / checkpoint.file_of(view)}: {name}", view.shape
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
        if view.kind not in DTYPES and view.scales is None:
            raise CapabilityError(f"{where} is {view.kind}; only {', '.join(DTYPES)} weights can be loaded")
    assert sizes is not None
    return sizes


def _kept_dtype(
    layout: ExpertLayout, views: _Views, layer: int, dtype: torch.dtype | None, intermediate: int
) -> torch.dtype:
    """What the matrices are kept in. float8_e4m3fn only for what is stored so; other things are quantised after it."""
    kinds = sorted({view.kind for (part, _), view in views.items() if not part.endswith("bias")})
    if dtype is None:
        if MXFP4 in kinds:
            raise ValueError(f"dtype is None, but layer {layer} is {MXFP4}; give what to decode it to, e.g. bfloat16")
        kinds = kinds if FP8 in kinds else sorted({view.kind for view in views.values()})
        if len(kinds) > 1:
            raise ValueError(
                f"dtype is None, but the tensors of layer {layer} are {', '.join(kinds)}; give one of them"
            )
        dtype = torch.float8_e4m3fn if kinds == [FP8] else DTYPES[kinds[0]]
    if dtype != torch.float8_e4m3fn:
        return dtype
    aligned = layout.gate_up is None or (layout.gate_up_order != "interleaved" and intermediate % GROUP == 0)
    if kinds == [FP8] and not aligned:
        raise CapabilityError(
            f"layer {layer}: blocks of {layout.gate_up} hold rows of gate and of up, with intermediate {intermediate};"
            " Experts.scales cannot say that, give dtype=torch.bfloat16"
        )
    return dtype if kinds == [FP8] else torch.float32


def _bias_dtype(views: _Views, kept: torch.dtype) -> torch.dtype:
    """Biases have no scales: where matrices stay FP8, they stay what they are."""
    stored = [view.kind for (part, _), view in views.items() if part.endswith("bias")]
    return DTYPES[stored[0]] if stored and kept == torch.float8_e4m3fn else kept


@dataclass(frozen=True, eq=False)
class _Target:
    """The tensors of one rank's experts. scales: of float8_e4m3fn matrices, by the names of these."""

    tensors: dict[str, Tensor]
    scales: dict[str, Tensor]

    @classmethod
    def empty(
        cls, layout: ExpertLayout, num_local: int, sizes: tuple[int, int], dtype: torch.dtype, bias_dtype: torch.dtype
    ) -> _Target:
        """To be filled."""
        hidden, intermediate = sizes
        tensors = {
            "gate_up": torch.empty(num_local, 2 * intermediate, hidden, dtype=dtype),
            "down": torch.empty(num_local, hidden, intermediate, dtype=dtype),
        }
        if layout.down_bias is not None:
            tensors["gate_up_bias"] = torch.empty(num_local, 2 * intermediate, dtype=bias_dtype)
            tensors["down_bias"] = torch.empty(num_local, hidden, dtype=bias_dtype)
        scales: dict[str, Tensor] = {}
        if dtype == torch.float8_e4m3fn:
            groups, hidden_groups = num_groups(intermediate), num_groups(hidden)
            scales["gate_up"] = torch.empty(num_local, 2 * groups, hidden_groups)
            scales["down"] = torch.empty(num_local, hidden_groups, groups)
        return cls(tensors, scales)

    def fill(self, part: str, slot: int, stored: Tensor | Quantized, transposed: bool) -> None:
        """Copy one expert's tensor of the layout to where it belongs."""
        values = _place(self.tensors, part)[slot]
        if self.scales and isinstance(stored, Quantized):
            values.copy_(stored.values)
            _place(self.scales, part)[slot].copy_(stored.scales)
        else:
            matrix = plain(stored)
            values.copy_(matrix.mT if transposed and matrix.dim() == 2 else matrix)

    def experts(self, **options: Any) -> Experts:
        """Them as `Experts`."""
        scales = (self.scales["gate_up"], self.scales["down"]) if self.scales else None
        return replace(
            Experts(self.tensors["gate_up"], self.tensors["down"], scales=scales, **options), **self.biases()
        )

    def biases(self) -> dict[str, Any]:
        """Those that there are, by name."""
        return {name: tensor for name, tensor in self.tensors.items() if name.endswith("bias")}


def _place(tensors: dict[str, Tensor], part: str) -> Tensor:
    """That part of the layout: the tensor of that name, or the first or second half of gate_up."""
    if part in ("gate", "up"):
        return tensors["gate_up"].chunk(2, 1)[part == "up"]
    return tensors[part]


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
