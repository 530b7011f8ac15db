"""Quantised checkpoints: FP8 with scales for 128 x 128 blocks, and MXFP4; tiny ones, written here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeloom import CapabilityError, Experts, MoeloomError, Placement
from moeloom.checkpoint import load_experts, save_experts
from moeloom.expert_layout import ExpertLayout
from tests.support.compare import equal_bits

NUM, H = 5, 200
PLACEMENT = Placement.from_slots([[3, 0, 3], [], [4, 1, 2]])
NAMES = {
    "deepseek_v3": ("model.layers.0.mlp.experts.{}.{}.weight", ("gate_proj", "up_proj", "down_proj")),
    "qwen3_moe": ("model.layers.0.mlp.experts.{}.{}.weight", ("gate_proj", "up_proj", "down_proj")),
    "minimax_m2": ("model.layers.0.block_sparse_moe.experts.{}.{}.weight", ("w1", "w3", "w2")),
}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def blocks_of(size: int) -> int:
    return (size + 127) // 128


def fp8_matrix(rows: int, columns: int, seed: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scales, and the numbers they stand for, block by block."""
    values = (100 * draw(rows, columns, seed=seed)).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = 2.0 ** torch.randint(-12, -3, (blocks_of(rows), blocks_of(columns)))
    if scale_dtype in (torch.float32, torch.bfloat16):
        scales = (scales * 1.1875).to(scale_dtype)
    numbers = values.float()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            numbers[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] *= float(scales[i, j])
    return values, scales.to(scale_dtype), numbers


def fp8_folder(
    path: Path, kind: str, intermediate: int, scale_dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Write a checkpoint; returns the numbers of each expert's gate, up and down."""
    pattern, parts = NAMES[kind]
    tensors, numbers = {}, []
    for expert in range(NUM):
        found = []
        for n, part in enumerate(parts):
            shape = (H, intermediate) if n == 2 else (intermediate, H)
            name = pattern.format(expert, part)
            tensors[name], tensors[f"{name}_scale_inv"], exact = fp8_matrix(*shape, 10 * expert + n, scale_dtype)
            found.append(exact)
        numbers.append((found[0], found[1], found[2]))
    path.mkdir(exist_ok=True, parents=True)
    save_file(tensors, path / "model.safetensors")
    return numbers


def assert_holds(experts: Experts, numbers: list, slots: tuple[int, ...], dtype: torch.dtype) -> None:
    gate_up = torch.stack([torch.cat(numbers[e][:2]) for e in slots]) if slots else experts.gate_up
    down = torch.stack([numbers[e][2] for e in slots]) if slots else experts.down
    assert equal_bits(experts.gate_up, gate_up.to(dtype)) and equal_bits(experts.down, down.to(dtype))
    assert experts.scales is None


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("intermediate", [96, 128, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_is_dequantised(tmp_path: Path, kind: str, intermediate: int, dtype: torch.dtype) -> None:
    numbers = fp8_folder(tmp_path, kind, intermediate)
    for rank in range(3):
        experts = load_experts(tmp_path, kind, layer=0, placement=PLACEMENT, rank=rank, dtype=dtype)
        experts.check(PLACEMENT.num_local(rank), H)
        assert_holds(experts, numbers, PLACEMENT.slots[rank], dtype)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_other_dtypes(tmp_path: Path, scale_dtype: torch.dtype) -> None:
    numbers = fp8_folder(tmp_path, "deepseek_v3", 130, scale_dtype)
    experts = load_experts(tmp_path, "deepseek_v3", layer=0, placement=PLACEMENT, rank=2, dtype=torch.float32)
    assert_holds(experts, numbers, PLACEMENT.slots[2], torch.float32)


@pytest.mark.parametrize("dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("intermediate", [96, 256])
def test_fp8_is_kept(tmp_path: Path, dtype: torch.dtype | None, intermediate: int) -> None:
    """Values and scales as they are; what the recipe fp8 computes with are the checkpoint's numbers."""
    numbers = fp8_folder(tmp_path, "minimax_m2", intermediate)
    for rank in range(3):
        experts = load_experts(tmp_path, "minimax_m2", layer=0, placement=PLACEMENT, rank=rank, dtype=dtype)
        experts.check(PLACEMENT.num_local(rank), H)
        assert experts.gate_up.dtype == torch.float8_e4m3fn and experts.scales is not None
        for slot, expert in enumerate(PLACEMENT.slots[rank]):
            gate_up, down = experts.rounded(slot)
            assert equal_bits(gate_up, torch.cat(numbers[expert][:2])) and equal_bits(down, numbers[expert][2])
        with pytest.raises(CapabilityError, match="experts have scales"):
            save_experts(tmp_path, "minimax_m2", layer=0, experts=experts, placement=PLACEMENT, rank=rank)


def test_a_plain_checkpoint_is_quantised_if_asked(tmp_path: Path) -> None:
    pattern, parts = NAMES["qwen3_moe"]
    tensors = {
        pattern.format(expert, part): draw(*((H, 96) if n == 2 else (96, H)), seed=10 * expert + n).bfloat16()
        for expert in range(NUM)
        for n, part in enumerate(parts)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    plain, quantized = (
        load_experts(tmp_path, "qwen3_moe", layer=0, placement=PLACEMENT, rank=0, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    )
    assert quantized.gate_up.dtype == torch.float8_e4m3fn
    assert all(map(equal_bits, plain.rounded(1), quantized.rounded(1)))


STEM = "model.layers.{layer}.experts."
STACKED = ExpertLayout(gate_up=f"{STEM}gate_up_proj", down=f"{STEM}down_proj")


@pytest.mark.parametrize("intermediate", [96, 128])
def test_a_stacked_checkpoint(tmp_path: Path, intermediate: int) -> None:
    """Its blocks run through gate and up together: kept only where no block holds rows of both."""
    stem = "model.layers.0.experts."
    made = [fp8_matrix(2 * intermediate, H, e, torch.float32) for e in range(NUM)]
    downs = [fp8_matrix(H, intermediate, 50 + e, torch.float32) for e in range(NUM)]
    tensors = {}
    for name, each in ((f"{stem}gate_up_proj", made), (f"{stem}down_proj", downs)):
        tensors[name] = torch.stack([values.view(torch.uint8) for values, _, _ in each]).view(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.stack([scales for _, scales, _ in each])
    save_file(tensors, tmp_path / "model.safetensors")
    experts = load_experts(tmp_path, STACKED, layer=0, placement=PLACEMENT, rank=2, dtype=torch.float32)
    assert equal_bits(experts.gate_up, torch.stack([made[e][2] for e in PLACEMENT.slots[2]]))
    assert equal_bits(experts.down, torch.stack([downs[e][2] for e in PLACEMENT.slots[2]]))
    if intermediate % 128:
        with pytest.raises(CapabilityError, match="hold rows of gate and of up, with intermediate 96"):
            load_experts(tmp_path, STACKED, layer=0, placement=PLACEMENT, rank=2)
        return
    kept = load_experts(tmp_path, STACKED, layer=0, placement=PLACEMENT, rank=2)
    assert equal_bits(kept.rounded(1)[0], experts.gate_up[1]) and equal_bits(kept.rounded(1)[1], experts.down[1])


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def mxfp4_matrix(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, scales and numbers `[rows, columns]`, in double precision."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=generator)
    scales = torch.randint(110, 140, (rows, columns // 32), generator=generator)
    table = torch.tensor(E2M1 + [-value for value in E2M1], dtype=torch.float64)
    numbers = table[codes] * 2.0 ** (scales.double() - 127).repeat_interleave(32, 1)
    blocks = codes[:, 0::2] + 16 * codes[:, 1::2]
    return blocks.view(rows, columns // 32, 16).to(torch.uint8), scales.to(torch.uint8), numbers


def gpt_oss_folder(path: Path, hidden: int = 64, intermediate: int = 96) -> tuple[list[Tensor], list[Tensor], dict]:
    stem = "model.layers.0.mlp.experts."
    made = [mxfp4_matrix(2 * intermediate, hidden, e) for e in range(NUM)]
    downs = [mxfp4_matrix(hidden, intermediate, 50 + e) for e in range(NUM)]
    tensors = {
        f"{stem}gate_up_proj_bias": draw(NUM, 2 * intermediate, seed=1).bfloat16(),
        f"{stem}down_proj_bias": draw(NUM, hidden, seed=2).bfloat16(),
    }
    for name, each in ((f"{stem}gate_up_proj", made), (f"{stem}down_proj", downs)):
        tensors[f"{name}_blocks"] = torch.stack([blocks for blocks, _, _ in each])
        tensors[f"{name}_scales"] = torch.stack([scales for _, scales, _ in each])
    save_file(tensors, path / "model.safetensors")
    return [numbers for _, _, numbers in made], [numbers for _, _, numbers in downs], tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_decoded(tmp_path: Path, dtype: torch.dtype) -> None:
    gate_up, down, tensors = gpt_oss_folder(tmp_path)
    for rank in range(3):
        experts = load_experts(tmp_path, "gpt_oss", layer=0, placement=PLACEMENT, rank=rank, dtype=dtype)
        experts.check(PLACEMENT.num_local(rank), 64)
        for slot, expert in enumerate(PLACEMENT.slots[rank]):
            assert equal_bits(experts.gate_up[slot], gate_up[expert].to(dtype))
            assert equal_bits(experts.down[slot], down[expert].to(dtype))
            assert experts.gate_up_bias is not None
            bias = tensors["model.layers.0.mlp.experts.gate_up_proj_bias"][expert]
            assert equal_bits(experts.gate_up_bias[slot], bias.to(dtype))


def test_mxfp4_is_what_transformers_decodes(tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    _, _, tensors = gpt_oss_folder(tmp_path)
    experts = load_experts(tmp_path, "gpt_oss", layer=0, placement=Placement.even(NUM, 1), rank=0, dtype=torch.bfloat16)
    for name, got in (("gate_up_proj", experts.gate_up), ("down_proj", experts.down)):
        stem = f"model.layers.0.mlp.experts.{name}"
        # its exponents are signed integers
        blocks, scales = tensors[f"{stem}_blocks"], tensors[f"{stem}_scales"]
        assert equal_bits(got, mxfp4.convert_moe_packed_tensors(blocks, scales).mT)


def test_mxfp4_needs_a_dtype_and_can_become_fp8(tmp_path: Path) -> None:
    gpt_oss_folder(tmp_path)
    with pytest.raises(ValueError, match="dtype is None, but layer 0 is MXFP4"):
        load_experts(tmp_path, "gpt_oss", layer=0, placement=PLACEMENT, rank=0)
    experts, exact = (
        load_experts(tmp_path, "gpt_oss", layer=0, placement=PLACEMENT, rank=0, dtype=dtype)
        for dtype in (torch.float8_e4m3fn, torch.float32)
    )
    experts.check(3, 64)
    assert experts.gate_up_order == "interleaved" and all(map(equal_bits, experts.rounded(0), exact.rounded(0)))


def test_only_the_needed_bytes_are_read(tmp_path: Path) -> None:
    """The file of the other experts is not there at all."""
    numbers = fp8_folder(tmp_path, "deepseek_v3", 128)
    shards: dict[str, dict[str, Tensor]] = {"mine.safetensors": {}, "others.safetensors": {}}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        mine = ".experts.0." in name or ".experts.3." in name
        shards["mine.safetensors" if mine else "others.safetensors"][name] = tensor
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    save_file(shards["mine.safetensors"], tmp_path / "mine.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    experts = load_experts(tmp_path, "deepseek_v3", layer=0, placement=PLACEMENT, rank=0, dtype=torch.bfloat16)
    assert_holds(experts, numbers, PLACEMENT.slots[0], torch.bfloat16)


def rewrite(folder: Path, change: dict[str, Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors") | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    pattern, parts = NAMES["deepseek_v3"]
    name = pattern.format(0, parts[0])

    def load() -> Experts:
        return load_experts(tmp_path, "deepseek_v3", layer=0, placement=PLACEMENT, rank=0, dtype=torch.bfloat16)

    fp8_folder(tmp_path, "deepseek_v3", 128)
    rewrite(tmp_path, {f"{name}_scale_inv": None})
    with pytest.raises(CapabilityError, match=r"experts.0.gate_proj.weight is F8_E4M3; only"):
        load()
    rewrite(tmp_path, {f"{name}_scale_inv": torch.ones(1)})
    with pytest.raises(CapabilityError, match=r"_scale_inv is \[1\]; for \[128, 200\] .* it must be \[1, 2\]"):
        load()
    rewrite(tmp_path, {f"{name}_scale_inv": torch.ones(1, 2), name: torch.zeros(128, H // 2, dtype=torch.int8)})
    with pytest.raises(CapabilityError, match="is I8; with .*_scale_inv beside it only F8_E4M3 can be loaded"):
        load()
    gpt_oss_folder(tmp_path)
    stem = "model.layers.0.mlp.experts.down_proj"
    rewrite(tmp_path, {f"{stem}_scales": None})
    with pytest.raises(MoeloomError, match=r"has .*down_proj_blocks, but no .*down_proj_scales"):
        load_experts(tmp_path, "gpt_oss", layer=0, placement=PLACEMENT, rank=0, dtype=torch.bfloat16)
    rewrite(tmp_path, {f"{stem}_scales": torch.zeros(NUM, 64, 4, dtype=torch.uint8)})
    with pytest.raises(MoeloomError, match="they must be U8"):
        load_experts(tmp_path, "gpt_oss", layer=0, placement=PLACEMENT, rank=0, dtype=torch.bfloat16)
