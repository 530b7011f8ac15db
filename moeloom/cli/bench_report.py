"""What `moeloom bench` prints and keeps: one table, JSON lines, and what has become slower since an earlier file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from moeloom.cli.bench import LAYER, OWN, REPLAY, TRAINING, Bench, Measurement
from moeloom.cli.drawings import bytes_text, check_file
from moeloom.cli.report import is_plain, say

ALLOWED_SLOWER = 1.15
WIDE = 100  # of what is no terminal: a table in a file should not be folded
NOISE_US = 1.0  # events on a GPU count in halves of it
# what must be equal for two measurements to be of the same thing
KEY = (
    "machine", "device", "model", "hidden", "intermediate", "experts", "topk", "recipe", "ranks", "train", "asked",
    "tokens", "max_tokens", "stage", "by", "cache",
)  # fmt: skip
NUMBERS = ("us", "tokens")


def print_bench(console: Console, bench: Bench, found: Sequence[Measurement], notes: Sequence[str]) -> None:
    """The whole report: a table for each model, and what is to be said of all."""
    first, plain = found[0], is_plain(console)
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    say(
        console,
        f"{bench.ranks} x {first.machine}, {first.recipe}, uniform routing"
        f"{', forward and backward' if bench.train else ''}",
    )
    for model in dict.fromkeys(one.model for one in found):
        mine = [one for one in found if one.model == model]
        sizes = f"hidden {mine[0].hidden}, intermediate {mine[0].intermediate}, {mine[0].experts} experts"
        width = f" at 1/{bench.scale} width" if bench.scale > 1 else ""
        say(console, f"{model}{width}: {sizes}, top-{mine[0].topk}", style="bold")
        console.print(_table(mine, plain, console.width >= WIDE))
    for line in (*_legend(bench, found, console.width >= WIDE), *dict.fromkeys(notes)):
        say(console, line, style="dim")


def _legend(bench: Bench, found: Sequence[Measurement], wide: bool) -> Iterator[str]:
    """What the columns and the names of the stages mean."""
    first, stages = found[0], {one.stage for one in found}
    warm = "warm: after the same call" if wide else f"times after the same call are shown from {WIDE} columns on"
    yield (
        f"us: the slowest rank's, waits for others included; median of {_rounds(found)}. cold: {_cold(first.device)};"
        f" {warm}. bound: what the busiest rank needs at least on this machine; share: of the time cold."
    )
    if "quantise" in stages:
        yield f"quantise: by itself; dispatch does it too{', but not alone' * bench.stages}."
    if bench.stages:
        yield "alone: the stage by itself, cold or warm; the others are parts of a layer."
    if REPLAY in stages:
        yield "replayed: the layer as a CUDA graph."
    if bench.max_tokens is not None:
        yield f"Runtimes were made for {bench.max_tokens} tokens per rank."
    peaks, (scale, unit) = first.peaks, _rate_unit(first.device)
    yield (
        f"machine, per rank: {peaks['flops'] / 1e12 * scale:.4g} {unit}, memory {bytes_text(peaks['reading'])}/s"
        f" reading, {bytes_text(peaks['copying'])}/s copying, link {bytes_text(peaks['link'])}/s each way"
        f" ({peaks['source']})."
    )
    if first.device == "cuda" and wide:
        yield "host: until all was queued; not part of the other times."
    if any(one.waits for one in found):
        yield "*: the GPU had to wait for the host, which is part of that time."


def _rounds(found: Sequence[Measurement]) -> str:
    """Fewer where the host was late."""
    least, most = min(one.rounds for one in found), max(one.rounds for one in found)
    return f"{least if least == most else f'{least} to {most}'} round{'' if most == 1 else 's'}"


def _cold(device: str) -> str:
    cache = "second-level cache" if device == "cuda" else "caches"
    return f"256 MB go through the {cache} before each call"


def _table(found: Sequence[Measurement], plain: bool, wide: bool) -> Table:
    """A row per stage, a section per number of tokens. wide: all columns."""
    table = Table(box=box.ASCII if plain else box.ROUNDED, header_style="bold")
    scale, unit = _rate_unit(found[0].device)
    columns = ["cold us", *["warm us"] * wide, "bound us", "by", "share", unit]
    columns += ["host us"] * (wide and found[0].device == "cuda")
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("stage", overflow="fold")
    for title in columns:
        table.add_column(title, justify="left" if title == "by" else "right", no_wrap=True)
    cold = [one for one in found if one.cache == "cold"]
    warm = {(one.tokens, one.stage, one.by): one for one in found if one.cache == "warm"}
    for tokens in dict.fromkeys(one.tokens for one in cold):
        table.add_section()
        for number, one in enumerate(m for m in cold if m.tokens == tokens):
            other = warm.get((one.tokens, one.stage, one.by))
            whole = one.by == OWN and one.stage in (LAYER, REPLAY, TRAINING)
            cells = {
                "cold us": _us(one.us) + "*" * one.waits,
                "warm us": _us(other.us) + "*" * other.waits if other else "-",
                "bound us": "-" if one.bound_us is None else _us(one.bound_us),
                "by": one.bound_by or "-",
                "share": "-" if one.share is None else f"{one.share:.2f}",
                unit: "-" if one.tflops is None else _rate(one.tflops * scale),
                "host us": "" if one.host_us is None else _us(one.host_us),
            }
            table.add_row(
                str(tokens) if number == 0 else "", _title(one), *(cells[title] for title in columns),
                style="bold" if whole else "cyan" if one.by != OWN else None,
            )  # fmt: skip
    return table


def _rate_unit(device: str) -> tuple[float, str]:
    """How many of the unit a TFLOP/s is, and the unit."""
    return (1.0, "TFLOP/s") if device == "cuda" else (1e3, "GFLOP/s")


def _title(one: Measurement) -> str:
    if one.by != OWN:
        return f"{one.stage}, {one.by}"
    if one.stage in (LAYER, TRAINING):
        return f"{one.stage} ({one.plan.removesuffix(', direct')})"
    return one.stage if one.stage == REPLAY else f"  {one.stage}"


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 99.95 else f"{value:.0f}"


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def json_line(one: Measurement) -> str:
    """One object, without a line break."""
    return json.dumps(one.to_json())


def read_lines(option: str, path: str) -> list[dict[str, Any]]:
    """The measurements that a file of `json_line`s holds. Raises ValueError, naming the option, for any other file."""
    try:
        lines = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{option} is {path!r}; it must be a file that --json has written ({error})") from None
    for number, line in enumerate(lines, 1):
        missing = [name for name in (*KEY, "us") if not isinstance(line, dict) or name not in line]
        if missing or any(not isinstance(line[name], int | float) for name in NUMBERS):
            names = ", ".join(missing) or " or ".join(NUMBERS)
            raise ValueError(
                f"{option} {path}: line {number} is no measurement of --json: {names} missing or no number"
            )
    if not lines:
        raise ValueError(f"{option} {path}: there is no measurement in it")
    return lines


@dataclass
class BenchFiles:
    """Where measurements go as they come, and the earlier ones to compare with."""

    json: str = ""
    against: str = ""
    earlier: list[dict[str, Any]] = field(default_factory=list)
    kept: int = 0

    @classmethod
    def open(cls, json: str, against: str) -> BenchFiles:
        """Read the earlier ones. Raises ValueError, naming the option, for files that do not serve."""
        if json and against and Path(json).absolute() == Path(against).absolute():
            raise ValueError(f"--json is {json!r}, the file of --against, which it would replace; name another")
        if json:
            check_file("--json", json, (Path(json).suffix.lower(),))
        return cls(json, against, read_lines("--against", against) if against else [])

    def keep(self, one: Measurement) -> None:
        """Add a line; the first one replaces what the file had."""
        if self.json:
            with Path(self.json).open("a" if self.kept else "w") as file:
                file.write(json_line(one) + "\n")
            self.kept += 1

    def regressed(self, console: Console, found: Sequence[Measurement]) -> bool:
        """Whether anything is slower than before; prints what."""
        if not self.against:
            return False
        compared, slower = compare(found, self.earlier)
        if not compared:
            say(console, f"nothing to compare: {self.against} has no measurement like these on this machine")
            return True
        words = f"{len(slower)} of {compared} measurements take 15 % longer or more than in {self.against}"
        say(console, words if slower else f"no regression: {compared} measurements compared with {self.against}")
        for line in slower:
            say(console, f"  {line}", style="bold red", indent="    ")
        return bool(slower)


def compare(found: Iterable[Measurement], earlier: Iterable[dict[str, Any]]) -> tuple[int, list[str]]:
    """How many of our own measurements there were before, and a line for each that takes 15 % longer now."""
    before = {tuple(line[name] for name in KEY): line for line in earlier}
    compared, slower = 0, []
    for one in found:
        now = one.to_json()
        was = before.get(tuple(now[name] for name in KEY))
        if was is None or one.by != OWN:
            continue
        compared += 1
        if one.us > ALLOWED_SLOWER * was["us"] and one.us > was["us"] + NOISE_US:
            slower.append(
                f"{one.model}, {one.tokens} tokens, {one.stage}, {one.cache}: {_us(was['us'])} -> {_us(one.us)} us,"
                f" {one.us / was['us']:.2f} times as long"
            )
    return compared, slower
