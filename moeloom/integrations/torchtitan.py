"""A token dispatcher for torchtitan's MoE layers (read from torchtitan 0.3.0), which needs no torchtitan to import.

    replaced = replace_dispatchers(model_config)      # before model_config.build()

torchtitan builds the dispatcher from its Config, wires the expert-parallel mesh and calls `dispatch` and `combine`.
Names carry its shape letters: `T` tokens of this rank, `D` hidden, `K` top-k, `E` experts, `e` local experts,
`R` received rows. Not traceable: leave the layer out of a full-graph `torch.compile`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moeloom.backends.base import Handle
from moeloom.integrations.runtimes import runtime_for
from moeloom.runtime import Runtime
from moeloom.types import Routing


class MoeloomTokenDispatcher:
    """Dispatch and combine of one MoE layer. All layers over the same mesh share one Runtime.

    `wire_meshes` and every operation are collective over the mesh, and so are their backwards. Until a mesh is wired,
    or with None, this rank holds all experts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """What torchtitan's model config holds in the dispatcher's place.

        num_experts, top_k: of the layer.
        pad_multiple: each expert's rows are padded with zeros to a multiple of it, and counted so, as quantised grouped
            products want.
        capacity: fixed number of rows R, the trailing ones zeros; more is a `CapacityError`. None: as many as come.
        score_before_experts: scores scale the experts' input, as Llama-4's do, instead of their output.
        num_max_tokens_per_rank: the most tokens any rank will pass, to size memory once; None grows as needed.
        """

        num_experts: int
        top_k: int
        pad_multiple: int = 1
        capacity: int | None = None
        score_before_experts: bool = False
        num_max_tokens_per_rank: int | None = None

        def build(self) -> MoeloomTokenDispatcher:
            """The dispatcher, with a copy of this config."""
            return MoeloomTokenDispatcher(config=replace(self))

    def __init__(self, config: Config) -> None:
        self.config, self.num_experts, self.top_k = config, config.num_experts, config.top_k
        self.ep_mesh: DeviceMesh | None = None
        self._runtime: Runtime | None = None

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None) -> None:
        """Use this one-dimensional mesh, over which torchtitan shards the experts in equal parts."""
        if ep_mesh is not None and self.num_experts % ep_mesh.size():
            raise ValueError(
                f"num_experts is {self.num_experts}; with {ep_mesh.size()} ranks in ep_mesh it must be a multiple of"
                " that, or torchtitan's shards are not the experts that get the rows"
            )
        self.ep_mesh = ep_mesh
        self.init_buffer()

    def init_buffer(self) -> None:
        """Make the mesh's Runtime, or find the one of another layer."""
        group = None if self.ep_mesh is None else self.ep_mesh.get_group()
        self._runtime = runtime_for(group, self.config.num_max_tokens_per_rank)

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, Handle]:
        """Bring each token to its experts. Differentiable in x and the scores; T may differ between ranks, and be 0.

        x_TD: `[T, D]`. topk_scores_TK: `[T, K]`. topk_expert_ids_TK: `[T, K]` global ids, -1 for not routed.
        num_local_tokens_per_expert_E: not needed, the ids say it.
        Returns rows `[R, D]` ordered by (local expert, source rank, token, slot); int64 `[e]`, the rows of each local
        expert with its padding, so that their sums are offsets; and what `combine` needs.
        """
        scores = topk_scores_TK.float()
        received, handle = self._wired().dispatch(
            x_TD,
            Routing(topk_expert_ids_TK, scores),
            self.num_experts,
            alignment=self.config.pad_multiple,
            capacity=self.config.capacity,
        )
        rows = received.rows
        if self.config.score_before_experts:
            rows = (rows.float() * received.topk_weights.unsqueeze(1)).to(rows.dtype)
        return rows, received.expert_start.diff(), handle

    def combine(self, routed_output_RD: Tensor, metadata: Handle, x_TD: Tensor) -> Tensor:
        """Bring the rows back and sum them, weighted with the scores unless they have been applied: `[T, D]`.

        What padding and trailing rows hold does not matter, NaN included. x_TD: not needed.
        """
        return self._wired().combine(routed_output_RD, metadata, weighted=not self.config.score_before_experts)

    def _wired(self) -> Runtime:
        if self._runtime is None:  # a model that is not parallelised never wires a mesh
            self.init_buffer()
        assert self._runtime is not None
        return self._runtime


def replace_dispatchers(model_config: Any, **options: Any) -> int:
    """Put this dispatcher into every MoE layer of a torchtitan model config; returns how many layers that were.

    options: of `MoeloomTokenDispatcher.Config`, beyond num_experts and top_k.
    """
    replaced = 0
    for layer in model_config.layers:
        if getattr(layer, "moe", None) is not None:
            old = layer.moe.routed_experts.token_dispatcher
            layer.moe.routed_experts.token_dispatcher = MoeloomTokenDispatcher.Config(
                num_experts=old.num_experts, top_k=old.top_k, **options
            )
            replaced += 1
    if not replaced:
        raise ValueError("model_config has no layer with a `moe`; nothing was replaced")
    return replaced
