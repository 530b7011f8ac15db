"""A small layer with one right answer, and calls whose error is the result: for tests in which things go wrong."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moeloom import Experts, Plan, Routing, Runtime, Topology, launch
from tests.support.pool import group_of

FOUR = (0, 1, 2, 3)
HIDDEN, LOCAL_EXPERTS, TOPK = 8, 2, 2


@dataclass(frozen=True)
class Attempt:
    """What came of a call: the error's class (empty if there was none) and text, and how long it took."""

    error: str
    text: str
    seconds: float


def attempt(call: Callable[..., object], *args: object) -> Attempt:
    """`call(*args)`, caught."""
    start = time.monotonic()
    try:
        call(*args)
    except BaseException as error:
        return Attempt(type(error).__name__, str(error), time.monotonic() - start)
    return Attempt("", "", time.monotonic() - start)


def the_same(attempts: list[Attempt]) -> Attempt:
    """What all ranks report, one of them."""
    assert len({(each.error, each.text) for each in attempts}) == 1, attempts
    return attempts[0]


@dataclass(frozen=True)
class Layer:
    """One rank's arguments of a call. Expert e multiplies by e + 1; all numbers are small integers: sums are exact."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    experts: Experts
    plan: Plan | None = None

    @property
    def routing(self) -> Routing:
        return Routing(self.topk_idx, self.topk_weights)

    @property
    def y(self) -> Tensor:
        """The right answer."""
        return (self.topk_weights * (self.topk_idx + 1)).sum(1, keepdim=True) * self.x  # id -1 adds nothing

    def but(self, **changes: object) -> Layer:
        """The same layer with something else in some places."""
        return replace(self, **changes)

    def run(self, rt: Runtime, out: Tensor | None = None) -> Tensor:
        """The whole layer on a Runtime."""
        return rt.moe(self.x, self.routing, self.experts, plan=self.plan, out=out)


def layer(rank: int, num_ranks: int, *, tokens: int = 5, hidden: int = HIDDEN, topk: int = TOPK) -> Layer:
    """A rank's layer; some slots are not routed."""
    generator = torch.Generator().manual_seed(rank)
    num_experts = LOCAL_EXPERTS * num_ranks
    topk_idx = torch.randint(-1, num_experts, (tokens, topk), generator=generator)
    weights = torch.randint(1, 4, (tokens, topk), generator=generator).float()
    x = torch.randint(-4, 5, (tokens, hidden), generator=generator).float()
    factors = torch.arange(1, LOCAL_EXPERTS + 1) + LOCAL_EXPERTS * rank
    eye = torch.eye(hidden).repeat(LOCAL_EXPERTS, 1, 1)
    gate_up = torch.cat([torch.zeros_like(eye), eye], dim=1)
    experts = Experts(gate_up, eye * factors.view(-1, 1, 1), activation=lambda gate, up: up)
    return Layer(x, topk_idx, weights, experts)


def layer_of(rt: Runtime, **shape: int) -> Layer:
    """This rank's layer."""
    return layer(rt.rank, rt.topology.num_ranks, **shape)


def works(rt: Runtime, **shape: int) -> bool:
    """Whether a correct call gives the right answer on this rank."""
    right = layer_of(rt, **shape)
    return torch.equal(right.run(rt), right.y)


def over_four(nodes: int, *, timeout: float = 30.0, max_tokens: int | None = None) -> Runtime | None:
    """A Runtime of its own for this test; None on the other ranks."""
    group = group_of(FOUR)
    return group and Runtime(group, topology=Topology.split(4, nodes), timeout=timeout, max_tokens=max_tokens)


def die() -> None:
    """End this process as the kernel does when memory runs out: nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def launch_endlessly(ranks: int, nodes: int, folder: str) -> None:
    """What a program that is about to be killed does."""
    launch(_call_endlessly, ranks, nodes, (folder,))


def _call_endlessly(folder: str) -> None:
    with Runtime() as rt:
        works(rt)
        Path(folder, f"running-{rt.rank}").touch()
        while True:
            works(rt)
