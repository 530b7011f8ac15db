"""Expert parallelism of transformers through moeloom, against transformers alone: tiny models of real architectures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moeloom import RankPool
from tests.integrations import test_transformers_cases as cases
from tests.integrations.test_transformers_cases import CONFIGS, EXPERTS, MESHES, NUM_RANKS, TP_PLANS, build, reference

pytest.importorskip("accelerate")  # transformers loads nothing in parallel without it

TOLERANCE = 3e-5  # fp32 sums in another order; 1.1e-5 on cores without AVX-512
CHANGE_TOLERANCE = 1e-2  # of the change by three steps: later ones magnify what the first rounded (4e-3 seen)
HALF = {"dtype": torch.bfloat16}


class FourRanks:
    """A world of exactly four ranks, started anew if a test has broken it."""

    def __init__(self) -> None:
        self._pool: RankPool | None = None

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        if self._pool is None or not self._pool.processes:
            self._pool = RankPool(NUM_RANKS)
        return self._pool.run(fn, *args, timeout=250.0)  # the first call imports transformers on every rank

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


@pytest.fixture(scope="module")
def four() -> Iterator[FourRanks]:
    ranks = FourRanks()
    yield ranks
    ranks.close()


def save_reference(path: Path, mesh: str, **options: Any) -> str:
    """The reference for that many batches, in a file beside the model."""
    count = MESHES[mesh].get("fsdp_size", 1)
    file = path / f"reference-{count}-{'-'.join(map(str, options.values()))}.pt"
    if not file.exists():
        torch.save(reference(str(path), count, **options), file)
    return str(file)


def plans_of(name: str, mesh: str) -> dict[str, Any]:
    return {"plans": {"tp_plan": TP_PLANS[name]}} if name in TP_PLANS and "tp" in mesh else {}


def assert_equal(found: dict[str, Any]) -> None:
    """A rank's results are those of the reference."""
    assert found["tokens"]
    assert found["logits"] <= TOLERANCE
    for name, distance in found["grads"].items():
        assert distance <= TOLERANCE, name
    for name, distance in found["change"].items():
        assert distance <= CHANGE_TOLERANCE, name


@pytest.mark.parametrize("name", CONFIGS)
def test_as_alone(four: FourRanks, tmp_path: Path, name: str) -> None:
    """Logits, every gradient, three steps and greedy tokens, on every mesh; through moeloom, which moves rows."""
    build(name, str(tmp_path))
    for mesh in MESHES:
        wanted = save_reference(tmp_path, mesh)
        results = four.run(cases.compare_and_forget, str(tmp_path), wanted, mesh, False, plans_of(name, mesh))
        for found in results:
            layers = (1,) if "first_k_dense_replace" in CONFIGS[name] else (0, 1)
            assert found["replaced"] == [f"model.layers.{layer}.mlp.experts" for layer in layers]
            assert_equal(found)
            calls = len(layers) * (4 + cases.NUM_STEPS)  # one for each token and step
            assert found["stats"]["dispatch"].calls == found["stats"]["combine"].calls == calls
        moved = [found["stats"] for found in results]
        assert all(stats["dispatch"].scale_up_bytes > 0 for stats in moved)
        assert sum(stats["combine"].scale_up_bytes for stats in moved) > 0


def test_swapped_experts_are_noticed(four: FourRanks, tmp_path: Path) -> None:
    """The comparison of `test_as_alone` is one that can fail."""
    (right, wrong) = tmp_path / "right", tmp_path / "wrong"
    build("Qwen3Moe", str(right))
    build("Qwen3Moe", str(wrong), swapped=True)
    wanted = save_reference(right, "tp4 ep4")
    for found in four.run(cases.compare_and_forget, str(wrong), wanted, "tp4 ep4", False, {}):
        assert found["logits"] > 0.01
        assert found["grads"]["model.layers.0.mlp.experts.down_proj"] > 0.1


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_without_rows(four: FourRanks, tmp_path: Path, mesh: str) -> None:
    """All tokens to two experts of one rank: the others' take part, and get zeros for gradients."""
    build("GptOss", str(tmp_path), biased=True)
    wanted = torch.load(save_reference(tmp_path, mesh))
    for grad in wanted["grads"].values():
        if not grad.any():
            pytest.fail("a whole tensor without gradient would compare as NaN")
    for found in four.run(cases.compare_and_forget, str(tmp_path), save_reference(tmp_path, mesh), mesh, False, {}):
        assert_equal(found)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_with_checkpointing_and_other_experts_functions(four: FourRanks, tmp_path: Path, implementation: str) -> None:
    build("Qwen3Moe", str(tmp_path))
    wanted, options = save_reference(tmp_path, "tp2 fsdp2 ep4"), {"experts_implementation": implementation}
    for found in four.run(cases.compare_and_forget, str(tmp_path), wanted, "tp2 fsdp2 ep4", True, options):
        assert_equal(found)
        forward, again = 2 * (4 + cases.NUM_STEPS), 2 * cases.NUM_STEPS
        assert found["stats"]["dispatch"].calls == forward + again


def test_bf16(four: FourRanks, tmp_path: Path) -> None:
    """The error against fp32 is at most twice that of transformers alone in BF16."""
    build("Mixtral", str(tmp_path))
    wanted = save_reference(tmp_path, "fsdp4 ep2")
    exact, rounded = torch.load(wanted), reference(str(tmp_path), 4, **HALF)
    found = four.run(cases.compare_and_forget, str(tmp_path), wanted, "fsdp4 ep2", False, HALF)
    for batch, result in enumerate(found):
        assert result["logits"] <= 2 * cases.distance(rounded["logits"][batch], exact["logits"][batch])
        for name, distance in cases.distances(rounded["grads"], exact["grads"]).items():
            assert result["grads"][name] <= 2 * distance, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_every_kind(four: FourRanks, name: str, dtype: torch.dtype) -> None:
    """One experts module, whose tokens four ranks share: few, unrouted and crowded ones; weights of either dtype."""
    tokens = {"one": [[6, 3]], "five": [[0, 1], [2, 3], [4, 5], [6, 7], [7, 0]], "crowd": [[4, 5]] * 6}
    if name not in ("GptOss", "NemotronH"):  # alone, they do not know transformers' mark for "no expert", here 8
        tokens["unrouted"] = [[8, 3], [8, 8], [5, 8], [0, 8], [8, 1], [2, 3]]
        tokens["nobody"] = [[8, 8]] * 2
    for found in four.run(cases.compare_experts, name, tokens, dtype):
        for case, distances in found.items():
            for key, distance in distances.items():
                # a BF16 weight's gradient is rounded, and NemotronH, alone, sums its experts in the weights' dtype
                rounded = dtype == torch.bfloat16 and (key == "weights" or name == "NemotronH")
                assert distance <= (0.2 if rounded else 1e-3), (case, key)


def test_models_side_by_side(four: FourRanks, tmp_path: Path) -> None:
    build("Qwen3Moe", str(tmp_path))
    assert four.run(cases.models_side_by_side, str(tmp_path)) == [[1, 2, 1]] * NUM_RANKS


def test_each_rank_for_itself(four: FourRanks) -> None:
    assert max(four.run(cases.alone_in_a_world)) <= 1e-4


def test_what_would_run_nothing_is_refused(four: FourRanks, tmp_path: Path) -> None:
    experts, dense = tmp_path / "experts", tmp_path / "dense"
    build("Qwen3Moe", str(experts))
    cases.build_dense(str(dense))
    for found in four.run(cases.refusals, str(experts), str(dense)):
        assert "LlamaForCausalLM" in found["no plan"] and "ep_plan" in found["no plan"]
        assert "no module of Qwen3MoeForCausalLM runs through moeloom" in found["no dispatch"]
        assert "model.layers.1.mlp.experts" in found["no dispatch"]
        assert "Qwen3MoeExperts holds all of its 8 experts" in found["not sharded"]
        assert "experts_implementation='moeloom' is for experts of one process" in found["both"]
