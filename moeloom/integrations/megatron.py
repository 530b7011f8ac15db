"""A token dispatcher for the MoE layers of Megatron (megatron-core 0.19.2), which needs no Megatron to import.

    replaced = replace_dispatchers(model)      # after building it, before wrapping it

Megatron describes routing by a map `[T, E]` of bools and probs `[T, E]`; `topk_from_map` and `map_from_topk` convert.
Its experts apply the probs themselves, so combining only sums. Letters: `T` tokens of this rank, `K` top-k,
`E` experts, `L` local experts, `R` received rows, `H` hidden.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moeloom.backends.base import Handle
from moeloom.integrations.runtimes import runtime_for
from moeloom.layout import first_bad_id
from moeloom.runtime import Runtime
from moeloom.types import Routing

# what of Megatron's config this dispatcher would silently get wrong
REFUSED = {
    "moe_shared_expert_overlap": "shared experts are computed outside of it",
    "moe_pad_expert_input_to_capacity": "rows are never padded to a capacity",
}


class MoeloomDispatcher:
    """The six steps of one MoE layer. All layers over the same group share one Runtime.

    num_local_experts, local_expert_indices: L consecutive experts, as Megatron gives them out.
    config: its num_moe_experts, moe_router_topk and flags are read. pg_collection: its `ep` and `expt_tp` groups;
    tensor parallelism inside experts is refused.
    num_topk: K, the most experts of any token, equal on all ranks; None takes config.moe_router_topk.
    alignment: each expert's rows are padded with zeros to a multiple of it, and counted so.

    Construction, `token_dispatch`, `token_combine` and their backwards are collective over `ep`.
    """

    cudagraph_attrs: tuple[str, ...] = ()  # Megatron asks for both when it captures graphs
    valid_cudagraph_attrs: list[str] | None = None
    _topk_idx: Tensor
    _handle: Handle

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: Any = None,
        *,
        num_topk: int | None = None,
        alignment: int = 1,
    ) -> None:
        if pg_collection is None:
            raise ValueError("pg_collection is None; it must have the groups `ep` and `expt_tp`")
        self.config, self.ep_group, self.tp_group = config, pg_collection.ep, getattr(pg_collection, "expt_tp", None)
        _refuse_unsupported(config, self.tp_group, alignment)
        self.num_local_experts, self.local_expert_indices = num_local_experts, list(local_expert_indices)
        self.num_experts = config.num_moe_experts
        self.num_topk = config.moe_router_topk if num_topk is None else num_topk
        self.alignment = alignment
        self.shared_experts = None
        ep_rank, ep_size = (0, 1) if self.ep_group is None else (self.ep_group.rank(), self.ep_group.size())
        first = ep_rank * num_local_experts
        if self.num_experts != ep_size * num_local_experts:
            raise ValueError(
                f"num_local_experts is {num_local_experts}; {ep_size} ranks must have config.num_moe_experts ="
                f" {self.num_experts} together"
            )
        if self.local_expert_indices != list(range(first, first + num_local_experts)):
            raise ValueError(
                f"local_expert_indices is {self.local_expert_indices}; on rank {ep_rank} it must be"
                f" {first}..{first + num_local_experts - 1}"
            )
        self._runtime: Runtime = runtime_for(self.ep_group)

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """tokens `[..., H]`, routing_map and probs `[T, E]` -> tokens `[T, H]`, the routed probs `[T, K]` fp32."""
        self.hidden_shape, self._probs_dtype = tokens.shape, probs.dtype
        with self._runtime.refusing("dispatch"):  # the other ranks wait for this rank's dispatch
            routing = topk_from_map(routing_map, probs, self.num_topk)
        self._topk_idx = routing.topk_idx
        return tokens.reshape(-1, tokens.shape[-1]), routing.topk_weights

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Both of `dispatch_preprocess` -> rows `[R, H]` by (local expert, source rank, token), their probs `[R]`."""
        received, self._handle = self._runtime.dispatch(
            hidden_states, Routing(self._topk_idx, probs), self.num_experts, alignment=self.alignment
        )
        self._tokens_per_expert = received.expert_start.diff()
        return received.rows, received.topk_weights

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows `[R, H]`, how many each expert has with its padding (int64 `[L]`), probs `[R]` of the router's dtype."""
        return hidden_states, self._tokens_per_expert, probs.to(self._probs_dtype)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The experts' rows `[R, H]`, as they are: probs have been applied."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Rows `[R, H]` -> their sums at the tokens `[T, H]`. What padding rows hold does not matter."""
        return self._runtime.combine(hidden_states, self._handle, weighted=False)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """`[T, H]` -> shaped like the tokens that came in."""
        return hidden_states.view(self.hidden_shape)

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Refused: this dispatcher does not overlap shared experts."""
        raise ValueError(f"config.moe_shared_expert_overlap: {REFUSED['moe_shared_expert_overlap']}; it must be False")

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        """None for either: experts write into memory of their own."""
        return None, None


def topk_from_map(routing_map: Tensor, probs: Tensor, num_topk: int) -> Routing:
    """Routing with each token's experts in ascending order, then -1 up to K. Differentiable in probs.

    routing_map: `[T, E]` bool; a row without any is padding. probs: `[T, E]`; what it holds elsewhere does not matter.
    num_topk: K, 1..E, equal on all ranks; more than that in one row is an error.
    """
    if routing_map.dim() != 2 or routing_map.dtype != torch.bool:
        raise ValueError(f"routing_map is {list(routing_map.shape)} {routing_map.dtype}; it must be [T, E] torch.bool")
    if probs.shape != routing_map.shape:
        raise ValueError(f"probs is {list(probs.shape)}; it must be shaped like routing_map, {list(routing_map.shape)}")
    if not 1 <= num_topk <= routing_map.shape[1]:
        raise ValueError(f"num_topk is {num_topk}; with {routing_map.shape[1]} experts it must be 1 to that many")
    num_routed = routing_map.sum(1)
    too_many = (num_routed > num_topk).nonzero()
    if len(too_many):
        row = int(too_many[0])
        raise ValueError(f"routing_map[{row}] names {num_routed[row]} experts; allowed: up to num_topk, {num_topk}")
    order = routing_map.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :num_topk]
    unrouted = ~routing_map.gather(1, order)
    return Routing(order.masked_fill(unrouted, -1), probs.gather(1, order).masked_fill(unrouted, 0.0).float())


def map_from_topk(routing: Routing, num_experts: int) -> tuple[Tensor, Tensor]:
    """Map `[T, E]` bool and probs `[T, E]` fp32, 0 where not routed. Differentiable in the weights.

    An expert that a token names twice gets the sum of both weights, which means the same to linear combining.
    """
    bad = first_bad_id(routing.topk_idx, num_experts)
    if bad is not None:
        row, k, value = bad
        raise ValueError(f"topk_idx[{row}, {k}] is {value}; allowed: 0..{num_experts - 1}, or -1 for not routed")
    column = routing.topk_idx.long() + 1  # column 0 takes the -1
    shape = (routing.num_tokens, num_experts + 1)
    routing_map = torch.zeros(shape, dtype=torch.bool, device=column.device).scatter_(1, column, True)
    probs = routing.topk_weights.new_zeros(shape).scatter_add(1, column, routing.topk_weights)
    return routing_map[:, 1:], probs[:, 1:]


def replace_dispatchers(model: torch.nn.Module, **options: Any) -> list[str]:
    """Put this dispatcher into every MoE layer of a model that has one of Megatron's; returns the layers' names.

    options: of `MoeloomDispatcher`, beyond what the old dispatcher knows. Collective over the expert-parallel groups.
    """
    replaced = []
    for name, layer in model.named_modules():
        old = getattr(layer, "token_dispatcher", None)
        if old is not None:
            groups = SimpleNamespace(ep=old.ep_group, expt_tp=old.tp_group)
            layer.token_dispatcher = MoeloomDispatcher(
                old.num_local_experts, old.local_expert_indices, old.config, groups, **options
            )
            replaced.append(name)
    if not replaced:
        raise ValueError("model has no layer with a `token_dispatcher`; nothing was replaced")
    return replaced


def _refuse_unsupported(config: Any, tp_group: Any, alignment: int) -> None:
    """Raise for what would be wrong without an error."""
    for name, reason in REFUSED.items():
        if getattr(config, name, False):
            raise ValueError(f"config.{name} is True; {reason}, so it must be False")
    if tp_group is not None and tp_group.size() > 1:
        raise ValueError(f"expt_tp has {tp_group.size()} ranks; tensor parallelism inside experts is not supported: 1")
    if getattr(config, "moe_router_padding_for_quantization", False) and alignment == 1:
        raise ValueError(
            "alignment is 1, but with config.moe_router_padding_for_quantization the experts expect padded rows; pass"
            " the multiple of their grouped product"
        )
