"""One tensor of a checkpoint in the format in which it is stored: plain, E4M3 with scales for blocks, or MXFP4."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeloom.errors import CapabilityError, MoeloomError
from moeloom.quantize import MXFP4_GROUP, decode_e8m0, decode_mxfp4, dequantize_blocks, num_groups
from moeloom.types import Quantized

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FP8, MXFP4 = "F8_E4M3", "MXFP4"
FP8_SCALES = "_scale_inv"  # behind the name of the weight; fp32 or E8M0, for 128 x 128 values
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
REFUSED = ("_scale", "_packed", "_scale_2")
"""What follows the name of a weight in other quantised checkpoints (compressed-tensors, NVFP4)."""

View = Callable[[str], Any]


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of which nothing is read before `read`.

    kind: what safetensors calls its dtype, or "MXFP4". shape: as a plain tensor of that name would have it.
    scales: of the formats that have them. transposed: whether a plain tensor would be the other way round.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    view: Any
    scales: Any = None
    transposed: bool = False

    def read(self, expert: int | None) -> Tensor | Quantized:
        """The tensor, or one expert's part of a stacked one; fp32 for MXFP4. It may refer to the mapped file."""
        one = self.view[:] if expert is None else self.view[expert]
        if self.scales is None:
            return one
        scales = self.scales[:] if expert is None else self.scales[expert]
        if self.kind == FP8:
            return Quantized(one, _fp32(scales))
        decoded = decode_mxfp4(one, scales)
        return decoded.mT if self.transposed else decoded


def is_stored(name: str, files: Container[str]) -> bool:
    """Whether there is that tensor, in a format known here."""
    return name in files or name + MXFP4_BLOCKS in files


def refuse_other_formats(where: str, name: str, files: Container[str]) -> None:
    """Raise CapabilityError if the weight is quantised in another way."""
    for other in (*(name + suffix for suffix in REFUSED), name.removesuffix("weight") + "qweight"):
        if other in files:
            raise CapabilityError(
                f"{where}: {other} is of a quantised checkpoint; only {', '.join(DTYPES)}, FP8 with {FP8_SCALES} and"
                f" MXFP4 with {MXFP4_BLOCKS} and {MXFP4_SCALES} can be loaded: convert it first"
            )


def find_stored(where: str, name: str, files: Container[str], view: View, transposed: bool) -> Stored:
    """The tensor of that name. view(name) gives a slice of safetensors; transposed: as in `ExpertLayout`.

    Raises MoeloomError where scales are missing or do not fit, CapabilityError for other blocks than 128 x 128.
    """
    if name not in files:
        return _mxfp4(where, name, files, view, transposed)
    weight = view(name)
    kind, shape = weight.get_dtype(), tuple(weight.get_shape())
    if name + FP8_SCALES not in files:
        return Stored(name, kind, shape, weight)
    if kind != FP8:
        raise CapabilityError(f"{where}: {name} is {kind}; with {name + FP8_SCALES} beside it only {FP8} can be loaded")
    if transposed or len(shape) < 2:
        raise CapabilityError(f"{where}: {name} is {kind} in a transposed layout; convert it to BF16 first")
    scales = view(name + FP8_SCALES)
    wanted = [*shape[:-2], num_groups(shape[-2]), num_groups(shape[-1])]
    if list(scales.get_shape()) != wanted:
        raise CapabilityError(
            f"{where}: {name + FP8_SCALES} is {list(scales.get_shape())}; for {list(shape)} in blocks of 128 x 128 it"
            f" must be {wanted}: convert it first"
        )
    return Stored(name, kind, shape, weight, scales)


def _mxfp4(where: str, name: str, files: Container[str], view: View, transposed: bool) -> Stored:
    """Blocks `[..., out, in / 32, 16]` and scales `[..., out, in / 32]`, whichever way round plain ones would be."""
    if name + MXFP4_SCALES not in files:
        raise MoeloomError(f"{where} has {name}{MXFP4_BLOCKS}, but no {name}{MXFP4_SCALES}")
    blocks, scales = view(name + MXFP4_BLOCKS), view(name + MXFP4_SCALES)
    shape = tuple(blocks.get_shape())
    kinds = (blocks.get_dtype(), scales.get_dtype())
    if kinds != ("U8", "U8") or shape[-1:] != (MXFP4_GROUP // 2,) or tuple(scales.get_shape()) != shape[:-1]:
        raise MoeloomError(
            f"{where}: {name}{MXFP4_BLOCKS} is {kinds[0]} {list(shape)}, {MXFP4_SCALES} is {kinds[1]}"
            f" {list(scales.get_shape())}; they must be U8, [..., out, in / 32, 16] and [..., out, in / 32]"
        )
    plain = (*shape[:-2], shape[-2] * MXFP4_GROUP)
    plain = (*plain[:-2], plain[-1], plain[-2]) if transposed else plain
    return Stored(name, MXFP4, plain, blocks, scales, transposed)


def plain(stored: Tensor | Quantized) -> Tensor:
    """What was read, dequantised."""
    return dequantize_blocks(*stored) if isinstance(stored, Quantized) else stored


def _fp32(scales: Tensor) -> Tensor:
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return decode_e8m0(scales.view(torch.uint8))
    return scales.float()
