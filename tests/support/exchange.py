"""Runs a case on the ranks and compares with the oracle, bit for bit. Ranks check themselves and report differences."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moeloom import Plan, Routing, Runtime
from moeloom.config import recipe_for
from moeloom.types import Received
from tests.support.cases import Case
from tests.support.oracle import World
from tests.support.pool import runtime_of


def expert_fn(rows: Tensor, expert: int | Tensor) -> Tensor:
    """A cheap expert: elementwise, so that the oracle's bits are the same; different for each expert."""
    scale = 1.0 + 0.125 * (torch.as_tensor(expert) % 7).float()
    return (rows.float() * (scale.unsqueeze(-1) if scale.dim() else scale)).to(rows.dtype)


def world_of(case: Case, payload: int = 0) -> World:
    """The oracle for all ranks of a case."""
    drawn = [case.inputs(rank, payload) for rank in range(case.ranks)]
    return World(
        [x for x, _ in drawn],
        [routing.topk_idx.tolist() for _, routing in drawn],
        [routing.topk_weights for _, routing in drawn],
        case.placement(),
    )


def differences(name: str, got: Tensor, wanted: Tensor) -> list[str]:
    """Nothing if equal in shape, dtype and every bit (NaN equals NaN); else one line naming the first row."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return [f"{name}: {list(got.shape)} {got.dtype}, wanted {list(wanted.shape)} {wanted.dtype}"]
    same = (got == wanted) | ((got != got) & (wanted != wanted))
    if got.is_floating_point():
        same &= torch.signbit(got) == torch.signbit(wanted)
    if same.all():
        return []
    first = (~same).nonzero()[0].tolist()
    return [f"{name}: first difference at {first}: {got[tuple(first)]}, wanted {wanted[tuple(first)]}"]


def run_case(case: Case, backend: str = "cpu") -> list[str]:
    """On every rank of the pool: dispatch twice (two handles), combine in reverse; [] if all bits are right."""
    rt = runtime_of(case.members, case.nodes, backend=backend)
    if rt is None:
        return []
    if backend == "cpu":
        poison(rt)
    worlds = [world_of(case, payload) for payload in (0, 1)]
    flows = [_dispatch(rt, case, world, payload) for payload, world in enumerate(worlds)]
    wrong = [line for flow in flows for line in flow[2]]
    for payload in (1, 0):
        received, handle, _ = flows[payload]
        wrong += _combine(rt, case, worlds[payload], received, handle)
    return [f"rank {rt.rank}: {line}" for line in wrong]


def _dispatch(rt: Runtime, case: Case, world: World, payload: int) -> tuple[Received, object, list[str]]:
    x, routing = on_device(rt, *case.inputs(rt.rank, payload))
    before = [tensor.clone() for tensor in (x, routing.topk_idx, routing.topk_weights)]
    received, handle = rt.dispatch(
        x, routing, case.placement(), order=case.order, alignment=case.alignment, plan=Plan(exchange=case.exchange)
    )
    rows, ids, weights, starts, counts = world.received(rt.rank, case.order, case.alignment)
    received = on_host(received)
    flat = received.rows.reshape(-1, case.hidden)
    wanted_ids = (
        torch.tensor(ids, dtype=torch.int64).reshape(-1, case.topk)
        if case.order == "rank"
        else torch.tensor(ids, dtype=torch.int64)
    )
    got_ids = received.topk_idx if case.order == "rank" else received.topk_idx.reshape(-1)
    got_weights = received.topk_weights if case.order == "rank" else received.topk_weights.reshape(-1)
    wrong = differences("rows", flat, rows)
    wrong += differences("topk_idx", got_ids, wanted_ids)
    wrong += differences("topk_weights", got_weights, weights)
    wrong += differences("expert_start", received.expert_start, torch.tensor(starts))
    wrong += differences(
        "num_tokens_per_expert", received.num_tokens_per_expert, torch.tensor(counts, dtype=torch.int64)
    )
    for name, old, new in zip(
        ("x", "topk_idx", "topk_weights"), before, (x, routing.topk_idx, routing.topk_weights), strict=True
    ):
        wrong += differences(f"input {name} after the call", new.cpu(), old.cpu())
    return received, handle, wrong


def _combine(rt: Runtime, case: Case, world: World, received: Received, handle) -> list[str]:
    placement = case.placement()
    if case.order == "rank":
        rows = expert_fn(received.rows, 0)
    else:
        held = torch.tensor([*placement.slots[rt.rank], 0])  # the last entry serves padding
        rows = expert_fn(received.rows, held[received.topk_idx])
        rows[received.topk_idx < 0] = float("nan")  # whatever padding holds must not matter
    recipe = recipe_for(case.torch_dtype).with_reduction(case.reduction)
    y = rt.combine(rows.to(rt.backend.device), handle, weighted=case.weighted, recipe=recipe).cpu()
    how = {"exchange": case.exchange, "reduction": case.reduction, "weighted": case.weighted, "order": case.order}
    return differences("y", y, world.combined(rt.rank, expert_fn, case.topology, **how))


def on_device(rt: Runtime, x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
    """Where the backend works, with the strides they have."""

    def move(tensor: Tensor) -> Tensor:
        moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=rt.backend.device)
        return moved.copy_(tensor)

    return move(x), Routing(move(routing.topk_idx), move(routing.topk_weights))


def on_host(received: Received) -> Received:
    """For comparison."""
    tensors = {name: value.cpu() for name, value in vars(received).items() if isinstance(value, Tensor)}
    return replace(received, **tensors)


def poison(rt: Runtime) -> None:
    """Fill this node's symmetric buffer with NaN bits: nothing may be read that was not written by this operation."""
    memory = rt._backend.buffer._memory
    if memory is not None and rt._backend.local_index == 0:
        memory.tensor(torch.uint8, (memory.num_bytes,), 0).fill_(0xFF)
