"""The planner: total, deterministic, minimal by its own model, and right about what is known of the trade-offs."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeloom import BF16, FP8, FP32, RECIPES, CapabilityError, Recipe, Topology
from moeloom.config import recipe_for
from moeloom.plan.choices import Choices, Recorded, Skewed, Uniform
from moeloom.plan.cpu import BUILT_IN
from moeloom.plan.efficiencies import GPU
from moeloom.plan.efficiency import Efficiency, Rates
from moeloom.plan.machine import Machine
from moeloom.plan.plan import EXCHANGES, PIPELINES, Candidate, Plan
from moeloom.plan.planner import Planner, choose
from moeloom.plan.problem import PHASES, UNKNOWN_TOKENS, Domains, Problem
from moeloom.plan.strategies import CHUNKS, Setting, candidates, roofline

ROOT = Path(__file__).parents[2]
NUM_EXAMPLES = 2000 if os.environ.get("MOELOOM_TEST_EXAMPLES") is None else 10_000
SMALL = 1 + 1e-9  # sums in another order
RATES = ("flops", "memory_bandwidth", "scale_up_bandwidth", "scale_out_bandwidth")
WIDTH = 160

CLUSTER = Machine(
    name="cluster",
    flops={"fp32": 60e12, "bf16": 900e12, "fp8": 1800e12},
    memory_bytes=80e9,
    memory_bandwidth=3.35e12,
    scale_up_bandwidth=450e9,
    scale_out_bandwidth=50e9,
    scale_up_latency=1e-6,
    scale_out_latency=8e-6,
    launch_seconds=3e-6,
    ranks_per_domain=8,
    num_sms=132,
    nics_per_rank=1.0,
    l2_bytes=50e6,
)


def problem(num_tokens: int | None, recipe: Recipe = BF16, **others: Any) -> Problem:
    """A layer of DeepSeek-V3's shape."""
    return Problem(num_tokens, **{"hidden": 7168, "num_experts": 256, "num_topk": 8, "recipe": recipe, **others})


def cluster(num_ranks: int, num_nodes: int, *pipelines: str, **changes: Any) -> Setting:
    """GPUs; without pipelines, only the split one."""
    efficiencies = {name: GPU[name] for name in pipelines or ("split",)}
    return Setting(replace(CLUSTER, **changes), Domains(num_ranks, num_nodes), efficiencies)


def cpus(num_ranks: int, num_nodes: int, cores: int) -> Setting:
    """The CPU backend's built-in numbers."""
    measured = BUILT_IN.for_ranks(num_ranks, cores)
    return Setting(measured.machine, Domains(num_ranks, num_nodes), measured.efficiencies)


# ---- any problem, anywhere


@dataclass(frozen=True)
class Case:
    """What to plan, and where."""

    problem: Problem
    setting: Setting


def draw_case(source: random.Random) -> Case:
    """Any problem and any setting that can be said."""
    pick = source.choice
    experts, phase = pick((1, 2, 3, 7, 8, 60, 128, 256, 384, 1000)), pick(PHASES)
    asked = Problem(
        num_tokens=pick((None, 0, 1, 2, 3, 7, 31, 64, 127, 521, 4096, 8191, 65_536, 1_000_000)),
        hidden=pick((1, 7, 128, 1000, 4096, 7168, 16_384)),
        num_experts=experts,
        num_topk=pick((1, 2, 4, 6, 8, 9, 16, experts, experts + 3)),
        recipe=pick(tuple(RECIPES.values())).with_reduction(pick(("per_rank", "per_slot"))),
        phase=phase,
        intermediate=pick((None, 1, 100, 2048, 16_384)),
    )
    ranks = pick((1, 2, 3, 4, 6, 8, 13, 16, 32, 64, 72, 100, pick((256, 997, 4096))))
    domains = Domains(ranks, pick((1, 1, 2, ranks, source.randint(1, ranks))) if ranks > 1 else 1)
    some = [name for name in PIPELINES if source.random() < 0.7]
    return Case(
        asked, Setting(_machine(source), domains, {name: _efficiency(source) for name in some}, _choices(source, asked))
    )


def _machine(source: random.Random) -> Machine:
    def rate(low: float, high: float, may_be_none: bool = True) -> float | None:
        if may_be_none and source.random() < 0.15:
            return None
        return math.exp(source.uniform(math.log(low), math.log(high)))

    known = [name for name in RECIPES if source.random() < 0.8]
    return Machine(
        name="drawn",
        flops={name: rate(1e9, 1e16, False) or 0.0 for name in known},
        memory_bytes=rate(1e9, 1e12),
        memory_bandwidth=rate(1e9, 1e13),
        scale_up_bandwidth=rate(1e8, 1e12),
        scale_out_bandwidth=rate(1e8, 1e12),
        scale_up_latency=source.choice((0.0, 1e-7, 1e-6, 5e-5)),
        scale_out_latency=source.choice((0.0, 1e-6, 1e-5, 1e-3)),
        launch_seconds=source.choice((1e-6, 1e-5, 1e-4)),
        ranks_per_domain=source.choice((1, 8, 72)),
        num_sms=source.choice((None, 78, 132)),
        nics_per_rank=source.choice((None, 0.5, 1.0)),
        l2_bytes=source.choice((None, 50e6)),
    )


def _efficiency(source: random.Random) -> Efficiency:
    def rates() -> Rates:
        shares = [source.uniform(0.05, 1.0) for _ in range(4)]
        fixed = [source.choice((0.0, 1e-6, 1e-4)) for _ in range(3)]
        return Rates(*shares, *fixed, source.choice((0.0, 1.0, 3.0)))

    stages = {name: rates() for name in ("dispatch", "experts", "combine") if source.random() < 0.8}
    return Efficiency(
        stages,
        exposed=source.choice((0.0, 0.2, 0.7, 1.0)),
        tile_rows=source.choice((1, 16, 64, 128, 256, 512)),
        fixed_shapes=source.random() < 0.3,
        exchange_apart=source.random() < 0.5,
        moving_computes=source.random() < 0.3,
        others=source.random() < 0.3,
        source=source.choice(("measured", "guessed")),
    )


def _choices(source: random.Random, asked: Problem) -> Choices:
    kind = source.random()
    if kind < 0.7 or asked.num_experts > 128:  # a skewed law of many experts takes long
        return Uniform()
    if kind < 0.85:
        return Skewed(source.choice((0.0, 0.5, 1.0, 2.0)))
    ids = [*range(asked.num_experts), *[-1] * 16]
    return Recorded(tuple(tuple(source.sample(ids, min(asked.num_topk, 16))) for _ in range(20)))


any_case = st.builds(draw_case, st.randoms(use_true_random=False))
over_many_cases = settings(
    max_examples=NUM_EXAMPLES, deadline=None, derandomize=NUM_EXAMPLES == 2000, suppress_health_check=list(HealthCheck)
)
over_some_cases = settings(over_many_cases, max_examples=NUM_EXAMPLES // 10)


def can_run(case: Case, candidate: Candidate) -> bool:
    """What the rules say, in other words than the planner's."""
    asked, setting = case.problem, case.setting
    wrong = candidate.pipeline not in setting.efficiencies
    wrong |= candidate.exchange == "hybrid" and setting.domains.num_nodes == 1
    wrong |= candidate.pipeline == "decode" and (asked.phase != "decode" or asked.num_tokens is None)
    wrong |= asked.phase == "train" and asked.recipe.quantized
    limit = setting.machine.memory_bytes
    return not wrong and (limit is None or candidate.memory_bytes <= limit)


def text_of(case: Case) -> str:
    """The plan or the refusal, whole."""
    try:
        return json.dumps(choose(case.problem, case.setting).to_json())
    except CapabilityError as error:
        return str(error)


@over_many_cases
@given(case=any_case)
def test_any_problem_gets_a_plan_or_the_reasons_why_not(case: Case) -> None:
    looked_at = candidates(case.problem, case.setting)
    assert {(c.pipeline, c.exchange) for c in looked_at} == {(p, e) for p in PIPELINES for e in EXCHANGES}
    assert len({c.name for c in looked_at}) == len(looked_at)
    for candidate in looked_at:
        assert (candidate.seconds is not None) == can_run(case, candidate), candidate
        assert candidate.seconds is not None or candidate.note
        assert candidate.chunks in CHUNKS
    legal = [c.seconds for c in looked_at if c.seconds is not None]
    if not legal:
        with pytest.raises(CapabilityError) as caught:
            choose(case.problem, case.setting)
        text = str(caught.value)
        assert str(case.problem) in text and all(f"{c.name}: {c.note}" in text for c in looked_at)
        return
    plan = choose(case.problem, case.setting)
    assert all(math.isfinite(seconds) and seconds > 0 for seconds in legal)
    assert plan.seconds == min(legal) and plan.candidates == looked_at
    assert plan.roofline == roofline(case.problem, case.setting)
    for seconds in legal:
        assert plan.roofline[0] <= seconds * SMALL
    assert all(len(line) <= WIDTH for line in plan.explain().splitlines())
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))).candidates == plan.candidates


@over_some_cases
@given(case=any_case)
def test_any_plan_is_the_same_again(case: Case) -> None:
    assert text_of(case) == text_of(case)


def fingerprint() -> str:
    """Of the plans of some drawn cases."""
    texts = [text_of(draw_case(random.Random(seed))) for seed in range(60)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def test_another_process_plans_the_same() -> None:
    script = "from tests.pure.test_planner import fingerprint; print(fingerprint())"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    other = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
    )
    assert other.returncode == 0, other.stderr
    assert other.stdout.strip() == fingerprint()


def faster(machine: Machine, name: str) -> Machine:
    """Twice the rate, where it is known."""
    if name == "flops":
        return replace(machine, flops={recipe: 2 * rate for recipe, rate in machine.flops.items()})
    rate = getattr(machine, name)
    return machine if rate is None else replace(machine, **{name: 2 * rate})


@over_some_cases
@given(case=any_case)
def test_a_faster_machine_is_never_predicted_to_be_slower(case: Case) -> None:
    setting = case.setting
    before = {c.name: c.seconds for c in candidates(case.problem, setting)}
    for name in RATES:
        better = replace(setting, machine=faster(setting.machine, name))
        for candidate in candidates(case.problem, better):
            old = before[candidate.name]
            assert (candidate.seconds is None) == (old is None)
            assert old is None or candidate.seconds <= old * SMALL, (name, candidate.name)


def test_no_tokens_are_only_waits() -> None:
    plan = choose(problem(0), cluster(16, 2, *PIPELINES))
    assert plan.seconds and plan.chosen and plan.chosen.bound == "latency"
    assert plan.chosen.on("latency") == pytest.approx(plan.seconds)
    assert plan.roofline[0] == 0.0


# ---- which exchange


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("num_tokens", [1, 8192, None])
def test_one_node_is_direct(num_ranks: int, num_tokens: int | None) -> None:
    plan = choose(problem(num_tokens), cluster(num_ranks, 1))
    assert plan.exchange == "direct"
    assert {c.note for c in plan.candidates if c.pipeline == "split" and c.exchange == "hybrid"} == {
        "one node: nothing to forward"
    }
    assert all(c.scale_out_bytes == 0.0 for c in plan.candidates)
    assert all(c.scale_up_bytes == 0.0 for c in plan.candidates) == (num_ranks == 1)


def test_few_tokens_go_directly_and_many_are_forwarded() -> None:
    setting = cluster(16, 2)
    exchanges = [choose(problem(tokens), setting).exchange for tokens in (1, 2, 4, 8, 16, 64, 512, 4096, 65_536)]
    assert (exchanges[0], exchanges[-2], exchanges[-1]) == ("direct", "hybrid", "hybrid")
    assert exchanges == sorted(exchanges)  # one crossing
    assert choose(problem(None), setting).exchange == "hybrid"


def test_nothing_is_forwarded_where_each_node_has_one_rank() -> None:
    looked_at = {c.name: c for c in candidates(problem(4096), cluster(8, 8))}
    direct, hybrid = looked_at["split, direct"], looked_at["split, hybrid"]
    assert direct.scale_out_bytes == pytest.approx(hybrid.scale_out_bytes)
    assert direct.scale_up_bytes == hybrid.scale_up_bytes == 0.0
    assert choose(problem(4), cluster(8, 8)).exchange == "direct"


def test_an_unknown_number_of_tokens_is_a_training_batch() -> None:
    setting = cluster(16, 2, "split", "mega")
    known, unknown = choose(problem(UNKNOWN_TOKENS), setting), choose(problem(None), setting)
    assert unknown == known and unknown.seconds == known.seconds
    assert unknown.reason.endswith("tokens unknown") and "unknown" not in known.reason


@pytest.mark.parametrize(("num_ranks", "num_nodes", "num_topk"), [(8, 2, 8), (16, 4, 8), (32, 4, 4), (8, 8, 1)])
def test_expected_traffic_is_that_of_random_routings(num_ranks: int, num_nodes: int, num_topk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(20_000, 256, generator=generator).topk(num_topk).indices  # different ones for each token
    ranks, per_node = ids // (256 // num_ranks), num_ranks // num_nodes
    on_rank = torch.zeros(len(ids), num_ranks).scatter_(1, ranks, 1.0)
    on_node = torch.zeros(len(ids), num_nodes).scatter_(1, ranks // per_node, 1.0)
    looked_at = candidates(problem(1000, num_topk=num_topk), cluster(num_ranks, num_nodes))
    direct, hybrid = (next(c for c in looked_at if c.name == f"split, {exchange}") for exchange in EXCHANGES)

    row = 2 * 7168 * 2  # there and back
    remote_ranks, remote_nodes = on_rank[:, per_node:].sum(1).mean(), on_node[:, 1:].sum(1).mean()
    assert direct.scale_out_bytes == pytest.approx(float(1000 * row * remote_ranks), rel=0.02)
    assert hybrid.scale_out_bytes == pytest.approx(float(1000 * row * remote_nodes), rel=0.02)
    local = float(1000 * row * on_rank[:, 1:per_node].sum(1).mean()) if per_node > 1 else 0.0
    assert direct.scale_up_bytes == pytest.approx(local, rel=0.02)
    not_forwarders = [rank for rank in range(per_node, num_ranks) if rank % per_node]  # rank 0 is on rail 0
    handed_on = float(1000 * row * on_rank[:, not_forwarders].sum(1).mean())
    assert hybrid.scale_up_bytes == pytest.approx(local + handed_on, rel=0.02)


# ---- which pipeline, how many chunks


def test_decode_only_in_phase_decode_with_a_number_of_tokens() -> None:
    setting = cluster(8, 1, *PIPELINES)
    for phase in PHASES:
        for tokens in (1, 64, None):
            looked_at = {c.name: c for c in candidates(problem(tokens, phase=phase), setting)}
            assert (looked_at["decode, direct"].seconds is not None) == (phase == "decode" and tokens is not None)
            assert choose(problem(tokens, phase=phase), setting).pipeline != "decode" or phase == "decode"
    only = cluster(8, 1, "decode")
    assert choose(problem(64, phase="decode"), only) == Plan("decode")
    with pytest.raises(CapabilityError, match=r"no plan for 64 tokens.*for phase decode, not train"):
        choose(problem(64, phase="train"), only)
    with pytest.raises(CapabilityError, match="number of tokens, which is not known"):
        choose(problem(None, phase="decode"), only)


def test_fp8_is_not_trained() -> None:
    with pytest.raises(CapabilityError, match=r"recipe fp8/per_rank, train: .*recipe fp8 has no gradient"):
        choose(problem(64, FP8, phase="train"), cluster(16, 2, *PIPELINES))
    assert choose(problem(64, FP8), cluster(16, 2)).seconds


def test_a_backend_without_pipelines_plans_nothing() -> None:
    with pytest.raises(CapabilityError) as caught:
        choose(problem(4), replace(cluster(2, 1), efficiencies={}))
    for pipeline in PIPELINES:
        assert f"this backend has no {pipeline} pipeline" in str(caught.value)


def test_what_does_not_fit_into_memory_cannot_run() -> None:
    plain = choose(problem(65_536), cluster(16, 2))
    whole, parts = (
        next(c for c in plain.candidates if c.name == n) for n in ("split, hybrid", "split, hybrid, 8 chunks")
    )
    assert parts.memory_bytes < whole.memory_bytes
    between = cluster(16, 2, memory_bytes=(whole.memory_bytes + parts.memory_bytes) / 2)
    plan = choose(problem(65_536), between)
    refused = next(c for c in plan.candidates if c.name == whole.name)
    assert refused.seconds is None and "GB beside the weights; cluster has" in refused.note
    assert plan.chunks > 1
    with pytest.raises(CapabilityError, match="GB beside the weights"):
        choose(problem(65_536), cluster(16, 2, memory_bytes=1e6))


def chunks_of(setting: Setting, tokens: int = 16_384) -> int:
    return choose(problem(tokens), setting).chunks


def test_chunks_where_links_and_compute_take_about_as_long() -> None:
    slow_network = replace(cluster(16, 2), machine=replace(CLUSTER, scale_out_bandwidth=20e9))
    plan = choose(problem(16_384), slow_network)
    whole = next(c for c in plan.candidates if (c.exchange, c.chunks) == (plan.exchange, 1))
    compute = next(s for s in whole.stages if s.stage == "experts").seconds
    assert 0.2 < compute / whole.seconds < 0.8  # there is something to hide on either side
    assert plan.chunks > 1 and plan.seconds < 0.9 * whole.seconds
    assert chunks_of(slow_network, 1) == 1  # nothing to cut
    assert chunks_of(cluster(1, 1)) == 1  # no link


def test_no_chunks_where_ranks_share_cores() -> None:
    asked = Problem(2048, 1024, 16, 8, FP32, intermediate=64)
    own_cores, shared = cpus(2, 1, cores=8), cpus(2, 1, cores=2)
    assert not own_cores.efficiencies["split"].moving_computes and shared.efficiencies["split"].moving_computes
    assert choose(asked, own_cores).chunks > 1
    assert choose(asked, shared).chunks == 1
    assert choose(asked, cpus(2, 2, cores=2)).chunks > 1  # the wire needs no core


def test_few_tokens_are_one_part() -> None:
    for tokens in (0, 1, 3, 4, 15, 16):
        looked_at = candidates(problem(tokens), cluster(16, 2))
        assert max(c.chunks for c in looked_at) == max(c for c in CHUNKS if c == 1 or 2 * c <= tokens)


def test_what_is_assumed_is_said() -> None:
    plan = choose(problem(64, FP8), cluster(16, 2, flops={"bf16": 1e15}, scale_out_bandwidth=None))
    for candidate in plan.candidates:
        if candidate.seconds is not None:
            assert candidate.note == "assumed: flops of fp8, scale_out_bandwidth"
    assert "assumed: flops of fp8, scale_out_bandwidth" in " ".join(plan.explain().split())
    one_node = choose(problem(64), cluster(8, 1, scale_out_bandwidth=None))
    assert "assumed" not in one_node.explain()


def test_whose_efficiencies_count_is_said() -> None:
    """A line for each source, and a note at every estimate that stands on others' kernels; they change no number."""
    mine, theirs = Efficiency(source="mine"), Efficiency(others=True, source="theirs")
    setting = replace(cluster(8, 1), efficiencies={"split": mine, "mega": theirs, "decode": mine})
    plan = choose(problem(64, phase="decode"), setting)
    assert plan.context[2:] == ("efficiency of split, decode: mine", "efficiency of mega: theirs")
    assert [c.name for c in plan.candidates if c.note == "as others' kernels"] == ["mega, direct"]
    own = replace(setting, efficiencies=setting.efficiencies | {"mega": replace(theirs, others=False)})
    assert [c.seconds for c in plan.candidates] == [c.seconds for c in candidates(problem(64, phase="decode"), own)]
    unknown = replace(setting, machine=replace(CLUSTER, memory_bandwidth=None))
    notes = {c.note for c in candidates(problem(64), unknown) if c.pipeline == "mega" and c.seconds is not None}
    assert notes == {"as others' kernels; assumed: memory_bandwidth"}


# ---- the planner of a Runtime


def test_a_planner_remembers() -> None:
    planner = Planner(cluster(16, 2))
    first = planner(problem(64))
    assert planner(problem(64)) is first
    assert planner(problem(65)) is not first
    assert first.candidates == choose(problem(64), cluster(16, 2)).candidates


def test_a_planner_learns() -> None:
    planner, asked = Planner(cluster(16, 2)), problem(64)
    before = planner(asked)
    planner.learn(asked, [{str(before): before.seconds * 3}, {str(before): before.seconds * 2}])
    after = planner(asked)
    by_name = {c.name: c for c in after.candidates}
    assert by_name[str(before)].seconds == pytest.approx(3 * before.seconds)
    assert "x 3.00 as measured" in by_name[str(before)].note and "x 3.00 as measured" in after.explain()
    assert planner(problem(1000)).candidates == choose(problem(1000), cluster(16, 2)).candidates  # another size


def test_corrections_choose_another_candidate_only_if_they_say_so() -> None:
    asked, setting = problem(64), cluster(16, 2)
    plain = choose(asked, setting)
    assert choose(asked, setting, {str(plain): 3.9}) == plain  # everything may be that much slower
    runner_up = min((c for c in plain.candidates if c.seconds and c.name != str(plain)), key=lambda c: c.seconds)
    lost = choose(asked, setting, {str(plain): 3.9, runner_up.name: 0.5})
    assert str(lost) == runner_up.name


# ---- problems and recipes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phase": "serve"}, "phase is 'serve'; allowed: train, prefill, decode"),
        ({"num_tokens": -1}, "num_tokens is -1; it must be 0 or more, or None"),
        ({"hidden": 0}, "hidden is 0; it must be at least 1"),
        ({"num_experts": 0}, "num_experts is 0; it must be at least 1"),
        ({"num_topk": -2}, "num_topk is -2; it must be at least 1"),
        ({"intermediate": 0}, "intermediate is 0; it must be at least 1, or None"),
    ],
)
def test_problems_that_cannot_be(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(problem(4), **change)


def test_a_problem_says_what_it_is() -> None:
    assert str(problem(None)) == (
        "any number of tokens per rank, hidden 7168, 256 experts, top-8, recipe bf16/per_rank, prefill"
    )
    assert str(problem(3, intermediate=2048, phase="train")) == (
        "3 tokens per rank, hidden 7168, intermediate 2048, 256 experts, top-8, recipe bf16/per_rank, train"
    )
    assert (problem(None).tokens, problem(3).tokens) == (UNKNOWN_TOKENS, 3)
    assert (problem(3).width, problem(3, intermediate=5).width, problem(3, hidden=1).width) == (1792, 5, 1)


def test_domains_are_those_of_a_topology() -> None:
    for ranks in range(1, 20):
        for nodes in range(1, ranks + 1):
            topology = Topology.split(ranks, nodes)
            domains = Domains.of(topology)
            assert domains == Domains(ranks, nodes)
            assert domains.rank_bounds == [members[-1] + 1 for members in topology.nodes]
    for nodes in (0, 5):
        with pytest.raises(ValueError, match=rf"num_nodes is {nodes}; allowed with 4 ranks: 1\.\.4"):
            Domains(4, nodes)


RATE_ERRORS: list[tuple[Callable[[], object], str]] = [
    (lambda: Rates(compute=0.0), "compute is 0.0; a share of the machine's rate must be positive"),
    (lambda: Rates(fixed_seconds=-1.0), "fixed_seconds is -1.0; it must be 0 or more"),
    (lambda: Efficiency(exposed=1.5), r"exposed is 1.5; allowed: 0\.\.1"),
    (lambda: Efficiency(tile_rows=0), "tile_rows is 0; it must be a whole number, 1..65536"),
    (lambda: Efficiency.from_json({"speed": 1}), r"efficiency has \['speed'\]; allowed: "),
]


@pytest.mark.parametrize(("make", "message"), RATE_ERRORS)
def test_efficiencies_that_cannot_be(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


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
