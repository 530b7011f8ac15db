"""Drawings of plans and of what ran when. matplotlib is imported when something is drawn, not before."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeloom.errors import CapabilityError
from moeloom.plan.plan import EXCHANGES, PIPELINES, WORDS, Plan
from moeloom.schedule.simulate import simulate
from moeloom.schedule.trace import Event, rank_name, to_perfetto
from moeloom.schedule.trace import events as events_of

if TYPE_CHECKING:
    from moeloom.cli.plan import Row

DRAWING_ENDINGS = (".png", ".svg", ".pdf")
TRACE_ENDINGS = (".json", *DRAWING_ENDINGS)
INSTALL = "pip install 'moeloom[plot]'"
# colours that people with any colour vision tell apart (Okabe and Ito; Tol)
KIND_COLOURS = {
    "dispatch": "#0072B2", "experts": "#E69F00", "combine": "#009E73", "exchange": "#882255",
    "exchange back": "#CC79A7", "mega": "#D55E00", "backward": "#777777",
}  # fmt: skip
OTHER_COLOURS = ("#56B4E9", "#999933", "#332288", "#117733")
PIPELINE_COLOURS = {"split": "#0072B2", "mega": "#D55E00", "decode": "#009E73"}
EXCHANGE_DASHES = {"direct": "-", "hybrid": (0, (4, 1.5))}
LIMITS = {"compute": "-", "memory": "--", "scale_up": "-.", "scale_out": ":"}  # resource: its line
RESOURCE_ORDER = ("links", "scale_out", "scale_up", "compute")
GREY, PALE = "#444444", "#F2F2F2"
PER_CENT_SHOWN = 60  # how much slower than the best a candidate may be to be in the lower panel
DOTS = 150  # per inch


def check_file(option: str, path: str, endings: Sequence[str]) -> None:
    """Raise ValueError, naming the option, unless such a file can be written, as far as can be told before."""
    ending = Path(path).suffix.lower()
    if ending not in endings:
        raise ValueError(f"{option} is {path!r}; the file must end in {', '.join(endings)}")
    folder = Path(path).absolute().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{option} is {path!r}, which cannot be written: {folder} is no folder, or not yours")
    if ending in DRAWING_ENDINGS and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} is {path!r}, and drawing needs matplotlib, which is missing: {INSTALL}")


def save_trace(events: Sequence[Event], path: str, title: str) -> None:
    """Write events for a trace viewer (.json), or draw them."""
    if Path(path).suffix.lower() == ".json":
        Path(path).write_text(json.dumps(to_perfetto(events)))
    else:
        draw_timeline(events, path, title)


def predicted_events(plan: Plan) -> list[Event]:
    """When a plan's tasks are expected to run; none if it was not made by the planner.

    Stretched to its predicted time, which knows more than its graph: cores that move rows and cannot compute
    meanwhile, and measured corrections.
    """
    if plan.chosen is None or plan.chosen.seconds is None:
        return []
    simulated = simulate(plan.chosen.graph)
    stretch = plan.chosen.seconds / simulated.seconds if simulated.seconds else 1.0
    return [replace(event, begin=event.begin * stretch, end=event.end * stretch) for event in events_of(simulated)]


def draw_timeline(events: Sequence[Event], path: str, title: str) -> None:
    """A row for each rank and resource, the predicted ones on top, a bar for each event with its chunk's number.

    Raises CapabilityError without matplotlib, ValueError without events.
    """
    if not events:
        raise ValueError("events is empty; there is nothing to draw")
    ranks = sorted({event.rank for event in events})
    rows = [(rank, resource) for rank in ranks for resource in _resources(events, rank)]
    start = min(event.begin for event in events)
    longest = max(event.end for event in events) - start
    unit, factor = _unit(longest)
    figure = _new_figure(11, 1.5 + 0.34 * len(rows) + 0.12 * len(ranks))
    axes = figure.add_subplot()
    places, tops = _places(rows)
    colours = _kind_colours(events)
    numbered = {event.kind for event in events if event.chunk}
    for event in sorted(events, key=lambda event: (event.rank, event.begin)):
        begin, width = (event.begin - start) * factor, (event.end - event.begin) * factor
        place = places[event.rank, event.resource]
        look = {"alpha": 0.55, "hatch": "////"} if event.rank < 0 else {}
        axes.barh(place, width, 0.8, begin, color=colours[event.kind], edgecolor="white", linewidth=0.6, **look)
        if event.kind in numbered and width > 0.012 * longest * factor:
            box = {"boxstyle": "round,pad=0.15", "fc": colours[event.kind], "ec": "none"} if event.rank < 0 else None
            axes.text(
                begin + width / 2, place, str(event.chunk), ha="center", va="center_baseline", color="white",
                fontsize=8, fontweight="bold", bbox=box,
            )  # fmt: skip
    for rank in ranks:
        _rank_frame(axes, rank, tops[rank], max(e.end for e in events if e.rank == rank) - start, longest)
    axes.set_yticks([places[row] for row in rows], [WORDS.get(resource, resource) for _, resource in rows])
    axes.set_ylim(max(bottom for _, bottom in tops.values()), 0.0)
    axes.set_xlim(0.0, longest * factor * 1.01)
    axes.set_xlabel(f"time [{unit}]")
    axes.xaxis.grid(True, color="#DDDDDD", linewidth=0.6)
    _finish_timeline(figure, axes, colours, title, bool(numbered))
    _save(figure, path)


def draw_roofline(rows: Sequence[Row], path: str, title: str) -> None:
    """Time over tokens: each candidate family, the machine's limits and the plan; below, how much slower than the plan.

    rows: for one number of nodes. Raises CapabilityError without matplotlib, ValueError without rows that have a plan.
    """
    rows = sorted((row for row in rows if row.best is not None), key=lambda row: row.tokens)
    if not rows:
        raise ValueError("rows have no plan; there is nothing to draw")
    figure = _new_figure(11.5, 7.4)
    upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [2.2, 1]})
    limits = _draw_limits(upper, rows)
    families = _draw_families(upper, lower, rows)
    slowest = max(max(line.get_ydata()) for line in lower.lines)
    chosen = _draw_plan(upper, lower, rows)
    _draw_bands(upper, lower, rows)
    upper.set(xscale="log", yscale="log", ylabel="time of one layer's forward")
    upper.set_xscale("log", base=2)
    upper.yaxis.set_major_formatter(_tick_text)
    bottom, top = upper.get_ylim()
    upper.yaxis.set_minor_formatter(
        lambda value, _: _tick_text(value) if top < 30 * bottom and _is_2_or_5(value) else ""
    )
    lower.yaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
    lower.set(
        ylim=(0, min(PER_CENT_SHOWN, max(5.0, 1.1 * slowest))), ylabel="slower than the plan", xlabel="tokens per rank"
    )
    ticks = [row.tokens for row in rows[:: -(-len(rows) // 16)]]
    lower.set_xticks(ticks, [str(count) for count in ticks])
    lower.minorticks_off()
    for axes in (upper, lower):
        axes.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
    style = {"frameon": False, "alignment": "left", "fontsize": 9.5, "title_fontproperties": {"weight": "bold"}}
    first = upper.legend(
        handles=[chosen, *families], title="ways to run it", loc="upper left", bbox_to_anchor=(1.01, 1.0), **style
    )
    upper.add_artist(first)
    heading = "limits of the machine\n(grey: nothing can be there)"
    upper.legend(handles=limits, title=heading, loc="lower left", bbox_to_anchor=(1.01, -0.02), **style)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    _save(figure, path)


def _draw_limits(axes: Any, rows: Sequence[Row]) -> list[Any]:
    """Thin lines below which the machine lets nothing be; the space below the roofline is grey."""
    tokens: list[float] = [row.tokens for row in rows]
    if len(rows) == 1:  # a line needs two points
        tokens, rows = [tokens[0] / 2**0.5, tokens[0] * 2**0.5], [*rows, *rows]
    lines = []
    for name, dashes in LIMITS.items():
        seconds = [row.limits.get(name, math.nan) for row in rows]
        if not all(map(math.isnan, seconds)):
            label = WORDS.get(name, name)
            lines += axes.plot(tokens, seconds, color=GREY, linewidth=1.1, linestyle=dashes, label=label, zorder=3)
    floor = [row.plan.roofline[0] if row.plan and row.plan.roofline else 0.0 for row in rows]
    lowest, highest = min(floor), max(seconds for row in rows for seconds in _family_seconds(row).values())
    waits = [row.best.on("latency") if row.best else math.nan for row in rows]
    look = {"color": "#AA7744", "linewidth": 1.2, "linestyle": (0, (5, 2, 1, 2, 1, 2)), "zorder": 3}
    lines += axes.plot(tokens, waits, label="waits of the plan\n(no limit)", **look)
    axes.fill_between(tokens, floor, lowest / 1e6, color="#B0B0B0", alpha=0.35, linewidth=0, zorder=1)
    axes.set_ylim(lowest / 3, highest * 1.5)
    return lines


def _draw_families(upper: Any, lower: Any, rows: Sequence[Row]) -> list[Any]:
    """A line for each pipeline and exchange, each number of tokens with its best number of chunks."""
    lines = []
    for pipeline, exchange in product(PIPELINES, EXCHANGES):
        found = []
        for row in rows:
            time = _family_seconds(row).get((pipeline, exchange))
            if time and row.best and row.best.seconds:
                found.append((row.tokens, time, (time / row.best.seconds - 1) * 100))
        if not found:
            continue
        tokens, seconds, slower = zip(*found, strict=True)
        look = {"color": PIPELINE_COLOURS[pipeline], "linestyle": EXCHANGE_DASHES[exchange], "linewidth": 1.9}
        look |= {"marker": ".", "markersize": 5, "zorder": 4}
        lines += upper.plot(tokens, seconds, label=f"{pipeline}, {exchange}", **look)
        lower.plot(tokens, slower, **look)
    return lines


def _family_seconds(row: Row) -> dict[tuple[str, str], float]:
    """By pipeline and exchange the time with the best number of chunks."""
    found: dict[tuple[str, str], float] = {}
    for candidate in row.possible:
        family, seconds = (candidate.pipeline, candidate.exchange), candidate.seconds or 0.0
        found[family] = min(seconds, found.get(family, seconds))
    return found


def _draw_plan(upper: Any, lower: Any, rows: Sequence[Row]) -> Any:
    """Circles about the plan, its number of chunks in them if there are several."""
    best = [(row.tokens, row.best.seconds, row.best.chunks) for row in rows if row.best]
    tokens, seconds, chunks = zip(*best, strict=True)
    look = {"linestyle": "", "marker": "o", "mfc": "white", "mec": "black", "mew": 1.5, "zorder": 6}
    several = max(chunks) > 1
    label = "the plan" + "\n(number: its chunks)" * several
    (line,) = upper.plot(tokens, seconds, ms=12 if several else 8, label=label, **look)
    lower.plot(tokens, [0.0] * len(tokens), ms=8, clip_on=False, **look)
    for count, time, number in best:
        if number > 1:
            upper.text(
                count, time, str(number), ha="center", va="center_baseline", fontsize=8.5, fontweight="bold", zorder=7
            )
    return line


def _draw_bands(upper: Any, lower: Any, rows: Sequence[Row]) -> None:
    """Where the same pipeline and exchange are best: a band with their names on top, and below these what binds it."""
    edges = [(one.tokens * two.tokens) ** 0.5 for one, two in pairwise(rows)]
    edges = [rows[0].tokens / 2**0.5, *edges, rows[-1].tokens * 2**0.5]
    upper.set_xlim(edges[0], edges[-1])
    best = [row.best for row in rows if row.best]
    whole = math.log2(edges[-1] / edges[0])
    for begin, end in _runs([(c.pipeline, c.exchange) for c in best]):
        low, high, one = edges[begin], edges[end], best[begin]
        for axes in (upper, lower) if end < len(rows) else ():
            axes.axvline(high, color="#999999", linewidth=0.9, zorder=2)
        if math.log2(high / low) / whole > 0.05:
            upper.text(
                (low * high) ** 0.5, 1.075, f"{one.pipeline}\n{one.exchange}", ha="center", va="bottom", fontsize=10,
                fontweight="bold", color=PIPELINE_COLOURS[one.pipeline], transform=upper.get_xaxis_transform(),
            )  # fmt: skip
    for begin, end in _runs([c.bound for c in best]):
        low, high, word = edges[begin], edges[end], WORDS.get(best[begin].bound, best[begin].bound)
        share = math.log2(high / low) / whole
        for side in (low, high):
            upper.plot(
                [side, side], [1.0, 1.06], color=GREY, lw=0.9, transform=upper.get_xaxis_transform(), clip_on=False
            )
        upper.text(
            (low * high) ** 0.5, 1.018, f"bound by {word}" if share > 0.15 else word if share > 0.05 else "",
            ha="center", va="bottom", fontsize=9, color=GREY, transform=upper.get_xaxis_transform(),
        )  # fmt: skip


def _runs(items: Sequence[Any]) -> list[tuple[int, int]]:
    """Begin and end of the stretches of equal neighbours.

    >>> _runs("aab")
    [(0, 2), (2, 3)]
    """
    cuts = [place for place in range(1, len(items)) if items[place] != items[place - 1]]
    return list(pairwise([0, *cuts, len(items)]))


def _resources(events: Iterable[Event], rank: int) -> list[str]:
    found = {event.resource for event in events if event.rank == rank}
    known = [name for name in RESOURCE_ORDER if name in found]
    return known + sorted(found - set(known))


def _places(rows: Sequence[tuple[int, str]]) -> tuple[dict[tuple[int, str], float], dict[int, tuple[float, float]]]:
    """The height of each row, and top and bottom of each rank: a gap between ranks."""
    places: dict[tuple[int, str], float] = {}
    tops: dict[int, tuple[float, float]] = {}
    top = 0.0
    for rank in dict.fromkeys(rank for rank, _ in rows):
        mine = [row for row in rows if row[0] == rank]
        places |= {row: top + 0.65 + number for number, row in enumerate(mine)}
        tops[rank] = (top, top + len(mine) + 0.3)
        top = tops[rank][1]
    return places, tops


def _rank_frame(axes: Any, rank: int, rows: tuple[float, float], seconds: float, longest: float) -> None:
    """The rank's name on the left, how long it took on the right, a line below."""
    top, bottom = rows
    left, middle = axes.get_yaxis_transform(), (top + bottom) / 2
    name, (unit, factor) = rank_name(rank), _unit(longest)
    axes.text(-0.095, middle, name, transform=left, ha="right", va="center", fontsize=10, fontweight="bold")
    axes.text(
        1.01, middle, f"{_three_digits(seconds * factor)} {unit}", transform=left, ha="left", va="center", fontsize=9.5
    )
    axes.axhline(bottom, color="#AAAAAA", linewidth=1.6 if rank < 0 else 0.8)
    if rank < 0:
        axes.axhspan(top, bottom, color=PALE, zorder=0)


def _finish_timeline(figure: Any, axes: Any, colours: dict[str, str], title: str, numbered: bool) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=kind) for kind, colour in colours.items()]
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    note = "number: chunk of the batch" if numbered else ""
    figure.legend(
        handles=handles, loc="outside lower center", ncols=max(3, len(handles)), frameon=False, title=note,
        fontsize=9.5, title_fontsize=9,
    )  # fmt: skip
    figure.suptitle(title, x=0.01, ha="left", fontsize=12.5, fontweight="bold")


def _kind_colours(events: Iterable[Event]) -> dict[str, str]:
    """By kind, in the order of their first begin."""
    kinds = dict.fromkeys(event.kind for event in sorted(events, key=lambda event: (event.rank, event.begin)))
    others = iter(OTHER_COLOURS * len(kinds))
    return {kind: KIND_COLOURS.get(kind) or next(others) for kind in kinds}


def _unit(seconds: float) -> tuple[str, float]:
    """The unit in which so many seconds read well, and how many make one second."""
    if seconds < 2e-3:
        return "us", 1e6
    return ("ms", 1e3) if seconds < 2.0 else ("s", 1.0)


def _is_2_or_5(value: float) -> bool:
    return f"{value:.0e}"[0] in "25"


def _tick_text(seconds: float, _: Any = None) -> str:
    unit, factor = _unit(seconds * 2)
    return f"{seconds * factor:g} {unit}"


def time_text(seconds: float) -> str:
    """Three digits: 4.75 us, 81.2 us, 1.23 ms, 1.50 s."""
    unit, factor = ("us", 1e6) if seconds < 999.5e-6 else ("ms", 1e3) if seconds < 999.5e-3 else ("s", 1.0)
    return f"{_three_digits(seconds * factor)} {unit}"


def bytes_text(number: float) -> str:
    """Three digits: 81.2 kB, 1.23 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{_three_digits(number)} {unit}"
        number /= 1000
    return f"{_three_digits(number)} TB"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _new_figure(width: float, height: float) -> Any:
    """A figure that needs no display and leaves no state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise CapabilityError(f"drawing needs matplotlib, which is missing: {INSTALL}") from None
    figure = Figure((width, height), dpi=DOTS, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: str) -> None:
    figure.savefig(path, dpi=DOTS)
