"""Megatron's dispatcher interface: recorded signatures, converters, a small model in its style against a plain one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu

from moeloom import RankPool, Routing
from moeloom.integrations.megatron import MoeloomDispatcher, map_from_topk, replace_dispatchers, topk_from_map
from tests.integrations.signatures import mismatches, num_returned, recorded

RANKS, EXPERTS, TOPK, HIDDEN, INTERMEDIATE, LAYERS = 4, 8, 3, 16, 24, 2
LOCAL = EXPERTS // RANKS
RECORD = recorded("megatron")


class SequentialExperts(nn.Module):
    """This rank's experts, one after the other; probs scale the activation, or the input."""

    def __init__(self, weights: dict[str, Tensor], on_input: bool) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Parameter(weights["fc1"].clone()), nn.Parameter(weights["fc2"].clone())
        self.on_input = on_input

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor) -> tuple[Tensor, None]:
        parts = []
        sizes = tokens_per_expert.tolist()
        for expert, (x, p) in enumerate(zip(rows.split(sizes), permuted_probs.split(sizes), strict=True)):
            p = p.unsqueeze(1)
            h = gelu((x * p if self.on_input else x) @ self.fc1[expert].t())
            parts.append((h if self.on_input else h * p) @ self.fc2[expert].t())
        return torch.cat(parts), None


class MoELayer(nn.Module):
    """The six steps in the order of Megatron's layer. hidden_states: `[S, B, H]`."""

    def __init__(self, weights: dict[str, Tensor], experts: nn.Module, dispatcher: MoeloomDispatcher) -> None:
        super().__init__()
        self.gate, self.experts, self.token_dispatcher = nn.Parameter(weights["gate"].clone()), experts, dispatcher

    def forward(self, hidden_states: Tensor, keep: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, HIDDEN)
        probs, routing_map = route(flat, self.gate, keep)
        steps = self.token_dispatcher
        hidden_states, probs = checked(
            "dispatch_preprocess", steps.dispatch_preprocess(hidden_states, routing_map, probs)
        )
        hidden_states, probs = checked("token_dispatch", steps.token_dispatch(hidden_states, probs))
        rows, counts, probs = checked("dispatch_postprocess", steps.dispatch_postprocess(hidden_states, probs))
        assert steps.get_expert_zero_copy_buffers() == (None, None)
        output, _ = self.experts(rows, counts, probs)
        output = checked("combine_preprocess", steps.combine_preprocess(output))
        output = checked("token_combine", steps.token_combine(output))
        return checked("combine_postprocess", steps.combine_postprocess(output))


def checked(step: str, result: Any) -> Any:
    """The result, if it has as many values as recorded."""
    assert num_returned(result) == RECORD["returned"][step], step
    return result


def route(x: Tensor, gate: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """probs `[T, E]` and routing_map `[T, E]`. keep: which (token, expert) pairs have not been dropped."""
    scores = torch.softmax(x @ gate.t(), dim=1)
    chosen = torch.zeros_like(keep).scatter_(1, scores.detach().topk(TOPK, dim=1).indices, True)
    routing_map = chosen & keep
    return scores * routing_map, routing_map


def plain_moe(hidden_states: Tensor, weights: dict[str, Tensor], keep: Tensor, on_input: bool) -> Tensor:
    """The same layer in one process: every token through every expert, those not routed with prob 0."""
    x = hidden_states.reshape(-1, HIDDEN)
    probs, routing_map = route(x, weights["gate"], keep)
    p = probs.unsqueeze(2)
    rows = x.unsqueeze(1) * p if on_input else x.unsqueeze(1).expand(-1, EXPERTS, -1)
    h = gelu(torch.einsum("teh,eih->tei", rows, weights["fc1"]))
    out = torch.einsum("tei,ehi->teh", h if on_input else h * p, weights["fc2"])
    return (out * routing_map.unsqueeze(2)).sum(1).view(hidden_states.shape)


@dataclass(frozen=True)
class Case:
    """One run of the two-layer model, with two sequences on each rank. dropped: share of the pairs that are."""

    lengths: tuple[int, ...] = (3, 0, 5, 2)
    skewed: bool = False
    alignment: int = 1
    on_input: bool = False
    dropped: float = 0.0
    padding: bool = False

    def drawn(self) -> tuple[list[dict[str, Tensor]], list[Tensor], list[Tensor]]:
        """Weights of each layer, tokens and kept pairs of each rank; alike on all ranks."""
        rng = torch.Generator().manual_seed(11)
        shapes = {
            "gate": (EXPERTS, HIDDEN),
            "fc1": (EXPERTS, INTERMEDIATE, HIDDEN),
            "fc2": (EXPERTS, HIDDEN, INTERMEDIATE),
        }
        layers = [{name: torch.randn(s, generator=rng) * 0.2 for name, s in shapes.items()} for _ in range(LAYERS)]
        tokens = [torch.randn(length, 2, HIDDEN, generator=rng) for length in self.lengths]
        keeps = []
        for x in tokens:
            keep = torch.rand(x.shape[0] * 2, EXPERTS, generator=rng) >= self.dropped
            keep[1::3] &= not self.padding  # tokens that go nowhere
            if self.skewed:
                keep[:, [0, 1, 2, 4, 5, 6, 7]] = False  # all that is left goes to expert 3
            keeps.append(keep)
        if self.skewed:
            for weights in layers:
                weights["gate"][3] *= 0.01
        return layers, tokens, keeps


def dispatcher_of(rank: int, **options: Any) -> MoeloomDispatcher:
    """One built as Megatron's layer builds its own."""
    config = SimpleNamespace(num_moe_experts=EXPERTS, moe_router_topk=TOPK)
    groups = SimpleNamespace(ep=dist.group.WORLD, expt_tp=None)
    indices = list(range(rank * LOCAL, (rank + 1) * LOCAL))
    return MoeloomDispatcher(LOCAL, indices, config=config, pg_collection=groups, **options)


def train(case: Case) -> dict[str, Tensor]:
    """On a rank: forward and backward of its tokens through its experts."""
    layers, tokens, keeps = case.drawn()
    rank = dist.get_rank()
    here = slice(rank * LOCAL, (rank + 1) * LOCAL)
    model = nn.ModuleList()
    for weights in layers:
        experts = SequentialExperts({name: weights[name][here] for name in ("fc1", "fc2")}, case.on_input)
        model.append(MoELayer(weights, experts, dispatcher_of(rank, alignment=case.alignment)))
    x = tokens[rank].requires_grad_()
    y = x
    for layer in model:
        y = y + layer(y, keeps[rank])
    (y * y).sum().backward()
    grads = {f"{name}.grad": weight.grad for name, weight in model.named_parameters()}
    return {"y": y.detach(), "x.grad": x.grad, **grads}


def plain_train(case: Case) -> dict[str, Tensor]:
    """All ranks' tokens in one process. What replicated weights get is the sum over ranks."""
    layers, tokens, keeps = case.drawn()
    for weight in (weight for weights in layers for weight in weights.values()):
        weight.requires_grad_()
    x, keep = torch.cat(tokens).requires_grad_(), torch.cat(keeps)
    y = x
    for weights in layers:
        y = y + plain_moe(y, weights, keep, case.on_input)
    (y * y).sum().backward()
    result = {"y": y.detach(), "x.grad": x.grad}
    for number, weights in enumerate(layers):
        result[f"{number}.gate.grad"] = weights["gate"].grad
        for name in ("fc1", "fc2"):
            result[f"{number}.experts.{name}.grad"] = weights[name].grad
    return result


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(RANKS) as ranks:
        yield ranks


CASES = {
    "one rank without tokens": Case(),
    "tokens on one rank only": Case(lengths=(0, 0, 4, 0)),
    "no tokens": Case(lengths=(0, 0, 0, 0)),
    "skewed": Case(lengths=(5, 1, 6, 2), skewed=True),
    "dropped pairs": Case(dropped=0.4),
    "padding tokens": Case(padding=True),
    "aligned": Case(dropped=0.2, padding=True, alignment=8),
    "probs on the input": Case(on_input=True, dropped=0.2),
}


@pytest.mark.parametrize("name", CASES)
def test_two_layers_equal_the_plain_computation(pool: RankPool, name: str) -> None:
    case = CASES[name]
    results, wanted = pool.run(train, case, timeout=60), plain_train(case)
    assert results[0].keys() == wanted.keys()
    for key, tensor in wanted.items():
        parts = [result[key] for result in results]
        together = sum(parts) if "gate" in key else torch.cat(parts)
        assert together.shape == tensor.shape, key
        scale, worst = (tensor.abs().max(), (together - tensor).abs().max()) if tensor.numel() else (0.0, 0.0)
        assert worst <= 1e-5 * max(1.0, scale), f"{key}: off by {worst}"


def steps_of_padding() -> tuple[list[int], int, Tensor, torch.dtype]:
    """On a rank: tokens of which only the first goes somewhere, to expert 3; probs are fp64."""
    dispatcher = dispatcher_of(dist.get_rank(), alignment=4)
    routing_map = torch.zeros(5, EXPERTS, dtype=torch.bool)
    routing_map[0, 3] = True
    flat, probs = dispatcher.dispatch_preprocess(torch.ones(5, HIDDEN), routing_map, torch.ones(5, EXPERTS).double())
    rows, counts, probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(flat, probs))
    y = dispatcher.combine_postprocess(dispatcher.token_combine(torch.where(rows > 0, rows, torch.nan)))
    return counts.tolist(), int((probs > 0).sum()), y.sum(1), probs.dtype


def test_padding_tokens_make_no_rows(pool: RankPool) -> None:
    for rank, (counts, num_rows, sums, dtype) in enumerate(pool.run(steps_of_padding)):
        assert (counts, num_rows) == (([0, 4], 4) if rank == 1 else ([0, 0], 0))
        assert sums.tolist() == [HIDDEN, 0, 0, 0, 0]
        assert dtype == torch.float64


def too_many_on_one_rank() -> tuple[str, float]:
    """On a rank: what a too full row of rank 2 does here, and then an ordinary layer."""
    rank = dist.get_rank()
    dispatcher = dispatcher_of(rank, num_topk=2)
    x, probs = torch.ones(3, HIDDEN), torch.ones(3, EXPERTS)
    routing_map = torch.zeros(3, EXPERTS, dtype=torch.bool)
    routing_map[1, : (3 if rank == 2 else 2)] = True
    try:
        dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, routing_map, probs))
        message = "no error"
    except ValueError as error:
        message = str(error)
    rows, _ = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, routing_map & (probs.cumsum(1) < 3), probs))
    return message, float(dispatcher.token_combine(rows)[1, 0])


def test_more_than_num_topk_is_the_same_error_on_all_ranks(pool: RankPool) -> None:
    outcomes = pool.run(too_many_on_one_rank)
    assert len({message for message, _ in outcomes}) == 1, outcomes
    assert "routing_map[1] names 3 experts; allowed: up to num_topk, 2" in outcomes[0][0]
    assert [value for _, value in outcomes] == [2.0] * RANKS


def test_topk_from_map() -> None:
    routing_map = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]).bool()
    probs = torch.arange(12.0).view(3, 4).requires_grad_()
    routing = topk_from_map(routing_map, probs, 3)
    assert routing.topk_idx.tolist() == [[1, 3, -1], [-1, -1, -1], [0, -1, -1]]
    assert routing.topk_weights.tolist() == [[1, 3, 0], [0, 0, 0], [8, 0, 0]]
    (routing.topk_weights * torch.tensor([[2.0, 3.0, 5.0]])).sum().backward()
    assert probs.grad.tolist() == [[0, 2, 0, 3], [0, 0, 0, 0], [2, 0, 0, 0]]


def test_map_from_topk() -> None:
    weights = torch.tensor([[0.5, 0.25, 9.0], [1.0, 2.0, 4.0]]).requires_grad_()
    routing_map, probs = map_from_topk(Routing(torch.tensor([[2, 0, -1], [1, 3, 1]]).int(), weights), 4)
    assert routing_map.tolist() == [[True, False, True, False], [False, True, False, True]]
    assert probs.tolist() == [[0.25, 0, 0.5, 0], [0, 5, 0, 2]]
    (probs * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert weights.grad.tolist() == [[3, 1, 0], [2, 4, 2]]


def test_converters_are_each_others_inverse() -> None:
    rng = torch.Generator().manual_seed(3)
    for num_tokens in (0, 1, 37):
        probs = torch.rand(num_tokens, EXPERTS, generator=rng)
        routing_map = torch.rand(num_tokens, EXPERTS, generator=rng) < 0.3
        there = topk_from_map(routing_map, probs, EXPERTS)
        back_map, back_probs = map_from_topk(there, EXPERTS)
        assert torch.equal(back_map, routing_map) and torch.equal(back_probs, probs * routing_map)
        again = topk_from_map(back_map, back_probs, EXPERTS)
        assert torch.equal(again.topk_idx, there.topk_idx) and torch.equal(again.topk_weights, there.topk_weights)


def test_wrong_arguments_are_named() -> None:
    ones = torch.ones(2, EXPERTS)
    with pytest.raises(ValueError, match=r"routing_map\[0\] names 8 experts; allowed: up to num_topk, 3"):
        topk_from_map(ones.bool(), ones, 3)
    with pytest.raises(ValueError, match=r"routing_map is \[2, 8\] torch.float32"):
        topk_from_map(ones, ones, 3)
    with pytest.raises(ValueError, match=r"probs is \[1, 8\]"):
        topk_from_map(ones.bool(), ones[:1], 3)
    with pytest.raises(ValueError, match="num_topk is 9"):
        topk_from_map(ones.bool(), ones, 9)
    with pytest.raises(ValueError, match=r"topk_idx\[0, 1\] is 4; allowed: 0..3"):
        map_from_topk(Routing(torch.tensor([[0, 4]]), torch.ones(1, 2)), 4)


@pytest.mark.parametrize(
    ("flags", "options", "message"),
    [
        ({"moe_shared_expert_overlap": True}, {}, "config.moe_shared_expert_overlap is True"),
        ({"moe_pad_expert_input_to_capacity": True}, {}, "config.moe_pad_expert_input_to_capacity is True"),
        ({"moe_router_padding_for_quantization": True}, {}, "alignment is 1"),
        ({}, {"pg_collection": None}, "pg_collection is None"),
        (
            {},
            {"pg_collection": SimpleNamespace(ep=None, expt_tp=SimpleNamespace(size=lambda: 2))},
            "expt_tp has 2 ranks",
        ),
        ({}, {"num_local_experts": 3}, "num_local_experts is 3; 1 ranks must have"),
        ({}, {"local_expert_indices": [1, 0]}, r"local_expert_indices is \[1, 0\]; on rank 0 it must be 0..1"),
    ],
)
def test_what_would_be_wrong_is_refused(flags: dict[str, bool], options: dict[str, Any], message: str) -> None:
    config = SimpleNamespace(num_moe_experts=2, moe_router_topk=1, **flags)
    arguments = {"num_local_experts": 2, "local_expert_indices": [0, 1], "config": config}
    arguments["pg_collection"] = SimpleNamespace(ep=None, expt_tp=None)
    with pytest.raises(ValueError, match=message):
        MoeloomDispatcher(**{**arguments, **options})


def test_replace_dispatchers() -> None:
    config = SimpleNamespace(num_moe_experts=2, moe_router_topk=1)
    old = SimpleNamespace(num_local_experts=2, local_expert_indices=[0, 1], config=config, ep_group=None, tp_group=None)
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    model[1].token_dispatcher = old
    assert replace_dispatchers(model, alignment=16) == ["1"]
    new = model[1].token_dispatcher
    assert isinstance(new, MoeloomDispatcher) and new.alignment == 16 and new.num_topk == 1
    with pytest.raises(ValueError, match="must be False"):
        new.set_shared_experts(None)
    with pytest.raises(ValueError, match="nothing was replaced"):
        replace_dispatchers(nn.Linear(2, 2))


def test_our_class_has_the_recorded_signatures() -> None:
    assert mismatches(MoeloomDispatcher, RECORD["parameters"] | RECORD["built_parameters"]) == []


def test_the_record_still_holds() -> None:
    module = pytest.importorskip(RECORD["module"], exc_type=ImportError)
    assert mismatches(getattr(module, RECORD["class"]), RECORD["parameters"]) == []
    assert mismatches(getattr(module, RECORD["built"]), RECORD["built_parameters"]) == []


def frameworks_loaded() -> list[str]:
    """On a rank: what has been imported of the framework."""
    return [name for name in sys.modules if name.split(".")[0] == "megatron"]


def test_the_framework_is_not_imported(pool: RankPool) -> None:
    assert pool.run(frameworks_loaded) == [[]] * RANKS
