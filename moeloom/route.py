"""From gate scores to a `Routing`.

One `Router` describes how a model family chooses experts and weighs them; it holds no parameters. The gate's product
(`x @ gate.T`) stays with the model. All arithmetic here is fp32, whatever the dtype of the logits.

Router layers of this kind are described in the DeepSeek-V3 report (arXiv 2412.19437, equations 12-16: sigmoid scores, a
bias that only steers the choice, groups) and in DeepSeek-V2's (arXiv 2405.04434: groups by their maximum).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from moeloom.types import Routing

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]
GroupScore = Literal["max", "top2_sum"]

NORMALIZE_EPSILON = 1e-20
"""Added to the sum of the chosen scores before dividing by it, as DeepSeek-V3, GLM and Hunyuan do. No score that fp32
can tell from zero is changed by it; a row whose chosen scores are all zero gets weights 0 instead of NaN."""

_SMALLEST_SOFTPLUS = torch.finfo(torch.float32).tiny
"""The slope of a square root at 0 is infinite, and infinity times the zero slope of an underflowed softplus is NaN."""


@dataclass(frozen=True)
class Router:
    """Chooses `num_topk` of E experts per token and weighs them.

    score: how a logit becomes a score; softmax runs over all E experts.
    num_groups, num_topk_groups: experts are split into num_groups runs of equal length, and only those in the
        num_topk_groups best groups can be chosen.
    group_score: what ranks a group, its best score ("max", DeepSeek-V2) or its best two ("top2_sum", DeepSeek-V3).
    normalize: divide the chosen scores by their sum. Softmax with normalize equals a softmax over the chosen logits
        alone, which is how Mixtral and gpt-oss write it.
    scale: multiplies the weights after normalising. Nothing else in moeloom applies it.

    Raises ValueError for a field out of range. Warns (UserWarning) if num_topk is 1 and normalize is set: each weight
    is then `scale` whatever the logits are, so that no gradient reaches the gate.
    """

    num_topk: int
    score: Score = "softmax"
    num_groups: int = 1
    num_topk_groups: int = 1
    group_score: GroupScore = "top2_sum"
    normalize: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("num_topk", "num_groups", "num_topk_groups"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
        if self.num_topk_groups > self.num_groups:
            raise ValueError(
                f"num_topk_groups is {self.num_topk_groups}; it must be at most num_groups, {self.num_groups}"
            )
        for name, allowed in (("score", get_args(Score)), ("group_score", get_args(GroupScore))):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale is {self.scale}; it must be positive and finite")
        if self.num_topk == 1 and self.normalize:
            # Frames: this method, the generated __init__, the caller.
            warnings.warn(
                "num_topk is 1 and normalize is True: a token's only weight is divided by itself, so the "
                "gate gets no gradient and never trains; set normalize=False",
                stacklevel=3,
            )

    def __call__(self, logits: Tensor, bias: Tensor | None = None) -> Routing:
        """Route T tokens.

        logits: `[T, E]`, any floating dtype. T may be 0.
        bias: `[E]` or None, added to the scores for the choice only; the weights come from the scores alone. No
            gradient flows to it.

        Returns topk_idx `[T, num_topk]` int64 and topk_weights `[T, num_topk]` fp32. The ids of a row are distinct and
        lie in [0, E), whatever the logits are. Slots are in descending order of the biased score, equal ones by lower
        id, so that the result does not depend on device or batch. An expert whose biased score is NaN is chosen after
        all finite ones of the chosen groups, and a NaN score gives a NaN weight: a broken row stays visible, but it
        stays one row. (Softmax, or normalize, spreads a NaN over its row.)

        Raises ValueError for a wrong shape or dtype, for E that num_groups does not divide, and if the chosen groups
        hold fewer than num_topk experts.
        """
        self.check(logits, bias)
        scores = self.scores(logits)
        with torch.no_grad():
            choice = scores if bias is None else scores + bias.float()
            ids = self.choose(choice)
        return Routing(ids, self.weigh(scores, ids))

    def check(self, logits: Tensor, bias: Tensor | None) -> None:
        """Raise ValueError unless these can be routed."""
        _check_logits(logits)
        num_experts = logits.shape[1]
        self.check_num_experts(num_experts)
        if bias is not None and bias.shape != (num_experts,):
            raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be [E], here [{num_experts}]")

    def check_num_experts(self, num_experts: int) -> None:
        """Raise ValueError unless groups and top-k fit that many experts."""
        if num_experts % self.num_groups:
            raise ValueError(f"logits has {num_experts} experts; num_groups, {self.num_groups}, must divide them")
        num_eligible = num_experts // self.num_groups * self.num_topk_groups
        if self.num_topk > num_eligible:
            raise ValueError(
                f"num_topk is {self.num_topk}; {self.num_topk_groups} of {self.num_groups} groups of "
                f"{num_experts} experts hold only {num_eligible}"
            )

    def scores(self, logits: Tensor) -> Tensor:
        """`[T, E]` to `[T, E]` fp32, differentiable."""
        logits = logits.float()
        if self.score == "softmax":
            return logits.softmax(dim=-1)
        if self.score == "sigmoid":
            return logits.sigmoid()
        return functional.softplus(logits).clamp_min(_SMALLEST_SOFTPLUS).sqrt()

    def choose(self, choice: Tensor) -> Tensor:
        """`[T, E]` fp32, biased scores, to `[T, num_topk]` int64."""
        # Everything finite, and NaN the lowest of it: then -inf is free to mean "outside of the chosen groups".
        choice = torch.nan_to_num(choice, nan=torch.finfo(torch.float32).min)
        if self.num_groups > 1:
            grouped = choice.unflatten(-1, (self.num_groups, -1))
            num_best = 1 if self.group_score == "max" else min(2, grouped.shape[-1])
            ranking = grouped.topk(num_best, dim=-1).values.sum(dim=-1)
            kept = torch.zeros_like(ranking, dtype=torch.bool)
            kept.scatter_(-1, _largest(ranking, self.num_topk_groups), True)
            choice = grouped.masked_fill(~kept.unsqueeze(-1), -math.inf).flatten(-2)
        return _largest(choice, self.num_topk)

    def weigh(self, scores: Tensor, ids: Tensor) -> Tensor:
        """Scores `[T, E]` and ids `[T, num_topk]` to weights `[T, num_topk]` fp32, differentiable in the scores."""
        weights = scores.gather(-1, ids)
        if self.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + NORMALIZE_EPSILON)
        return weights * self.scale


def hash_route(token_ids: Tensor, table: Tensor, logits: Tensor, router: Router) -> Routing:
    """Experts by table look-up, weights by the gate, as in DeepSeek-V4's first layers.

    token_ids: `[T]` int32 or int64, in [0, V). table: `[V, K]` int32 or int64, K = router.num_topk: the experts of each
    token id, distinct and in [0, E). logits: `[T, E]`. The weights are the router's scores of these experts, normalised
    and scaled as the router says; its groups play no part, nor does a bias. Slots are in the table's order.

    Raises ValueError for a wrong shape or dtype. A token or expert id out of range is torch's to raise, as in any
    look-up (IndexError or RuntimeError on the CPU): checking the values here would make a device wait.
    """
    _check_logits(logits)
    for name, tensor, ndim in (("token_ids", token_ids, 1), ("table", table, 2)):
        if tensor.ndim != ndim or tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; it must have {ndim} "
                "dimensions and dtype int32 or int64"
            )
    if token_ids.shape[0] != logits.shape[0]:
        raise ValueError(
            f"token_ids has {token_ids.shape[0]} tokens; it must have as many as logits, {logits.shape[0]}"
        )
    if table.shape[1] != router.num_topk:
        raise ValueError(
            f"table has {table.shape[1]} experts per token id; it must have router.num_topk, {router.num_topk}"
        )
    # index_select, unlike table[token_ids], does not take -1 for the last row.
    ids = table.index_select(0, token_ids).long()
    return Routing(ids, router.weigh(router.scores(logits), ids))


def mask_tokens(routing: Routing, valid: Tensor) -> Routing:
    """The routing with its padding tokens taken out: rows of -1 with weight 0, which make no rows and no traffic.

    valid: `[T]` bool, False for padding. Dtypes stay, the given routing is not changed, and NaN weights of padding
    tokens become 0 too. Raises ValueError for a wrong shape or dtype.
    """
    if valid.dtype != torch.bool or valid.shape != (routing.num_tokens,):
        raise ValueError(
            f"valid has shape {tuple(valid.shape)} and dtype {valid.dtype}; it must be [T] bool, here "
            f"[{routing.num_tokens}]"
        )
    padding = ~valid.unsqueeze(-1)
    return Routing(routing.topk_idx.masked_fill(padding, -1), routing.topk_weights.masked_fill(padding, 0.0))


def _check_logits(logits: Tensor) -> None:
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits has shape {tuple(logits.shape)} and dtype {logits.dtype}; it must be [T, E] and of floating dtype"
        )


def _largest(values: Tensor, count: int) -> Tensor:
    """Where the `count` largest of each row are, `[T, N]` to `[T, count]` int64: descending, equal ones by lower index.

    A stable sort, since topk leaves the order of equal values open and answers differently from device to device.
    """
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]
