"""The planner's choice and what it says about it; recipes."""

from __future__ import annotations

import pytest
import torch

from moeloom import BF16, FP8, FP32, RECIPES, Plan, Recipe, Topology
from moeloom.config import recipe_for
from moeloom.plan.plan import Problem
from moeloom.plan.planner import choose, reached


def problem(num_tokens: int | None, num_topk: int = 8) -> Problem:
    """A layer of DeepSeek-V3's shape."""
    return Problem(num_tokens, hidden=7168, num_experts=256, num_topk=num_topk, recipe=BF16)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("num_tokens", [1, 8192, None])
def test_one_node_is_direct_and_has_no_other_candidate(num_ranks: int, num_tokens: int | None) -> None:
    plan = choose(problem(num_tokens), Topology.split(num_ranks, 1))
    assert plan.exchange == "direct" and len(plan.candidates) == 1
    assert plan.candidates[0].scale_out_bytes == 0.0


def test_few_tokens_go_directly_and_many_are_forwarded() -> None:
    topology = Topology.split(16, 2)
    assert choose(problem(1), topology).exchange == "direct"
    assert choose(problem(4096), topology).exchange == "hybrid"
    assert choose(problem(None), topology).exchange == "hybrid"
    exchanges = [choose(problem(tokens), topology).exchange for tokens in (1, 2, 4, 8, 16, 64, 512, 4096)]
    assert exchanges == sorted(exchanges)  # one crossing


def test_nothing_is_forwarded_where_each_node_has_one_rank() -> None:
    plan = choose(problem(4096), Topology.split(8, 8))
    assert plan.exchange == "direct"
    direct, hybrid = plan.candidates
    assert direct.scale_out_bytes == pytest.approx(hybrid.scale_out_bytes)


def test_the_choice_is_the_candidate_with_the_least_time() -> None:
    for num_tokens in (1, 4, 64, 4096):
        plan = choose(problem(num_tokens), Topology.split(32, 4))
        best = min(plan.candidates, key=lambda candidate: candidate.microseconds)
        assert (best.pipeline, best.exchange) == (plan.pipeline, plan.exchange)


@pytest.mark.parametrize(("num_ranks", "num_nodes", "num_topk"), [(8, 2, 8), (16, 4, 8), (32, 4, 4), (8, 8, 1)])
def test_expected_traffic_is_that_of_random_routings(num_ranks: int, num_nodes: int, num_topk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (20_000, num_topk), generator=generator)
    ranks, per_node = ids // (256 // num_ranks), num_ranks // num_nodes
    on_rank = torch.zeros(len(ids), num_ranks).scatter_(1, ranks, 1.0)
    on_node = torch.zeros(len(ids), num_nodes).scatter_(1, ranks // per_node, 1.0)
    assert reached(num_ranks, 1 / num_ranks, num_topk) == pytest.approx(float(on_rank.sum(1).mean()), rel=0.01)
    assert reached(num_nodes, 1 / num_nodes, num_topk) == pytest.approx(float(on_node.sum(1).mean()), rel=0.01)

    direct, hybrid = choose(problem(1000, num_topk), Topology.split(num_ranks, num_nodes)).candidates
    row = 2 * 7168 * 2  # there and back
    remote_ranks, remote_nodes = on_rank[:, per_node:].sum(1).mean(), on_node[:, 1:].sum(1).mean()
    assert direct.scale_out_bytes == pytest.approx(float(1000 * row * remote_ranks), rel=0.02)
    assert hybrid.scale_out_bytes == pytest.approx(float(1000 * row * remote_nodes), rel=0.02)
    local = float(1000 * row * on_rank[:, 1:per_node].sum(1).mean()) if per_node > 1 else 0.0
    assert direct.scale_up_bytes == pytest.approx(local, rel=0.02)
    not_forwarders = [rank for rank in range(per_node, num_ranks) if rank % per_node]  # rank 0 is on rail 0
    handed_on = float(1000 * row * on_rank[:, not_forwarders].sum(1).mean())
    assert hybrid.scale_up_bytes == pytest.approx(local + handed_on, rel=0.02)


def test_explain_shows_every_candidate_and_marks_the_choice() -> None:
    plan = choose(problem(None), Topology.split(16, 2))
    first, *lines = plan.explain().splitlines()
    assert first == "plan: split, hybrid (least expected communication time, tokens unknown)"
    assert [line.split()[:2] for line in lines] == [["split", "direct"], ["*", "split"]]
    for candidate, line in zip(plan.candidates, lines, strict=True):
        assert f"{candidate.scale_out_bytes / 1e6:.3f} MB" in line
        assert f"{candidate.scale_up_bytes / 1e6:.3f} MB" in line
        assert f"{candidate.microseconds:.1f} us" in line
        assert line.endswith(candidate.note)
    one_node = choose(problem(64), Topology.split(2, 1)).explain()
    assert "one node: nothing to forward" in one_node and "unknown" not in one_node
    assert Plan().explain() == "plan: split, direct (given by the caller)"


def test_plans_are_equal_if_they_run_the_same() -> None:
    chosen = choose(problem(4096), Topology.split(16, 2))
    assert chosen == Plan("split", "hybrid") and hash(chosen) == hash(Plan("split", "hybrid"))
    assert chosen != Plan("split", "direct")
    assert len({chosen, Plan(exchange="hybrid", reason="mine"), Plan()}) == 2
    assert Plan() != "split, direct"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline": "mega"}, "pipeline is 'mega'; allowed: split"),
        ({"exchange": "relay"}, "exchange is 'relay'; allowed: direct, hybrid"),
    ],
)
def test_unknown_names_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**arguments)


def test_a_problem_says_what_it_is() -> None:
    assert str(problem(None)) == "any number of tokens per rank, hidden 7168, 256 experts, top-8, recipe bf16/per_rank"
    assert str(problem(3)).startswith("3 tokens per rank")


def test_recipes() -> None:
    assert RECIPES == {"fp32": FP32, "bf16": BF16, "fp8": FP8}
    assert recipe_for(torch.float32) is FP32 and recipe_for(torch.bfloat16) is BF16
    assert FP32.reduction == BF16.reduction == "per_rank"
    other = BF16.with_reduction("per_slot")
    assert (other.name, other.dtype, other.reduction) == ("bf16", torch.bfloat16, "per_slot")
    assert str(other) == "bf16/per_slot" and other != BF16 and other.with_reduction("per_rank") == BF16


def test_recipes_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="reduction is 'random'; allowed: per_rank, per_slot"):
        Recipe("mine", torch.float32, "random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x has dtype torch\.float16; allowed: torch\.float32, torch\.bfloat16"):
        recipe_for(torch.float16)
