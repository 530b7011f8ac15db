"""dispatch and combine, over a generated matrix: every bit as the oracle says."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, given, settings

from tests.support.cases import all_pairs, covering_cases, pairs_of, random_cases
from tests.support.exchange import run_case
from tests.support.pool import Ranks

NUM_EXAMPLES = int(os.environ.get("MOELOOM_TEST_EXAMPLES", "300"))  # `make test-full`: 5000


def check(ranks: Ranks, case) -> None:
    wrong = [line for lines in ranks.run(run_case, case) for line in lines]
    assert not wrong, f"{case}\n" + "\n".join(wrong)


def test_every_pair_of_listed_values(ranks: Ranks) -> None:
    seen = set()
    for case in covering_cases():
        check(ranks, case)
        seen |= pairs_of(case)
    assert seen >= all_pairs()


@settings(
    max_examples=NUM_EXAMPLES, deadline=None, derandomize=NUM_EXAMPLES == 300, suppress_health_check=list(HealthCheck)
)
@given(case=random_cases())
def test_any_case(ranks: Ranks, case) -> None:
    check(ranks, case)
