"""The `moeloom` command: what it prints, its exit codes, and that it leaves nothing behind."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

import moeloom
from moeloom.cli.app import app, parse_tokens
from moeloom.cli.check import Verdict, judge
from moeloom.cli.execute import execute
from moeloom.cli.run import Settings, load_routing, make_routing, make_tokens
from moeloom.cli.weights import local_experts, one_expert
from moeloom.models import MODELS
from moeloom.runtime import Runtime
from moeloom.types import Routing
from tests.support.processes import heed_interrupts

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "tests/assets/routing_qwen3moe_stdlib.safetensors"
SMALL = ("--device", "cpu", "--scale", "16", "--tokens", "32", "--steps", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "moeloom")


def checked(settings: Settings, x: torch.Tensor, routing: Routing, y: torch.Tensor) -> Verdict:
    expert = functools.partial(one_expert, settings)
    return judge(settings.shape, settings.recipe, expert, x, routing, {"result": y}, None)["result"]


def invoke(*options: str) -> Result:
    return CliRunner().invoke(app, ["run", *SMALL, *options])


def start(*arguments: str) -> subprocess.Popen[str]:
    """A Python process in a session of its own, without what would make rich see a terminal."""
    unwanted = ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS")
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT, env=env,
        preexec_fn=heed_interrupts,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=60)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def session_members(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # it ended while we looked
        if int(its_session) == session and state != "Z":
            members.append(int(stat.parent.name))
    return members


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_plain_report() -> None:
    process = start("-m", "moeloom", "run", *SMALL)
    out, err = finish(process)
    assert (process.returncode, err) == (0, "")
    assert out.isascii() and "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80 and not re.search(r" $", out, re.MULTILINE)
    for stage in ("dispatch", "experts", "combine", "total"):
        assert re.search(rf"^\| {stage} +\| +[\d.]+ ms ", out, re.MULTILINE), out
    assert "plan: split, direct (least predicted time)" in out and re.search(r"^predicted \S+ ms, bound by ", out, re.M)
    assert "expert load: 1024 rows" in out and "####" in out
    assert re.search(r"^check passed: error \S+, allowed \S+ \(twice that of PyTorch in fp32\),$", out, re.MULTILINE)
    assert "4 ranks, 128 tokens" in out


def test_two_nodes_hybrid_bf16() -> None:
    result = invoke("--nodes", "2", "--exchange", "hybrid", "--recipe", "bf16", "--reduction", "per_slot")
    assert result.exit_code == 0, result.output
    assert "4 ranks on 2 nodes" in result.output and "plan: split, hybrid (--exchange hybrid)" in result.output
    assert "bf16/per_slot" in result.output and "(twice that of PyTorch in bf16)" in result.output
    total = next(line for line in result.output.splitlines() if line.startswith("| total"))
    assert total.split("|")[5].strip() != "-", "nothing between nodes"


def test_tokens_of_each_rank_one_without() -> None:
    result = invoke("--tokens", "70,0,1,33", "--routing", "skewed", "--model", "deepseek-v3")
    assert result.exit_code == 0, result.output
    assert "70, 0, 1, 33 tokens, skewed routing" in result.output and "104 tokens" in result.output
    assert "Not run here: the model's 1 shared expert." in result.output


def test_routing_file() -> None:
    result = invoke("--routing", str(RECORDED), "--no-check", "--ranks", "2")
    assert result.exit_code == 0, result.output
    assert "top-4" in result.output and RECORDED.name in result.output
    assert "rank load: 256, 0 rows" in result.output and "check" not in result.output


def test_routing_file_wraps_around(tmp_path: Path) -> None:
    ids = torch.tensor([[0, 1], [2, 3], [4, -1]])
    save_file({"topk_idx": ids, "topk_weights": torch.full((3, 2), 0.5)}, tmp_path / "r.safetensors")
    settings = Settings(tokens=(2, 4), routing=str(tmp_path / "r.safetensors"))
    assert make_routing(settings, 0).topk_idx.tolist() == [[0, 1], [2, 3]]
    assert make_routing(settings, 1).topk_idx.tolist() == [[4, -1], [0, 1], [2, 3], [4, -1]]


def test_routing_file_errors(tmp_path: Path) -> None:
    path, ids, weights = str(tmp_path / "r.safetensors"), torch.tensor([[0, 9]]), torch.ones(1, 2)
    for tensors, message in (
        ({"topk_idx": ids}, "topk_weights missing"),
        ({"topk_idx": ids, "topk_weights": weights}, "topk_idx is in 0..9; the model allows -1..8"),
        ({"topk_idx": ids.float(), "topk_weights": weights}, "it must be int32/int64"),
        ({"topk_idx": ids, "topk_weights": weights.double()}, "it must be float32"),
    ):
        save_file(tensors, path)
        with pytest.raises(ValueError, match=re.escape(message)):
            load_routing(path, 9)
    Path(path).write_text("text")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_routing(path, 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "qwen3-30b"), r"--model is 'qwen3-30b', which is no known model; close: qwen3-30b-a3b\b.*"),
        (("--model", "zzz"), r"--model is 'zzz', .*known: deepseek-v2, .*"),
        (("--routing", "skew"), r"--routing is 'skew'; allowed: uniform, skewed, or a safetensors file.*"),
        (("--nodes", "9"), r"--nodes is 9; allowed with 4 ranks: 1\.\.4"),
        (("--tokens", "1,2"), r"--tokens has 2 numbers; give one, or one for each of 4 ranks"),
        (("--tokens", "many"), r"--tokens is 'many'; give .*"),
        (("--tokens", "-1"), r"--tokens is -1,-1,-1,-1; every number must be at least 0"),
        (("--timeout", "0"), r"--timeout is 0; .*"),
        (("--layer", "3"), r"--layer is 3, which is of a checkpoint; name its folder by --checkpoint"),
    ],
)
def test_wrong_options_are_one_line(options: tuple[str, ...], message: str) -> None:
    result = invoke(*options)
    assert result.exit_code == 2 and result.stdout == ""
    assert re.fullmatch(f"error: {message}\n", result.stderr), result.stderr


def test_usage_and_version() -> None:
    assert invoke("--exchange", "pigeon").exit_code == 2
    assert invoke("--ranks", "0").exit_code == 2
    assert CliRunner().invoke(app, ["--version"]).output == f"moeloom {moeloom.__version__}\n"
    assert CliRunner().invoke(app, ["run", "--help"]).output.isascii()


def test_parse_tokens() -> None:
    assert parse_tokens("7", 3) == (7, 7, 7)
    assert parse_tokens("256,0,17", 3) == (256, 0, 17)


def test_error_on_a_rank(capfd: pytest.CaptureFixture[str]) -> None:
    """A routing file that has gone by the time the ranks read it."""
    settings = Settings(tokens=(8, 8), routing=str(RECORDED), steps=1)
    object.__setattr__(settings, "routing", "gone.safetensors")
    assert execute(settings) == 1
    out, err = capfd.readouterr()
    assert out == "" and re.fullmatch(r"error: .*gone\.safetensors.*\n", err)
    assert execute(settings, debug=True) == 1
    err = capfd.readouterr().err
    assert "Traceback" in err and "in load_routing" in err, "the rank's traceback is missing"
    assert err.splitlines()[-1].startswith("error: ")


def test_failed_check_names_the_row(capfd: pytest.CaptureFixture[str]) -> None:
    settings = Settings(tokens=(16, 20, 16), scale=16, steps=1, nodes=3, corrupt=True)
    assert execute(settings) == 1
    out, err = capfd.readouterr()
    assert err == "" and "check FAILED on rank 1 of 3" in out and "first wrong row: rank 1, token 10;" in out
    text = " ".join(out.split())
    named = {int(expert): int(rank) for expert, rank in re.findall(r"(\d+) \(rank (\d)\)", text.split("token 10;")[1])}
    assert list(named) == make_routing(settings, 1).topk_idx[10].tolist()
    assert all(expert in settings.placement.slots[rank] for expert, rank in named.items())
    expected, got = re.search(r"expected (\S+), got (\S+)$", text).groups()
    assert float(expected) == pytest.approx(-float(got), rel=1e-4)


def test_terminal_has_colour_and_boxes() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80, color_system="standard", highlight=False)
    console._environ = {}  # whatever TERM says
    assert execute(Settings(tokens=(8, 8), scale=16, steps=1), console=console) == 0
    assert "\x1b[" in written.getvalue() and "╭" in written.getvalue() and "█" in written.getvalue()


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8"])
def test_check_of_a_few_tokens(recipe: str) -> None:
    """PyTorch is far more exact for a handful of rows than for many; the check must not ask that of us."""
    for num_tokens, seed in ((1, 0), (1, 1), (8, 0), (8, 1)):
        settings = Settings(recipe_name=recipe, tokens=(num_tokens,), scale=16, seed=seed)
        x, routing = make_tokens(settings, 0), make_routing(settings, 0)
        with Runtime() as runtime:
            y = runtime.moe(x, routing, local_experts(settings, 0), recipe=settings.recipe)
        verdict = checked(settings, x, routing, y)
        assert verdict.error < 1.5 * verdict.peer_error, (num_tokens, seed)


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("model", ["gpt-oss-20b", "longcat-flash", "llama-4-scout", "minimax-m3", "kimi-k3"])
def test_every_kind_of_preset_passes_its_check(model: str, recipe: str) -> None:
    """Biases and interleaved rows, identity experts, weight on the input, clamps, a narrower routed width: one rank."""
    settings = Settings(model=model, recipe_name=recipe, tokens=(24,), scale=64)
    x, routing = make_tokens(settings, 0), make_routing(settings, 0)
    with Runtime() as runtime:
        y = runtime.moe(x, routing, local_experts(settings, 0), recipe=settings.recipe)
    verdict = checked(settings, x, routing, y)
    assert verdict.passed and verdict.error > 0
    y[3, 2] = float("nan")
    broken = checked(settings, x, routing, y)
    assert not broken.passed and (broken.wrong.token, broken.wrong.element) == (3, 2)


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
@pytest.mark.parametrize("model", ["gpt-oss-20b", "mixtral-8x7b"])
def test_a_rank_holds_what_one_expert_gives(model: str, recipe: str) -> None:
    """Slot by slot, bit for bit; a rank may have none."""
    ranks = 9 if model == "mixtral-8x7b" else 5
    settings = Settings(model=model, recipe_name=recipe, tokens=(3,) * ranks, scale=64)
    for rank, slots in enumerate(settings.placement.slots):
        held = local_experts(settings, rank)
        held.check(len(slots), settings.shape.expert_hidden)
        assert (held.scales is not None) == (recipe == "fp8") and held.placement == settings.placement
        for slot, expert in enumerate(slots):
            one = one_expert(settings, expert)
            assert one.tensors().keys() == held.tensors().keys()
            pairs = [(held.tensors()[name], tensor) for name, tensor in one.tensors().items()]
            pairs += zip(held.scales or (), one.scales or (), strict=True)
            assert all(torch.equal(bits(whole[slot]), bits(alone[0])) for whole, alone in pairs)
            assert all(tensor.float().isfinite().all() and tensor.float().any() for _, tensor in pairs)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "gpt-oss-20b"])
def test_quantised_weights_are_of_the_size_of_the_others(model: str) -> None:
    fp8, plain = (one_expert(Settings(model=model, recipe_name=name, scale=16), 0) for name in ("fp8", "fp32"))
    for number, weight in zip(fp8.rounded(0), (plain.gate_up[0], plain.down[0]), strict=True):
        assert float(number.square().mean()) == pytest.approx(float(weight.square().mean()), rel=0.3)


def test_what_gpus_cannot_do_yet_is_said_before_ranks_start() -> None:
    for options, message in (
        ({"recipe_name": "fp32"}, "--recipe is fp32, not for GPUs yet; allowed there: bf16 and fp8; or --device cpu"),
        ({"recipe_name": "bf16", "nodes": 2}, "--nodes is 2, not for GPUs yet; allowed there: 1; or --device cpu"),
        (
            {"recipe_name": "bf16", "exchange": "hybrid"},
            "--exchange is hybrid, not for GPUs yet; allowed there: auto and",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            Settings(device="cuda", **options)
    assert Settings(device="cuda", recipe_name="fp8").backend == "sm90"


def test_fp8_has_no_backward() -> None:
    with pytest.raises(ValueError, match="--backward is set, but --recipe fp8 is forward only"):
        Settings(recipe_name="fp8", backward=True)


def test_every_preset_routes() -> None:
    for name in MODELS:
        settings = Settings(model=name, tokens=(5, 0), scale=64)
        for routing in ("uniform", "skewed"):
            ids = make_routing(dataclasses.replace(settings, routing=routing), 0).topk_idx
            assert ids.shape == (5, settings.num_topk) and int(ids.max()) < settings.placement.num_ids, name


def test_skewed_is_skewed() -> None:
    def busiest(routing: str) -> int:
        ids = make_routing(Settings(tokens=(512,), routing=routing), 0).topk_idx
        return int(torch.bincount(ids.flatten()).max())

    assert busiest("skewed") > 4 * busiest("uniform")


def test_interrupt_ends_all_ranks() -> None:
    process = start("-m", "moeloom", "run", "--device", "cpu", "--steps", "1000000")
    try:
        # this process, resource tracker, fork server, four ranks; then a moment to get into the steps
        assert wait_until(lambda: len(session_members(process.pid)) >= 7, 30)
        time.sleep(1.0)
        os.killpg(process.pid, signal.SIGINT)
        out, err = finish(process)
        assert (process.returncode, out, err) == (130, "", "interrupted\n")
        assert wait_until(lambda: not session_members(process.pid), 5), "ranks are left"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_joins_torchrun() -> None:
    process = start(*TORCHRUN, "run", *SMALL, "--check")
    out, err = finish(process)
    assert process.returncode == 0, err
    assert out.count("check passed") == 1 and "2 ranks on 1 node" in out
    assert "error" not in err.lower()


def test_bench_joins_torchrun() -> None:
    small = ("--device", "cpu", "--model", "mixtral-8x7b", "--scale", "64", "--tokens", "8", "--steps", "1")
    process = start(*TORCHRUN, "bench", *small)
    out, err = finish(process)
    assert process.returncode == 0, err
    assert out.count("|   experts") == 1 and out.startswith("2 x ") and "\nmixtral-8x7b at 1/64 width" in out
    assert "error" not in err.lower()


def test_torchrun_with_another_number_of_ranks() -> None:
    process = start(*TORCHRUN, "run", *SMALL, "--ranks", "3")
    out, err = finish(process)
    assert process.returncode != 0 and out == ""
    assert "--ranks is 3, but torchrun started 2; leave it out" in err


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["gpt-oss-20b", "llama-4-scout", "longcat-flash", "deepseek-v3"])
def test_backward_is_run_and_checked(model: str, recipe: str) -> None:
    result = invoke(
        "--model", model, "--scale", "64", "--ranks", "2", "--tokens", "24,0", "--recipe", recipe, "--backward"
    )
    assert result.exit_code == 0, result.output
    assert "| backward |" in result.output and "check passed (gradient of x)" in result.output


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers writes it for gpt-oss, without transformers: E = 5, H = 32, I = 48."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = {
        "model_type": "gpt_oss", "hidden_size": 32, "intermediate_size": 48, "num_local_experts": 5,
        "num_experts_per_tok": 2, "num_hidden_layers": 2, "swiglu_limit": 7.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    stem = "model.layers.1.mlp.experts."
    shapes = {"gate_up_proj": (32, 96), "down_proj": (48, 32), "gate_up_proj_bias": (96,), "down_proj_bias": (32,)}
    save_file({stem + name: torch.randn(5, *shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def test_checkpoint_layer_runs(checkpoint: Path) -> None:
    result = invoke("--checkpoint", str(checkpoint), "--layer", "1", "--ranks", "3", "--backward")
    assert result.exit_code == 0, result.output
    assert "gpt_oss checkpoint: hidden 32, intermediate 48, 5 experts, top-2" in result.output
    assert result.output.count("check passed") == 2


def test_missing_layer_and_folder_are_one_line(checkpoint: Path, tmp_path: Path) -> None:
    missing = invoke("--checkpoint", str(checkpoint), "--layer", "0", "--ranks", "2")
    assert missing.exit_code == 1 and "model.layers.0" in missing.output
    nothing = invoke("--checkpoint", str(tmp_path))
    assert nothing.exit_code == 2 and "config.json" in nothing.output
