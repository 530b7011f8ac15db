"""Errors on their way across ranks."""

from __future__ import annotations

import json

import pytest

from moeloom import CapabilityError, CapacityError, MoeloomError, PeerTimeout
from moeloom.errors import from_record, to_record
from moeloom.launch import RankFailed


@pytest.mark.parametrize("cls", [MoeloomError, PeerTimeout, CapabilityError, CapacityError, ValueError])
def test_another_rank_raises_the_same(cls: type[Exception]) -> None:
    error = from_record(json.loads(json.dumps(to_record(cls("rank 1: topk_idx[3, 0] is 9\n\u2026")))))
    assert type(error) is cls and str(error) == "rank 1: topk_idx[3, 0] is 9\n\u2026"


@pytest.mark.parametrize(
    "foreign", [KeyError("a"), RuntimeError("out of memory"), KeyboardInterrupt(), RankFailed("gone")]
)
def test_what_is_not_known_everywhere_keeps_its_name(foreign: BaseException) -> None:
    error = from_record(to_record(foreign))
    assert type(error) is MoeloomError
    assert str(error) == f"{type(foreign).__name__}: {foreign}"


def test_all_are_moelooms_and_a_timeout_is_a_timeout() -> None:
    assert all(issubclass(cls, MoeloomError) for cls in (PeerTimeout, CapabilityError, CapacityError))
    assert issubclass(PeerTimeout, TimeoutError)
    assert not issubclass(MoeloomError, ValueError)
