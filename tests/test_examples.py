"""The examples, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import torch

from examples.train_tiny_moe import Options, Progress, read_text, train, unigram_entropy
from moeloom import RankPool

ROOT = Path(__file__).parent.parent


def start(script: str, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=200,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_forward() -> None:
    lines = start("forward.py", "--ranks", "3", "--nodes", "3", "--tokens", "16").splitlines()
    rows = [int(line.split(", ")[1].split()[0]) for line in lines]
    assert len(lines) == 3 and sum(rows) == 3 * 16 * 8


def test_decode_loop() -> None:
    assert "buffers grown by 0 bytes" in start("decode_loop.py", "--ranks", "2", "--steps", "20")


def test_train_writes_a_picture(tmp_path: Path) -> None:
    if util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    picture = tmp_path / "loss.png"
    out = start("train_tiny_moe.py", "--ranks", "2", "--steps", "3", "--plot", str(picture))
    assert "unigram entropy" in out and picture.read_bytes()[:4] == b"\x89PNG"


def test_hf_generate() -> None:
    if util.find_spec("transformers") is None or util.find_spec("accelerate") is None:
        pytest.skip("transformers or accelerate is not installed")
    assert "equal: True" in start("hf_generate.py")


def curve(ranks: int, steps: int) -> list[Progress]:
    with RankPool(ranks) as pool:
        return list(pool.stream(train, Options(ranks=ranks, steps=steps)))


def test_training_does_not_depend_on_the_number_of_ranks_and_learns() -> None:
    one, four = curve(1, 50), curve(4, 50)
    losses = torch.tensor([[p.loss for p in run] for run in (one, four)])
    torch.testing.assert_close(losses[0], losses[1], rtol=2e-3, atol=0)
    assert losses[:, -5:].mean() < unigram_entropy(read_text("")) - 0.3
    assert sum(four[0].load) == 2 * 2 * 16 * 128  # layers, top-k, batch, length
