"""Problem + setting -> Plan: a pure function of what all ranks share, so it needs no communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import geometric_mean

from moeloom.errors import CapabilityError
from moeloom.plan.feedback import Feedback
from moeloom.plan.plan import Candidate, Plan
from moeloom.plan.problem import Problem
from moeloom.plan.strategies import Setting, candidates, roofline

Corrections = Mapping[str, float]


def choose(problem: Problem, setting: Setting, corrections: Corrections | None = None) -> Plan:
    """The candidate with the least predicted time; of equals the first, which is the simpler one.

    corrections: measured over predicted time by candidate name, for problems of this size (`plan.feedback`). The other
    candidates get the geometric mean of them: what makes one way slower than predicted mostly makes all slower.
    Raises CapabilityError if nothing can run this problem, with every candidate's reason.
    """
    known = corrections or {}
    others = geometric_mean(known.values()) if known else 1.0
    found = tuple(_corrected(c, known.get(c.name, others)) for c in candidates(problem, setting))
    legal = [candidate for candidate in found if candidate.seconds is not None]
    if not legal:
        reasons = "; ".join(dict.fromkeys(f"{c.name}: {c.note}" for c in found))
        raise CapabilityError(f"no plan for {problem}: {reasons}")
    best = min(legal, key=lambda candidate: candidate.seconds or 0.0)
    domains = setting.domains
    context = (
        f"problem: {problem}, {setting.choices} routing",
        f"machine: {setting.machine.name}, {domains.num_ranks} ranks on {domains.num_nodes} node(s)",
        *_efficiencies(setting),
    )
    reason = "least predicted time" + ("" if problem.num_tokens is not None else ", tokens unknown")
    return Plan(best.pipeline, best.exchange, best.chunks, reason, found, context, roofline(problem, setting))


def _efficiencies(setting: Setting) -> Iterator[str]:
    """Whose measurements the predictions stand on, a line for each source."""
    pipelines: dict[str, list[str]] = {}
    for name, efficiency in setting.efficiencies.items():
        pipelines.setdefault(efficiency.source, []).append(name)
    for source, names in pipelines.items():
        yield f"efficiency of {', '.join(names)}: {source}"


def _corrected(candidate: Candidate, factor: float) -> Candidate:
    if factor == 1.0 or candidate.seconds is None:
        return candidate
    note = "; ".join(filter(None, (candidate.note, f"x {factor:.2f} as measured")))
    return replace(candidate, seconds=candidate.seconds * factor, note=note)


class Planner:
    """`choose` for one Runtime: remembers its plans, and corrects them by what was measured."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.feedback = setting, Feedback()
        self._plans: dict[Problem, Plan] = {}

    def __call__(self, problem: Problem) -> Plan:
        """The plan for a problem; a pure function of it and of what all ranks have agreed on."""
        if problem not in self._plans:
            self._plans[problem] = choose(problem, self.setting, self.feedback.corrections(problem))
        return self._plans[problem]

    def learn(self, problem: Problem, reports: list[dict[str, float]]) -> None:
        """Correct the model by what every rank has measured; `reports` must be equal on all ranks."""
        plain = choose(problem, self.setting)
        predicted = {c.name: c.seconds for c in plain.candidates if c.seconds is not None}
        self.feedback.update(problem, predicted, reports)
        self._plans.clear()
