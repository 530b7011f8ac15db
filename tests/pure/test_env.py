"""Environment variables: read when asked, written only where said."""

from __future__ import annotations

import os

import pytest

from moeloom import env


def test_the_shared_memory_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOELOOM_SHM_DIR", raising=False)
    assert env.shared_memory_dir() == "/dev/shm"
    monkeypatch.setenv("MOELOOM_SHM_DIR", "/scratch")
    assert env.shared_memory_dir() == "/scratch"


def test_the_declared_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOELOOM_NODE", "a")  # so that it is taken away afterwards
    env.declare_node("rack 7")
    assert env.declared_node() == os.environ["MOELOOM_NODE"] == "rack 7"
    monkeypatch.delenv("MOELOOM_NODE")
    assert env.declared_node() is None


def test_loopback_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    env.use_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    env.use_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(("names", "wanted"), [((), False), (("RANK",), False), (("RANK", "WORLD_SIZE"), True)])
def test_torchrun_is_told_by_rank_and_world_size(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], wanted: bool
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in names:
        monkeypatch.setenv(name, "1")
    assert env.is_torchrun() is wanted
