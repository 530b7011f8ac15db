"""What flows between the stages.

Shape letters, used everywhere: `T` tokens on this rank, `K` top-k, `E` experts, `L` local experts (slots),
`R` received rows, `H` hidden size, `I` intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

Order = Literal["expert", "rank", "batched"]
Overflow = Literal["error", "drop"]
ExchangeName = Literal["direct", "hybrid"]
ReductionName = Literal["per_rank", "per_slot"]


class Quantized(NamedTuple):
    """Numbers as small values and the scales that these are multiplied with; see `moeloom.quantize`.

    values: `[..., H]` float8_e4m3fn. scales: fp32, `[..., ceil(H/128)]` for rows, `[ceil(N/128), ceil(K/128)]` for a
    weight `[N, K]`.
    """

    values: Tensor
    scales: Tensor


@dataclass(frozen=True, eq=False)
class Routing:
    """Which experts each token goes to, and with what weight.

    topk_idx: `[T, K]` int32 or int64, global expert ids; -1 means "not routed".
    topk_weights: `[T, K]` fp32.
    Checked when it is used, not here: only then can the other ranks be told.
    """

    topk_idx: Tensor
    topk_weights: Tensor

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.topk_idx.shape[0]

    @property
    def num_topk(self) -> int:
        """K."""
        return self.topk_idx.shape[1]


@dataclass(frozen=True, eq=False)
class Received:
    """The rows that `dispatch` brought to this rank.

    order "expert": rows `[R, H]` by (local expert, source rank, source token, slot); topk_idx and topk_weights `[R]`.
    order "batched": the same rows at `[L, capacity, H]`; topk_idx and topk_weights `[L, capacity]`.
    order "rank": one row per token, rows `[R, H]` by (source rank, source token); topk_idx and topk_weights `[R, K]`.

    topk_idx holds local expert ids. A padding row has -1 in every index, weight 0 and zeros as payload.
    expert_start: `[L + 1]` int64, where each local expert's rows begin ("rank": zeros).
    num_tokens_per_expert: `[L]` int64, rows without padding (and without dropped ones).
    num_dropped: `[]` int64, (token, slot) pairs left out for want of capacity.
    scales: of quantised rows, which are then float8_e4m3fn: fp32, shaped like rows but `ceil(H/128)` last; zeros in
    padding rows.
    """

    rows: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    expert_start: Tensor
    num_tokens_per_expert: Tensor
    num_dropped: Tensor
    order: Order
    scales: Tensor | None = None
