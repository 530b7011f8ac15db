"""A Runtime on GPUs, one process per rank: the exchange cases of the CPU backend, bit for bit.

Ranks share the GPUs that there are; several on one take turns, so every signal takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.support.cases import Case, covering_cases
from tests.support.exchange import run_case
from tests.support.pool import Ranks

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    """Ranks that live on the machine's GPUs."""
    pool = Ranks("cuda")
    yield pool
    pool.close()


def on_one_node(case: Case) -> Case:
    return replace(case, nodes=1, identity=0)


def run_cases(cases: list[Case]) -> list[str]:
    """On every rank; one call for all, as each start of a call costs more than a case."""
    wrong = []
    for case in cases:
        wrong += [f"{case}\n{line}" for line in run_case(case, backend="sm90")]
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_exchange(gpus: Ranks, ranks: int) -> None:
    if ranks > 2 * torch.cuda.device_count():
        pytest.skip("takes minutes where more than two ranks share a GPU")
    cases = [on_one_node(case) for case in covering_cases() if case.ranks == ranks]
    assert cases
    wrong = [line for lines in gpus.run(run_cases, cases) for line in lines]
    assert not wrong, "\n".join(wrong[:20])
