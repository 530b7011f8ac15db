"""The layer as a torch module: router, experts, shared experts, load statistics, and a state dict of global expert ids.

docs/training.md says how it goes together with DDP, FSDP2, HSDP, checkpoints and gradient accumulation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from moeloom.activation import Activation, SwiGLU
from moeloom.config import RECIPES, Recipe
from moeloom.experts import Experts
from moeloom.placement import Placement
from moeloom.route import Router
from moeloom.runtime import Runtime
from moeloom.types import Routing

EXPERT_TENSORS = ("gate_up", "down", "gate_up_bias", "down_bias")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Shape and options of a layer.

    hidden (H), intermediate (I), num_experts (E). router: applies its scale; nothing else does.
    activation: of the routed and of the shared experts. biases: gate_up_bias and down_bias for the routed experts.
    recipe: None takes the one of x's dtype.
    num_shared_experts: experts that every token passes, as one MLP of that many times I.
    shared_gate: their result is multiplied by `sigmoid(x @ g)` (Qwen2-MoE).
    bias_update_speed: step of `MoE.update_bias`. aux_loss_weight: of the load-balance loss, see `MoE`.
    """

    hidden: int
    intermediate: int
    num_experts: int
    router: Router
    activation: Activation = field(default_factory=SwiGLU)
    biases: bool = False
    recipe: Recipe | None = None
    num_shared_experts: int = 0
    shared_gate: bool = False
    bias_update_speed: float = 0.0
    aux_loss_weight: float = 0.0

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "num_experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("num_shared_experts", "bias_update_speed", "aux_loss_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.shared_gate and not self.num_shared_experts:
            raise ValueError("shared_gate is True; it needs num_shared_experts of at least 1")


class SharedExperts(nn.Module):
    """What every token passes: `down(activation(gate, up))`, optionally times `sigmoid(x @ g)`. Data-parallel.

    gate_up `[2nI, H]`, gate first. down `[H, nI]`. gate `[1, H]` or None.
    """

    def __init__(self, config: MoEConfig, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        width = config.num_shared_experts * config.intermediate
        empty = functools.partial(torch.empty, device=device, dtype=dtype)
        self.activation = config.activation
        self.gate_up = nn.Parameter(empty(2 * width, config.hidden))
        self.down = nn.Parameter(empty(config.hidden, width))
        self.gate = nn.Parameter(empty(1, config.hidden)) if config.shared_gate else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters as `nn.Linear` does."""
        for parameter in self.parameters():
            _draw(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """`[T, H] -> [T, H]`."""
        gate, up = functional.linear(x, self.gate_up).float().chunk(2, dim=-1)
        y = functional.linear(self.activation(gate, up).to(x.dtype), self.down)
        return y if self.gate is None else y * functional.linear(x, self.gate).sigmoid()


class MoE(nn.Module):
    """`x [..., H] -> [..., H]`: routed experts over the Runtime's ranks, plus shared ones. Collective, also backward.

    mesh: the one-dimensional DeviceMesh of the Runtime's ranks. The experts' parameters are then DTensors, `Shard(0)`
        over it: state dicts hold global expert ids and load at any other number of ranks. A Runtime of one rank does
        without.
    Parameters: gate `[E, H]` and shared (the dense part: equal on all ranks, data-parallel); gate_up `[E, 2I, H]`, down
        `[E, H, I]`, gate_up_bias `[E, 2I]`, down_bias `[E, H]` (`expert_parameters`). Of these a rank holds E / ranks
        experts, rounded up, the last ranks fewer or none: as DTensor and torch.chunk split.
    Buffers: router_bias `[E]` fp32, added to the scores for the choice only. load `[E]` int64, not saved: (token, slot)
        pairs of this rank's tokens by expert, since the last `update_bias`; `global_load` sums over ranks. aux_loss
        `[]` fp32, not saved: of the last forward. Both change in training only, and not when a forward is recomputed.

    The load-balance loss is that of Switch Transformers (arXiv 2101.03961, equations 4-6) with top-k instead of top-1:
    `E * sum over experts of (its share of this rank's pairs) * (its mean probability)`, 1 for a perfect balance. Times
    aux_loss_weight and aux_loss_scale (what the loss itself is multiplied by, such as 1 / microbatches) its gradient
    joins that of the loss by itself: nothing has to be collected from layers that checkpointing or a pipeline hides.
    """

    router_bias: Tensor
    load: Tensor
    aux_loss: Tensor

    def __init__(
        self,
        config: MoEConfig,
        runtime: Runtime,
        *,
        mesh: DeviceMesh | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_mesh(mesh, runtime)
        num_experts, hidden, intermediate = config.num_experts, config.hidden, config.intermediate
        config.router.check_num_experts(num_experts)
        self.config, self.runtime, self.aux_loss_scale = config, runtime, 1.0
        self.placement = _chunked(num_experts, runtime.topology.num_ranks)
        self.gate = nn.Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype))
        shapes = [(2 * intermediate, hidden), (hidden, intermediate), (2 * intermediate,), (hidden,)]
        num_local = self.placement.num_local(runtime.rank)
        for name, shape in zip(EXPERT_TENSORS, shapes, strict=True):
            wanted = config.biases or not name.endswith("bias")
            local = torch.empty(num_local, *shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(_shard(local, num_experts, mesh)) if wanted else None)
        self.shared = SharedExperts(config, device, dtype) if config.num_shared_experts else None
        self.register_buffer("router_bias", torch.zeros(num_experts, device=device))
        self.register_buffer("load", torch.zeros(num_experts, dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("aux_loss", torch.zeros((), device=device), persistent=False)
        # a compiled graph can hold the number of a call, but not make one
        recipes = [config.recipe] if config.recipe else [r for r in RECIPES.values() if not r.quantized]
        self._calls = {r.dtype: runtime.layer_call(self.experts(), r, None, None) for r in recipes}
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw gate and experts as `nn.Linear` does, and clear the buffers. (`shared` is a module with its own.)

        An expert's numbers follow from the default generator and its global id: they do not depend on the number of
        ranks, if all ranks are seeded alike, which the gate needs anyway.
        """
        for buffer in (self.router_bias, self.load, self.aux_loss):
            buffer.zero_()
        _draw(self.gate)
        seed = int(torch.randint(2**62, (), device="cpu"))
        fan_in = {"down": self.config.intermediate, "down_bias": self.config.intermediate}
        for name, tensor in self.experts().tensors().items():
            if tensor.is_meta:
                continue
            for slot, expert in enumerate(self.placement.slots[self.runtime.rank]):
                key = seed + expert + EXPERT_TENSORS.index(name) * self.config.num_experts
                generator = torch.Generator(tensor.device).manual_seed(key)
                _draw(tensor[slot], fan_in.get(name, self.config.hidden), generator)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., H] -> [..., H]`; x is not changed."""
        compiling = torch.compiler.is_compiling()
        # what is wrong with x is told to the other ranks
        with nullcontext() if compiling else self.runtime.refusing("dispatch"):
            if x.shape[-1] != self.config.hidden:
                raise ValueError(f"x is {list(x.shape)}; its last dimension must be hidden, {self.config.hidden}")
            flat = x.reshape(-1, self.config.hidden)
            routing = self._route(flat)
        experts = self.experts()
        if compiling:
            tensors = (experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias)
            number = self._calls[x.dtype].number
            y = torch.ops.moeloom.moe(flat, routing.topk_idx, routing.topk_weights, *tensors, number, False)
        else:
            y = self.runtime.moe(flat, routing, experts, recipe=self.config.recipe)
        if self.shared is not None:
            y = y + self.shared(flat)
        return y.view(x.shape)

    def experts(self) -> Experts:
        """This rank's experts: views of the parameters."""
        gate_up, down, gate_up_bias, down_bias = (_local(getattr(self, name)) for name in EXPERT_TENSORS)
        return Experts(
            gate_up,
            down,
            activation=self.config.activation,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            placement=self.placement,
        )

    def expert_parameters(self) -> list[nn.Parameter]:
        """The parameters that are split over the Runtime's ranks; all others are equal on all ranks."""
        return [parameter for name in EXPERT_TENSORS if (parameter := getattr(self, name)) is not None]

    def global_load(self, group: ProcessGroup | None = None) -> Tensor:
        """`load` summed over a group of ranks, `[E]`. Collective over it. None: the default group, if there is one."""
        load = self.load.clone()
        if dist.is_initialized():
            dist.all_reduce(load, group=group)
        return load

    @torch.no_grad()
    def update_bias(self, group: ProcessGroup | None = None) -> None:
        """Steer the choice towards experts with less than the mean load, then count anew. Call it once after each step.

        `router_bias += bias_update_speed * sign(mean(load) - load)` (arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437,
        2.1.2), over the load of all ranks of the group: those that share this router. None: the default group.
        """
        load = self.global_load(group).float()
        self.router_bias.add_(torch.sign(load.mean() - load), alpha=self.config.bias_update_speed)
        self.load.zero_()

    def extra_repr(self) -> str:
        """What printing the module shows."""
        return f"{self.config}, slots={self.placement.num_local(self.runtime.rank)}"

    def _route(self, x: Tensor) -> Routing:
        """Choose and weigh in fp32, and keep the statistics."""
        router, logits = self.config.router, functional.linear(x.float(), self.gate.float())
        if not self.training and not torch.compiler.is_compiling():
            return self.runtime.route(router, logits, self.router_bias)
        scores = router.scores(logits)
        topk_idx = torch.ops.moeloom.keep_choice(router.choose(scores.detach() + self.router_bias))
        weights = router.weigh(scores, topk_idx)
        if not self.training:
            return Routing(topk_idx, weights)
        flat = topk_idx.flatten()
        load = torch.zeros_like(self.load).scatter_add(0, flat, torch.ones_like(flat))
        aux_loss = None
        if self.config.aux_loss_weight:
            aux_loss = balance_loss(scores, load)
            weights = _WithLoss.apply(weights, aux_loss * (self.config.aux_loss_weight * self.aux_loss_scale))
        if torch.compiler.is_compiling() or not _in_backward():
            self.load.add_(load)
            if aux_loss is not None:
                self.aux_loss.copy_(aux_loss.detach())
        return Routing(topk_idx, weights)

    def _apply(self, fn: Callable, recurse: bool = True) -> MoE:
        """`.to(dtype)` and the like; but router_bias stays fp32, since its steps are too small for less."""
        bias = self.router_bias
        super()._apply(fn, recurse)
        if self.router_bias.dtype != torch.float32:
            self.router_bias = bias.to(self.router_bias.device)
        return self


def balance_loss(scores: Tensor, load: Tensor) -> Tensor:
    """`E * sum_e load_e / sum(load) * mean_t p[t, e]`, p the scores `[T, E]` over their row's sum. load: `[E]`."""
    num_tokens, num_experts = scores.shape
    probability = (scores / scores.sum(1, keepdim=True)).sum(0) / max(num_tokens, 1)
    return num_experts * (load / load.sum().clamp(min=1) * probability).sum()


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those of every MoE in a model: `fully_shard(model, ignored_params=set(expert_parameters(model)))`."""
    return [p for module in model.modules() if isinstance(module, MoE) for p in module.expert_parameters()]


def exclude_from_ddp(model: nn.Module) -> None:
    """Call before `DistributedDataParallel(model)`: it must neither average experts nor copy rank 0's load to all."""
    names = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if isinstance(module, MoE)
        for name in (*EXPERT_TENSORS, "load", "aux_loss")
    ]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


@torch.no_grad()
def scale_expert_gradients(model: nn.Module, num_data_parallel: int, replicas: ProcessGroup | None = None) -> None:
    """Make the experts' gradients those of the mean of all ranks' losses, as DDP and FSDP make the others.

    Call it once between the last backward and the optimizer's step. num_data_parallel: ranks that DDP or FSDP average
    over. replicas: the ranks that hold the same experts as this one, if there are several Runtimes side by side (HSDP);
    their gradients are summed. Collective over replicas.
    """
    for parameter in expert_parameters(model):
        if parameter.grad is not None:
            grad = _local(parameter.grad)
            if replicas is not None:
                dist.all_reduce(grad, group=replicas)
            grad.div_(num_data_parallel)


def checkpoint_contexts() -> Any:
    """`checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_contexts)`: save the experts' choice, `[T, K]`.

    Recomputed from inputs that are not the same to the last bit it might differ from what the forward did.
    """
    return create_selective_checkpoint_contexts(_keep_the_choice)


def _keep_the_choice(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op == torch.ops.moeloom.keep_choice.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@torch.library.custom_op("moeloom::keep_choice", mutates_args=())
def keep_choice(topk_idx: Tensor) -> Tensor:
    """`topk_idx`, by a name that a checkpointing policy can refer to."""
    return topk_idx.clone()


@keep_choice.register_fake
def _(topk_idx: Tensor) -> Tensor:
    return torch.empty_like(topk_idx)


class _WithLoss(torch.autograd.Function):
    """The first argument; backward also goes into `loss`, as if it had been added to the loss at the end."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss.detach())
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, d_weights: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return d_weights, torch.ones_like(loss)


def _in_backward() -> bool:
    """Whether a backward is running: a forward within it is a recomputation of activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def _chunked(num_experts: int, num_ranks: int) -> Placement:
    """Experts split as DTensor and torch.chunk do: 10 on 4 -> 3, 3, 3, 1; 5 on 4 -> 2, 2, 1, 0."""
    share = -(-num_experts // num_ranks)
    return Placement.from_slots([range(num_experts)[rank * share : (rank + 1) * share] for rank in range(num_ranks)])


def _shard(local: Tensor, num_experts: int, mesh: DeviceMesh | None) -> Tensor:
    """This rank's `[L, ...]` as a part of `[E, ...]`."""
    if mesh is None:
        return local
    shape = torch.Size((num_experts, *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _local(tensor: Tensor | None) -> Any:
    """A DTensor's part of this rank, differentiable; anything else as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _draw(weight: Tensor, fan_in: int | None = None, generator: torch.Generator | None = None) -> None:
    """Uniform within 1 / sqrt(fan_in), fan_in being the last dimension unless given."""
    bound = (fan_in or weight.shape[-1]) ** -0.5
    weight.uniform_(-bound, bound, generator=generator)


def _check_mesh(mesh: DeviceMesh | None, runtime: Runtime) -> None:
    """Raise unless the parameters can be split over the mesh as the Runtime splits the experts."""
    num_ranks = runtime.topology.num_ranks
    if mesh is None:
        if num_ranks > 1:
            raise ValueError(
                f"mesh is None; with a Runtime of {num_ranks} ranks pass their one-dimensional DeviceMesh, so that"
                " state dicts hold global expert ids"
            )
        return
    if mesh.ndim != 1 or mesh.size() != num_ranks or mesh.get_local_rank() != runtime.rank:
        raise ValueError(
            f"mesh is {mesh}; it must be one-dimensional, of the Runtime's {num_ranks} ranks in their order"
        )
