"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.pool import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Six ranks, alive for the whole session."""
    pool = Ranks()
    yield pool
    pool.close()
