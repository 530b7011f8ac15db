"""The module on several ranks: the same function for any number of them, with DDP, FSDP2 and HSDP, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moeloom import RankPool, Router, Runtime, Topology
from moeloom.nn import MoE, MoEConfig, exclude_from_ddp, expert_parameters, scale_expert_gradients
from tests.support.failure import attempt
from tests.support.pool import group_of

HIDDEN, EXPERTS, RANKS = 16, 10, 4
STEPS, BATCH = 20, 48  # tokens of all ranks in a microbatch
TRAINED = {"bias_update_speed": 0.01, "shared_gate": True}
MEMBERS = {0: (0, 1, 2, 3), 1: (3,), 2: (1, 3), 3: (0, 2, 3), 4: (0, 1, 2, 3)}


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    """Four ranks whose default group is all of them, as device meshes of two dimensions want it."""
    with RankPool(RANKS) as pool:
        yield pool


def config(**options: Any) -> MoEConfig:
    shape = {"hidden": HIDDEN, "intermediate": 6, "num_experts": EXPERTS, "router": Router(num_topk=3)}
    return MoEConfig(**{**shape, "num_shared_experts": 1, "biases": True, **options})


class Model(nn.Module):
    """Dense layers around an MoE with a residual."""

    def __init__(self, rt: Runtime, mesh: DeviceMesh | None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoE(config(**options), rt, mesh=mesh)
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y = checkpoint(self.moe, x, use_reentrant=False) if self.checkpointed else self.moe(x)
        return self.after(x + y)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def over(num_ranks: int, nodes: int = 1) -> tuple[Runtime, DeviceMesh] | None:
    """A Runtime over this many ranks and its mesh; None for the others. All ranks of the pool must call it."""
    group = group_of(MEMBERS[num_ranks])
    if group is None:
        return None
    return Runtime(group, topology=Topology.split(num_ranks, nodes), timeout=30.0), DeviceMesh.from_group(group, "cpu")


def full(tensor: Tensor) -> Tensor:
    """All of it, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


# ---- the same function for any number of ranks


def outputs(num_ranks: int, options: dict[str, Any]) -> list[Any] | None:
    """The outputs of all tokens, their number on each rank being unequal; and the load of all ranks."""
    made = over(num_ranks, nodes=2 if num_ranks == 4 else 1)
    if made is None:
        return None
    rt, mesh = made
    with rt:
        moe = Model(rt, mesh, **options).moe
        x = draw(41, HIDDEN, seed=1)
        sizes = [41, 0, 0, 0] if num_ranks == 1 else [0, 17, 23, 1][:num_ranks]
        sizes[-1] += 41 - sum(sizes)
        mine = x[sum(sizes[: rt.rank]) :][: sizes[rt.rank]]
        before = mine.clone()
        y = moe(mine)
        assert torch.equal(mine, before)
        with torch.no_grad():
            routed = y - moe.shared(mine)
        load = moe.global_load(mesh.get_group())
        moe.update_bias(mesh.get_group())
        told = "" if num_ranks == 1 else attempt(lambda: MoE(config(), rt)).text
        wrong = attempt(lambda: moe(mine[:, :3] if rt.rank == num_ranks - 1 else mine)).text
        works = bool(torch.isfinite(moe(mine)).all())
        return [y.detach().numpy(), routed.numpy(), load.tolist(), moe.router_bias.tolist(), told, wrong, works]


@pytest.mark.parametrize("options", [{"shared_gate": True, "bias_update_speed": 0.1}], ids=str)
def test_the_same_function_for_any_number_of_ranks(four: RankPool, options: dict[str, Any]) -> None:
    """W1: shared experts exactly once, whatever the number of ranks; W6 likewise."""
    alone = None
    for num_ranks in (1, 2, 3, 4):
        outcomes = [outcome for outcome in four.run(outputs, num_ranks, options) if outcome]
        assert len(outcomes) == num_ranks
        y, routed = (torch.cat([torch.from_numpy(outcome[i]) for outcome in outcomes]) for i in (0, 1))
        alone = alone or (y, routed, outcomes[0][2], outcomes[0][3])
        torch.testing.assert_close(y, alone[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(routed, alone[1], rtol=1e-5, atol=1e-6)
        for outcome in outcomes:
            assert outcome[2:4] == list(alone[2:]) and sum(outcome[2]) == 41 * 3
            assert num_ranks == 1 or "mesh is None; with a Runtime of" in outcome[4]
            assert "its last dimension must be hidden, 16" in outcome[5] and outcome[6]


# ---- training


def train(model: nn.Module, batches: int, number: int, finish: Callable[[], None]) -> dict[str, Any]:
    """AdamW steps of two microbatches each, on part `number` of every batch; the parameters of `Model`, complete."""
    experts = expert_parameters(model)
    names = {id(parameter): name.removeprefix("module.") for name, parameter in model.named_parameters()}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in {id(expert) for expert in experts}]
    # eps bounds what a rounding error in a tiny gradient can do to a step
    optimizer = torch.optim.AdamW([{"params": dense}, {"params": experts}], lr=1e-2, eps=1e-4)
    for step in range(STEPS):
        for micro in range(2):
            x, target = (draw(BATCH, HIDDEN, seed=100 * step + 10 * micro + i).chunk(batches)[number] for i in (0, 1))
            ((model(x) - target).square().mean() / 2).backward()
        finish()
        optimizer.step()
        optimizer.zero_grad()
    return {names[id(parameter)]: full(parameter).numpy() for parameter in model.parameters()}


@pytest.fixture(scope="module")
def trained_alone() -> dict[str, Any]:
    """One process over the batches of all ranks."""
    with Runtime() as rt:
        model = Model(rt, None, **TRAINED)
        return train(model, 1, 0, model.moe.update_bias)


def train_together(kind: str, num_ranks: int, checkpointed: bool) -> dict[str, Any] | None:
    """Data-parallel ranks, each its part. HSDP: two Runtimes of two ranks side by side, both with all experts."""
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "experts"))
        ep, replicas = mesh["experts"], mesh["replicas"].get_group()
        everyone = group_of(MEMBERS[num_ranks])
    else:
        everyone, replicas = group_of(MEMBERS[num_ranks]), None
        if everyone is None:
            return None
        mesh = ep = DeviceMesh.from_group(everyone, "cpu")
    with Runtime(ep, timeout=60.0) as rt:
        model: nn.Module = Model(rt, ep, **TRAINED)
        moe, model.checkpointed = model.moe, checkpointed
        if kind == "ddp":
            exclude_from_ddp(model)
            model = DistributedDataParallel(model, process_group=everyone)
        else:
            ignored = set(expert_parameters(model))
            fully_shard(model.moe, mesh=mesh, ignored_params=ignored)
            fully_shard(model, mesh=mesh, ignored_params=ignored)

        def finish() -> None:
            scale_expert_gradients(model, num_ranks, replicas)
            moe.update_bias(everyone)

        trained = train(model, num_ranks, dist.get_rank(everyone), finish)
        if num_ranks > 1:
            assert int(moe.global_load(everyone).sum()) == 0
        return trained


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("kind", "num_ranks"), [("ddp", 4), ("fsdp", 4), ("hsdp", 4), ("ddp", 1), ("fsdp", 1)])
def test_training_equals_one_process(
    four: RankPool, trained_alone: dict[str, Any], kind: str, num_ranks: int, checkpointed: bool
) -> None:
    """20 AdamW steps of two microbatches: all parameters as in one process over all batches, within fp32 rounding."""
    outcomes = [outcome for outcome in four.run(train_together, kind, num_ranks, checkpointed) if outcome]
    assert len(outcomes) == num_ranks
    for outcome in outcomes:
        assert outcome.keys() == trained_alone.keys()
        for name, value in trained_alone.items():
            np.testing.assert_allclose(outcome[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


# ---- saving and loading


def step(model: Model, optimizer: torch.optim.Optimizer, x: Tensor, num_ranks: int) -> None:
    """Every rank has the same tokens, so that the dense gradients need no exchange."""
    model(x).square().sum().backward()
    scale_expert_gradients(model, num_ranks)
    optimizer.step()
    optimizer.zero_grad()


def save(num_ranks: int, num_experts: int, folder: str) -> tuple[Any, ...] | None:
    """Train a step, save, then what this rank answers before and after one more."""
    made = over(num_ranks)
    if made is None:
        return None
    rt, mesh = made
    with rt:
        model = Model(rt, mesh if num_ranks > 1 else None, num_experts=num_experts)
        x = draw(7, HIDDEN, seed=5)
        with torch.no_grad():
            model.moe.router_bias += draw(num_experts, seed=9)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step(model, optimizer, x, num_ranks)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=folder, process_group=mesh.get_group(), no_dist=num_ranks == 1)
        return answers(model, optimizer, x, num_ranks)


def load(num_ranks: int, num_experts: int, folder: str) -> tuple[Any, ...] | None:
    """The same answers from what has been saved."""
    made = over(num_ranks)
    if made is None:
        return None
    rt, mesh = made
    with rt:
        model = Model(rt, mesh if num_ranks > 1 else None, num_experts=num_experts)
        x = draw(7, HIDDEN, seed=5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        model.moe.router_bias.fill_(torch.nan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=folder, process_group=mesh.get_group(), no_dist=num_ranks == 1)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return answers(model, optimizer, x, num_ranks)


def answers(model: Model, optimizer: torch.optim.Optimizer, x: Tensor, num_ranks: int) -> tuple[Any, ...]:
    """Outputs now, and after another step, which the optimizer's state takes part in."""
    before = model(x).detach()
    step(model, optimizer, x, num_ranks)
    return before.numpy(), model(x).detach().numpy(), full(model.moe.gate_up).numpy()


@pytest.mark.parametrize(("saved_at", "num_experts"), [(4, 10), (1, 10), (4, 5), (1, 5)])
def test_checkpoints_load_at_any_number_of_ranks(
    four: RankPool, tmp_path: Path, saved_at: int, num_experts: int
) -> None:
    """V5: 10 experts as 3, 3, 3, 1, as 4, 4, 2 and whole (5 experts: one rank has none); optimizer included."""
    folder = str(tmp_path / "saved")
    wanted = next(filter(None, four.run(save, saved_at, num_experts, folder)))
    for num_ranks in (1, 3, 4):
        for outcome in filter(None, four.run(load, num_ranks, num_experts, folder)):
            for got, want in zip(outcome, wanted, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
