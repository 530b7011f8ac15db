"""What measured run times say about the model: a bounded factor for each way to run, per size of problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from statistics import median

from moeloom.plan.problem import Problem

LIMIT = 4.0  # a factor stays within 1/4 .. 4: one odd measurement must not rule a candidate out for good
WEIGHT = 0.5  # of what is new
KEPT = 32  # latest measurements that wait to be agreed on


@lru_cache(maxsize=1024)  # asked on every forward
def bucket(problem: Problem) -> Problem:
    """Problems that share corrections: tokens rounded up to a power of two, whatever the phase."""
    tokens = problem.tokens
    num_tokens = 1 << (tokens - 1).bit_length() if tokens else 0
    return replace(problem, num_tokens=num_tokens, phase="prefill", intermediate=None)


class Feedback:
    """Measurements of this rank that the others do not know yet, and corrections that all ranks share."""

    def __init__(self) -> None:
        self._measured: dict[tuple[Problem, str], list[float]] = {}
        self._corrections: dict[Problem, dict[str, float]] = {}

    def record(self, problem: Problem, plan_name: str, seconds: float) -> None:
        """A layer took this long here. Changes no plan until `update`."""
        latest = self._measured.setdefault((bucket(problem), plan_name), [])
        latest.append(seconds)
        del latest[:-KEPT]

    def report(self, problem: Problem) -> dict[str, float]:
        """By plan name the median of what this rank has measured for problems of this size."""
        key = bucket(problem)
        return {name: median(times) for (size, name), times in self._measured.items() if size == key}

    def update(self, problem: Problem, predicted: Mapping[str, float], reports: list[dict[str, float]]) -> None:
        """Take over what all ranks report: the slowest rank counts, of plans that all ranks have run.

        predicted: seconds by plan name, uncorrected. Called with equal arguments on all ranks.
        """
        key = bucket(problem)
        known = self._corrections.setdefault(key, {})
        for name, expected in predicted.items():
            times = [report[name] for report in reports if name in report]
            if len(times) == len(reports) and expected > 0:
                factor = max(times) / expected
                factor = min(max(factor, 1 / LIMIT), LIMIT)
                known[name] = factor if name not in known else (1 - WEIGHT) * known[name] + WEIGHT * factor
            self._measured.pop((key, name), None)

    def corrections(self, problem: Problem) -> Mapping[str, float]:
        """Measured over predicted by plan name, of plans that were run."""
        return self._corrections.get(bucket(problem), {})
