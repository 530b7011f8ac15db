"""Behind the options of `moeloom run` and `moeloom bench`: ranks, reports, errors in one line, exit codes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch.distributed as dist
import typer
from rich.console import Console

from moeloom.cli.bench import Bench, Measurement, Note, bench_rank
from moeloom.cli.bench_report import BenchFiles, print_bench
from moeloom.cli.drawings import save_trace
from moeloom.cli.report import passed, print_report, progress_bar, trace_title
from moeloom.cli.run import Report, Settings, Step, run_rank
from moeloom.cli.timing import meet
from moeloom.errors import MoeloomError
from moeloom.launch import RankPool

FAILED, USAGE, INTERRUPTED = 1, 2, 130
DEFAULT_NODES = 1


def execute(settings: Settings, *, debug: bool = False, console: Console | None = None) -> int:
    """Run, print the report and return the exit code."""
    console = console or Console(highlight=False)
    report = None
    try:
        with progress_bar(console) as show, closing(_events(settings)) as events:
            for event in events:
                if isinstance(event, Report):
                    report = event
                elif not (dist.is_initialized() and dist.get_rank()):
                    show(event)
        if report is None:  # rank 0 has it
            return 0
        print_report(console, settings, report)
        if settings.trace:
            save_trace(report.trace, settings.trace, trace_title(settings, report))
        return 0 if passed(report) else FAILED
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        return INTERRUPTED
    except Exception as error:  # whatever it is, a user gets one line and an exit code
        report_error(error, debug)
        return FAILED


def _events(settings: Settings) -> Generator[Step | Report, None, None]:
    """What happens on rank 0: in this process if torchrun made it a rank, otherwise in a new one."""
    if not dist.is_initialized():
        pool = (settings.num_ranks, settings.nodes or DEFAULT_NODES, settings.device)
        yield from _on_ranks(pool, run_rank, settings)
    else:
        yield from _on_this_rank(run_rank, settings)


def _on_ranks(
    pool: tuple[int, int, str], fn: Callable[..., Iterator[Any]], settings: Any
) -> Generator[Any, None, None]:
    """What fn yields on rank 0 of a new pool of so many ranks, nodes, and of that device."""
    with RankPool(*pool) as ranks:
        try:
            yield from ranks.stream(fn, settings)
        except BaseException:
            for process in ranks.processes:
                process.kill()  # in the middle of a step it does not listen; the pool would wait a second for each
            raise


def _on_this_rank(fn: Callable[..., Iterator[Any]], settings: Any) -> Generator[Any, None, None]:
    """What fn yields on this rank of torchrun's."""
    yield from fn(settings)
    meet()  # nobody leaves while another still reads what it sent
    dist.destroy_process_group()


def execute_bench(bench: Bench, files: BenchFiles, *, debug: bool = False, console: Console | None = None) -> int:
    """Measure, print, keep and compare; the exit code."""
    console = console or Console(highlight=False)
    joined = dist.is_initialized()
    is_first = not (joined and dist.get_rank())
    found: list[Measurement] = []
    notes: list[str] = []
    try:
        pool = (bench.ranks, 1, bench.device)
        ranks = _on_this_rank(bench_rank, bench) if joined else _on_ranks(pool, bench_rank, bench)
        with progress_bar(console) as show, closing(ranks) as events:
            for event in events:
                if isinstance(event, Measurement):
                    found.append(event)
                    files.keep(event)
                elif isinstance(event, Note):
                    notes.append(event.text)
                elif is_first:
                    show(event)
        if not is_first:
            return 0
        print_bench(console, bench, found, notes)
        return FAILED if files.regressed(console, found) else 0
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        return INTERRUPTED
    except Exception as error:  # as in execute
        report_error(error, debug)
        return FAILED


@contextmanager
def one_line_errors(debug: bool, in_options: bool = False) -> Iterator[None]:
    """Whatever goes wrong inside, a user gets one line and an exit code. in_options: a ValueError is of the usage."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        report_error(error, debug)
        raise typer.Exit(USAGE if in_options and isinstance(error, ValueError) else FAILED) from None


def report_error(error: Exception, debug: bool) -> None:
    """One line on stderr; with debug the traceback before it, and that of the rank, which is a note of the error."""
    if debug:
        typer.echo("".join(traceback.format_exception(error)).rstrip() + "\n", err=True)
    where = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
    kind = "" if isinstance(error, MoeloomError | ValueError) else f"{type(error).__name__}: "
    typer.echo(f"error: {where}{kind}{' '.join(str(error).split())}", err=True)
