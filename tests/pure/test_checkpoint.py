"""`moeloom.checkpoint`: this rank's bytes and no others, the right way round, and back to what transformers loads."""

from __future__ import annotations

import doctest
import json
import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import moeloom.checkpoint
import moeloom.expert_layout
from moeloom.activation import SwiGLU
from moeloom.checkpoint import load_experts, save_experts, stack_shards, write_index
from moeloom.errors import CapabilityError, MoeloomError
from moeloom.expert_layout import LAYOUTS, ExpertLayout, reorder_gate_up
from moeloom.experts import GATE_UP_ORDERS, Experts
from moeloom.models import find_model
from moeloom.placement import Placement

E, H, I = 10, 6, 4  # noqa: E741
STEM = "model.layers.{layer}.mlp.experts."
UP_FIRST = ExpertLayout(
    gate_up=STEM + "{expert}.up_gate",
    down=STEM + "{expert}.down",
    gate_up_order="up_first",
    transposed=True,
    gate_up_bias=STEM + "{expert}.up_gate_bias",
    down_bias=STEM + "{expert}.down_bias",
)
STACKED_APART = ExpertLayout(gate=STEM + "gate", up=STEM + "up", down=STEM + "down")
KINDS = {
    "qwen3_moe": LAYOUTS["qwen3_moe"],
    "mixtral": LAYOUTS["mixtral"],
    "gpt_oss": LAYOUTS["gpt_oss"],
    "llama4_text": LAYOUTS["llama4_text"],
    "transformers_stacked": LAYOUTS["transformers_stacked"],
    "up first, one tensor per expert": UP_FIRST,
    "gate and up apart, stacked": STACKED_APART,
}
PLACEMENTS = {
    "even": Placement.even(E, 2),
    "uneven": Placement.even(E, 3),
    "scattered, replicated, one rank empty": Placement.from_slots([[9, 0, 9], [], [3, 1, 2, 0], [4, 8, 7, 6, 5]]),
}
FEW = Placement.even(E, 3)

Parts = dict[str, Tensor]


def random_parts(layer: int = 0, dtype: torch.dtype = torch.float32) -> Parts:
    """Every expert's gate, up, down and biases, all values different."""
    generator = torch.Generator().manual_seed(layer)
    shapes = {
        "gate": (E, I, H),
        "up": (E, I, H),
        "down": (E, H, I),
        "gate_bias": (E, I),
        "up_bias": (E, I),
        "down_bias": (E, H),
    }
    return {part: torch.randn(shape, generator=generator).to(dtype) for part, shape in shapes.items()}


def on_disk(kind: str, parts: Parts, layer: int = 0) -> Parts:
    """The same experts as a checkpoint of that kind has them: written out here, without the code under test."""
    gate, up, down = parts["gate"], parts["up"], parts["down"]
    mlp = f"model.layers.{layer}.mlp.experts"
    if kind == "qwen3_moe":
        named = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        return {f"{mlp}.{e}.{name}.weight": whole[e].clone() for name, whole in named.items() for e in range(E)}
    if kind == "mixtral":
        named = {"w1": gate, "w3": up, "w2": down}
        stem = f"model.layers.{layer}.block_sparse_moe.experts"
        return {f"{stem}.{e}.{name}.weight": whole[e].clone() for name, whole in named.items() for e in range(E)}
    if kind == "gpt_oss":
        gate_up, bias = torch.empty(E, H, 2 * I), torch.empty(E, 2 * I)
        gate_up[:, :, 0::2], gate_up[:, :, 1::2] = gate.transpose(1, 2), up.transpose(1, 2)
        bias[:, 0::2], bias[:, 1::2] = parts["gate_bias"], parts["up_bias"]
        return {
            f"{mlp}.gate_up_proj": gate_up.to(gate.dtype),
            f"{mlp}.gate_up_proj_bias": bias.to(gate.dtype),
            f"{mlp}.down_proj": down.transpose(1, 2).contiguous(),
            f"{mlp}.down_proj_bias": parts["down_bias"].clone(),
        }
    if kind == "llama4_text":
        stem = f"model.layers.{layer}.feed_forward.experts"
        gate_up = torch.cat((gate.transpose(1, 2), up.transpose(1, 2)), dim=2)
        return {f"{stem}.gate_up_proj": gate_up, f"{stem}.down_proj": down.transpose(1, 2).contiguous()}
    if kind == "transformers_stacked":
        return {f"{mlp}.gate_up_proj": torch.cat((gate, up), dim=1), f"{mlp}.down_proj": down.clone()}
    if kind == "up first, one tensor per expert":
        named = {
            "up_gate": torch.cat((up, gate), dim=1).transpose(1, 2),
            "down": down.transpose(1, 2),
            "up_gate_bias": torch.cat((parts["up_bias"], parts["gate_bias"]), dim=1),
            "down_bias": parts["down_bias"],
        }
        return {f"{mlp}.{e}.{name}": whole[e].contiguous() for name, whole in named.items() for e in range(E)}
    assert kind == "gate and up apart, stacked"
    return {f"{mlp}.gate": gate.clone(), f"{mlp}.up": up.clone(), f"{mlp}.down": down.clone()}


def folder_of(path: Path, tensors: Parts) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def sharded_folder(path: Path, shards: dict[str, Parts]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        save_file(tensors, path / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def assert_holds(experts: Experts, parts: Parts, slots: tuple[int, ...], *, biases: bool) -> None:
    """Gate, up and down of every slot, bit for bit, whatever order gate and up have."""
    chosen = list(slots)
    assert experts.gate_up.shape == (len(chosen), 2 * I, H)
    for product, gate, up in [(experts.gate_up.mT, parts["gate"].mT, parts["up"].mT)] + (
        [(experts.gate_up_bias, parts["gate_bias"], parts["up_bias"])] if biases else []
    ):
        found_gate, found_up = experts.split_gate_up(product)
        assert torch.equal(found_gate, gate[chosen]) and torch.equal(found_up, up[chosen])
    assert torch.equal(experts.down, parts["down"][chosen])
    if biases:
        assert experts.down_bias is not None and torch.equal(experts.down_bias, parts["down_bias"][chosen])
    else:
        assert experts.gate_up_bias is None and experts.down_bias is None


def test_the_examples_of_the_docstrings_run() -> None:
    result = doctest.testmod(moeloom.expert_layout)
    assert result.attempted >= 1 and result.failed == 0


# reorder_gate_up


@pytest.mark.parametrize(
    ("order", "block", "wanted"),
    [
        ("gate_first", 1, [1, 2, 3, 4, -1, -2, -3, -4]),
        ("up_first", 1, [-1, -2, -3, -4, 1, 2, 3, 4]),
        ("interleaved", 1, [1, -1, 2, -2, 3, -3, 4, -4]),
        ("interleaved", 2, [1, 2, -1, -2, 3, 4, -3, -4]),
        ("interleaved", 4, [1, 2, 3, 4, -1, -2, -3, -4]),
    ],
)
def test_orders_are_what_their_names_say(order: Any, block: int, wanted: list[int]) -> None:
    gate_first = torch.tensor([1, 2, 3, 4, -1, -2, -3, -4])
    assert reorder_gate_up(gate_first, "gate_first", order, 0, block=block).tolist() == wanted
    assert reorder_gate_up(torch.tensor(wanted), order, "gate_first", 0, block=block).equal(gate_first)


@pytest.mark.parametrize("block", [1, 8, 32])
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("back", GATE_UP_ORDERS)
@pytest.mark.parametrize("order", GATE_UP_ORDERS)
def test_every_order_leads_back(order: Any, back: Any, dim: int, block: int) -> None:
    shape = [2, 3, 5]
    shape[dim] = 192  # I is 96: gate and up differ in every block
    tensor = torch.arange(2 * 3 * 5 * 192 // [2, 3, 5][dim]).reshape(shape)
    there = reorder_gate_up(tensor, back, order, dim, block=block)
    assert there.equal(tensor) == (order == back)
    assert (there is tensor) == (order == back)
    assert there.shape == tensor.shape
    assert reorder_gate_up(there, order, back, dim, block=block).equal(tensor)


def test_experts_understand_what_was_reordered() -> None:
    gate, up = torch.randn(3, I, H), torch.randn(3, I, H)
    for order in GATE_UP_ORDERS:
        gate_up = reorder_gate_up(torch.cat((gate, up), 1), "gate_first", order, 1)
        found = Experts(gate_up, torch.empty(3, H, I), gate_up_order=order).split_gate_up(gate_up.mT)
        assert found[0].mT.equal(gate) and found[1].mT.equal(up)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("gate_last", "up_first", 0), {}, "from_order is 'gate_last'; allowed: gate_first, up_first, interleaved"),
        (("up_first", "gate", 0), {}, "to_order is 'gate'"),
        (("gate_first", "up_first", 1), {}, "size 3 along dim 1"),
        (("gate_first", "interleaved", 0), {"block": 3}, "size 8 along dim 0 and block is 3.* 2 \\* block"),
        (("interleaved", "up_first", 0), {"block": 0}, "block is 0"),
    ],
)
def test_reorder_refuses(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reorder_gate_up(torch.zeros(8, 3), *arguments, **options)


# layouts


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gate": "{layer}g"}, "give either gate and up or gate_up"),
        ({"up": "{layer}u"}, "give either gate and up or gate_up"),
        ({}, "give either gate and up or gate_up"),
        ({"gate": "{layer}g", "up": "{layer}u", "gate_up": "{layer}gu"}, "give either gate and up or gate_up"),
        ({"gate": "{layer}g", "up": "{layer}u", "gate_up_order": "up_first"}, "must be gate_first"),
        ({"gate_up": "{layer}gu", "gate_up_order": "up"}, "gate_up_order is 'up'; allowed: gate_first"),
        ({"gate_up": "{layer}gu", "down_bias": "{layer}b"}, "gate_up_bias is None, down_bias is '{layer}b'; give both"),
        ({"gate": "{layer}g", "up": "{layer}u", "gate_up_bias": "{layer}a", "down_bias": "{layer}b"}, "with gate_up"),
        ({"gate_up": "gu"}, "gate_up is 'gu'; every name needs {layer}"),
        ({"gate_up": "{layer}gu{expert}"}, "all or none need {expert}"),
    ],
)
def test_layouts_that_do_not_fit_together_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertLayout(down="{layer}d", **fields)


def test_layouts_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        LAYOUTS["mine"] = UP_FIRST  # type: ignore[index]


# load


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gets_its_slots(tmp_path: Path, kind: str, placement: Placement) -> None:
    parts = random_parts()
    folder = folder_of(tmp_path, on_disk(kind, parts))
    for rank in range(placement.num_ranks):
        experts = load_experts(folder, KINDS[kind], layer=0, placement=placement, rank=rank)
        assert_holds(experts, parts, placement.slots[rank], biases=KINDS[kind].down_bias is not None)
        assert experts.placement is placement
        experts.check(placement.num_local(rank), H)


def test_layers_are_not_mixed_up(tmp_path: Path) -> None:
    """Layer 1 is not layer 11, and a name is enough of a layout."""
    tensors = {}
    for layer in (1, 11, 2):
        tensors |= on_disk("qwen3_moe", random_parts(layer), layer)
    folder = folder_of(tmp_path, tensors)
    for layer in (1, 2, 11):
        experts = load_experts(folder, "qwen3_moe", layer=layer, placement=FEW, rank=1)
        assert_holds(experts, random_parts(layer), FEW.slots[1], biases=False)


def test_the_options_of_the_model_are_passed_on(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, on_disk("llama4_text", random_parts()))
    activation = SwiGLU(clamp=7.0)
    experts = load_experts(
        folder, "llama4_text", layer=0, placement=FEW, rank=0, activation=activation, weight_on_input=True
    )
    assert experts.activation is activation and experts.weight_on_input


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_dtypes_stay_or_are_converted_as_asked(tmp_path: Path, kind: str) -> None:
    parts = random_parts()
    folder = folder_of(tmp_path, on_disk(kind, parts))
    kept = load_experts(folder, kind, layer=0, placement=FEW, rank=2)
    assert {tensor.dtype for tensor in kept.tensors().values()} == {torch.float32}
    converted = load_experts(folder, kind, layer=0, placement=FEW, rank=2, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in converted.tensors().values()} == {torch.bfloat16}
    rounded = {part: tensor.to(torch.bfloat16) for part, tensor in parts.items()}
    assert_holds(converted, rounded, FEW.slots[2], biases=kind == "gpt_oss")


def test_several_stored_dtypes_need_an_explicit_one(tmp_path: Path) -> None:
    tensors = on_disk("gpt_oss", random_parts())
    tensors = {name: tensor.bfloat16() if "bias" in name else tensor for name, tensor in tensors.items()}
    folder = folder_of(tmp_path, tensors)
    with pytest.raises(ValueError, match="dtype is None, but the tensors of layer 0 are BF16, F32"):
        load_experts(folder, "gpt_oss", layer=0, placement=FEW, rank=0)
    assert load_experts(folder, "gpt_oss", layer=0, placement=FEW, rank=0, dtype=torch.float16).num_local == 4
    with pytest.raises(ValueError, match=r"dtype is torch\.int8; it must be a floating"):
        load_experts(folder, "gpt_oss", layer=0, placement=FEW, rank=0, dtype=torch.int8)


def test_what_was_loaded_does_not_depend_on_the_file(tmp_path: Path) -> None:
    """A safetensors slice refers to the mapped file; what is handed out must not, nor keep the mapping alive."""
    parts = random_parts()
    folder = folder_of(tmp_path, on_disk("transformers_stacked", parts))
    experts = load_experts(folder, "transformers_stacked", layer=0, placement=FEW, rank=0)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(bytes((folder / "model.safetensors").stat().st_size))
    assert_holds(experts, parts, FEW.slots[0], biases=False)
    for tensor in experts.tensors().values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()


# only this rank's bytes


class _Meter:
    """`safe_open` that keeps account of what is indexed."""

    def __init__(self) -> None:
        self.read: list[tuple[str, int | None]] = []
        self.bytes = 0

    def open(self, path: Path, framework: str) -> _MeteredFile:
        return _MeteredFile(self, safe_open(path, framework=framework))


class _MeteredFile:
    def __init__(self, meter: _Meter, file: Any) -> None:
        self._meter, self._file = meter, file

    def __enter__(self) -> _MeteredFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return self._file.keys()

    def get_slice(self, name: str) -> _MeteredSlice:  # the only way in: get_tensor would be an AttributeError
        return _MeteredSlice(self._meter, name, self._file.get_slice(name))


class _MeteredSlice:
    def __init__(self, meter: _Meter, name: str, view: Any) -> None:
        self._meter, self._name, self._view = meter, name, view
        self.get_shape, self.get_dtype = view.get_shape, view.get_dtype

    def __getitem__(self, index: int | slice) -> Tensor:
        tensor = self._view[index]
        self._meter.read.append((self._name, index if isinstance(index, int) else None))
        self._meter.bytes += tensor.nbytes
        return tensor


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Meter]:
    meter = _Meter()
    monkeypatch.setattr(moeloom.checkpoint, "safe_open", meter.open)
    yield meter


@pytest.mark.parametrize("kind", KINDS)
def test_only_this_ranks_experts_are_indexed_and_replicas_once(tmp_path: Path, kind: str, meter: _Meter) -> None:
    placement, rank = PLACEMENTS["scattered, replicated, one rank empty"], 0
    folder = folder_of(tmp_path, on_disk(kind, random_parts()))
    load_experts(folder, KINDS[kind], layer=0, placement=placement, rank=rank)
    layout = KINDS[kind]
    wanted = {
        (layout.name(part, 0, expert), expert if layout.stacked else None)
        for part in layout.patterns()
        for expert in (9, 0)
    }
    assert set(meter.read) == wanted and len(meter.read) == len(wanted)
    values = 3 * I * H + (2 * I + H if layout.down_bias else 0)
    assert meter.bytes == 2 * 4 * values


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_slots_reads_nothing(tmp_path: Path, kind: str, meter: _Meter) -> None:
    placement = PLACEMENTS["scattered, replicated, one rank empty"]
    folder = folder_of(tmp_path, on_disk(kind, random_parts()))
    experts = load_experts(folder, KINDS[kind], layer=0, placement=placement, rank=1)
    assert (experts.num_local, experts.hidden, experts.intermediate) == (0, H, I)
    assert meter.read == []


def test_files_of_other_ranks_need_not_be_there(tmp_path: Path) -> None:
    parts = random_parts()
    tensors = on_disk("qwen3_moe", parts)
    shards: dict[str, Parts] = {"low.safetensors": {}, "high.safetensors": {}}
    for name, tensor in tensors.items():
        shards["low.safetensors" if int(name.split(".")[5]) < 5 else "high.safetensors"][name] = tensor
    folder = sharded_folder(tmp_path, shards)
    placement = Placement.even(E, 2)
    (folder / "low.safetensors").unlink()
    experts = load_experts(folder, "qwen3_moe", layer=0, placement=placement, rank=1)
    assert_holds(experts, parts, (5, 6, 7, 8, 9), biases=False)
    with pytest.raises(MoeloomError, match=r"low\.safetensors cannot be opened"):
        load_experts(folder, "qwen3_moe", layer=0, placement=placement, rank=0)


def test_the_rest_of_a_large_file_never_becomes_resident(tmp_path: Path) -> None:
    """1 GiB of experts, of which this rank needs 1/64: the kernel says how much of the mapping was touched."""
    experts, hidden, intermediate = 64, 1024, 2816
    shapes = {"gate_up_proj": (experts, 2 * intermediate, hidden), "down_proj": (experts, hidden, intermediate)}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * shape[1] * shape[2]
        header[f"model.layers.0.mlp.experts.{name}"] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [end, end + size],
        }
        end += size
    head = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + end)  # a hole: reads as zeros, costs no disk
    assert end > 2**30
    Path("/proc/self/clear_refs").write_text("5")  # peak resident memory counts from here
    before = _resident_peak()
    loaded = load_experts(tmp_path, "transformers_stacked", layer=0, placement=Placement.even(experts, 64), rank=37)
    mine = sum(tensor.nbytes for tensor in loaded.tensors().values())
    assert mine == end // 64
    assert _resident_peak() - before < 2 * mine + 2**25  # file pages and result, and 32 MiB of slack


def _resident_peak() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


# refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "qwen3_moes"}, "layout is 'qwen3_moes', which is no known model type; close: qwen3_moe"),
        ({"layout": "zzzzzz"}, "type; known: .*mixtral.*, or give an ExpertLayout"),
        ({"rank": 3}, r"rank is 3; allowed: 0\.\.2"),
        ({"rank": -1}, r"rank is -1; allowed: 0\.\.2"),
        ({"layer": 1}, r"layer 1 has no experts in this layout, such as .*1\.mlp\.experts\.0.*; layers .*: 0, 4$"),
        ({"layout": "mixtral"}, r"layers that have: none; this one has model\.layers\.0\.mlp\.experts\."),
        ({"placement": Placement.even(11, 3)}, r"placement has 11 experts, but .*layer 0 lacks 3 of their 33.*\.10\."),
        ({"placement": Placement.even(9, 3)}, r"placement has 9 experts, but .* has more: .*experts\.9\.down_proj"),
        ({"folder": Path("/nowhere")}, "folder is /nowhere; it has neither model.safetensors nor"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = folder_of(tmp_path, on_disk("qwen3_moe", random_parts()) | on_disk("qwen3_moe", random_parts(), 4))
    arguments = {"folder": folder, "layout": "qwen3_moe", "layer": 0, "placement": FEW, "rank": 0, **change}
    with pytest.raises(ValueError, match=message):
        load_experts(arguments.pop("folder"), arguments.pop("layout"), **arguments)


@pytest.mark.parametrize("num_experts", [9, 11, 1])
def test_a_stacked_tensor_must_hold_as_many_experts_as_the_placement(tmp_path: Path, num_experts: int) -> None:
    folder = folder_of(tmp_path, on_disk("gpt_oss", random_parts()))
    with pytest.raises(ValueError, match=rf"placement has {num_experts} experts; .*down_proj is \[10, 4, 6\]"):
        load_experts(folder, "gpt_oss", layer=0, placement=Placement.even(num_experts, 1), rank=0)


def test_a_missing_expert_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """Nobody is left with fewer experts, or with ones that stay as they were initialised."""
    tensors = on_disk("qwen3_moe", random_parts())
    del tensors["model.layers.0.mlp.experts.7.up_proj.weight"]
    folder = folder_of(tmp_path, tensors)
    for rank in range(3):
        with pytest.raises(ValueError, match=r"lacks 1 of their 30 tensors: model\..*\.experts\.7\.up_proj\.weight"):
            load_experts(folder, "qwen3_moe", layer=0, placement=FEW, rank=rank)


def test_an_empty_stack_is_an_error(tmp_path: Path) -> None:
    tensors = {name: tensor[:0].clone() for name, tensor in on_disk("gpt_oss", random_parts()).items()}
    with pytest.raises(ValueError, match=r"placement has 10 experts; .*down_proj is \[0, 4, 6\]"):
        load_experts(folder_of(tmp_path, tensors), "gpt_oss", layer=0, placement=FEW, rank=0)


@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [
        ("qwen3_moe", "model.layers.0.mlp.experts.2.gate_proj.weight", [H, I]),
        ("qwen3_moe", "model.layers.0.mlp.experts.0.down_proj.weight", [H, I, 1]),
        ("qwen3_moe", "model.layers.0.mlp.experts.3.down_proj.weight", [H, I + 1]),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj", [E, H, I]),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_bias", [E, 2 * I, 1]),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj_bias", [E, I]),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj", [E, 0, H]),
    ],
)
def test_wrong_shapes_are_named(tmp_path: Path, kind: str, name: str, shape: list[int]) -> None:
    tensors = on_disk(kind, random_parts())
    assert name in tensors
    folder = folder_of(tmp_path, tensors | {name: torch.zeros(shape)})
    with pytest.raises(MoeloomError, match=re.escape(f"model.safetensors: {name} is {shape}; ")):
        load_experts(folder, kind, layer=0, placement=FEW, rank=0)


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4_text", "transformers_stacked", "up first, one tensor per expert"])
def test_a_layout_that_is_the_wrong_way_round_is_found(tmp_path: Path, kind: str) -> None:
    folder = folder_of(tmp_path, on_disk(kind, random_parts()))
    wrong = replace(KINDS[kind], transposed=not KINDS[kind].transposed)
    with pytest.raises(MoeloomError, match="it must be"):
        load_experts(folder, wrong, layer=0, placement=FEW, rank=0)


@pytest.mark.parametrize(
    ("kind", "rename"),
    [
        ("qwen3_moe", lambda name: [name, f"{name}_scale"]),  # compressed-tensors, NVFP4
        ("qwen3_moe", lambda name: [f"{name}_packed", f"{name}_scale"]),
        ("qwen3_moe", lambda name: [name.replace("weight", "qweight")]),  # GPTQ, AWQ
    ],
)
def test_quantised_checkpoints_are_refused_by_name(tmp_path: Path, kind: str, rename: Any) -> None:
    tensors = {new: tensor.clone() for name, tensor in on_disk(kind, random_parts()).items() for new in rename(name)}
    with pytest.raises(CapabilityError, match=r"layer 0: model\..* is of a quantised checkpoint; only F64, F32"):
        load_experts(folder_of(tmp_path, tensors), kind, layer=0, placement=FEW, rank=0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_weights_in_another_format_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in on_disk("mixtral", random_parts()).items()}
    with pytest.raises(CapabilityError, match=r"w2\.weight is (F8_E4M3|I8|U8); only"):
        load_experts(folder_of(tmp_path, tensors), "mixtral", layer=0, placement=FEW, rank=0, dtype=torch.float32)


def test_broken_folders_are_named(tmp_path: Path) -> None:
    tensors = on_disk("gpt_oss", random_parts())
    folder = sharded_folder(tmp_path, {"a.safetensors": tensors})
    index, file = folder / "model.safetensors.index.json", folder / "a.safetensors"
    good = json.loads(index.read_text())

    def load() -> None:
        load_experts(folder, "gpt_oss", layer=0, placement=FEW, rank=0)

    load()
    save_file({name: tensor for name, tensor in tensors.items() if "down_proj_bias" not in name}, file)
    with pytest.raises(MoeloomError, match=r"a\.safetensors has no model.*down_proj_bias, which model.*places there"):
        load()
    whole = file.read_bytes()
    for content in (b"", b"not a safetensors file", whole[:-8]):
        file.write_bytes(content)
        with pytest.raises(MoeloomError, match=r"a\.safetensors cannot be opened as a safetensors file"):
            load()
    index.write_text(json.dumps({"weight_map": dict.fromkeys(good["weight_map"], "../a.safetensors")}))
    with pytest.raises(MoeloomError, match=r"names '\.\./a\.safetensors' for .*; it must be a file beside it"):
        load()
    for content in ("", "[]", '{"metadata": {}}'):
        index.write_text(content)
        with pytest.raises(MoeloomError, match="is not an index with a weight_map"):
            load()


# save


def save_all(target: Path, kind: str, source: Path, placement: Placement, layer: int = 0) -> None:
    """What the ranks of a program would do, one after the other."""
    layout = KINDS[kind]
    for rank in range(placement.num_ranks):
        experts = load_experts(source, layout, layer=layer, placement=placement, rank=rank)
        save_experts(target, layout, layer=layer, experts=experts, placement=placement, rank=rank)
    if layout.stacked:
        stack_shards(target, layout, layer=layer)


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_saving_gives_the_same_tensors_each_once(tmp_path: Path, kind: str, placement: Placement) -> None:
    tensors = on_disk(kind, random_parts(), layer=3)
    source, target = folder_of(tmp_path / "source", tensors), tmp_path / "target"
    save_all(target, kind, source, placement, layer=3)
    assert not [path for path in target.iterdir() if path.suffix != ".safetensors"]
    names = sorted(path.name for path in target.iterdir())
    ranks = [f"experts-layer3-rank{rank}.safetensors" for rank in range(placement.num_ranks)]
    assert names == (["experts-layer3.safetensors"] if KINDS[kind].stacked else ranks)
    saved: Parts = {}
    for path in target.iterdir():
        content = load_file(path)
        assert not saved.keys() & content.keys()
        saved |= content
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensors[name]) for name in tensors)

    index = json.loads(write_index(target).read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    again = Placement.even(E, 4)  # what was saved loads at another number of ranks
    for rank in range(4):
        experts = load_experts(target, KINDS[kind], layer=3, placement=again, rank=rank)
        assert_holds(experts, random_parts(), again.slots[rank], biases=KINDS[kind].down_bias is not None)


@pytest.mark.parametrize("order", GATE_UP_ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_saving_brings_any_order_and_any_strides_into_the_layouts(tmp_path: Path, kind: str, order: Any) -> None:
    parts = random_parts()
    gate_up = reorder_gate_up(torch.cat((parts["gate"], parts["up"]), 1), "gate_first", order, 1)
    bias = reorder_gate_up(torch.cat((parts["gate_bias"], parts["up_bias"]), 1), "gate_first", order, 1)
    has_bias = KINDS[kind].down_bias is not None
    experts = Experts(
        gate_up.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(),
        parts["down"],
        gate_up_order=order,
        gate_up_bias=bias if has_bias else None,
        down_bias=parts["down_bias"] if has_bias else None,
    )
    placement = Placement.even(E, 1)
    path = save_experts(tmp_path, KINDS[kind], layer=0, experts=experts, placement=placement, rank=0)
    if KINDS[kind].stacked:
        path = stack_shards(tmp_path, KINDS[kind], layer=0)
    saved, wanted = load_file(path), on_disk(kind, parts)
    assert saved.keys() == wanted.keys()
    assert all(torch.equal(saved[name], wanted[name]) for name in wanted)


def test_the_lowest_replica_is_the_one_that_is_saved(tmp_path: Path) -> None:
    placement = Placement.from_slots([[1, 0], [0, 2, 2], [1, 2]])
    for rank, slots in enumerate(placement.slots):
        filled = torch.tensor([100.0 * rank + slot for slot in range(len(slots))]).reshape(-1, 1, 1)
        experts = Experts(filled.expand(-1, 4, 3).contiguous(), filled.expand(-1, 3, 2).contiguous())
        save_experts(tmp_path, "qwen3_moe", layer=0, experts=experts, placement=placement, rank=rank)
    found = {}
    for rank in range(3):
        for name, tensor in load_file(tmp_path / f"experts-layer0-rank{rank}.safetensors").items():
            found.setdefault(int(name.split(".")[5]), set()).update(tensor.unique().tolist())
    assert found == {0: {1.0}, 1: {0.0}, 2: {101.0}}  # 100 * rank + slot
    assert load_file(tmp_path / "experts-layer0-rank2.safetensors") == {}
    assert (write_index(tmp_path)).exists()


def test_save_refuses_what_does_not_fit(tmp_path: Path) -> None:
    parts = random_parts()
    folder = folder_of(tmp_path / "source", on_disk("gpt_oss", parts))
    biased = load_experts(folder, "gpt_oss", layer=0, placement=FEW, rank=0)
    plain = replace(biased, gate_up_bias=None, down_bias=None)
    for layout, experts, rank, message in [
        ("qwen3_moe", biased, 0, "experts have biases, for which the layout has no name"),
        ("gpt_oss", plain, 0, "experts have no biases, which the layout has"),
        ("gpt_oss", biased, 1, "gate_up is .*with 3 slots"),
        ("gpt_oss", biased, 3, "rank is 3"),
        ("gpt", biased, 0, "layout is 'gpt', which is no known model type"),
    ]:
        with pytest.raises(ValueError, match=message):
            save_experts(tmp_path / "target", layout, layer=0, experts=experts, placement=FEW, rank=rank)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_an_incomplete_or_mixed_save_is_found(tmp_path: Path, kind: str) -> None:
    """Otherwise transformers would leave the missing experts random, with a warning."""
    source, target = folder_of(tmp_path / "source", on_disk(kind, random_parts())), tmp_path / "target"

    def save(placement: Placement, rank: int) -> None:
        experts = load_experts(source, kind, layer=0, placement=placement, rank=rank)
        save_experts(target, kind, layer=0, experts=experts, placement=placement, rank=rank)

    def finish() -> None:
        if KINDS[kind].stacked:
            stack_shards(target, kind, layer=0)
        write_index(target)

    save(FEW, 0)
    save(FEW, 2)
    with pytest.raises(MoeloomError, match=r"layer 0: 3 ranks save; the files of \[1\] are missing"):
        finish()
    save(Placement.even(E, 2), 1)
    with pytest.raises(MoeloomError, match="not the files of one save with one placement"):
        finish()
    assert not (target / "model.safetensors.index.json").exists()
    save(FEW, 1)
    finish()
    assert (target / "model.safetensors.index.json").exists()


def test_stack_and_index_refuse_what_cannot_be(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", on_disk("gpt_oss", random_parts()))
    target = tmp_path / "target"
    with pytest.raises(ValueError, match=r"has no \.safetensors file"):
        write_index(target)
    with pytest.raises(ValueError, match="only stacked layouts have shards"):
        stack_shards(target, "mixtral", layer=0)
    with pytest.raises(MoeloomError, match=r"layer 0: no experts-layer0-rank\*\.part"):
        stack_shards(target, "gpt_oss", layer=0)
    one = Placement.even(E, 1)
    experts = load_experts(source, "gpt_oss", layer=0, placement=one, rank=0)
    path = save_experts(target, "gpt_oss", layer=0, experts=experts, placement=one, rank=0)
    save_file({"x": torch.zeros(1)}, target / "rest.safetensors")
    with pytest.raises(ValueError, match=rf"{path.name} is only a part; call stack_shards"):
        write_index(target)
    with pytest.raises(MoeloomError, match=r"no \.part file has model\.layers\.0\.feed_forward"):
        stack_shards(target, "llama4_text", layer=0)
    assert path.exists()
    stack_shards(target, "gpt_oss", layer=0)
    save_file(on_disk("gpt_oss", random_parts()), target / "old.safetensors")
    with pytest.raises(MoeloomError, match=r"is both in experts-layer0\.safetensors and in old\.safetensors"):
        write_index(target)
    (target / "old.safetensors").rename(target / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors would be read alone, without experts-layer0\."):
        write_index(target)
    (target / "model.safetensors").unlink()
    assert len(json.loads(write_index(target).read_text())["weight_map"]) == 5


# transformers

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "intermediate_size": 12,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
TRUE_OF_ONE = {"gpt_oss": {"max_position_embeddings": 131072}}


def tiny(model_type: str, num_experts: int) -> Any:
    """A random model of that type, every parameter set: biases would be zeros."""
    transformers = pytest.importorskip("transformers", reason="needs transformers to say what it writes")
    experts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), num_experts)
    kind = type(transformers.AutoConfig.for_model(model_type))
    torch.manual_seed(0)
    if model_type == "llama4":
        config = kind(
            text_config={**SIZES, **experts},
            vision_config={
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "vision_output_dim": 16,
                "image_size": 28,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
        )
        return transformers.AutoModelForImageTextToText.from_config(config)
    config = kind(**{**SIZES, **experts, **TRUE_OF_ONE.get(model_type, {})})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("model_type", [name for name in LAYOUTS if name != "transformers_stacked"])
def test_presets_are_what_transformers_writes(tmp_path: Path, model_type: str) -> None:
    """Every expert tensor on disk has a name in the layout, and loading gives what the model holds."""
    model = tiny(model_type, 4)
    model.save_pretrained(tmp_path)
    layout, layer = LAYOUTS[model_type], 1
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        names = {
            name
            for name in file.keys()  # noqa: SIM118
            if f"layers.{layer}." in name
            and ("experts." in name or "put_linear" in name)
            and "shared" not in name
            and "gate.e_score" not in name
            and "vision" not in name
        }
    assert names == {layout.name(part, layer, expert) for part in layout.patterns() for expert in range(4)}
    placement = Placement.even(4, 3)
    (held,) = [
        module
        for name, module in model.named_modules()
        if f"layers.{layer}." in name and getattr(getattr(module, "gate_up_proj", None), "ndim", 0) == 3
    ]
    for rank in range(3):
        experts = load_experts(tmp_path, model_type, layer=layer, placement=placement, rank=rank)
        slots = list(placement.slots[rank])
        gate_up, down = held.gate_up_proj.detach()[slots], held.down_proj.detach()[slots]
        if layout.transposed:
            gate_up, down = gate_up.mT, down.mT
        assert experts.gate_up.equal(gate_up) and experts.down.equal(down)
        if layout.down_bias is not None:
            assert experts.gate_up_bias is not None and experts.gate_up_bias.equal(held.gate_up_proj_bias[slots])
            assert experts.down_bias is not None and experts.down_bias.equal(held.down_proj_bias[slots])


def round_trip(source: Path, target: Path, layout: str, placement: Placement) -> Any:
    """The model after its experts went through three ranks of moeloom into another folder."""
    transformers = pytest.importorskip("transformers", reason="needs transformers to load what was written")
    tensors = load_file(source / "model.safetensors")
    layers = [layer for layer in range(2) if LAYOUTS[layout].name("down", layer, 0) in tensors]  # the others are dense
    for layer in layers:
        for rank in range(placement.num_ranks):
            experts = load_experts(source, layout, layer=layer, placement=placement, rank=rank)
            save_experts(target, layout, layer=layer, experts=experts, placement=placement, rank=rank)
        if LAYOUTS[layout].stacked:
            stack_shards(target, layout, layer=layer)
    moved = {
        LAYOUTS[layout].name(part, layer, expert)
        for part in LAYOUTS[layout].patterns()
        for layer in layers
        for expert in range(placement.num_experts)
    }
    assert moved and moved <= tensors.keys()
    rest = {name: tensor for name, tensor in tensors.items() if name not in moved}
    save_file(rest, target / "rest.safetensors", metadata={"format": "pt"})
    shutil.copy(source / "config.json", target)
    write_index(target)
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    return loaded.eval()


def assert_equal_weights(wanted: Any, found: Any) -> None:
    state = found.state_dict()
    assert state.keys() == wanted.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in wanted.state_dict().items())


def assert_equal_logits(wanted: Any, found: Any) -> None:
    for parameter in found.parameters():
        # transformers leaves stacked tensors in the mapped file, 8-byte aligned; CPU products have other bits there
        parameter.data = parameter.data.clone()
    tokens = torch.randint(3, 32, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = wanted(tokens).logits
        assert torch.isfinite(logits).all() and logits.std() > 0.01
        assert torch.equal(logits, found(tokens).logits)


@pytest.mark.parametrize("model_type", [name for name in LAYOUTS if name not in ("transformers_stacked", "llama4")])
def test_transformers_loads_what_was_saved(tmp_path: Path, model_type: str) -> None:
    model = tiny(model_type, 10)
    model.save_pretrained(tmp_path / "source")
    loaded = round_trip(tmp_path / "source", tmp_path / "target", model_type, Placement.even(10, 3))
    assert_equal_weights(model, loaded)


@pytest.mark.parametrize("num_experts", [8, 10])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss", "llama4_text"])
def test_logits_are_what_they_were(tmp_path: Path, model_type: str, num_experts: int) -> None:
    model = tiny(model_type, num_experts)
    model.save_pretrained(tmp_path / "source")
    placement = Placement.even(num_experts, 3)
    assert_equal_logits(model, round_trip(tmp_path / "source", tmp_path / "target", model_type, placement))


def test_transformers_loads_its_own_stacked_format(tmp_path: Path) -> None:
    model = tiny("mixtral", 8)
    model.save_pretrained(tmp_path / "source", save_original_format=False)
    placement = Placement.from_slots([[7, 0, 1], [2, 3, 7], [4, 5, 6, 0]])
    loaded = round_trip(tmp_path / "source", tmp_path / "target", "transformers_stacked", placement)
    assert_equal_weights(model, loaded)
    assert_equal_logits(model, loaded)


@pytest.mark.parametrize(("model_type", "model_name"), [("qwen3_moe", None), ("gpt_oss", "gpt-oss-20b")])
def test_loaded_experts_compute_what_the_model_does(tmp_path: Path, model_type: str, model_name: str | None) -> None:
    """Names, orders and activation together: the formula on what was loaded against the module of transformers."""
    model = tiny(model_type, 8)
    model.save_pretrained(tmp_path)
    module = model.model.layers[1].mlp.experts
    activation = find_model(model_name).activation if model_name else SwiGLU()
    placement = Placement.even(8, 3)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(2)) * 3
    for rank in range(3):
        experts = load_experts(tmp_path, model_type, layer=1, placement=placement, rank=rank, activation=activation)
        for slot, expert in enumerate(placement.slots[rank]):
            product = x @ experts.gate_up[slot].T
            if experts.gate_up_bias is not None:
                product = product + experts.gate_up_bias[slot]
            found = experts.activation(*experts.split_gate_up(product)) @ experts.down[slot].T
            if experts.down_bias is not None:
                found = found + experts.down_bias[slot]
            with torch.no_grad():
                wanted = module(x, torch.full((5, 1), expert), torch.ones(5, 1))
            assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)
            assert wanted.abs().max() > 0.1
