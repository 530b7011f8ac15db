"""The experts stage in BF16 by grouped products and one kernel between them: its gradients, and a plain forward.

Rows lie in expert-major order; how many each expert has is read on the GPU only, so nothing waits and all of it can be
captured. Cost follows the rows that there are, memory the rows allocated (R):

    forward   gate_up [R, 2I], hidden [R, I], result [R, H]
    backward  gate_up [R, 2I], d_hidden [R, I]: each becomes what the next product needs, in place; d_rows [R, H] when
              d_hidden is free again; the weights' gradients
    also      weight_on_input: rows [R, H]. `owned` unset: rows and d_out [R, H], each until its product is done
              weights that are not bf16: both in bf16, and each gradient once in bf16

gate, up and d_hidden are rounded to bf16 between the kernels, as they are in PyTorch's layers of that dtype.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeloom import jit
from moeloom.activation import SwiGLU
from moeloom.backends.base import ExpertGrads
from moeloom.backends.sm90 import grouped
from moeloom.backends.sm90.launch import launch, loaded
from moeloom.backends.sm90.parameters import ADDRESS, FLOAT, INT, fields, proof
from moeloom.errors import CapabilityError
from moeloom.experts import Experts

THREADS = 256
WARPS = THREADS // 32
BLOCKS_PER_SM = 4
SUM_COLUMNS = 64


class ExpertRows(ctypes.Structure):
    """Which rows are whose."""

    _fields_ = [*fields(ADDRESS, "start count weight"), *fields(INT, "experts rows")]


class SwiGLUParams(ctypes.Structure):
    """The activation, and where its inputs lie in a row."""

    _fields_ = [*fields(FLOAT, "clamp alpha up_offset"), *fields(INT, "width gate up")]


ROW_KERNELS = (
    "activation_forward<false>",
    "activation_forward<true>",
    "activation_backward<false>",
    "activation_backward<true>",
    "weigh_rows",
    "weigh_rows_backward",
    "zero_padding",
    "add_bias",
)
_NUMBERS = {"ROW_THREADS": THREADS, "SUM_COLUMNS": SUM_COLUMNS}
_TEXT = f'#include "activation.cuh"\n{proof((ExpertRows, SwiGLUParams), _NUMBERS)}'
_SOURCE = jit.Source("activation", _TEXT, tuple(f"moeloom::{name}" for name in (*ROW_KERNELS, "sum_rows")))
KERNELS = (jit.Declared(_SOURCE, THREADS, BLOCKS_PER_SM),)


def forward(rows: Tensor, expert_start: Tensor, expert_rows: Tensor, row_weight: Tensor, weights: Experts) -> Tensor:
    """The experts stage: `[R, H]` bf16; unwritten in rows behind the last expert's, no meaning in other padding rows.

    rows: `[R, H]` bf16. expert_start: `[L + 1]` int32, the first row of each expert, and the end. expert_rows: `[L]`
    int32, rows without padding. row_weight: `[R]` fp32. Raises ValueError; CapabilityError for what it does not have.
    """
    stage = Stage.make(rows, expert_start, expert_rows, row_weight, weights)
    with torch.no_grad():
        x = stage.weighed(rows) if weights.weight_on_input else rows
        gate_up = grouped.times_weights(x, stage.gate_up, stage.ends)
        hidden = rows.new_empty(len(rows), weights.intermediate)
        stage.launch(
            stage.kernel("activation_forward"), stage.own, stage.activation, gate_up, stage.gate_up_bias, hidden
        )
        out = grouped.times_weights(hidden, stage.down, stage.ends)
        if stage.down_bias is not None:
            stage.launch("add_bias", stage.own, stage.down_bias, weights.hidden, out)
    return out


def experts_backward(
    rows: Tensor,
    expert_start: Tensor,
    expert_rows: Tensor,
    row_weight: Tensor,
    d_out: Tensor,
    weights: Experts,
    owned: bool = False,
    zero_tail: bool = True,
) -> ExpertGrads:
    """Gradients of `forward` for the gradient `d_out [R, H]` bf16 of its result; the first arguments are `forward`'s.

    weights: gradients of those that require one, in their dtype. owned: rows and d_out may be written: their padding
    rows between experts are set to zero; else that happens in copies, which an alignment of `grouped.ALIGNMENT` makes
    needless, though nobody looks. zero_tail: also write zeros to `rows` of the result behind the last expert's.
    """
    stage = Stage.make(rows, expert_start, expert_rows, row_weight, weights)
    _check_rows("d_out", d_out, rows.shape, rows.device)
    wanted = {name: tensor.dtype for name, tensor in weights.tensors().items() if tensor.requires_grad}
    on_input = weights.weight_on_input
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        x = stage.weighed(rows) if on_input else rows
        d_gate_up = grouped.times_weights(x, stage.gate_up, stage.ends)
        hidden = grouped.times_weights(d_out, stage.down.transpose(1, 2), stage.ends)
        d_row_weights = torch.zeros_like(row_weight)
        biases = (stage.gate_up_bias, d_out, stage.down_bias, weights.hidden)
        d_weight = None if on_input else d_row_weights
        stage.launch(
            stage.kernel("activation_backward"), stage.own, stage.activation, d_gate_up, hidden, *biases, d_weight
        )
        if "down" in wanted:
            found["down"] = grouped.by_group(stage.without_padding(d_out, owned), hidden, stage.ends)
        del hidden
        if "gate_up" in wanted:
            x = x if on_input else stage.without_padding(x, owned)
            found["gate_up"] = grouped.by_group(d_gate_up, x, stage.ends)
        del x
        if "gate_up_bias" in wanted:
            found["gate_up_bias"] = stage.sums(d_gate_up, stage.unweighted)
        if "down_bias" in wanted:
            found["down_bias"] = stage.sums(d_out, stage.own)
        d_rows = grouped.times_weights(d_gate_up, stage.gate_up.transpose(1, 2), stage.ends)
        if on_input:
            stage.launch("weigh_rows_backward", stage.of_input, rows, weights.hidden, d_rows, d_row_weights)
        if zero_tail:
            stage.launch("zero_padding", stage.own, d_rows, weights.hidden, 1)
    return ExpertGrads(d_rows, d_row_weights, {name: found[name].to(dtype) for name, dtype in wanted.items()})


@dataclass(eq=False)
class Stage:
    """What forward and backward have in common.

    own: rows with the weight that the activation (and a down bias) is multiplied with. of_input: with the weight that
    the row is. unweighted: without. alternate: gate and up do. gate_up, down: bf16. Biases: fp32.
    """

    own: ExpertRows
    of_input: ExpertRows
    unweighted: ExpertRows
    ends: Tensor
    activation: SwiGLUParams
    alternate: bool
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    device: torch.device

    @classmethod
    def make(cls, rows: Tensor, start: Tensor, count: Tensor, weight: Tensor, weights: Experts) -> Stage:
        """Raises ValueError, CapabilityError."""
        activation = _swiglu(weights)
        weights.check(weights.num_local, rows.shape[-1])
        _check(rows, start, count, weight, weights)
        where, sizes = (start.data_ptr(), count.data_ptr()), (weights.num_local, len(rows))
        weighted, unweighted = (ExpertRows(*where, address, *sizes) for address in (weight.data_ptr(), 0))
        biases = [
            None if bias is None else bias.detach().float().contiguous()
            for bias in (weights.gate_up_bias, weights.down_bias)
        ]
        return cls(
            own=unweighted if weights.weight_on_input else weighted,
            of_input=weighted,
            unweighted=unweighted,
            ends=start[1:],
            activation=activation,
            alternate=weights.gate_up_order == "interleaved",
            gate_up=grouped.operand(weights.gate_up),
            down=grouped.operand(weights.down),
            gate_up_bias=biases[0],
            down_bias=biases[1],
            device=rows.device,
        )

    def kernel(self, name: str) -> str:
        """The instance of an activation's kernel for the order of gate and up."""
        return f"{name}<{str(self.alternate).lower()}>"

    def launch(self, name: str, *args: Any) -> None:
        """One of `ROW_KERNELS` on the device's current stream, if there is anything to do."""
        if self.own.rows and self.own.experts:
            _, processors = loaded(KERNELS[0], self.device.index)
            blocks = min(processors * BLOCKS_PER_SM, -(-self.own.rows // WARPS))
            launch(KERNELS[0], self.device, args, blocks, f"moeloom::{name}")

    def weighed(self, rows: Tensor) -> Tensor:
        """A copy, each row multiplied with its router weight, padding rows zero."""
        out = torch.empty_like(rows)
        self.launch("weigh_rows", self.of_input, rows, rows.shape[1], out)
        return out

    def without_padding(self, rows: Tensor, owned: bool) -> Tensor:
        """The rows, or a copy, in which padding rows between experts are zero."""
        out = rows if owned else torch.empty_like(rows)
        if owned:
            self.launch("zero_padding", self.own, rows, rows.shape[1], 0)
        else:
            self.launch("weigh_rows", self.unweighted, rows, rows.shape[1], out)
        return out

    def sums(self, rows: Tensor, own: ExpertRows) -> Tensor:
        """Of each expert's rows: `[L, columns]` fp32."""
        out = torch.zeros(own.experts, rows.shape[1], device=rows.device)
        if out.numel():
            grid = (-(-rows.shape[1] // SUM_COLUMNS), own.experts, 1)
            launch(KERNELS[0], self.device, (own, rows, rows.shape[1], out), grid, "moeloom::sum_rows")
        return out


def _swiglu(weights: Experts) -> SwiGLUParams:
    """The activation for the kernel. Raises CapabilityError for any other."""
    activation, width = weights.activation, weights.intermediate
    if not isinstance(activation, SwiGLU):
        raise CapabilityError(f"activation is {activation!r}; the sm90 backend has SwiGLU with clamp, alpha, up_offset")
    clamp = math.inf if activation.clamp is None else activation.clamp
    gate, up = (width, 0) if weights.gate_up_order == "up_first" else (0, width)
    return SwiGLUParams(clamp, activation.alpha, activation.up_offset, width, gate, up)


def _check(rows: Tensor, start: Tensor, count: Tensor, weight: Tensor, weights: Experts) -> None:
    hidden, local = weights.hidden, weights.num_local
    if weights.gate_up.dtype not in (torch.bfloat16, torch.float32):
        raise CapabilityError(f"gate_up is {weights.gate_up.dtype}; trained in torch.bfloat16 or torch.float32")
    for name, width in (("hidden", hidden), ("intermediate", weights.intermediate)):
        if width % grouped.COLUMNS:
            raise CapabilityError(f"{name} size is {width}; the sm90 backend has multiples of {grouped.COLUMNS}")
    if local > grouped.MAX_GROUPS:
        raise CapabilityError(f"local experts are {local}; the sm90 backend has up to {grouped.MAX_GROUPS}")
    _check_rows("rows", rows, torch.Size([len(rows), hidden]), weights.gate_up.device)
    for name, tensor, size, dtype in (
        ("expert_start", start, local + 1, torch.int32),
        ("expert_rows", count, local, torch.int32),
        ("row_weight", weight, len(rows), torch.float32),
    ):
        fits = tensor.dtype == dtype and tensor.device == rows.device and tensor.is_contiguous()
        if list(tensor.shape) != [size] or not fits:
            raise ValueError(
                f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}; allowed: contiguous {[size]}"
                f" {dtype} on {rows.device}"
            )


def _check_rows(name: str, rows: Tensor, shape: torch.Size, device: torch.device) -> None:
    fits = rows.shape == shape and rows.dtype == torch.bfloat16 and rows.device == device and rows.is_contiguous()
    if not fits:
        raise ValueError(
            f"{name} is {list(rows.shape)} {rows.dtype} on {rows.device}; allowed: contiguous {list(shape)}"
            f" torch.bfloat16 on {device}, where the weights are"
        )
