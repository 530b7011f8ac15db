"""The `moeloom` command: its options."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import typer
from rich.console import Console

import moeloom
from moeloom import env, machine_cache
from moeloom.backends.sm90.probe import gpus_with_kernels
from moeloom.cli.bench import Bench, PipelineChoice
from moeloom.cli.bench_report import BenchFiles
from moeloom.cli.doctor import examine, works
from moeloom.cli.execute import DEFAULT_NODES, FAILED, execute, execute_bench, one_line_errors
from moeloom.cli.findings import as_json, print_findings
from moeloom.cli.measure import run_measure, table_of
from moeloom.cli.measure_gpu import print_gpu, run_measure_gpu
from moeloom.cli.plan import CPU, MACHINES, Output, PhaseName, Query, parse_range, show_plans
from moeloom.cli.run import GPU_RECIPES, DeviceName, ExchangeChoice, RecipeName, Settings
from moeloom.errors import CapabilityError
from moeloom.jit.bindings import driver, nvrtc
from moeloom.launch import BACKENDS
from moeloom.types import ReductionName

DEFAULT_RANKS = 4
MeasuredBackend = Literal["auto", "cpu", "sm90"]
DeviceChoice = Literal["auto", "cpu", "cuda"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def main() -> None:
    """Entry point."""
    app(prog_name="moeloom")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moeloom {moeloom.__version__}")
        raise typer.Exit()


@app.callback()
def commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """The expert-parallel data flow of mixture-of-experts layers."""


@app.command(short_help="Run a layer on several ranks, check it, report time and traffic.")
def run(
    model: Annotated[str, typer.Option(help="Preset of moeloom.models.")] = "qwen3-30b-a3b",
    scale: Annotated[int, typer.Option(min=1, help="Divide the model's widths by this.")] = 8,
    device: Annotated[
        DeviceChoice, typer.Option(help="Where it runs; auto: GPUs, if they are H100 or H200 and can do what is asked.")
    ] = "auto",
    ranks: Annotated[
        int | None,
        typer.Option(min=1, show_default="4, one per GPU, or those of torchrun", help="Number of ranks to start."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, show_default="1, or those of torchrun", help="Nodes to spread the ranks over.")
    ] = None,
    tokens: Annotated[
        str, typer.Option(help="Tokens per rank: one number, or one for each rank: 256,0,17,300.")
    ] = "256",
    exchange: Annotated[ExchangeChoice, typer.Option(help="How rows cross nodes; auto asks the planner.")] = "auto",
    recipe: Annotated[
        RecipeName | None, typer.Option(show_default="fp32, bf16 on GPUs", help="Dtype of tokens, weights and rows.")
    ] = None,
    reduction: Annotated[ReductionName, typer.Option(help="Where a token's rows are summed.")] = "per_rank",
    routing: Annotated[
        str,
        typer.Option(
            metavar="uniform|skewed|FILE",
            help="Experts for each token; a safetensors FILE has topk_idx and topk_weights [N, K].",
        ),
    ] = "uniform",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, after one to warm up.")] = 5,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Compare the result with plain PyTorch.")] = True,
    seed: Annotated[int, typer.Option(help="For weights, tokens and routing.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a rank that does not come.")] = 60.0,
    checkpoint: Annotated[
        str, typer.Option(metavar="DIR", help="Take the experts of a Hugging Face folder instead of a preset's shape.")
    ] = "",
    layer: Annotated[int, typer.Option(min=0, help="Which layer of the checkpoint.")] = 0,
    backward: Annotated[bool, typer.Option("--backward", help="Run the backward too, and check x's gradient.")] = False,
    chunks: Annotated[
        int, typer.Option(help="Parts of the batch, so that links and experts overlap; 0 asks the planner.")
    ] = 0,
    trace: Annotated[
        str, typer.Option(metavar="FILE", help="Save what ran when in the last step: .json for Perfetto, or .png.")
    ] = "",
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Run one mixture-of-experts layer on several ranks, check the result and report time and traffic.

    Starts the ranks itself, or joins those of torchrun.
    """
    with one_line_errors(debug, in_options=True):
        chosen = device_to_use(device, nodes, exchange, recipe)
        num_ranks = ranks_to_use(chosen, ranks, DEFAULT_RANKS)
        settings = Settings(
            model=model, scale=scale, tokens=parse_tokens(tokens, num_ranks),
            nodes=nodes if nodes or dist.is_initialized() else DEFAULT_NODES,
            exchange=exchange, recipe_name=recipe or ("fp32" if chosen == "cpu" else "bf16"), reduction=reduction,
            routing=routing, steps=steps, check=check, seed=seed, timeout=timeout, checkpoint=checkpoint, layer=layer,
            backward=backward, chunks=chunks, trace=trace, device=chosen,
        )  # fmt: skip
    raise typer.Exit(execute(settings, debug=debug))


@app.command(short_help="Time layers and their stages; find regressions.")
def bench(
    model: Annotated[
        str | None,
        typer.Option(
            show_default="deepseek-v3; qwen3-30b-a3b on CPUs",
            help="Preset of moeloom.models, or several: deepseek-v3,qwen3-235b-a22b.",
        ),
    ] = None,
    scale: Annotated[
        int | None, typer.Option(min=1, show_default="1; 8 on CPUs", help="Divide the model's widths by this.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(show_default="1,8,64,512,2048,8192; 1,16,256 on CPUs", help="Per rank: a case for each number."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, show_default="each case's", help="Tokens per rank that memory and fixed shapes are for."),
    ] = None,
    recipe: Annotated[
        RecipeName | None,
        typer.Option(show_default="fp8, bf16 with --train; fp32 on CPUs", help="Dtype of weights and rows."),
    ] = None,
    device: Annotated[DeviceChoice, typer.Option(help="auto: GPUs, if they are H100 or H200.")] = "auto",
    ranks: Annotated[
        int | None,
        typer.Option(min=1, show_default="one per GPU, or those of torchrun; 2 on CPUs", help="Ranks to start."),
    ] = None,
    pipeline: Annotated[
        PipelineChoice, typer.Option(help="auto asks the planner; decode is timed as a CUDA graph too, on GPUs.")
    ] = "auto",
    train: Annotated[bool, typer.Option("--train", help="Time a training step: forward and backward.")] = False,
    stages: Annotated[
        bool, typer.Option("--stages", help="Time each stage by itself too, not only as a part of the layer.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Timed rounds of each case.")] = 9,
    peers: Annotated[
        bool,
        typer.Option("--peers/--no-peers", help="On GPUs time other systems' forward beside, if they are installed."),
    ] = True,
    seed: Annotated[int, typer.Option(help="For weights, tokens and routing.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a rank that does not come.")] = 60.0,
    json_file: Annotated[
        str, typer.Option("--json", metavar="FILE", help="Keep every measurement there, as a line of JSON.")
    ] = "",
    against: Annotated[
        str, typer.Option(metavar="FILE", help="Exit code 1 if anything takes 15 % longer than in that --json FILE.")
    ] = "",
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Time a layer and its stages, beside what this machine cannot do faster; with --against, find regressions.

    Times are the median of rounds, of the slowest rank in each; once with cold caches, once after the same call. On
    GPUs they are between events on the stream, behind a kernel that rests until all is queued. Results are checked
    before. Starts the ranks itself, or joins those of torchrun.
    """
    with one_line_errors(debug, in_options=True):
        on_cpu = (chosen := device_to_use(device, None, "auto", recipe)) == "cpu"
        fast: RecipeName = "bf16" if train else "fp8"
        settings = Bench(
            models=tuple((model or ("qwen3-30b-a3b" if on_cpu else "deepseek-v3")).split(",")),
            scale=scale or (8 if on_cpu else 1), max_tokens=max_tokens,
            tokens=parse_cases(tokens or ("1,16,256" if on_cpu else "1,8,64,512,2048,8192")),
            ranks=ranks_to_use(chosen, ranks, 2), recipe_name=recipe or ("fp32" if on_cpu else fast), device=chosen,
            pipeline=pipeline, train=train, stages=stages, steps=steps, seed=seed, timeout=timeout, peers=peers,
        )  # fmt: skip
        files = BenchFiles.open(json_file, against)
    raise typer.Exit(execute_bench(settings, files, debug=debug))


@app.command(short_help="Predict how a layer is best run on a machine, and why.")
def plan(
    model: Annotated[str, typer.Option(help="Preset of moeloom.models.")] = "deepseek-v3",
    machine: Annotated[
        str, typer.Option(help=f"{', '.join(MACHINES)}; or {CPU}: this machine, as `moeloom measure` found it.")
    ] = "h200",
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, show_default="as the machine has", help="GPUs that share a scale-up domain.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Scale-up domains.")] = 1,
    tokens: Annotated[
        str, typer.Option(help="Per GPU: a number, several (1,64,4096), or a range by powers of two.")
    ] = "1..8192",
    phase: Annotated[PhaseName, typer.Option(help="Decode allows fixed shapes; train needs a backward.")] = "decode",
    recipe: Annotated[RecipeName, typer.Option(help="Dtype of tokens, weights and rows.")] = "bf16",
    routing: Annotated[
        str, typer.Option(metavar="uniform|skewed|FILE", help="How tokens choose experts; a FILE as for run.")
    ] = "uniform",
    sweep: Annotated[bool, typer.Option("--sweep", help="Also for fewer nodes: 1, 2, 4, ...")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show all candidates of every row.")] = False,
    plot: Annotated[
        str, typer.Option(metavar="FILE", help="Draw time over tokens, with the machine's limits: .png, .svg or .pdf.")
    ] = "",
    trace: Annotated[
        str, typer.Option(metavar="FILE", help="Save the predicted timeline of one row: .json for Perfetto, or .png.")
    ] = "",
    as_json_text: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Say how one mixture-of-experts layer would best be run on a machine, how long it would take, and why.

    Nothing is run: times are predicted. Exit code 1 if there is no way to run it.
    """
    with one_line_errors(debug, in_options=True):
        query = Query(
            model=model, machine=machine, gpus_per_node=gpus_per_node, nodes=nodes, tokens=parse_range(tokens),
            phase=phase, recipe_name=recipe, routing=routing, sweep=sweep,
        )  # fmt: skip
        output = Output(explain=explain, as_json=as_json_text, plot=plot, trace=trace)
        output.check(query)
    with one_line_errors(debug):
        found = show_plans(Console(highlight=False), query, output)
    raise typer.Exit(0 if found else FAILED)


@app.command(short_help="Measure what this machine gives to ranks, for plans.")
def measure(
    backend: Annotated[
        MeasuredBackend, typer.Option(help="Whose machine; auto: sm90 if there is an H100 or H200 and no --ranks.")
    ] = "auto",
    ranks: Annotated[
        int | None,
        typer.Option(min=1, show_default="as many as cores, 4 at most", help="Ranks that work at once on the CPU."),
    ] = None,
    times: Annotated[int, typer.Option(min=3, help="How often each point is timed.")] = 9,
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Keep the result for later plans.")] = True,
    as_json_text: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Measure what this machine gives to ranks, for plans. Takes about 10 seconds; run it while nothing else runs."""
    status = Console(stderr=True, highlight=False)
    with one_line_errors(debug, in_options=True):
        chosen = backend_to_measure(backend, ranks)
    with one_line_errors(debug):
        if chosen == "sm90":
            of_gpu = run_measure_gpu(status, times)
            found, data = of_gpu.measured, of_gpu.to_json()
        else:
            found = run_measure(status, ranks or min(4, machine_cache.cores()), times)
            data = found.to_json()
        if as_json_text:
            typer.echo(json.dumps(data, indent=1))
        elif chosen == "sm90":
            print_gpu(Console(highlight=False), of_gpu)
        else:
            typer.echo(table_of(found))
        if keep:
            typer.echo(f"kept in {machine_cache.store(found, chosen)}", err=True)


def backend_to_measure(asked: MeasuredBackend, ranks: int | None) -> str:
    """The backend whose machine is measured. Raises ValueError for GPUs that are not there, or ranks of theirs."""
    if asked == "auto":
        return "sm90" if ranks is None and gpus_with_kernels() else "cpu"
    if asked == "sm90" and not gpus_with_kernels():
        raise ValueError("--backend is 'sm90', but torch sees no H100 or H200 here; `moeloom doctor` says why")
    if asked == "sm90" and ranks is not None:
        raise ValueError(f"--ranks is {ranks}; leave it out with --backend sm90, where each rank has a GPU")
    return asked


@app.command(short_help="Look at this machine: what is here, and what to mend.")
def doctor(
    ranks: Annotated[int, typer.Option(min=1, help="How many ranks you mean to run on this machine.")] = DEFAULT_RANKS,
    as_json_text: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look at this machine: what is here, whether Runtimes work, and what to do if not.

    Exit code 0 if Runtimes of several ranks work, 1 if not.
    """
    findings = examine(ranks)
    if as_json_text:
        typer.echo(as_json(findings))
    else:
        print_findings(Console(highlight=False), findings)
    raise typer.Exit(0 if works(findings) else FAILED)


def device_to_use(
    asked: DeviceChoice, nodes: int | None, exchange: ExchangeChoice, recipe: RecipeName | None
) -> DeviceName:
    """The device for what is asked. Raises ValueError for GPUs that are not there, or that kernels cannot run on."""
    if asked == "cpu":
        return "cpu"
    is_there = bool(gpus_with_kernels())
    if asked == "cuda" and not is_there:
        raise ValueError("--device is 'cuda', but torch sees no H100 or H200 here; `moeloom doctor` says why")
    fits = nodes in (None, 1) and exchange != "hybrid" and recipe in (None, *GPU_RECIPES)
    if asked == "auto" and not (is_there and fits):
        return "cpu"
    try:  # before ranks start
        nvrtc(), driver()
    except CapabilityError as error:
        raise ValueError(f"--device is {asked!r}, and there are GPUs, but {error}; or --device cpu") from None
    return "cuda"


def ranks_to_use(device: DeviceName, asked: int | None, on_cpu: int) -> int:
    """As asked, or those of torchrun, one per GPU, or `on_cpu`."""
    if env.is_torchrun():
        return join_launcher(asked, device)
    return asked or (on_cpu if device == "cpu" else len(gpus_with_kernels()))


def join_launcher(ranks: int | None, device: DeviceName = "cpu") -> int:
    """Join the ranks that torchrun started; their number. Raises ValueError if the user asked for another one."""
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank(0) % torch.cuda.device_count())
    dist.init_process_group(BACKENDS[device])
    num_ranks = dist.get_world_size()
    if ranks not in (None, num_ranks):
        raise ValueError(f"--ranks is {ranks}, but torchrun started {num_ranks}; leave it out")
    return num_ranks


def parse_cases(text: str) -> tuple[int, ...]:
    """The cases of a benchmark. Raises ValueError unless `text` is a list of numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--tokens is {text!r}; give numbers: 1,64,4096") from None


def parse_tokens(text: str, num_ranks: int) -> tuple[int, ...]:
    """The tokens of each rank. Raises ValueError unless `text` is one number or `num_ranks` of them."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--tokens is {text!r}; give one number, or one for each rank: 256,0,17,300") from None
    if len(counts) not in (1, num_ranks):
        raise ValueError(f"--tokens has {len(counts)} numbers; give one, or one for each of {num_ranks} ranks")
    return counts if len(counts) == num_ranks else counts * num_ranks
