"""Corrections by measurement: bounded, agreed by all ranks, and right in the long run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeloom import BF16, FP32
from moeloom.plan.feedback import KEPT, LIMIT, Feedback, bucket
from moeloom.plan.planner import Planner, choose
from moeloom.plan.problem import UNKNOWN_TOKENS, Problem
from tests.pure.test_planner import cluster

ASKED = Problem(64, 7168, 256, 8, BF16)
ONE, OTHER = "split, direct", "split, hybrid"


def test_sizes_share_corrections_up_to_a_power_of_two() -> None:
    tokens = [0, 1, 2, 3, 4, 5, 8, 9, 1000, 1024, 1025, None]
    found = [bucket(replace(ASKED, num_tokens=count)).num_tokens for count in tokens]
    assert found == [0, 1, 2, 4, 4, 8, 8, 16, 1024, 1024, 2048, UNKNOWN_TOKENS]
    assert bucket(ASKED) == bucket(replace(ASKED, num_tokens=33)) != bucket(replace(ASKED, hidden=7169))


def test_nothing_changes_until_all_ranks_agree() -> None:
    feedback = Feedback()
    feedback.record(ASKED, ONE, 2.0)
    assert feedback.corrections(ASKED) == {}
    assert feedback.report(ASKED) == {ONE: 2.0}
    feedback.update(ASKED, {ONE: 1.0, OTHER: 1.0}, [feedback.report(ASKED), {ONE: 1.5}])
    assert feedback.corrections(ASKED) == {ONE: 2.0}
    assert feedback.report(ASKED) == {}  # agreed on: not counted twice


def test_a_rank_reports_the_median_of_its_latest() -> None:
    feedback = Feedback()
    for seconds in (5.0, 1.0, 2.0):
        feedback.record(ASKED, ONE, seconds)
    feedback.record(replace(ASKED, num_tokens=50), ONE, 2.0)  # the same size
    feedback.record(ASKED, OTHER, 7.0)
    assert feedback.report(ASKED) == {ONE: 2.0, OTHER: 7.0}
    for _ in range(KEPT):
        feedback.record(ASKED, ONE, 9.0)
    assert feedback.report(ASKED)[ONE] == 9.0
    for other in (replace(ASKED, num_tokens=65), replace(ASKED, recipe=FP32), replace(ASKED, num_topk=3)):
        assert feedback.report(other) == {}
    assert feedback.report(replace(ASKED, phase="train", intermediate=7)) == feedback.report(ASKED)


def test_the_slowest_rank_counts() -> None:
    feedback = Feedback()
    feedback.update(ASKED, {ONE: 1.0}, [{ONE: 0.5}, {ONE: 3.0}, {ONE: 1.0}])
    assert feedback.corrections(ASKED) == {ONE: 3.0}


def test_what_some_rank_has_not_run_is_not_corrected() -> None:
    feedback = Feedback()
    feedback.update(ASKED, {ONE: 1.0, OTHER: 1.0}, [{ONE: 2.0, OTHER: 2.0}, {OTHER: 3.0}])
    assert feedback.corrections(ASKED) == {OTHER: 3.0}
    feedback.update(ASKED, {ONE: 1.0}, [{ONE: 2.0, "mine": 1.0}, {ONE: 2.0, "mine": 1.0}])  # nothing predicted it
    assert feedback.corrections(ASKED) == {OTHER: 3.0, ONE: 2.0}


def test_corrections_are_per_size() -> None:
    feedback = Feedback()
    feedback.update(ASKED, {ONE: 1.0}, [{ONE: 2.0}])
    assert feedback.corrections(replace(ASKED, num_tokens=33)) == {ONE: 2.0}
    for other in (replace(ASKED, num_tokens=65), replace(ASKED, num_topk=4), replace(ASKED, hidden=512)):
        assert feedback.corrections(other) == {}


def test_later_measurements_count_half() -> None:
    feedback = Feedback()
    for measured, wanted in ((2.0, 2.0), (1.0, 1.5), (1.0, 1.25)):
        feedback.update(ASKED, {ONE: 1.0}, [{ONE: measured}])
        assert feedback.corrections(ASKED)[ONE] == pytest.approx(wanted)


times = st.floats(0.0, 1e6) | st.just(float("inf"))


@settings(max_examples=300, deadline=None)
@given(
    predicted=st.floats(0.0, 1e3),
    rounds=st.lists(st.lists(times, min_size=1, max_size=4), min_size=1, max_size=6),
)
def test_any_correction_is_bounded(predicted: float, rounds: list[list[float]]) -> None:
    feedback = Feedback()
    for measured in rounds:
        feedback.update(ASKED, {ONE: predicted}, [{ONE: seconds} for seconds in measured])
        for factor in feedback.corrections(ASKED).values():
            assert 1 / LIMIT <= factor <= LIMIT
    assert bool(feedback.corrections(ASKED)) == (predicted > 0)


@pytest.mark.parametrize("slowness", [0.1, 0.6, 2.0, 3.5, 50.0])
def test_general_slowness_flips_nothing(slowness: float) -> None:
    """Where everything takes that much longer than predicted, what was not tried is not better."""
    planner = Planner(cluster(16, 2))
    first = planner(ASKED)
    for _ in range(5):
        plan = planner(ASKED)
        assert plan == first
        planner.learn(ASKED, [{str(plan): first.seconds * slowness}] * 2)


def run_and_learn(planner: Planner, truth: dict[str, float], names: list[str], generator: random.Random) -> None:
    """Two ranks run these plans three times each, at their true times and up to 5 % more, and agree."""
    ranks = [Feedback(), Feedback()]
    for name in names:
        for rank in ranks * 3:
            rank.record(ASKED, name, truth[name] * generator.uniform(1.0, 1.05))
    planner.learn(ASKED, [rank.report(ASKED) for rank in ranks])


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_loop_settles_on_the_truly_best_of_what_was_run(factor: float) -> None:
    """The model is wrong by two about one candidate, whichever it is; each was run once beside the chosen one."""
    setting, generator = cluster(16, 2), random.Random(0)
    plan = choose(ASKED, setting)
    predicted = {c.name: c.seconds for c in plan.candidates if c.seconds}
    for wrong in predicted:
        truth = {**predicted, wrong: predicted[wrong] * factor}
        planner = Planner(setting)
        for other in predicted:
            run_and_learn(planner, truth, sorted({str(planner(ASKED)), other}), generator)
        for _ in range(5):
            chosen = planner(ASKED)
            assert truth[str(chosen)] <= 1.05 * min(truth.values()), wrong
            run_and_learn(planner, truth, [str(chosen)], generator)


def test_a_flattered_candidate_is_left_as_soon_as_a_better_one_was_run() -> None:
    """Until then all others count as just as much slower than predicted: nobody knows that they are not."""
    setting, generator = cluster(16, 2), random.Random(0)
    plan = choose(ASKED, setting)
    truth = {c.name: c.seconds for c in plan.candidates if c.seconds}
    truth[str(plan)] *= 2
    best, planner = min(truth, key=lambda name: truth[name]), Planner(setting)
    for _ in range(3):
        assert str(planner(ASKED)) == str(plan) != best
        run_and_learn(planner, truth, [str(plan)], generator)
    run_and_learn(planner, truth, [best], generator)
    for _ in range(3):
        assert str(planner(ASKED)) == best
        run_and_learn(planner, truth, [best], generator)
