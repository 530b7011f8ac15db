"""Routing on SM90: scores, groups, choice and weights of a `Router` in one launch."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from moeloom import jit
from moeloom.backends.sm90.launch import launch
from moeloom.backends.sm90.parameters import ADDRESS, INT, LONG, fields, proof
from moeloom.route import Router
from moeloom.types import Routing

THREADS = 128
TOKENS_PER_BLOCK = THREADS // 32
MAX_TOPK = MAX_GROUPS = 32  # a lane for each
BLOCKS_PER_SM = {4: 16, 8: 16, 16: 8, 32: 4}  # by experts of a lane; a kernel for each
MAX_EXPERTS = 32 * max(BLOCKS_PER_SM)

_NUMBERS = {torch.bfloat16: "moeloom::u16", torch.float32: "float"}
_SCORES = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2}
_INVERSE_BITS = 20


class RouteParams(ctypes.Structure):
    """What routing takes."""

    _fields_ = [
        *fields(ADDRESS, "logits bias topk_idx topk_weights"),
        ("logits_stride", LONG),
        *fields(INT, "num_tokens num_experts num_topk score normalize"),
        *fields(INT, "num_groups num_topk_groups group_size group_best"),
        *fields(INT, "group_shift group_share group_inverse"),
        ("scale", ctypes.c_float),
    ]


def _source(per_lane: int) -> jit.Source:
    kernels = tuple(_expression(dtype, per_lane) for dtype in _NUMBERS)
    return jit.Source(f"route_{per_lane}", f'#include "route.cuh"\n{_PROOF}', kernels)


def _expression(dtype: torch.dtype, per_lane: int) -> str:
    return f"moeloom::route<{_NUMBERS[dtype]}, {per_lane}>"


_PROOF = proof(
    (RouteParams,),
    {
        "ROUTE_THREADS": THREADS,
        **{f"SCORE_{name.upper()}": number for name, number in _SCORES.items()},
        **{f"route_blocks({per_lane})": blocks for per_lane, blocks in BLOCKS_PER_SM.items()},
    },
)
_DECLARED = {each: jit.Declared(_source(each), THREADS, blocks) for each, blocks in BLOCKS_PER_SM.items()}
KERNELS = tuple(_DECLARED.values())


def route(router: Router, logits: Tensor, bias: Tensor | None = None) -> Routing:
    """`router(logits, bias)` on the current stream; nothing is read by the host.

    The choice is that of the CPU wherever the scores' bits are, and scores differ by a few units in the last place.
    Logits that `covered` does not name, in dtype, size or place, go through the router's own functions. If a gradient
    is wanted the kernel chooses, and those functions weigh. Raises ValueError as the router does.
    """
    router.check(logits, bias)
    if bias is not None and bias.device != logits.device:
        raise ValueError(f"bias is on {bias.device}; it must be where logits is, on {logits.device}")
    if not covered(router, logits):
        return router(logits, bias)
    routing = _choose(router, logits.detach(), None if bias is None else bias.detach().float().contiguous())
    if torch.is_grad_enabled() and logits.requires_grad:
        return Routing(routing.topk_idx, router.weigh(router.scores(logits), routing.topk_idx))
    return routing


def covered(router: Router, logits: Tensor) -> bool:
    """Whether the kernel can: bf16 or fp32 on a GPU, E up to 1024, K and groups up to 32, rows contiguous."""
    return (
        logits.is_cuda
        and logits.dtype in _NUMBERS
        and logits.shape[1] <= MAX_EXPERTS
        and router.num_topk <= MAX_TOPK
        and router.num_groups <= MAX_GROUPS
        and (logits.shape[1] == 1 or logits.stride(1) == 1)
    )


def _choose(router: Router, logits: Tensor, bias: Tensor | None) -> Routing:
    num_tokens, num_experts = logits.shape
    ids = torch.empty(num_tokens, router.num_topk, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_tokens, router.num_topk, dtype=torch.float32, device=logits.device)
    group_size = num_experts // router.num_groups
    # 32 lanes for one group, 16 each for two, ... 1 each for 17 to 32
    group_shift = 5 - (router.num_groups - 1).bit_length()
    params = RouteParams(
        logits=logits.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        topk_idx=ids.data_ptr(),
        topk_weights=weights.data_ptr(),
        logits_stride=logits.stride(0),
        num_tokens=num_tokens,
        num_experts=num_experts,
        num_topk=router.num_topk,
        score=_SCORES[router.score],
        normalize=router.normalize,
        num_groups=router.num_groups,
        num_topk_groups=router.num_topk_groups,
        group_size=group_size,
        group_best=1 if router.group_score == "max" else min(2, group_size),
        group_shift=group_shift,
        group_share=-(-group_size >> group_shift),
        group_inverse=-(-(1 << _INVERSE_BITS) // group_size),
        scale=router.scale,
    )
    if num_tokens:
        per_lane = next(size for size in BLOCKS_PER_SM if num_experts <= 32 * size)
        blocks = -(-num_tokens // TOKENS_PER_BLOCK)
        launch(_DECLARED[per_lane], logits.device, (params,), blocks, _expression(logits.dtype, per_lane))
    return Routing(ids, weights)
