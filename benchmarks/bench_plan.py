"""Is the planner right on this CPU? Every way to run a layer, interleaved, beside what the planner chose.

A cell is one number of tokens on one topology. The choice is right if its measured median is within 10 % of the best
one, or within the interquartile range of the best one's own times. With --link the two nodes are joined by a proxy
process of that bandwidth, where chunks pay: their predicted and measured speed-up is shown.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from statistics import quantiles

import torch
import torch.distributed as dist

from benchmarks.measure import interleaved, median
from moeloom import FP32, Experts, Placement, Plan, RankPool, Routing, Runtime, Topology
from moeloom.cli.measure import Around, measure
from moeloom.machine_cache import cores
from moeloom.plan.measured import Measured
from moeloom.plan.planner import choose
from moeloom.plan.problem import Domains, Phase, Problem
from moeloom.plan.strategies import Setting
from tests.support.throttle import ThrottledLink, throttled

EXPERTS_PER_RANK = 8


@dataclass(frozen=True)
class Cell:
    """What is run, by all candidates."""

    ranks: int
    nodes: int
    tokens: int
    hidden: int
    intermediate: int
    topk: int
    phase: Phase = "decode"

    @property
    def problem(self) -> Problem:
        """What each rank has to do. In phase decode every pipeline is allowed."""
        shape = (self.hidden, EXPERTS_PER_RANK * self.ranks, self.topk)
        return Problem(self.tokens, *shape, FP32, self.phase, self.intermediate)

    def plan(self, measured: Measured) -> Plan:
        """The planner's choice."""
        mine = measured.for_ranks(self.ranks, cores())
        return choose(self.problem, Setting(mine.machine, Domains(self.ranks, self.nodes), mine.efficiencies))


@dataclass(frozen=True)
class Outcome:
    """A cell's candidates: predicted and measured seconds (slowest rank of each round)."""

    cell: Cell
    plan: Plan
    times: dict[str, list[float]]

    @property
    def best(self) -> str:
        """The candidate with the least median."""
        return min(self.times, key=lambda name: median(self.times[name]))

    @property
    def lost(self) -> float:
        """How much longer the choice takes than the best one: 0.1 is 10 %."""
        return median(self.times[str(self.plan)]) / median(self.times[self.best]) - 1

    def speed_up(self) -> str:
        """Of the best number of chunks over one, for the planned pipeline and exchange: predicted and measured."""
        seconds = {c.name: c.seconds or 0.0 for c in self.plan.candidates}
        serial = str(Plan("split", self.plan.exchange))
        chunked = [name for name in self.times if name.startswith(f"{serial}, ")]
        if not chunked:
            return ""
        best = min(chunked, key=lambda name: seconds[name])
        measured = median(self.times[serial]) / median(self.times[best])
        return f" | {best.rsplit(', ', 1)[1]} predicted {seconds[serial] / seconds[best]:.2f} measured {measured:.2f} x"

    @property
    def right(self) -> bool:
        """Within 10 %, or within the best one's interquartile range."""
        low, _, high = quantiles(self.times[self.best], n=4)
        return self.lost <= 0.1 or median(self.times[str(self.plan)]) - median(self.times[self.best]) <= high - low

    def line(self) -> str:
        """For people."""
        cell, measured = self.cell, median(self.times[str(self.plan)])
        return (
            f"{cell.ranks} ranks {cell.nodes} nodes T={cell.tokens:<4} H={cell.hidden:<4} K={cell.topk}"
            f" | planned {self.plan!s:<24} predicted {(self.plan.seconds or 0) * 1e3:8.2f} ms measured"
            f" {measured * 1e3:8.2f} ms | best {self.best:<24} {median(self.times[self.best]) * 1e3:8.2f} ms"
            f" | {'right' if self.right else f'{self.lost:.0%} slower'}{self.speed_up()}"
        )


def run_cell(cell: Cell, names: list[Plan], rounds: int, around: Around) -> dict[str, list[float]]:
    """On a rank: seconds of each candidate, round by round. All give the same bits."""
    torch.set_num_threads(max(1, cores() // cell.ranks))
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    experts = EXPERTS_PER_RANK * cell.ranks
    shape = (EXPERTS_PER_RANK, 2 * cell.intermediate, cell.hidden)
    weights = Experts(
        torch.randn(shape, generator=generator) * cell.hidden**-0.5,
        torch.randn(EXPERTS_PER_RANK, cell.hidden, cell.intermediate, generator=generator) * cell.intermediate**-0.5,
        placement=Placement.even(experts, cell.ranks),
    )
    ids = torch.rand(cell.tokens, experts, generator=generator).topk(cell.topk).indices
    routing = Routing(ids, torch.rand(cell.tokens, cell.topk, generator=generator))
    x = torch.randn(cell.tokens, cell.hidden, generator=generator)
    topology = Topology.split(cell.ranks, cell.nodes)
    with around(), Runtime(max_tokens=cell.tokens, backend="cpu", timeout=120, topology=topology) as rt:
        first = {plan.exchange: rt.moe(x, routing, weights, plan=Plan("split", plan.exchange)) for plan in names}
        for plan in names:
            if not torch.equal(rt.moe(x, routing, weights, plan=plan), first[plan.exchange]):
                raise AssertionError(f"{plan} gives other bits than split, {plan.exchange}")
        return interleaved(
            {str(plan): lambda plan=plan: rt.moe(x, routing, weights, plan=plan) for plan in names}, rounds
        )


def outcome(pool: RankPool, cell: Cell, measured: Measured, rounds: int, around: Around) -> Outcome:
    """Plan and measure one cell."""
    plan = cell.plan(measured)
    names = [Plan(c.pipeline, c.exchange, c.chunks) for c in plan.candidates if c.seconds is not None]
    results = pool.run(run_cell, cell, names, rounds, around)
    times = {str(p): [max(r) for r in zip(*(result[str(p)] for result in results), strict=True)] for p in names}
    return Outcome(cell, plan, times)


def main() -> None:
    """Measure the machine, then every cell; print a line for each and the share of right choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nodes", default="1,2")
    parser.add_argument("--tokens", default="1,4,16,64,256,1024")
    parser.add_argument("--shapes", default="512x256x4,1024x512x8", help="hidden x intermediate x top-k")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--link", type=float, default=0.0, help="bytes per second between two nodes; 0: no proxy")
    parser.add_argument("--phase", choices=("decode", "prefill"), default="decode", help="prefill: no decode pipeline")
    parser.add_argument("--all", action="store_true", help="show every candidate")
    chosen = parser.parse_args()
    with ExitStack() as stack:
        around: Around = nullcontext
        if chosen.link:
            link = stack.enter_context(ThrottledLink(bytes_per_second=chosen.link))
            around = functools.partial(throttled, link.address)
        measured = next(event for event in measure(chosen.ranks, around=around) if isinstance(event, Measured))
        pool = stack.enter_context(RankPool(chosen.ranks))
        outcomes = []
        for cell in cells(chosen):
            outcomes.append(outcome(pool, cell, measured, chosen.rounds, around))
            print(outcomes[-1].line(), flush=True)
            if chosen.all:
                print(details(outcomes[-1]), flush=True)
    right = sum(each.right for each in outcomes)
    print(f"planner right in {right} of {len(outcomes)} cells")


def cells(chosen: argparse.Namespace) -> Iterator[Cell]:
    """What is to be run."""
    for shape in chosen.shapes.split(","):
        hidden, intermediate, topk = map(int, shape.split("x"))
        for nodes in map(int, chosen.nodes.split(",")):
            for tokens in map(int, chosen.tokens.split(",")):
                yield Cell(chosen.ranks, nodes, tokens, hidden, intermediate, topk, chosen.phase)


def details(found: Outcome) -> str:
    """Every candidate's prediction beside its measurement."""
    predicted = {candidate.name: candidate.seconds or 0.0 for candidate in found.plan.candidates}
    return "\n".join(
        f"    {name:<26} predicted {predicted[name] * 1e3:8.2f} ms, measured {median(times) * 1e3:8.2f} ms"
        for name, times in found.times.items()
    )


if __name__ == "__main__":
    main()
