"""What `moeloom run` prints: rich on a terminal, plain ASCII elsewhere, readable at 80 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from moeloom.cli.check import Verdict
from moeloom.cli.drawings import time_text
from moeloom.cli.run import SYNTHETIC_ROUTING, RankReport, Report, Settings, Step
from moeloom.meter import StageStats
from moeloom.plan.plan import WORDS, Plan

STAGES = ("dispatch", "experts", "combine", "backward")
MAX_BARS = 16
BUSIEST = 8
BAR_WIDTH = 40


def is_plain(console: Console) -> bool:
    """Whether the console should get ASCII only."""
    return not console.is_terminal or console.options.ascii_only


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[Step], None]]:
    """A function that shows a Step, on a terminal; nothing stays when it is done."""
    if not console.is_terminal:
        yield lambda step: None
        return
    columns = (TextColumn("{task.description:<14}"), BarColumn(BAR_WIDTH), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting ranks", total=None)

        def show(step: Step) -> None:
            total = step.total if step.total > 1 else None  # no total: the bar moves from side to side
            progress.update(task, description=step.phase, completed=step.done, total=total)

        yield show


def print_report(console: Console, settings: Settings, report: Report) -> None:
    """The whole report."""
    _print_title(console, settings, report)
    console.print(_stage_table(report.ranks, is_plain(console)))
    _print_notes(console, settings)
    console.print()
    _print_plan(console, settings, report)
    console.print()
    _print_load(console, settings, report)
    for what in report.ranks[0].verdicts:
        console.print()
        _print_verdict(console, settings, what, {one.rank: one.verdicts[what] for one in report.ranks})


def passed(report: Report) -> bool:
    """Whether no rank's check failed."""
    return all(verdict.passed for one in report.ranks for verdict in one.verdicts.values())


def _print_title(console: Console, settings: Settings, report: Report) -> None:
    shape, tokens = settings.shape, settings.tokens
    is_whole = settings.scale == 1 or settings.checkpoint
    name = shape.name if is_whole else f"{settings.model} at 1/{settings.scale} width"
    each = f"{_count(tokens[0], 'token')} each" if len(set(tokens)) == 1 else f"{', '.join(map(str, tokens))} tokens"
    routing = f"{settings.routing} routing"
    if settings.routing not in SYNTHETIC_ROUTING:
        routing = f"routing of {Path(settings.routing).name}"
    identity = f" (and {shape.num_identity_experts} identity)" if shape.num_identity_experts else ""
    say(
        console,
        f"{name}: hidden {shape.expert_hidden}, intermediate {shape.intermediate}, {shape.num_experts}{identity}"
        f" experts, top-{settings.num_topk}",
        style="bold",
    )
    say(
        console,
        f"{_count(settings.num_ranks, 'rank')} on {'GPUs of ' * (settings.device == 'cuda')}"
        f"{_count(report.topology.num_nodes, 'node')}, {each}, {routing},"
        f" {settings.recipe}, {report.plan.exchange}",
    )


def _stage_table(ranks: tuple[RankReport, ...], plain: bool) -> Table:
    """Stages by time and traffic. In each step a stage takes as long as on its slowest rank."""
    table = Table(box=box.ASCII if plain else box.ROUNDED, header_style="bold")
    table.add_column("stage")
    for title in ("time", "share", "within nodes", "between nodes", "rows"):
        table.add_column(title, justify="right")
    steps = list(zip(*(one.stages for one in ranks), strict=True))  # [step][rank] -> stages
    run = tuple(name for name in STAGES if name in steps[0][0])
    whole = mean(_seconds(stages, run) for step in steps for stages in step)
    for title, names in (*((name, (name,)) for name in run), ("total", run)):
        slowest = median(max(_seconds(stages, names) for stages in step) for step in steps)
        share = mean(_seconds(stages, names) for step in steps for stages in step) / whole
        used = [stages[name] for step in steps for stages in step for name in names]
        if title == "total":
            table.add_section()
        table.add_row(
            title,
            f"{slowest * 1e3:.2f} ms",
            f"{share:.0%}",
            _bytes(sum(one.scale_up_bytes for one in used) / len(steps)),
            _bytes(sum(one.scale_out_bytes for one in used) / len(steps)),
            f"{sum(one.rows for one in used) / len(steps):.0f}" if any(one.rows for one in used) else "-",
            style="bold" if title == "total" else None,
        )
    return table


def _print_notes(console: Console, settings: Settings) -> None:
    shared = settings.shape.num_shared_experts
    notes = [
        f"Time: the slowest rank's, median of {_count(settings.steps, 'step')}. Share: mean of all ranks.",
        "Bytes and rows: sums over the ranks, of one step.",
    ]
    if settings.device == "cuda":
        notes.append("On GPUs a stage's time is between events on its stream: waits for the host are in it.")
    if shared:
        notes.append(f"Not run here: the model's {_count(shared, 'shared expert')}.")
    for note in notes:
        say(console, note, style="dim")


def _print_plan(console: Console, settings: Settings, report: Report) -> None:
    """The plan that ran, what was expected of it and what it took."""
    plan, measured = report.plan, report.forward_seconds
    say(console, f"plan: {plan} ({plan.reason})", indent="  ")
    if plan.seconds and plan.chosen:
        bound = WORDS.get(plan.chosen.bound, plan.chosen.bound)
        say(
            console,
            f"predicted {time_text(plan.seconds)}, bound by {bound}; measured {time_text(measured)}:"
            f" {measured / plan.seconds:.2f} x as long",
        )
    else:
        say(console, f"measured {time_text(measured)}; no prediction: {_why_none(plan)}")
    others = [c for c in plan.candidates if c is not plan.chosen and c.seconds is not None]
    if others:
        second = min(others, key=lambda candidate: candidate.seconds or 0.0)
        is_better = (second.seconds or 0.0) < (plan.seconds or math.inf)
        words = "the planner would take" if is_better else "runner-up"
        say(console, f"{words}: {second.name}, predicted {time_text(second.seconds or 0.0)}")
    note = f"Both of a forward: the slowest rank's, median of {_count(settings.steps, 'step')}."
    if plan.chunks > 1:
        note += " Its stages overlap."
    say(console, note, style="dim")
    for line in plan.context[1:]:
        say(console, f"Predicted for {line.removeprefix('machine: ')}.", style="dim")


def _why_none(plan: Plan) -> str:
    """Why the planner does not know the plan that ran."""
    same = [c for c in plan.candidates if (c.pipeline, c.exchange) == (plan.pipeline, plan.exchange)]
    notes = [candidate.note for candidate in same if candidate.seconds is None]
    known = sorted(candidate.chunks for candidate in same)
    return notes[0] if notes else f"{plan.chunks} chunks; the planner looks at {', '.join(map(str, known))}"


def trace_title(settings: Settings, report: Report) -> str:
    """For a drawing of the last step."""
    return f"{settings.shape.name}, {_count(settings.num_ranks, 'rank')}, {settings.recipe}: {report.plan}"


def _print_load(console: Console, settings: Settings, report: Report) -> None:
    """Rows per expert, all of them or the busiest, and per rank."""
    placement = settings.placement
    load = [sum(counts) for counts in zip(*(one.load for one in report.ranks), strict=True)]
    experts, identity = load[: placement.num_experts], sum(load[placement.num_experts :])
    say(
        console,
        f"expert load: {_count(sum(experts), 'row')}, mean {mean(experts):.1f}, max {max(experts)}"
        f" ({_ratio(experts)} of the mean), {experts.count(0)} of {len(experts)} idle",
    )
    shown = list(range(len(experts)))
    if len(experts) > MAX_BARS:
        shown = sorted(shown, key=lambda expert: -experts[expert])[:BUSIEST]
    rank_of = {expert: rank for rank, slots in enumerate(placement.slots) for expert in slots}
    bar = "#" if is_plain(console) else "█"
    widths = (len(str(number)) for number in (len(experts) - 1, placement.num_ranks - 1, max(experts)))
    wide_id, wide_rank, wide_count = widths
    for expert in shown if any(experts) else ():
        label = f"  expert {expert:>{wide_id}}, rank {rank_of[expert]:>{wide_rank}}: {experts[expert]:>{wide_count}} "
        console.print(Text(label).append(bar * round(BAR_WIDTH * experts[expert] / max(experts)), style="cyan"))
    rest = [experts[expert] for expert in set(range(len(experts))) - set(shown)]
    if rest and any(experts):
        console.print(f"  {len(rest)} others: mean {mean(rest):.1f}, least {min(rest)}")
    per_rank = [sum(experts[expert] for expert in slots) for slots in placement.slots]
    listed = f"{', '.join(map(str, per_rank))} rows, " if len(per_rank) <= MAX_BARS else ""
    say(console, f"rank load: {listed}max {_ratio(per_rank)} of the mean")
    if identity:
        console.print(f"identity experts: {identity} rows, which stay where they are")


def _print_verdict(console: Console, settings: Settings, what: str, verdicts: dict[int, Verdict]) -> None:
    """One result's check on all ranks."""
    wrong = [rank for rank, verdict in verdicts.items() if not verdict.passed]
    dtype, of = settings.recipe_name, f" ({what})" if what != "result" else ""
    if not wrong:
        # the rank closest to its limit speaks for all
        breaks = "\n " if of else " \n"  # where it fits 80 columns
        worst = max(verdicts.values(), key=lambda one: one.error / one.allowed if one.allowed else 0.0)
        console.print(
            Text("check passed", "bold green").append(
                f"{of}: error {worst.error:.1e}, allowed {worst.allowed:.1e}{breaks[0]}"
                f"(twice that of PyTorch in {dtype}),"
                f"{breaks[1]}{_count(len(verdicts), 'rank')}, {_count(sum(settings.tokens), 'token')};"
                f" largest difference {max(one.max_difference for one in verdicts.values()):.1e}",
                "not bold default",
            )
        )
        return
    first = verdicts[wrong[0]]
    names = f"rank {wrong[0]}" if len(wrong) == 1 else f"ranks {', '.join(map(str, wrong))}"
    console.print(Text("check FAILED", "bold red").append(f"{of} on {names} of {len(verdicts)}", "not bold default"))
    say(
        console,
        f"rank {wrong[0]}: error {first.error:.1e}, allowed {first.allowed:.1e} (twice that of PyTorch in {dtype});"
        f" largest difference {first.max_difference:.1e}",
    )
    _print_wrong_row(console, settings, wrong[0], first)


def _print_wrong_row(console: Console, settings: Settings, rank: int, verdict: Verdict) -> None:
    row, placement = verdict.wrong, settings.placement
    assert row is not None
    rank_of = {expert: holder for holder, slots in enumerate(placement.slots) for expert in slots}
    experts = ", ".join(
        f"{expert} (rank {rank_of[expert]})" if expert in rank_of else f"{expert} (identity)"
        for expert in row.expert_ids
        if expert >= 0
    )
    say(console, f"first wrong row: rank {rank}, token {row.token}; experts {experts or 'none'}")
    say(console, f"its worst element, {row.element}: expected {row.expected:.6g}, got {row.got:.6g}")


def say(console: Console, text: str, style: str | None = None, indent: str = "") -> None:
    """Print a line, wrapped; rich would leave blanks at the ends. indent: of what does not fit."""
    lines = textwrap.wrap(text, console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    console.print("\n".join(lines), style=style, markup=False, soft_wrap=True)


def _seconds(stages: dict[str, StageStats], names: tuple[str, ...]) -> float:
    return sum(stages[name].seconds for name in names)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _ratio(counts: list[int]) -> str:
    return f"{max(counts) / mean(counts):.2f}x" if any(counts) else "1.00x"


def _bytes(number: float) -> str:
    if not number:
        return "-"
    for unit in ("B", "kB", "MB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.4g} GB"
