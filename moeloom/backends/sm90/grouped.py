"""Products of all experts at once by torch's grouped GEMM (CUTLASS): BF16, fp32 sums. Group sizes stay on the GPU.

Groups follow each other: each begins where the last one ends, padding included. Rows behind the last are not computed.
What the library asks for (torch 2.11, SM90): fewer than 1024 groups; 16-byte aligned addresses and strides. Group sizes
may be anything in both products below, 0 too, because a group never begins inside 16 bytes: rows have multiples of 8
columns, and `by_group` has the rows' dimension outermost in both operands.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 1  # of each expert's first row, to be asked of dispatch: then there is no padding between experts
COLUMNS = 8  # every width is a multiple
MAX_GROUPS = 1023


def times_weights(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """`rows [R, K] @ weights[expert of the row] [N, K].T`: `[R, N]` bf16, unwritten behind the last expert's rows.

    weights: `[L, N, K]` bf16 as `operand` gives them. ends: `[L]` int32, where each expert's rows end.
    """
    if not rows.numel() or not weights.numel():
        return rows.new_zeros(len(rows), weights.shape[1])
    return torch._grouped_mm(rows, weights.transpose(1, 2), offs=ends)


def by_group(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """`left[an expert's rows].T @ right[the same rows]`: `[L, N, K]` bf16 of `[R, N]` and `[R, K]`, zeros without rows.

    Padding rows between experts count: they must be zeros in both.
    """
    if not left.numel() or not right.numel() or not len(ends):
        return left.new_zeros(len(ends), left.shape[1], right.shape[1])
    return torch._grouped_mm(left.t(), right, offs=ends)


def operand(weights: Tensor) -> Tensor:
    """Weights `[L, N, K]` in bf16, copied only if they are not, or if the library cannot read them as they lie."""
    weights = weights.detach().bfloat16()
    shape, strides = weights.shape, weights.stride()
    aligned = weights.data_ptr() % 16 == 0 and strides[0] % COLUMNS == 0
    for inner, outer in ((2, 1), (1, 2)):
        covers = strides[outer] >= shape[inner] and strides[outer] % COLUMNS == 0
        if aligned and strides[inner] == 1 and covers:
            return weights
    return weights.contiguous()
