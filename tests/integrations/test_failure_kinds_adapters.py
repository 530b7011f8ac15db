"""Kinds of faults of adapters: tokens that several ranks hold, rows behind the last expert's.

The letters in brackets are those of tests/failure_kinds.toml.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moeloom import RankPool
from moeloom.integrations.torchtitan import MoeloomTokenDispatcher

RANKS, EXPERTS, DIM, CAPACITY = 2, 8, 16, 40


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(RANKS) as ranks:
        yield ranks


# ---- trailing rows (Y4)


def trailing(pad_multiple: int) -> list[bool]:
    """On a rank: a dispatch with a fixed number of rows, over memory that another has filled with large numbers."""
    config = MoeloomTokenDispatcher.Config(num_experts=EXPERTS, top_k=1, pad_multiple=pad_multiple, capacity=CAPACITY)
    dispatcher = config.build()
    dispatcher.wire_meshes(ep_mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))

    def step(scale: float, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = torch.full((num_tokens, DIM), scale).requires_grad_()
        ids = torch.arange(num_tokens).remainder(EXPERTS).unsqueeze(1)
        rows, counts, handle = dispatcher.dispatch(x, torch.ones(num_tokens, 1), ids, torch.empty(0))
        used = torch.arange(CAPACITY) < counts.sum()
        out = torch.where(used.unsqueeze(1), 2 * rows, torch.nan)  # as grouped products leave what is past the offsets
        y = dispatcher.combine(out, handle, x)
        rows.retain_grad()
        y.sum().backward()
        return rows, counts, y, x

    step(1e30, 16)
    rows, counts, y, x = step(1.0, 3)
    held = torch.zeros(CAPACITY)
    for expert, start in enumerate((counts.cumsum(0) - counts).tolist()):
        if len(counts) * dist.get_rank() + expert < 3:  # the tokens' experts: each rank sends one row
            held[start : start + RANKS] = 1.0
    return [
        rows.shape == (CAPACITY, DIM),
        torch.equal(rows.detach(), held.unsqueeze(1).expand(-1, DIM)),
        torch.equal(y.detach(), torch.full((3, DIM), 2.0)),
        torch.equal(x.grad, torch.full((3, DIM), 2.0)),
        bool(torch.isfinite(rows.grad).all()) and not rows.grad[held == 0].any(),
    ]


@pytest.mark.parametrize("pad_multiple", [1, 8])
def test_rows_past_the_offsets_are_zeros_and_take_no_part(pool: RankPool, pad_multiple: int) -> None:
    """Y4: torchtitan's experts leave them undefined; so may their gradients be."""
    assert pool.run(trailing, pad_multiple) == [[True] * 5] * RANKS


# ---- what the ranks hold alike (Y1)


def rows_of_shared_tokens(num_tokens: int) -> tuple[int, int]:
    """On a rank: rows that one call of a transformers experts module brought, whose tokens all ranks hold."""
    from tests.integrations import test_transformers_cases as cases

    cases.adapter.register()
    parent = nn.Module()
    parent.experts = cases.experts_module("Qwen3Moe")
    plan = {
        "experts.gate_up_proj": "grouped_gemm",
        "experts.down_proj": "grouped_gemm",
        "experts": "ep_dispatch_experts",
    }
    mesh = init_device_mesh("cpu", (RANKS,))
    cases.expert_parallel.apply_expert_parallelism(parent, mesh, mesh, plan, ep_implementation="moeloom")
    ids = torch.tensor([[token % EXPERTS, (token + 3) % EXPERTS] for token in range(num_tokens)])
    with torch.no_grad():
        parent.experts(torch.ones(num_tokens, 64), ids, torch.ones(num_tokens, 2))
    stats = cases.adapter.runtimes()[-1].stats()
    return stats["dispatch"].rows, stats["combine"].rows


def test_tokens_that_ranks_share_are_sent_once(pool: RankPool) -> None:
    """Y1: under tensor parallelism every rank has all tokens, and brings its part of them to the experts."""
    pytest.importorskip("transformers", minversion="5.23")
    outcomes = pool.run(rows_of_shared_tokens, 10, timeout=120)
    assert sum(rows for rows, _ in outcomes) == 10 * 2
