"""What `moeloom plan` works out and prints: the best way to run a layer, for each number of tokens and of nodes."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeloom import machine_cache
from moeloom.cli.drawings import (
    DRAWING_ENDINGS,
    TRACE_ENDINGS,
    bytes_text,
    check_file,
    draw_roofline,
    predicted_events,
    save_trace,
    time_text,
)
from moeloom.cli.run import SYNTHETIC_ROUTING, RecipeName, load_routing, one_model
from moeloom.config import RECIPES
from moeloom.errors import CapabilityError
from moeloom.models import ModelShape
from moeloom.plan.choices import Choices, Recorded, Skewed, Uniform
from moeloom.plan.cost import ASSUMED, fused_time, unknown_rates
from moeloom.plan.efficiencies import GPU
from moeloom.plan.efficiency import RESOURCES, Efficiency
from moeloom.plan.flow import expected_flow
from moeloom.plan.machines import MACHINES
from moeloom.plan.plan import EXCHANGES, WORDS, Candidate, Plan
from moeloom.plan.planner import choose
from moeloom.plan.problem import Domains, Problem
from moeloom.plan.strategies import Setting, candidates
from moeloom.plan.work import layer_work

PhaseName = Literal["decode", "prefill", "train"]
CPU = "cpu"
MAX_GPUS = 65536  # a second per row
MAX_TOKENS = 1 << 30
WIDE = 120  # of what is no terminal: a table in a file should not be folded
COLUMNS: dict[str, Literal["left", "right"]] = {
    "tokens": "right", "pipeline": "left", "exchange": "left", "chunks": "right", "time": "right", "bound by": "left",
    "roofline": "right", "memory": "right", "runner-up": "left", "slower": "right",
}  # fmt: skip
FULL_TABLE, NODES_COLUMN = 112, 8  # places that they take
PIPELINE_STYLES = {"split": "cyan", "mega": "magenta", "decode": "green"}


@dataclass(frozen=True, kw_only=True)
class Query:
    """What was asked for. Raises ValueError, naming the option, for what cannot be planned.

    machine: a name of `moeloom.plan.machines`, or "cpu" for this one as measured. gpus_per_node: None takes as many as
    the machine usually has. tokens: per GPU, a row for each. sweep: also fewer nodes: 1, 2, 4, ...
    """

    model: str = "deepseek-v3"
    machine: str = "h200"
    gpus_per_node: int | None = None
    nodes: int = 1
    tokens: tuple[int, ...] = (128,)
    phase: PhaseName = "decode"
    recipe_name: RecipeName = "bf16"
    routing: str = "uniform"
    sweep: bool = False

    def __post_init__(self) -> None:
        if self.machine != CPU and self.machine not in MACHINES:
            raise ValueError(f"--machine is {self.machine!r}; allowed: {', '.join(MACHINES)}, {CPU} (this one)")
        if self.nodes * self.num_per_node > MAX_GPUS:
            raise ValueError(
                f"--nodes is {self.nodes}: {self.nodes * self.num_per_node} GPUs; allowed: up to {MAX_GPUS}"
            )
        one_model(self.model)  # raises
        flops = self.setting(1).machine.flops
        if self.recipe_name not in flops:
            raise ValueError(
                f"--recipe is {self.recipe_name}, which {self.machine} does not compute; allowed: {', '.join(flops)}"
            )
        if self.phase == "train" and RECIPES[self.recipe_name].quantized:
            raise ValueError(f"--phase is train, but --recipe {self.recipe_name} has no gradient; use fp32 or bf16")

    @property
    def shape(self) -> ModelShape:
        """The model's layer."""
        return one_model(self.model)

    @cached_property
    def num_per_node(self) -> int:
        """GPUs in each node."""
        if self.gpus_per_node is not None:
            return self.gpus_per_node
        return (machine_cache.load().machine if self.machine == CPU else MACHINES[self.machine]).ranks_per_domain

    @property
    def node_counts(self) -> list[int]:
        """With sweep powers of two below `nodes`; `nodes` last."""
        below = range((self.nodes - 1).bit_length()) if self.sweep else ()
        return [*(1 << power for power in below), self.nodes]

    @cached_property
    def choices(self) -> Choices:
        """How tokens choose experts."""
        if self.routing not in SYNTHETIC_ROUTING:
            ids = load_routing(self.routing, self.shape.num_choices).topk_idx
            return Recorded(tuple(map(tuple, ids.masked_fill(ids >= self.shape.num_experts, -1).tolist())))
        return Skewed() if self.routing == "skewed" else Uniform()

    def setting(self, nodes: int) -> Setting:
        """So many nodes of the machine."""
        domains = Domains(nodes * self.num_per_node, nodes)
        if self.machine != CPU:
            return Setting(MACHINES[self.machine], domains, GPU, self.choices)
        measured = machine_cache.load().for_ranks(self.num_per_node, machine_cache.cores())
        return Setting(measured.machine, domains, measured.efficiencies, self.choices)

    def problem(self, tokens: int) -> Problem:
        """One layer with so many tokens per GPU."""
        shape = self.shape
        num_topk = len(self.choices.rows[0]) if isinstance(self.choices, Recorded) else shape.num_topk
        recipe = RECIPES[self.recipe_name]
        return Problem(tokens, shape.expert_hidden, shape.num_experts, num_topk, recipe, self.phase, shape.intermediate)


@dataclass(frozen=True)
class Output:
    """Where the answer goes. Raises ValueError, naming the option, for files that cannot be written.

    explain: print `Plan.explain` of every row, not only of a single one. plot: of all rows of the most nodes. trace: of
    the only row.
    """

    explain: bool = False
    as_json: bool = False
    plot: str = ""
    trace: str = ""

    def __post_init__(self) -> None:
        if self.plot:
            check_file("--plot", self.plot, DRAWING_ENDINGS)
        if self.trace:
            check_file("--trace", self.trace, TRACE_ENDINGS)

    def check(self, query: Query) -> None:
        """Raise ValueError if what was asked for does not fit the query."""
        if self.trace and (len(query.tokens) > 1 or query.sweep):
            raise ValueError(f"--trace is {self.trace!r}: of one plan; give one number of --tokens, and no --sweep")


@dataclass(frozen=True)
class Row:
    """The answer for one number of tokens and of nodes. plan: None if nothing can run, then `note` says why.

    limits: for each resource the seconds below which it lets no implementation be.
    """

    tokens: int
    nodes: int
    gpus: int
    plan: Plan | None
    limits: dict[str, float]
    note: str = ""

    @property
    def best(self) -> Candidate | None:
        """What the plan takes."""
        return self.plan.chosen if self.plan else None

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest of the others."""
        return min((c for c in self.possible if c is not self.best), key=lambda c: c.seconds or 0.0, default=None)

    @property
    def possible(self) -> list[Candidate]:
        """Candidates that can run."""
        return [c for c in self.plan.candidates if c.seconds is not None] if self.plan else []

    @property
    def slower(self) -> float | None:
        """The runner-up's time over the best one's."""
        best, second = self.best, self.runner_up
        return second.seconds / best.seconds if best and second and best.seconds and second.seconds else None

    @property
    def share(self) -> float | None:
        """Of the machine's roofline that the best plan reaches."""
        plan = self.plan
        return plan.roofline[0] / plan.seconds if plan and plan.roofline and plan.seconds else None

    def to_json(self) -> dict[str, Any]:
        """As plain data; `plan` is `Plan.to_json`."""
        best, second = self.best, self.runner_up
        return {
            "tokens": self.tokens, "nodes": self.nodes, "gpus": self.gpus,
            "name": str(self.plan) if self.plan else None, "seconds": best.seconds if best else None,
            "bound": best.bound if best else None, "share_of_roofline": self.share,
            "memory_bytes": best.memory_bytes if best else None,
            "runner_up": second.name if second else None, "runner_up_ratio": self.slower,
            "limits": self.limits, "note": self.note, "plan": self.plan.to_json() if self.plan else None,
        }  # fmt: skip


def parse_range(text: str) -> tuple[int, ...]:
    """A number, several with commas, or `a..b`: both ends and the powers of two between. Raises ValueError.

    >>> parse_range("3..20,100")
    (3, 4, 8, 16, 20, 100)
    """
    found: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        if not (first.strip().isdecimal() and (last.strip().isdecimal() or not dots)):
            raise ValueError(f"--tokens is {text!r}; give a number, several like 1,64,4096, or a range like 1..8192")
        low, high = int(first), int(last or first)
        if not 1 <= low <= high <= MAX_TOKENS:
            raise ValueError(f"--tokens is {text!r}; numbers must rise and be in 1..{MAX_TOKENS}")
        powers = (1 << power for power in range(low.bit_length(), high.bit_length()))
        found += [low, *powers, high]
    return tuple(dict.fromkeys(found))


def show_plans(console: Console, query: Query, output: Output) -> bool:
    """Work out the rows, print them and write the files; whether any has a plan. Raises OSError for a file."""
    rows = list(plan_rows(query))
    found = any(row.plan for row in rows)
    of_most = [row for row in rows if row.nodes == query.nodes]
    if output.plot and any(row.plan for row in of_most):
        draw_roofline(of_most, output.plot, title(query, query.nodes))
    if output.trace and rows[0].plan:
        text = f"{title(query, query.nodes)}, {rows[0].tokens} tokens: {rows[0].plan}"
        save_trace(predicted_events(rows[0].plan), output.trace, text)
    if output.as_json:
        console.print_json(json.dumps([row.to_json() for row in rows]), indent=1, highlight=False)
    else:
        print_plans(console, query, rows, output.explain or len(rows) == 1)
    return found


def plan_rows(query: Query) -> Iterator[Row]:
    """Rows in the order of the table: by nodes, then tokens."""
    for nodes in query.node_counts:
        setting = query.setting(nodes)
        for tokens in query.tokens:
            problem = query.problem(tokens)
            row = Row(tokens, nodes, setting.domains.num_ranks, None, resource_limits(problem, setting))
            try:
                yield replace(row, plan=choose(problem, setting))
            except CapabilityError:
                reasons = dict.fromkeys(candidate.note for candidate in candidates(problem, setting))
                yield replace(row, note=f"no plan: {'; '.join(reasons)}")


def resource_limits(problem: Problem, setting: Setting) -> dict[str, float]:
    """Seconds that each resource takes at least, whatever the exchange; those that have nothing to do are left out."""
    times = []
    for exchange in EXCHANGES[: 1 + (setting.domains.num_nodes > 1)]:
        works = layer_work(problem, expected_flow(problem, setting.domains, exchange, setting.choices))
        times.append(fused_time(works, setting.machine, problem.recipe.name, Efficiency()))
    least = {name: min(getattr(time, name) for time in times) for name in RESOURCES}
    return {name: seconds for name, seconds in least.items() if seconds}


def print_plans(console: Console, query: Query, rows: list[Row], explain: bool) -> None:
    """The table, what its numbers stand on and, if wanted, `Plan.explain` of every row."""
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    shape, setting = query.shape, query.setting(query.nodes)
    topk = query.problem(1).num_topk
    _say(
        console,
        f"{shape.name}: hidden {shape.expert_hidden}, intermediate {shape.intermediate}, {shape.num_experts} experts,"
        f" top-{topk}, {query.recipe_name}, {query.phase}, {setting.choices} routing",
        "bold",
    )
    _say(console, _machine_line(query, setting))
    console.print(_table(query, rows, console))
    for line in _notes(query, setting, rows):
        _say(console, line, "dim")
    for row in rows if explain else ():
        if row.plan is not None:
            console.print()
            if len(rows) > 1:
                _say(console, f"{row.tokens} tokens, {row.nodes} x {query.num_per_node}", "bold")
            for line in row.plan.explain().splitlines():
                _say(console, line, indent=" " * 10)


def title(query: Query, nodes: int) -> str:
    """For drawings."""
    return (
        f"{query.model} on {nodes} x {query.num_per_node} {query.machine},"
        f" {query.recipe_name}, {query.phase}, {query.routing} routing"
    )


def _machine_line(query: Query, setting: Setting) -> str:
    machine = setting.machine
    parts = [f"{machine.flops[query.recipe_name] / 1e12:.4g} TFLOP/s"]
    rates: list[tuple[str, float | None]] = [
        ("memory", machine.memory_bandwidth),
        ("scale-up", machine.scale_up_bandwidth),
    ]
    rates += [("scale-out", machine.scale_out_bandwidth)] if query.nodes > 1 else []
    parts += [f"{name} {rate / 1e9:.4g} GB/s" for name, rate in rates if rate is not None]
    nodes = "1 node" if query.nodes == 1 else f"{'up to ' * query.sweep}{query.nodes} nodes"
    return f"{machine.name}: {nodes} of {query.num_per_node}; {', '.join(parts)}"


def _table(query: Query, rows: list[Row], console: Console) -> Table:
    """Wide, or with fewer columns for narrow terminals."""
    wide = console.width >= FULL_TABLE + NODES_COLUMN * query.sweep
    plain = not console.is_terminal or console.options.ascii_only
    frame = box.ASCII if plain else box.ROUNDED
    look: dict[str, Any] = {"box": frame} if wide else {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0)}
    table = Table(header_style="bold", **look)
    if query.sweep:
        table.add_column("nodes", justify="right", no_wrap=True)
    for name, side in COLUMNS.items():
        if wide or name not in ("exchange", "chunks", "memory"):
            shown = "plan" if name == "pipeline" and not wide else name
            table.add_column(shown, justify=side, no_wrap=name != "runner-up")
    before = None
    for row in rows:
        if before not in (None, row.nodes):
            table.add_section()
        cells = [str(row.nodes) if row.nodes != before else ""] * query.sweep
        table.add_row(*cells, *_cells(row, wide))
        before = row.nodes
    return table


def _cells(row: Row, wide: bool) -> list[str | Text]:
    best, second = row.best, row.runner_up
    if best is None or best.seconds is None:
        return [str(row.tokens), "none", *["-"] * (len(COLUMNS) - 2 if wide else len(COLUMNS) - 5)]
    style = PIPELINE_STYLES[best.pipeline]
    plan: list[str | Text] = [Text(best.pipeline, style), best.exchange, str(best.chunks)]
    return [
        str(row.tokens),
        *(plan if wide else [Text(_short(best), style)]),
        time_text(best.seconds),
        WORDS.get(best.bound, best.bound),
        "-" if row.share is None else f"{row.share:.0%}",
        *([bytes_text(best.memory_bytes)] if wide else []),
        _short(second) if second else "-",
        f"+{row.slower - 1:.1%}" if row.slower is not None else "-",
    ]


def _short(candidate: Candidate) -> str:
    """As `Candidate.name`, in 16 places."""
    return candidate.name.removesuffix(" chunks")


def _notes(query: Query, setting: Setting, rows: list[Row]) -> Iterator[str]:
    """What a reader must know about the numbers."""
    who, machine = "rank" if query.machine == CPU else "GPU", setting.machine
    yield (
        f"Time: one layer's forward on the busiest {who}, predicted. Tokens: per {who}. Roofline: the share of it that"
        " the plan reaches. Memory: beside the weights."
    )
    sources = dict.fromkeys(efficiency.source for efficiency in setting.efficiencies.values())
    yield f"Efficiencies: {'; '.join(sources)}."
    most = max(rows, key=lambda row: row.nodes)
    unknown = unknown_rates(machine, query.recipe_name, most.nodes, most.gpus)
    if unknown:
        values = (f"{name} {ASSUMED[name.split()[0]] / 1e9:g} GB/s" for name in unknown)
        yield f"Assumed, as {machine.name} does not say: {', '.join(values)}."
    if most.gpus > query.shape.num_experts:
        yield f"{most.gpus} {who}s share {query.shape.num_experts} experts: some have none."
    for row in rows:
        if row.plan is None:
            yield f"{row.tokens} tokens, {row.nodes} node(s): {row.note}"


def _say(console: Console, text: str, style: str | None = None, indent: str = "") -> None:
    """Print a line, wrapped on a terminal only."""
    lines = [text]
    if console.is_terminal or not indent:
        lines = textwrap.wrap(text, console.width, subsequent_indent=indent, break_on_hyphens=False) or [""]
    console.print("\n".join(lines), style=style, markup=False, soft_wrap=True)
