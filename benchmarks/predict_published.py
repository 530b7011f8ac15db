"""Does the planner's model predict what others have published, and what moeloom takes?

Each published system is one `Efficiency` of few numbers. `--fit` chooses them from its rows of odd number (the first,
third, ... in the order of the files); the rows of even number are predicted. Times come from the planner's own
functions: `expected_flow`, `layer_work`, `stage_time`, `fused_time`. A bandwidth is counted as its source counts it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from moeloom.config import RECIPES
from moeloom.plan.choices import Choices, Uniform
from moeloom.plan.cost import fused_time, stage_time
from moeloom.plan.efficiency import Efficiency, Rates
from moeloom.plan.flow import Flow, expected_flow
from moeloom.plan.machines import machine
from moeloom.plan.problem import Domains, Problem
from moeloom.plan.work import Work, layer_work, row_bytes, weight_bytes

PUBLISHED = Path(__file__).parent / "published"
STORED = PUBLISHED / "efficiencies.json"
DIFFERENT = 1.1  # alternatives that differ by less are equally good

Known = Mapping[str, Efficiency]


@dataclass(frozen=True)
class Grouped:
    """K experts of the best groups: every set of `chosen` of the `groups` groups, then every set of K of their experts,
    is equally likely (DeepSeek-V3 has 4 of 8).

    >>> [round(chance, 3) for chance in Grouped(8, 4).reached([64, 128], 256, 8)]
    [0.732, 0.732]
    """

    groups: int
    chosen: int

    def chances(self, num_experts: int, num_topk: int) -> Sequence[float]:
        """See `Choices`."""
        return Uniform().chances(num_experts, num_topk)

    def reached(self, bounds: Sequence[int], num_experts: int, num_topk: int) -> list[float]:
        """See `Choices`: over all sets of groups, the mean chance that K of their experts are not all elsewhere."""
        return list(_grouped(self.groups, self.chosen, tuple(bounds), num_experts, num_topk))

    def __str__(self) -> str:
        return f"{self.chosen} of {self.groups} groups"


@lru_cache(maxsize=256)
def _grouped(groups: int, chosen: int, bounds: tuple[int, ...], num_experts: int, num_topk: int) -> tuple[float, ...]:
    size = num_experts // groups
    sets = list(combinations(range(groups), chosen))
    chances = []
    for begin, end in zip([0, *bounds], bounds, strict=False):
        inside = [max(0, min(end, (group + 1) * size) - max(begin, group * size)) for group in range(groups)]
        numbers = [sum(inside[group] for group in taken) for taken in sets]
        misses = sum(math.comb(chosen * size - number, num_topk) for number in numbers) / len(sets)
        chances.append(1.0 - misses / math.comb(chosen * size, num_topk))
    return tuple(chances)


ROUTINGS: dict[str, Choices] = {"uniform": Uniform(), "4 of 8 groups": Grouped(8, 4)}


@dataclass(frozen=True)
class Row:
    """One published number.

    number: within its system, from 1. what: dispatch, experts, combine, layer, or product: of matrices, product =
    (groups, N, K) with `tokens` rows for each group. layout: received rows are one for each "expert" or "rank".
    counted: which bytes a bandwidth counts. unit: us, GB/s, TFLOP/s, or "x SYSTEM": the time as a multiple of
    another's. why: it is far off.
    """

    system: str
    number: int
    source: str
    machine: str
    what: str
    unit: str
    tokens: int
    value: float
    why: str = ""
    problem: Problem | None = None
    product: tuple[int, int, int] | None = None
    ranks: int = 1
    nodes: int = 1
    exchange: str = "direct"
    routing: str = "uniform"
    layout: str = "expert"
    counted: str = ""

    @property
    def domains(self) -> Domains:
        """Where it ran."""
        return Domains(self.ranks, self.nodes)

    @property
    def title(self) -> str:
        """For people."""
        name = f"{self.what} on {self.ranks} x {self.machine}" + (f", {self.nodes} nodes" if self.nodes > 1 else "")
        if self.product:
            groups, n, k = self.product
            return f"{name}: {groups} x {self.tokens} rows, N {n}, K {k}"
        assert self.problem
        p = self.problem
        if p.intermediate is not None:  # of a whole layer, or a stage of one
            return f"{name}: {self.tokens} tokens, {p.hidden}/{p.width}/{p.num_experts}/{p.num_topk}"
        return f"{name}: {self.tokens} tokens, {p.hidden}, {p.recipe.name}, a row per {self.layout}"


@dataclass(frozen=True)
class System:
    """How a published system is described; see systems.toml."""

    kind: str
    pairs: bool = False
    given: Mapping[str, float] | None = None
    like: Mapping[str, str] | None = None
    free: Mapping[str, tuple[float, float]] | None = None
    tile_rows: tuple[int, ...] = (1,)

    def efficiency(self, values: Iterable[float], tile_rows: int, known: Known) -> Efficiency:
        """With values for the free numbers, in their order. `known`: the systems that it is like."""
        stages = {stage: known[name].rates(stage) for stage, name in (self.like or {}).items()}
        exposed = known[self.like["experts"]].exposed if self.like and "experts" in self.like else 0.0
        for path, value in [*(self.given or {}).items(), *zip(self.free or (), values, strict=True)]:
            if path == "exposed":
                exposed = value
                continue
            names, _, number = path.partition(".")
            for name in names.split("+"):
                stages[name] = replace(stages.get(name, Rates()), **{number: value})
        return Efficiency(stages, exposed=exposed, tile_rows=tile_rows, source="")


def load_rows() -> list[Row]:
    """All published numbers, in the order of the files. A list in a table's `ranks` or `nodes` has one for each row."""
    rows: list[Row] = []
    counts: dict[str, int] = {}
    allowed = {f.name for f in fields(Row)} | {"rows"}
    for path in ("deepep.toml", "layers.toml", "grouped_gemm.toml", "moeloom.toml"):
        for table in tomllib.loads((PUBLISHED / path).read_text())["table"]:
            assert set(table) <= allowed, f"{path}: {sorted(set(table) - allowed)} is not known"
            for place, (tokens, value, *why) in enumerate(table["rows"]):
                entries = {
                    k: v[place] if k in ("ranks", "nodes") and isinstance(v, list) else v for k, v in table.items()
                }
                del entries["rows"]
                if "problem" in entries:
                    entries["problem"] = _problem(tokens, **entries["problem"])
                if "product" in entries:
                    entries["product"] = tuple(entries["product"][name] for name in ("groups", "n", "k"))
                number = counts[table["system"]] = counts.get(table["system"], 0) + 1
                rows.append(Row(number=number, tokens=tokens, value=float(value), why="".join(why), **entries))
    return rows


def _problem(tokens: int, recipe: str, **shape: int) -> Problem:
    name, _, reduction = recipe.partition("/")
    found = RECIPES[name]
    return Problem(tokens, recipe=found.with_reduction(reduction) if reduction else found, **shape)  # type: ignore[arg-type]


def load_systems() -> dict[str, System]:
    """What systems.toml says."""
    data = tomllib.loads((PUBLISHED / "systems.toml").read_text())
    return {
        name: System(**{k: tuple(v) if k == "tile_rows" else v for k, v in entry.items()})
        for name, entry in data.items()
    }


def load_efficiencies() -> dict[str, Efficiency]:
    """What was fitted and stored."""
    return {name: Efficiency.from_json(entry) for name, entry in json.loads(STORED.read_text()).items()}


@lru_cache(maxsize=4096)
def flow_of(row: Row, pairs: bool) -> Flow:
    """The planner's flow; without de-duplication every row of a pair counts as a token, and ordered by rank every token
    that arrives as a pair.
    """
    assert row.problem
    flow = expected_flow(row.problem, row.domains, row.exchange, ROUTINGS[row.routing])  # type: ignore[arg-type]
    if pairs:
        return replace(flow, tokens=flow.pairs, scale_up=flow.pairs_up, scale_out=flow.pairs_out)
    return replace(flow, pairs=flow.tokens) if row.layout == "rank" else flow


@lru_cache(maxsize=8192)
def works_of(row: Row, pairs: bool, tile_rows: int) -> tuple[Work, ...]:
    """The planner's work of a row's stages. A single product is no stage of a layer: its work is written down here."""
    if row.product:
        groups, n, k = row.product
        rows, weights, fp8 = groups * row.tokens, n * k * weight_bytes(RECIPES["fp8"]), RECIPES["fp8"]
        moved = groups * weights + rows * (row_bytes(fp8, k) + 2 * n)
        return (Work("experts", flops=2.0 * rows * n * k, memory_bytes=moved, experts=groups),)
    assert row.problem
    works = layer_work(row.problem, flow_of(row, pairs), tile_rows)
    return works if row.what == "layer" else tuple(work for work in works if work.stage == row.what)


def seconds(row: Row, system: System, efficiency: Efficiency) -> float:
    """Predicted time of what a row measured."""
    works, recipe = works_of(row, system.pairs, efficiency.tile_rows), row.problem.recipe.name if row.problem else "fp8"
    where = machine(row.machine)
    if system.kind == "fused":
        return fused_time(works, where, recipe, efficiency).seconds
    return math.fsum(stage_time(work, where, recipe, efficiency).seconds for work in works)


@lru_cache(maxsize=1024)
def counted_bytes(row: Row) -> float:
    """Bytes by which the source divides: each row that a rank receives, or each (token, node), local ones included."""
    assert row.problem
    problem, (version, link) = row.problem, row.counted.split()
    there = problem.hidden + 4 * problem.hidden // 128 + (12 * problem.num_topk if version == "v2" else 0)
    each = there if row.what == "dispatch" else 2 * problem.hidden
    if link == "nvlink":
        return each * flow_of(row, False).tokens
    ends = row.domains.expert_bounds(problem.num_experts)
    nodes = [ends[rank - 1] for rank in row.domains.rank_bounds]
    to_node = ROUTINGS[row.routing].reached(nodes, problem.num_experts, problem.num_topk)
    return each * problem.tokens * math.fsum(to_node)


def converted(row: Row, number: float) -> float:
    """Seconds from a number in the row's unit. Of a rate it is its own inverse."""
    if row.unit == "TFLOP/s":
        assert row.product
        return 2.0 * math.prod(row.product) * row.tokens / 1e12 / number
    return counted_bytes(row) / 1e9 / number if row.unit == "GB/s" else number / 1e6


def predicted(row: Row, efficiency: Efficiency, systems: Mapping[str, System], known: Known) -> float:
    """In the row's unit."""
    time = seconds(row, systems[row.system], efficiency)
    if row.unit.startswith("x "):
        other = row.unit.removeprefix("x ")
        return time / seconds(row, systems[other], known[other])
    return time * 1e6 if row.unit == "us" else converted(row, time)


@dataclass(frozen=True)
class Prediction:
    """A row, what the model says, and whether the row was fitted to."""

    row: Row
    value: float
    fitted: bool

    @property
    def error(self) -> float:
        """Absolute, as a share of what was published."""
        return abs(self.value / self.row.value - 1)

    @property
    def ratio(self) -> float:
        """How far off, whichever way: 1 or more."""
        return max(self.value / self.row.value, self.row.value / self.value)


def predictions(rows: Iterable[Row], systems: Mapping[str, System], known: Known) -> list[Prediction]:
    """Of all rows."""
    return [
        Prediction(row, predicted(row, known[row.system], systems, known), fitted(row, systems[row.system]))
        for row in rows
    ]


def fitted(row: Row, system: System) -> bool:
    """Odd numbers are fitted, of the systems that have something to fit."""
    return bool(system.free) and row.number % 2 == 1


@dataclass(frozen=True)
class Choice:
    """One problem for which several systems published: times of each, published and predicted, in any unit."""

    title: str
    published: Mapping[str, float]
    predicted: Mapping[str, float]

    @property
    def differs(self) -> bool:
        """Whether it matters what is chosen."""
        return max(self.published.values()) > DIFFERENT * min(self.published.values())

    @property
    def chosen(self) -> str:
        """By the model."""
        return min(self.predicted, key=lambda name: self.predicted[name])

    @property
    def right(self) -> bool:
        """The choice takes at most 10 % more than the best one; of two that differ, it is the best one."""
        return self.published[self.chosen] <= DIFFERENT * min(self.published.values())

    def orders(self) -> list[bool]:
        """For each two that differ by more than 10 %: whether the model has their order right."""
        apart = [
            (a, b)
            for a, b in combinations(self.published, 2)
            if max(self.published[a], self.published[b]) > DIFFERENT * min(self.published[a], self.published[b])
        ]
        return [(self.published[a] < self.published[b]) == (self.predicted[a] < self.predicted[b]) for a, b in apart]


def choices(found: Iterable[Prediction]) -> list[Choice]:
    """All problems with alternatives. A system's best number counts where it has several for one problem."""
    published: dict[tuple, dict[str, float]] = {}
    said: dict[tuple, dict[str, float]] = {}
    titles: dict[tuple, str] = {}
    for one in found:
        row = one.row
        recipe = row.problem.recipe.name if row.problem else ""
        shape = replace(row.problem, recipe=RECIPES[recipe]) if row.problem else row.product
        key = (row.what, shape, row.tokens, row.machine, row.domains, row.layout, row.routing, row.unit[:2] == "x ")
        titles[key] = row.title
        times, model = published.setdefault(key, {}), said.setdefault(key, {})
        if row.unit.startswith("x "):
            other = row.unit.removeprefix("x ")
            times |= {row.system: row.value, other: 1.0}
            model |= {row.system: one.value, other: 1.0}
            continue
        times[row.system] = min(converted(row, row.value), times.get(row.system, math.inf))
        model[row.system] = one.value / 1e6 if row.unit == "us" else converted(row, one.value)
    return [Choice(titles[key], times, said[key]) for key, times in published.items() if len(times) > 1]


def fit(rows: Sequence[Row], systems: Mapping[str, System], starts: int = 6) -> dict[str, Efficiency]:
    """Each system's numbers, from its rows of odd number: least soft-L1 logarithm of predicted / published."""
    known: dict[str, Efficiency] = {}
    for name, system in systems.items():  # those that others are like come first
        mine = [row for row in rows if row.system == name and fitted(row, system)]
        if not mine:
            known[name] = system.efficiency((), system.tile_rows[0], known)
            continue
        tries = [_fit(mine, systems, tile, known, start) for tile in system.tile_rows for start in range(starts)]
        known[name] = min(tries, key=lambda each: each[0])[1]
    return known


def _fit(
    rows: Sequence[Row], systems: Mapping[str, System], tile_rows: int, known: Known, start: int
) -> tuple[float, Efficiency]:
    """From one starting point: the cost, and numbers of three digits."""
    from scipy.optimize import least_squares  # only here: nothing else needs it

    system = systems[rows[0].system]
    bounds = list((system.free or {}).values())
    generator = random.Random(start)
    first = [0.5 if start == 0 else generator.uniform(0.05, 0.95) for _ in bounds]

    def numbers(places: Iterable[float]) -> list[float]:
        return [float(f"{low + place * (high - low):.6g}") for place, (low, high) in zip(places, bounds, strict=True)]

    def wrong(places: Iterable[float]) -> list[float]:
        efficiency = system.efficiency(numbers(places), tile_rows, known)
        return [math.log(predicted(row, efficiency, systems, known) / row.value) for row in rows]

    best = least_squares(wrong, first, bounds=(0.0, 1.0), loss="soft_l1", f_scale=0.1, diff_step=1e-4)
    rounded = [float(f"{number:.3g}") for number in numbers(best.x)]
    return float(best.cost), system.efficiency(rounded, tile_rows, known)


def report(found: Sequence[Prediction]) -> list[str]:
    """Tables for people, as Markdown."""
    lines, names = [], list(dict.fromkeys(one.row.system for one in found))
    for name in names:
        lines += ["", f"### {name}", "", "| # | what | predicted | published | error | |", "|--:|--|--:|--:|--:|--|"]
        for one in (one for one in found if one.row.system == name):
            note = "; ".join(filter(None, ("fitted" if one.fitted else "", one.row.why)))
            error, published = f"{one.value / one.row.value - 1:+.0%}", f"{one.row.value:g} {one.row.unit}"
            lines.append(f"| {one.row.number} | {one.row.title} | {one.value:.4g} | {published} | {error} | {note} |")
    return [*summary(found), *choice_lines(choices(found)), *lines]


def summary(found: Sequence[Prediction]) -> list[str]:
    """For each system and for all: median absolute errors, the worst row, and how many rows are 2x off."""
    lines = ["| system | rows | fitted: median error | predicted: median error | worst ratio | off by more than 2x |"]
    lines.append("|--|--:|--:|--:|--:|--:|")
    names = list(dict.fromkeys(one.row.system for one in found))
    for name in [*names, "all"]:
        mine = [one for one in found if name in (one.row.system, "all")]
        kinds = [[one.error for one in mine if one.fitted is kind] for kind in (True, False)]
        errors = " | ".join(f"{median(kind):.1%}" if kind else "-" for kind in kinds)
        far = sum(one.ratio > 2 for one in mine)
        lines.append(f"| {name} | {len(mine)} | {errors} | {max(one.ratio for one in mine):.2f} | {far} |")
    return lines


def choice_lines(found: Sequence[Choice]) -> list[str]:
    """The table of choices, and the shares that are right."""
    apart = [one for one in found if one.differs]
    right = sum(one.right for one in apart)
    orders = [order for one in found for order in one.orders()]
    lines = [
        "",
        f"Choices: {len(found)} problems with alternatives, {len(apart)} where they differ by more than 10 %; right in"
        f" {right} ({right / len(apart):.0%}). Orders of two that differ"
        f" by more than 10 %: {sum(orders)} of {len(orders)} right ({sum(orders) / len(orders):.0%}).",
        "",
        "| problem | published: system, time of the best = 1 | predicted | |",
        "|--|--|--|--|",
    ]
    for one in found:
        cells = []
        for times in (one.published, one.predicted):
            least = min(times.values())
            cells.append(
                ", ".join(f"{name} {times[name] / least:.2f}" for name in sorted(times, key=times.__getitem__))
            )
        verdict = ("right" if one.right else "WRONG") if one.differs else "level"
        lines.append(f"| {one.title} | {cells[0]} | {cells[1]} | {verdict} |")
    return lines


def as_json(found: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Plain data, one entry for each row."""
    names = ("system", "number", "source", "unit", "why")
    return [
        {name: getattr(one.row, name) for name in names}
        | {"what": one.row.title, "published": one.row.value, "predicted": one.value, "fitted": one.fitted}
        for one in found
    ]


def main() -> None:
    """Print the tables; with --fit, what belongs into published/efficiencies.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit again and print the numbers; needs scipy")
    parser.add_argument("--json", action="store_true", help="the predictions as JSON")
    asked = parser.parse_args()
    rows, systems = load_rows(), load_systems()
    if asked.fit:
        print(json.dumps({name: each.to_json() for name, each in fit(rows, systems).items()}, indent=1))
        return
    found = predictions(rows, systems, load_efficiencies())
    print(json.dumps(as_json(found), indent=1) if asked.json else "\n".join(report(found)))


if __name__ == "__main__":
    main()
