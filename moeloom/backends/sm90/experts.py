"""experts on SM90: two launches, up/gate and down, of products over all experts whose counts only the device knows."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moeloom import jit
from moeloom.activation import SwiGLU
from moeloom.backends.sm90.experts_parameters import Bias, ExpertsParams, Operands, TensorMap, Tiles
from moeloom.backends.sm90.launch import launch
from moeloom.backends.sm90.parameters import proof
from moeloom.backends.sm90.tensor_map import ALIGNMENT, tensor_map
from moeloom.config import Recipe
from moeloom.errors import CapabilityError
from moeloom.experts import Experts
from moeloom.quantize import num_groups, record_bytes

THREADS, WEIGH_THREADS = 384, 256
SHARED_BYTES = 226_304  # of a block
LARGE_ROWS, FEW_ROWS = 128, 16  # of the boxes in which rows are copied
BLOCK, STEP_BYTES, SCALE_STEPS = 128, 128, 4
TILE_COLUMNS = 256
MAX_INTERMEDIATE = 16384
UNIT = 16  # H and I are multiples of it
HIDDEN_ALIGNMENT = 128  # bytes, of the rows between the products

_NUMBERS = {
    "EXPERTS_THREADS": THREADS,
    "WEIGH_THREADS": WEIGH_THREADS,
    "sizeof(ExpertsShared)": SHARED_BYTES,
    "LARGE": LARGE_ROWS,
    "SMALL_BOX": FEW_ROWS,
    "BLOCK": BLOCK,
    "STEP_BYTES": STEP_BYTES,
    "SCALE_STEPS": SCALE_STEPS,
}
_TEXT = '#include "experts.cuh"\n' + proof((TensorMap, Operands, Tiles, Bias, ExpertsParams), _NUMBERS)
PHASES = ("up_gate", "down")


def _product(values: str, phase: str) -> jit.Declared:
    kernel = f"moeloom::experts_product<moeloom::Values::{values}, moeloom::Phase::{phase}>"
    return jit.Declared(jit.Source(f"experts_{values}_{phase}", _TEXT, (kernel,)), THREADS, shared_bytes=SHARED_BYTES)


_PRODUCTS = {(values, phase): _product(values, phase) for values in ("e4m3", "bf16") for phase in PHASES}
_WEIGH = jit.Declared(jit.Source("weigh_rows", _TEXT, ("moeloom::weigh_rows",)), WEIGH_THREADS, blocks_per_sm=4)
KERNELS = (*_PRODUCTS.values(), _WEIGH)


@dataclass(frozen=True, eq=False)
class Scratch:
    """What the two products leave to each other; for one call after the other on a stream.

    hidden: `[R, bytes]` uint8, rows between the products. tickets: `[2]` int32, zeros between calls. weighed: `[R, H]`
    bf16, for models that weigh bf16 rows; else None.
    """

    hidden: Tensor
    tickets: Tensor
    weighed: Tensor | None

    @classmethod
    def make(cls, num_rows: int, weights: Experts, recipe: Recipe, tickets: Tensor | None = None) -> Scratch:
        """Memory for calls with so many rows, on the weights' device. tickets: `[2]` int32 zeros of the caller's."""
        device = weights.gate_up.device
        row = record_bytes(weights.intermediate) if recipe.quantized else 2 * weights.intermediate
        row = -(-row // HIDDEN_ALIGNMENT) * HIDDEN_ALIGNMENT
        weighed = None
        if weights.weight_on_input and not recipe.quantized:
            weighed = torch.empty(num_rows, weights.hidden, dtype=torch.bfloat16, device=device)
        hidden = torch.empty(num_rows, row, dtype=torch.uint8, device=device)
        if tickets is None:
            tickets = torch.zeros(2, dtype=torch.int32, device=device)
        return cls(hidden, tickets, weighed)


class Layout(NamedTuple):
    """Where an expert's rows are, on the device."""

    expert_start: Tensor
    expert_rows: Tensor
    row_weight: Tensor


def experts(
    rows: Tensor,
    expert_start: Tensor,
    expert_rows: Tensor,
    row_weight: Tensor,
    weights: Experts,
    recipe: Recipe,
    scratch: Scratch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Each expert's function of its rows, launched on the current stream; the host reads nothing.

    rows: `[R, pitch]` uint8 records of E4M3 values and scales (recipe fp8), or `[R, H]` bf16, by expert. expert_start:
    `[L]` or more int32, each expert's first row; expert_rows: `[L]` int32, its rows; what lies between is neither read
    for nor written. row_weight: `[R]` fp32, the router's. weights: fp8 with scales, or bf16. scratch:
    of `Scratch.make` for as many rows or more; None makes one. Returns `[R, H]` bf16, `out` if given.

    A row's bits depend on nothing but the row, its weight and its expert. Raises ValueError for arguments that do not
    fit, CapabilityError for what the kernels do not have.
    """
    layout = Layout(expert_start, expert_rows, row_weight)
    check(weights, recipe)
    check_rows(rows, layout, weights, recipe)
    if out is None:
        out = torch.empty(len(rows), weights.hidden, dtype=torch.bfloat16, device=rows.device)
    for step in launches(rows, layout, weights, recipe, scratch or Scratch.make(len(rows), weights, recipe), out):
        step()
    return out


def launches(
    rows: Tensor, layout: Layout, weights: Experts, recipe: Recipe, scratch: Scratch, out: Tensor
) -> list[Callable[[], None]]:
    """What `experts` launches, one after the other: the last two are up/gate and down."""
    num_rows = len(rows)
    if list(out.shape) != [num_rows, weights.hidden] or out.dtype != torch.bfloat16 or not _copyable(out):
        raise ValueError(f"out is {out.dtype} {list(out.shape)}; allowed: bf16 {[num_rows, weights.hidden]}")
    if len(scratch.hidden) < num_rows or (scratch.weighed is None) == _weighs_bf16(weights, recipe):
        raise ValueError(
            f"scratch has {len(scratch.hidden)} rows; allowed: one made for {num_rows}, weights and recipe"
        )
    if not num_rows or not weights.num_local:
        return []
    found = []
    if scratch.weighed is not None:
        found.append(_weigh(rows, layout, scratch.weighed))
        rows = scratch.weighed[:num_rows]
    values = "e4m3" if recipe.quantized else "bf16"
    up = _up_gate(rows, layout, weights, recipe, scratch)
    down = _down(layout, weights, recipe, scratch, out)
    for phase, params in zip(PHASES, (up, down), strict=True):
        found.append(functools.partial(launch, _PRODUCTS[values, phase], rows.device, (bytes(params),)))
    return found


def check(weights: Experts, recipe: Recipe) -> None:
    """Raise CapabilityError or ValueError unless the kernels can compute with these weights in this recipe."""
    if recipe.dtype != torch.bfloat16:
        raise CapabilityError(f"recipe {recipe.name} on sm90; allowed: bf16, fp8")
    wanted = torch.float8_e4m3fn if recipe.quantized else torch.bfloat16
    if weights.gate_up.dtype != wanted:
        hint = "; `Experts.quantized` makes them" if recipe.quantized else ""
        raise ValueError(f"gate_up is {weights.gate_up.dtype}; recipe {recipe.name} takes {wanted} here{hint}")
    if not isinstance(weights.activation, SwiGLU):
        raise CapabilityError(f"activation {weights.activation!r} on sm90; allowed: SwiGLU(...)")
    sizes = (weights.hidden, weights.intermediate)
    if any(size % UNIT or size < UNIT for size in sizes) or weights.intermediate > MAX_INTERMEDIATE:
        found = f"hidden {sizes[0]}, intermediate {sizes[1]}"
        raise CapabilityError(f"{found} on sm90; allowed: multiples of {UNIT}, intermediate up to {MAX_INTERMEDIATE}")
    for name in ("gate_up", "down"):
        if not _copyable(getattr(weights, name)):
            strides = getattr(weights, name).stride()
            raise CapabilityError(f"{name} has strides {strides} on sm90; allowed: contiguous rows, 16 bytes aligned")
    for name in ("gate_up_bias", "down_bias"):
        bias = getattr(weights, name)
        if bias is not None and (bias.dtype not in (torch.bfloat16, torch.float32) or bias.stride(-1) != 1):
            found = f"{name} is {bias.dtype} with strides {bias.stride()} on sm90"
            raise CapabilityError(f"{found}; allowed: torch.bfloat16, torch.float32, contiguous rows")
    for scales in weights.scales or ():
        if scales.stride(-1) != 1 and scales.shape[-1] > 1:
            raise CapabilityError(f"scales with strides {scales.stride()} on sm90; allowed: contiguous rows")


def check_rows(rows: Tensor, layout: Layout, weights: Experts, recipe: Recipe) -> None:
    """Raise ValueError unless the kernels can read these rows."""
    dtype = torch.uint8 if recipe.quantized else torch.bfloat16
    least = record_bytes(weights.hidden) if recipe.quantized else weights.hidden
    fits = rows.dim() == 2 and (rows.shape[1] >= least if recipe.quantized else rows.shape[1] == least)
    if not fits or rows.dtype != dtype or not _copyable(rows):
        found = f"rows are {rows.dtype} {list(rows.shape)} with strides {rows.stride()}"
        raise ValueError(f"{found}; allowed: {dtype} [R, {least}], each contiguous and 16 bytes aligned")
    num_local = weights.num_local
    for name, dtype, least in (("expert_start", torch.int32, num_local), ("expert_rows", torch.int32, num_local),
                               ("row_weight", torch.float32, len(rows))):  # fmt: skip
        tensor = getattr(layout, name)
        if tensor.dtype != dtype or tensor.dim() != 1 or len(tensor) < least or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; allowed: contiguous {dtype} [{least}]")
    for name, tensor in (*layout._asdict().items(), *weights.tensors().items()):
        if tensor.device != rows.device:
            raise ValueError(f"{name} is on {tensor.device}; allowed: {rows.device}, where rows are")


def _copyable(tensor: Tensor) -> bool:
    """Whether the copy engine can read it: contiguous rows, all else at multiples of 16 bytes."""
    *outer, inner = tensor.stride()
    aligned = all(
        stride * tensor.element_size() % ALIGNMENT == 0
        for stride, size in zip(outer, tensor.shape, strict=False)
        if size > 1
    )
    return (inner == 1 or tensor.shape[-1] == 1) and aligned and tensor.data_ptr() % ALIGNMENT == 0


def _weighs_bf16(weights: Experts, recipe: Recipe) -> bool:
    return weights.weight_on_input and not recipe.quantized


def _weigh(rows: Tensor, layout: Layout, out: Tensor) -> Callable[[], None]:
    """bf16 rows times their weights."""
    vectors = rows.shape[1] * rows.element_size() // ALIGNMENT
    pitch = rows.stride(0) * rows.element_size() // ALIGNMENT
    args = (rows, layout.expert_start, layout.expert_rows, layout.row_weight, out, pitch, vectors)
    return functools.partial(launch, _WEIGH, rows.device, (*args, len(layout.expert_rows)))


def _up_gate(rows: Tensor, layout: Layout, weights: Experts, recipe: Recipe, scratch: Scratch) -> ExpertsParams:
    hidden, intermediate, order = weights.hidden, weights.intermediate, weights.gate_up_order
    slot, row, _ = (stride * weights.gate_up.element_size() for stride in _strides(weights.gate_up))
    interleaved, swapped = order == "interleaved", order == "up_first"
    places = (2 * row, row) if interleaved else (row, intermediate * row)
    operands = _operands(rows, hidden, recipe)
    operands.weights = _weights_map(weights.gate_up, (hidden, intermediate, 2, weights.num_local), (*places, slot))
    groups = num_groups(intermediate)
    _set_scales(operands, weights.scales and weights.scales[0], (groups, 0) if swapped else (0, groups))
    operands.swap_halves = swapped
    begin, step = ((0, 1), 2) if interleaved else ((intermediate, 0) if swapped else (0, intermediate), 1)
    activation = weights.activation
    assert isinstance(activation, SwiGLU)
    return ExpertsParams(
        operands=operands,
        tiles=_tiles(layout, weights, scratch, 0, groups),
        row_weight=layout.row_weight.data_ptr(),
        out=scratch.hidden.data_ptr(),
        other_ticket=scratch.tickets[1:].data_ptr(),
        out_pitch=scratch.hidden.stride(0),
        bias=_bias(weights.gate_up_bias, begin, step),
        out_columns=intermediate,
        scales_begin=intermediate,
        clamp=activation.clamp or 0,
        slope=-activation.alpha * math.log2(math.e),
        up_offset=activation.up_offset,
        weigh_rows=weights.weight_on_input and recipe.quantized,
        weigh_out=not weights.weight_on_input,
    )


def _down(layout: Layout, weights: Experts, recipe: Recipe, scratch: Scratch, out: Tensor) -> ExpertsParams:
    hidden = scratch.hidden if recipe.quantized else scratch.hidden.view(torch.bfloat16)
    slot, row, _ = (stride * weights.down.element_size() for stride in _strides(weights.down))
    operands = _operands(hidden, weights.intermediate, recipe)
    sizes = (weights.intermediate, weights.hidden, 1, weights.num_local)
    operands.weights = _weights_map(weights.down, sizes, (row, row, slot))
    _set_scales(operands, weights.scales and weights.scales[1], (0, 0))
    return ExpertsParams(
        operands=operands,
        tiles=_tiles(layout, weights, scratch, 1, -(-weights.hidden // TILE_COLUMNS)),
        row_weight=layout.row_weight.data_ptr(),
        out=out.data_ptr(),
        other_ticket=scratch.tickets.data_ptr(),
        out_pitch=out.stride(0) * out.element_size(),
        bias=_bias(weights.down_bias, (0, 0), 1),
        out_columns=weights.hidden,
        weigh_out=not weights.weight_on_input,
    )


def _strides(weight: Tensor) -> tuple[int, ...]:
    """A size of one may have any stride; the copy engine wants one that fits."""
    _, rows, columns = weight.shape
    defaults = (rows * columns, columns, 1)
    return tuple(d if size == 1 else s for s, size, d in zip(weight.stride(), weight.shape, defaults, strict=True))


def _operands(rows: Tensor, depth: int, recipe: Recipe) -> Operands:
    """All but the weights. depth: values along the sum."""
    elements = STEP_BYTES // (1 if recipe.quantized else 2)
    operands = Operands(steps=-(-depth // elements))
    pitch = rows.stride(0) * rows.element_size()
    for large, name in ((LARGE_ROWS, "rows"), (FEW_ROWS, "few_rows")):
        values = tensor_map(rows.data_ptr(), rows.dtype, (depth, len(rows)), (pitch,), (elements, large), True)
        setattr(operands, name, values)
    if recipe.quantized:
        address, sizes = rows.data_ptr() + depth, (num_groups(depth), len(rows))
        for large, name in ((LARGE_ROWS, "scales"), (FEW_ROWS, "few_scales")):
            setattr(operands, name, tensor_map(address, torch.float32, sizes, (pitch,), (SCALE_STEPS, large), False))
    return operands


def _weights_map(weight: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> TensorMap:
    """sizes: depth, rows, halves, slots. strides: of all but the first."""
    elements = STEP_BYTES // weight.element_size()
    return tensor_map(weight.data_ptr(), weight.dtype, sizes, strides, (elements, BLOCK, 1, 1), True)


def _set_scales(operands: Operands, scales: Tensor | None, begin: tuple[int, int]) -> None:
    if scales is None:
        return
    operands.weight_scale = scales.data_ptr()
    operands.scale_slot, operands.scale_block, _ = scales.stride()
    operands.scale_begin[:] = begin
    operands.scale_last = scales.shape[1] - 1


def _tiles(layout: Layout, weights: Experts, scratch: Scratch, phase: int, columns: int) -> Tiles:
    return Tiles(
        expert_start=layout.expert_start.data_ptr(),
        expert_rows=layout.expert_rows.data_ptr(),
        ticket=scratch.tickets[phase:].data_ptr(),
        num_slots=weights.num_local,
        columns=columns,
    )


def _bias(bias: Tensor | None, begin: tuple[int, int], step: int) -> Bias:
    if bias is None:
        return Bias()
    is_bf16 = bias.dtype == torch.bfloat16
    return Bias(bias.data_ptr(), bias.stride(0), (ctypes.c_int32 * 2)(*begin), step, is_bf16)
