"""Ranks that a program starts: a failure on one ends the run soon, and says what happened."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from moeloom import RankPool, launch
from moeloom.launch import RankFailed, RankLate
from tests.support.failure import die


class Awkward(Exception):
    """Pickles, but cannot be made again from its arguments."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")


def fail_on_rank_1(how: str) -> Callable | None:
    """Rank 1 fails; rank 0 waits for it longer than anybody would."""
    if dist.get_rank() == 0:
        time.sleep(0 if how == "lambda" else 300)
    elif how == "killed":
        die()
    elif how == "awkward":
        raise Awkward(7, "no room")
    return (lambda: None) if how == "lambda" else None


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("killed", "the process of rank 1 ended with exit code -9"),
        ("awkward", "Awkward: no room (7)"),
        ("lambda", "its result cannot be sent"),
    ],
)
def test_failure_of_one_rank_ends_the_run(monkeypatch: pytest.MonkeyPatch, how: str, text: str) -> None:
    monkeypatch.setattr(sys.modules["moeloom.launch"], "GRACE_SECONDS", 0.5)  # `moeloom.launch` is the function
    start = time.monotonic()
    with pytest.raises(RankFailed, match=text.replace("(", "\\(").replace(")", "\\)")):
        launch(fail_on_rank_1, 2, 1, (how,))
    assert time.monotonic() - start < 20


def sleep_on_rank_1() -> int:
    time.sleep(300 * dist.get_rank())
    return dist.get_rank()


def test_rank_that_does_not_finish() -> None:
    with RankPool(2) as pool:
        first, second = pool.outcomes(sleep_on_rank_1, timeout=4.0)
        assert first == 0 and isinstance(second, RankLate) and str(second) == "rank(s) 1 did not finish in time"
        assert pool.processes == []
