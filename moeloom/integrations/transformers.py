"""Hugging Face transformers over moeloom: `register()`, then name "moeloom" where transformers wants an implementation.

    register()
    model = AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(tp_size=4, ep_size=4, ep_implementation="moeloom")
    )
    replaced_modules(model)  # raises if nothing runs through moeloom

Expert parallelism: transformers shards the experts and calls `MoeloomEP` with global ids, and moeloom moves rows to and
from the experts module's own forward. Gradients need no factor: FSDP averages over batches, as transformers sets it up.
One process: `experts_implementation="moeloom"`, where moeloom computes the experts.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from moeloom.errors import CapabilityError
from moeloom.experts import Experts
from moeloom.runtime import Runtime
from moeloom.types import Routing

try:
    import transformers
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    from transformers.integrations.moe import ExpertsInterface
except ImportError as error:
    raise CapabilityError(
        f"transformers {getattr(transformers, '__version__', '')} has no registry of expert-parallel implementations;"
        " moeloom.integrations.transformers needs 5.23 or newer"
    ) from error

NAME = "moeloom"

ExpertsModule = Any
"""An `nn.Module` of the form that transformers' `use_experts_implementation` describes."""

_numbers = itertools.count()
_leases: weakref.WeakValueDictionary[int, Lease] = weakref.WeakValueDictionary()  # by the identity of their mesh
_replaced: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def register() -> None:
    """Make "moeloom" known to transformers, as `ep_implementation` and as `experts_implementation`. Idempotent."""
    EPImplementationInterface.register(NAME, MoeloomEP)
    ExpertsInterface.register(NAME, local_experts)


def runtimes() -> list[Runtime]:
    """The live Runtimes of this rank's expert-parallel models, oldest first: `rt.stats()` says what moved."""
    return [lease.runtime for lease in sorted(_leases.values(), key=lambda lease: lease.number)]


def replaced_modules(model: nn.Module) -> list[str]:
    """Names of the modules of `model` whose experts run through moeloom. Raises `ValueError` if there are none."""
    names, experts = [], []
    for name, module in model.named_modules():
        if module in _replaced:
            names.append(name)
        elif hasattr(module, "_is_expert_parallel"):
            experts.append(name)
            if getattr(module.config, "_experts_implementation", None) == NAME:
                names.append(name)
    if not names:
        raise ValueError(
            f"no module of {type(model).__name__} runs through moeloom; experts modules found: {experts or 'none'}."
            " Call register(), then load with DistributedConfig(ep_size=..., ep_implementation='moeloom') and a model"
            " whose ep_plan has an 'ep_dispatch_experts' rule, or with experts_implementation='moeloom'"
        )
    return names


class Lease:
    """A Runtime as long as somebody holds this."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh  # keeps its identity from being given to another mesh
        self.runtime = Runtime(mesh)
        self.number = next(_numbers)
        weakref.finalize(self, self.runtime.close)


def _lease(mesh: DeviceMesh) -> Lease:
    """The Lease of an expert-parallel mesh, made when the first layer of a model asks for it.

    transformers makes a mesh per model and hands the same object to all its layers. Two models do not share a Runtime,
    though their group may be the same: a model is a cycle of references, which each rank collects when it likes, so
    whether an older Runtime were still there to be shared would differ between ranks. A mesh object is new on all of
    them, or on none.
    """
    lease = _leases.get(id(mesh))
    if lease is None:
        lease = _leases[id(mesh)] = Lease(mesh)
    return lease


class MoeloomEP(EPImplementation):
    """Tokens of an experts module to the ranks of their experts and back, through the Runtime of the model's EP group.

    Rows come in order "expert", one per (token, expert), and meet the module's own forward as top-1 tokens with local
    ids and their router weights; what it returns is summed as it is. So gates, biases, activations, norms and where the
    weight is applied stay the module's, and the weights' gradient is the module's too. Order "rank" moves the same rows
    but would need an id for "not here", which not every forward accepts (gpt-oss's and NemotronH's eager ones do not).
    Weighting in combine would keep the rows for backward, round before weighting, and suit only modules that are linear
    in their weight.
    """

    def __init__(self, experts: ExpertsModule, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        if not getattr(experts, "_is_expert_parallel", False):
            raise ValueError(
                f"{type(experts).__name__} holds all of its {experts.num_experts} experts on every rank; its ep_plan"
                " needs a 'grouped_gemm' rule for each parameter of the experts beside the 'ep_dispatch_experts' rule"
            )
        self.num_experts = int(experts.num_experts) * ep_mesh.size()
        self._lease = _lease(ep_mesh)
        _replaced.add(experts)

    @property
    def runtime(self) -> Runtime:
        """The Runtime shared by all layers of the model."""
        return self._lease.runtime

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted expert outputs for this rank's tokens `[T, H]`; ids from `num_experts` on mean "not routed"."""
        tp_group = self.tp_mesh.get_group() if self.tp_mesh.size() > 1 else None
        num_tokens = hidden_states.shape[0]
        if tp_group is not None:  # these ranks hold the same tokens; each brings a part of them to the experts
            hidden_states, top_k_weights = (_OwnPart.apply(t, tp_group) for t in (hidden_states, top_k_weights))
            top_k_index = top_k_index[_part(num_tokens, tp_group)]
        output = self._exchange(hidden_states, top_k_index, top_k_weights)
        return output if tp_group is None else _AllParts.apply(output, num_tokens, tp_group)

    def _exchange(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        routing = Routing(_routed(top_k_index, self.num_experts), top_k_weights.float())
        received, handle = self.runtime.dispatch(hidden_states, routing, self.num_experts, order="expert")
        # back in the dtype that the router chose, since the module may expect it: the way through fp32 lost nothing
        rows = self._run(received.rows, received.topk_idx, received.topk_weights.to(top_k_weights.dtype))
        return self.runtime.combine(rows, handle, weighted=False)

    def _run(self, rows: Tensor, local_ids: Tensor, weights: Tensor) -> Tensor:
        """The module's forward on `rows [R, H]`; without rows on one of zeros, whose result is left out.

        Then backward reaches the experts' parameters also here: FSDP and moeloom need every rank in their collectives.
        """
        missing = int(len(rows) == 0)
        rows = pad(rows, (0, 0, 0, missing))
        local_ids, weights = pad(local_ids, (0, missing)), pad(weights, (0, missing))
        output = self.experts_forward(rows, local_ids.unsqueeze(1), weights.unsqueeze(1))
        return output[: len(rows) - missing].to(rows.dtype)


def _routed(ids: Tensor, num_experts: int) -> Tensor:
    """Ids with transformers' mark for "no expert", any from num_experts on, as moeloom's -1."""
    return ids.masked_fill(ids >= num_experts, -1)


def _part(num_tokens: int, group: ProcessGroup) -> slice:
    """This rank's part of tokens that all ranks of the group hold; the last ranks' may be short, or empty."""
    return _parts(num_tokens, group)[dist.get_rank(group)]


def _parts(num_tokens: int, group: ProcessGroup) -> list[slice]:
    num_ranks = dist.get_world_size(group)
    size = -(-num_tokens // num_ranks)
    bounds = [min(size * rank, num_tokens) for rank in range(num_ranks + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def _gather_parts(part: Tensor, num_tokens: int, group: ProcessGroup) -> Tensor:
    """The `num_tokens` rows of which each rank of the group holds its `_part`."""
    lengths = [own.stop - own.start for own in _parts(num_tokens, group)]
    padded = pad(part, (0, 0, 0, lengths[0] - len(part))).contiguous()  # a collective wants them equally long
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([rows[:length] for rows, length in zip(gathered, lengths, strict=True)])


class _OwnPart(torch.autograd.Function):
    """This rank's part of rows that all ranks of the group hold. Each row's gradient is known to one of them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.num_tokens, ctx.group = len(rows), group
        return rows[_part(len(rows), group)].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather_parts(grad, ctx.num_tokens, ctx.group), None


class _AllParts(torch.autograd.Function):
    """All rows from the ranks' parts. What follows is the same on all ranks, and so are the gradients: no sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, num_tokens: int, group: ProcessGroup) -> Tensor:
        ctx.own = _part(num_tokens, group)
        return _gather_parts(part, num_tokens, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.own].contiguous(), None, None


class _Gate:
    """An experts module's `_apply_gate` as an activation of gate and up. The module is not kept alive by it."""

    def __init__(self, module: ExpertsModule) -> None:
        self.module: weakref.ref[ExpertsModule] = weakref.ref(module)

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        module = self.module()
        assert module is not None, "its forward is running"
        if module.is_concatenated:
            return module._apply_gate(torch.cat([gate, up], dim=-1))
        return module._apply_gate(torch.stack([gate, up], dim=-1).flatten(-2))


_local: weakref.WeakKeyDictionary[ExpertsModule, tuple[Runtime, _Gate]] = weakref.WeakKeyDictionary()


def local_experts(module: ExpertsModule, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts function "moeloom" of `ExpertsInterface`: one process's experts, computed by a Runtime of one rank.

    Raises `CapabilityError` for modules that moeloom's experts stage has no formula for.
    """
    if module not in _local:
        _check_local(module)
        _local[module] = Runtime("self"), _Gate(module)
    runtime, gate = _local[module]
    gate_up, down = module.gate_up_proj, module.down_proj
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    experts = Experts(
        gate_up,
        down,
        activation=gate,
        gate_up_order="gate_first" if module.is_concatenated else "interleaved",
        gate_up_bias=module.gate_up_proj_bias if module.has_bias else None,
        down_bias=module.down_proj_bias if module.has_bias else None,
    )
    routing = Routing(_routed(top_k_index, module.num_experts), top_k_weights.float())
    return runtime.moe(hidden_states, routing, experts)


def _check_local(module: ExpertsModule) -> None:
    """Raise unless `local_experts` can stand for the module's forward."""
    name = type(module).__name__
    if module._is_expert_parallel:
        raise CapabilityError(
            f"{name} is expert-parallel, and experts_implementation='moeloom' is for experts of one process; use"
            " DistributedConfig(ep_implementation='moeloom') with another experts_implementation"
        )
    if not module.has_gate:
        raise CapabilityError(f"{name} has has_gate=False; experts_implementation='moeloom' needs gated experts")
    if module.has_post_expert_norm:
        raise CapabilityError(
            f"{name} has has_post_expert_norm=True; experts_implementation='moeloom' has no norm behind the experts"
        )
