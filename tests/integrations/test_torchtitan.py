"""torchtitan's dispatcher interface: recorded signatures, a small model in its style against a plain computation."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from moeloom import RankPool
from moeloom.integrations.runtimes import close_runtimes
from moeloom.integrations.torchtitan import MoeloomTokenDispatcher, replace_dispatchers
from tests.integrations.signatures import mismatches, num_returned, recorded

RANKS, EXPERTS, TOPK, DIM, HIDDEN, LAYERS = 4, 8, 3, 16, 24, 2
RECORD = recorded("torchtitan")


class GroupedExperts(nn.Module):
    """This rank's experts, as a grouped product does them: rows past the last offset are undefined."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.w1_EFD = nn.Parameter(weights["w1"].clone())
        self.w2_EDF = nn.Parameter(weights["w2"].clone())
        self.w3_EFD = nn.Parameter(weights["w3"].clone())

    def forward(self, x_RD: Tensor, num_tokens_per_expert_e: Tensor) -> Tensor:
        parts, start = [], 0
        for expert, end in enumerate(torch.cumsum(num_tokens_per_expert_e, dim=0).tolist()):
            x = x_RD[start:end]
            h = silu(x @ self.w1_EFD[expert].t()) * (x @ self.w3_EFD[expert].t())
            parts.append(h @ self.w2_EDF[expert].t())
            start = end
        return torch.cat([*parts, torch.full_like(x_RD[start:], torch.nan)])


class MoE(nn.Module):
    """Router, dispatcher and experts, put together as torchtitan's MoE and RoutedExperts are."""

    def __init__(self, weights: dict[str, Tensor], experts: slice, bias: Tensor, **options: object) -> None:
        super().__init__()
        self.gate = nn.Parameter(weights["gate"].clone())
        self.inner_experts = GroupedExperts({name: weights[name][experts] for name in ("w1", "w2", "w3")})
        config = MoeloomTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOPK, **options)
        self.token_dispatcher = config.build()
        self.expert_bias_E = bias

    def forward(self, x_TD: Tensor) -> Tensor:
        scores_TK, ids_TK = route(x_TD, self.gate, self.expert_bias_E)
        counts_E = torch.bincount(ids_TK.reshape(-1), minlength=EXPERTS)
        dispatched = self.token_dispatcher.dispatch(x_TD, scores_TK, ids_TK, counts_E)
        assert num_returned(dispatched) == RECORD["returned"]["dispatch"]
        routed_input_RD, num_tokens_per_local_expert_e, metadata = dispatched
        routed_output_RD = self.inner_experts(routed_input_RD, num_tokens_per_local_expert_e)
        return self.token_dispatcher.combine(routed_output_RD, metadata, x_TD)


def route(x: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Scores `[T, K]` and ids `[T, K]`; the bias decides who is chosen, but is no part of the scores."""
    scores = torch.sigmoid(x.float() @ gate.t())
    ids = torch.topk(scores + bias, TOPK, dim=1, sorted=False).indices
    return scores.gather(1, ids), ids


def plain_moe(x: Tensor, weights: dict[str, Tensor], bias: Tensor, before: bool) -> Tensor:
    """The same layer in one process, pair by pair."""
    scores, ids = route(x, weights["gate"], bias)
    y = torch.zeros_like(x)
    for k in range(TOPK):
        w1, w2, w3 = (weights[name][ids[:, k]] for name in ("w1", "w2", "w3"))
        score = scores[:, k, None]
        row = x * score if before else x
        h = silu(torch.einsum("td,tfd->tf", row, w1)) * torch.einsum("td,tfd->tf", row, w3)
        out = torch.einsum("tf,tdf->td", h, w2)
        y = y + (out if before else out * score)
    return y


@dataclass(frozen=True)
class Case:
    """One run of the two-layer model. ep: ranks of one mesh; the others repeat the experts."""

    tokens: tuple[int, ...] = (6, 0, 9, 4)
    ep: int = RANKS
    skewed: bool = False
    pad_multiple: int = 1
    capacity: int | None = None
    before: bool = False
    recompute: bool = False

    def drawn(self) -> tuple[list[dict[str, Tensor]], list[Tensor], Tensor]:
        """Weights of each layer, tokens of each rank, selection bias; alike on all ranks."""
        rng = torch.Generator().manual_seed(7)
        shapes = {"gate": (EXPERTS, DIM), "w1": (EXPERTS, HIDDEN, DIM), "w3": (EXPERTS, HIDDEN, DIM)}
        shapes["w2"] = (EXPERTS, DIM, HIDDEN)
        layers = [{name: torch.randn(s, generator=rng) * 0.2 for name, s in shapes.items()} for _ in range(LAYERS)]
        x = [torch.randn(tokens, DIM, generator=rng) for tokens in self.tokens]
        bias = torch.zeros(EXPERTS)
        bias[2:5] = 10.0 if self.skewed else 0.0  # then all tokens go to experts 2, 3, 4
        return layers, x, bias


@functools.cache
def mesh_of(ep: int) -> DeviceMesh:
    """The expert-parallel dimension of a mesh over all ranks."""
    return init_device_mesh("cpu", (RANKS // ep, ep), mesh_dim_names=("dp", "ep"))["ep"]


def train(case: Case) -> dict[str, Tensor]:
    """On a rank: forward and backward of its tokens through its experts."""
    layers, tokens, bias = case.drawn()
    mesh = mesh_of(case.ep)
    local, here = EXPERTS // case.ep, mesh.get_local_rank()
    options = {"pad_multiple": case.pad_multiple, "capacity": case.capacity, "score_before_experts": case.before}
    experts = slice(here * local, (here + 1) * local)
    model = nn.ModuleList(MoE(weights, experts, bias, **options) for weights in layers)
    for layer in model:
        layer.token_dispatcher.wire_meshes(ep_mesh=mesh)
    x = tokens[dist.get_rank()].requires_grad_()
    y = x
    for layer in model:
        y = y + (checkpoint(layer, y, use_reentrant=False) if case.recompute else layer(y))
    (y * y).sum().backward()
    grads = {f"{name}.grad": weight.grad for name, weight in model.named_parameters()}
    return {"y": y.detach(), "x.grad": x.grad, **grads}


def plain_train(case: Case) -> dict[str, Tensor]:
    """All ranks' tokens in one process. What replicated weights get is the sum over ranks."""
    layers, tokens, bias = case.drawn()
    for weight in (weight for weights in layers for weight in weights.values()):
        weight.requires_grad_()
    x = torch.cat(tokens).requires_grad_()
    y = x
    for weights in layers:
        y = y + plain_moe(y, weights, bias, case.before)
    (y * y).sum().backward()
    result = {"y": y.detach(), "x.grad": x.grad}
    for number, weights in enumerate(layers):
        result[f"{number}.gate.grad"] = weights["gate"].grad
        for name, full in (("w1", "w1_EFD"), ("w2", "w2_EDF"), ("w3", "w3_EFD")):
            result[f"{number}.inner_experts.{full}.grad"] = weights[name].grad
    return result


def gathered(case: Case, results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the ranks have, put together as the one process has it."""
    together = {}
    for name in results[0]:
        parts = [result[name] for result in results]
        if "inner_experts" in name:
            meshes = [torch.cat(parts[start : start + case.ep]) for start in range(0, RANKS, case.ep)]
            together[name] = sum(meshes)
        else:
            together[name] = torch.cat(parts) if name in ("y", "x.grad") else sum(parts)
    return together


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(RANKS) as ranks:
        yield ranks


CASES = {
    "one rank without tokens": Case(),
    "tokens on one rank only": Case(tokens=(0, 0, 0, 5)),
    "no tokens": Case(tokens=(0, 0, 0, 0)),
    "skewed": Case(tokens=(5, 7, 1, 11), skewed=True),
    "padded groups": Case(skewed=True, pad_multiple=8),
    "trailing rows": Case(pad_multiple=4, capacity=96),
    "scores before the experts": Case(before=True),
    "scores before, trailing rows": Case(before=True, capacity=64, pad_multiple=4),
    "two meshes": Case(ep=2),
    "a mesh for each rank": Case(ep=1),
    "recomputed": Case(recompute=True, pad_multiple=4),
}


@pytest.mark.parametrize("name", CASES)
def test_two_layers_equal_the_plain_computation(pool: RankPool, name: str) -> None:
    case = CASES[name]
    together, wanted = gathered(case, pool.run(train, case, timeout=60)), plain_train(case)
    assert together.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert together[key].shape == tensor.shape, key
        worst = (together[key] - tensor).abs().max() if tensor.numel() else 0.0
        assert worst <= 1e-5 * max(1.0, tensor.abs().max() if tensor.numel() else 0.0), f"{key}: off by {worst}"


def rows_of_a_dispatch() -> tuple[Tensor, Tensor]:
    """On a rank: the rows and counts of a padded dispatch with trailing rows."""
    dispatcher = MoeloomTokenDispatcher.Config(num_experts=EXPERTS, top_k=1, pad_multiple=4, capacity=40).build()
    dispatcher.wire_meshes(ep_mesh=mesh_of(RANKS))
    ids = torch.tensor([[0], [3], [3]])
    rows, counts, _ = dispatcher.dispatch(torch.ones(3, DIM), torch.ones(3, 1), ids, torch.empty(0))
    return rows, counts


def test_padding_and_trailing_rows_are_zeros_and_counts_give_the_offsets(pool: RankPool) -> None:
    for rank, (rows, counts) in enumerate(pool.run(rows_of_a_dispatch)):
        wanted = {0: [4, 0], 1: [0, 8]}.get(rank, [0, 0])
        assert counts.tolist() == wanted
        filled = {0: [4], 1: [8]}.get(rank, [0])[0]
        assert rows.shape == (40, DIM)
        assert rows[:filled].amax(1).tolist() == [1.0] * filled


def half_precision() -> tuple[torch.dtype, torch.dtype]:
    """On a rank: dtypes of a BF16 layer whose scores are BF16 too."""
    dispatcher = MoeloomTokenDispatcher.Config(num_experts=EXPERTS, top_k=1).build()
    dispatcher.wire_meshes(ep_mesh=mesh_of(RANKS))
    x, scores = torch.ones(2, DIM, dtype=torch.bfloat16), torch.ones(2, 1, dtype=torch.bfloat16).requires_grad_()
    rows, _, metadata = dispatcher.dispatch(x, scores, torch.tensor([[1], [7]]), torch.empty(0))
    y = dispatcher.combine(rows * 2, metadata, x)
    y.sum().backward()
    assert scores.grad.tolist() == [[2.0 * DIM]] * 2
    return y.dtype, scores.grad.dtype


def test_bf16(pool: RankPool) -> None:
    assert pool.run(half_precision) == [(torch.bfloat16, torch.bfloat16)] * RANKS


def lifetimes() -> list[bool]:
    """On a rank: who shares a Runtime, and when it is closed."""
    mesh, group = mesh_of(RANKS), dist.new_group(list(range(RANKS)))
    first, second, third = (MoeloomTokenDispatcher.Config(num_experts=EXPERTS, top_k=1).build() for _ in range(3))
    first.wire_meshes(ep_mesh=mesh)
    second.wire_meshes(ep_mesh=mesh)
    third.wire_meshes(ep_mesh=DeviceMesh.from_group(group, "cpu"))
    runtime = third._runtime
    shared = [first._runtime is second._runtime, first._runtime is not runtime, not runtime._closed]
    del third
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return [*shared, runtime._closed, not first._runtime._closed]


def test_a_runtime_is_shared_by_the_layers_of_a_mesh_and_closed_with_its_group(pool: RankPool) -> None:
    assert pool.run(lifetimes) == [[True] * 5] * RANKS


def unwired() -> None:
    """Without a mesh, all experts are here."""
    case = Case(tokens=(7, 0, 0, 0))
    layers, tokens, bias = case.drawn()
    layer = MoE(layers[0], slice(0, EXPERTS), bias)
    torch.testing.assert_close(layer(tokens[0]), plain_moe(tokens[0], layers[0], bias, False), atol=1e-5, rtol=1e-5)
    layer.token_dispatcher.wire_meshes(ep_mesh=None)
    torch.testing.assert_close(layer(tokens[0]), plain_moe(tokens[0], layers[0], bias, False), atol=1e-5, rtol=1e-5)


def test_without_a_mesh(pool: RankPool) -> None:
    pool.run(unwired)
    unwired()
    close_runtimes()


def test_experts_that_do_not_divide_are_refused() -> None:
    dispatcher = MoeloomTokenDispatcher.Config(num_experts=6, top_k=1).build()
    with pytest.raises(ValueError, match="num_experts is 6; with 4 ranks"):
        dispatcher.wire_meshes(ep_mesh=SimpleNamespace(size=lambda: 4))


def test_replace_dispatchers() -> None:
    old = SimpleNamespace(num_experts=EXPERTS, top_k=TOPK)
    moe = SimpleNamespace(routed_experts=SimpleNamespace(token_dispatcher=old))
    model_config = SimpleNamespace(layers=[SimpleNamespace(moe=None), SimpleNamespace(moe=moe)])
    assert replace_dispatchers(model_config, pad_multiple=16) == 1
    config = moe.routed_experts.token_dispatcher
    assert config == MoeloomTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOPK, pad_multiple=16)
    dispatcher = config.build()
    assert dispatcher.config == config and dispatcher.config is not config
    with pytest.raises(ValueError, match="nothing was replaced"):
        replace_dispatchers(SimpleNamespace(layers=[SimpleNamespace()]))


def test_our_class_has_the_recorded_signatures() -> None:
    assert mismatches(MoeloomTokenDispatcher, RECORD["parameters"]) == []
    names = [field.name for field in fields(MoeloomTokenDispatcher.Config)]
    assert names[: len(RECORD["config_fields"])] == RECORD["config_fields"]
    assert all(field.kw_only for field in fields(MoeloomTokenDispatcher.Config))


def test_the_record_still_holds() -> None:
    theirs = getattr(pytest.importorskip(RECORD["module"], exc_type=ImportError), RECORD["class"])
    assert mismatches(theirs, RECORD["parameters"]) == []
    assert [field.name for field in fields(theirs.Config) if field.init] == RECORD["config_fields"]
    for method, number in RECORD["returned"].items():
        returned = inspect.signature(getattr(theirs, method)).return_annotation
        assert max(1, len(get_args(returned))) == number


def frameworks_loaded() -> list[str]:
    """On a rank: what has been imported of the framework."""
    return [name for name in sys.modules if name.split(".")[0] == RECORD["package"]]


def test_the_framework_is_not_imported(pool: RankPool) -> None:
    assert pool.run(frameworks_loaded) == [[]] * RANKS
