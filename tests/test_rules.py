"""The rules of CONTRIBUTING.md that a program can check."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moeloom import Runtime
from moeloom.errors import CapabilityError

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "moeloom"

LAYERS: tuple[set[str], ...] = (
    {"types", "config", "errors", "env"},
    {
        "route",
        "layout",
        "placement",
        "regions",
        "activation",
        "topology",
        "models",
        "reference",
        "experts",
        "expert_layout",
        "quantize",
        "schedule",
    },
    {"plan", "jit"},
    {"backends"},
    {"pipeline", "meter", "checks", "autograd", "layer"},
    {"runtime", "launch", "checkpoint", "stored", "machine_cache"},
    {"nn"},
    {"cli", "integrations", "__main__"},
)
# within one layer nothing imports its neighbours, but for these
NEIGHBOURS = {
    "models": {"route", "activation"},
    "experts": {"activation", "placement", "quantize"},
    "expert_layout": {"experts"},
    "config": {"types"},
    "pipeline": {"meter"},
    "layer": {"autograd", "checks", "meter", "pipeline"},
    "checkpoint": {"stored"},
    "runtime": {"machine_cache"},
    "__main__": {"cli"},
}
STAGES = ("dispatch", "experts", "combine")
# what each backend has; one that lacks a stage is not behind Runtime yet
STAGES_OF = {"cpu": STAGES, "sm90": STAGES}

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
MAX_RETURNED = 3
MAX_ENVIRONMENT_VARIABLES = 8
# what may exceed a limit, and why
EXCEPTIONS: dict[str, str] = {
    "cli/app.py:run": "one parameter per command line option",
    "cli/app.py:bench": "one parameter per command line option",
    "cli/app.py:plan": "one parameter per command line option",
    "runtime.py:dispatch": "the options of a stage, by keyword",
    "autograd.py:backward": "torch wants one gradient per input",
    "layer.py:_backward": "torch wants one gradient per input",
    "layer.py:moe": "an operator takes tensors and numbers, no dataclass",
    "layer.py:moe_backward": "an operator takes tensors and numbers, no dataclass",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files() -> list[tuple[str, ast.Module, str]]:
    """Path within the package, syntax tree and text of each module."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return [(str(path.relative_to(PACKAGE)), ast.parse(path.read_text()), path.read_text()) for path in paths]


def functions(tree: ast.Module) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def room(path: str) -> str:
    """The folder or module of the package that a file belongs to."""
    return path.split("/")[0].removesuffix(".py")


def layer_of(name: str) -> int:
    return next(number for number, rooms in enumerate(LAYERS) if name in rooms)


def imported_rooms(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("moeloom.")}


def test_imports_go_down() -> None:
    known = set().union(*LAYERS)
    for path, tree, _ in files():
        here = room(path)
        if here == "__init__":
            continue
        assert here in known, f"{path}: give {here} a layer"
        for other in imported_rooms(tree) & known - {here}:
            below = layer_of(other) < layer_of(here)
            assert below or other in NEIGHBOURS.get(here, ()), f"{path} imports {other}, which is not below it"


def test_backends_do_not_know_each_other() -> None:
    backends = {path.name for path in (PACKAGE / "backends").iterdir() if path.is_dir() and path.name != "__pycache__"}
    for path, _, text in files():
        if path.startswith("backends/"):
            own = path.split("/")[1]
            assert not [b for b in backends - {own} if f"moeloom.backends.{b}" in text and own in backends], path


def test_planner_is_pure_numbers() -> None:
    for path, _, text in files():
        if path.startswith(("plan/", "schedule/")):
            assert "torch.distributed" not in text and "torch.cuda" not in text and "import torch" not in text, path


def test_sizes() -> None:
    for path, tree, text in files():
        assert len(text.splitlines()) <= MAX_FILE_LINES, path
        for function in functions(tree):
            name = f"{path}:{function.name}"
            if name in EXCEPTIONS:
                continue
            arguments = function.args
            count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
            count -= bool(arguments.args) and arguments.args[0].arg in ("self", "cls")
            lines = function.end_lineno - function.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{name} has {lines} lines"
            assert count <= MAX_PARAMETERS, f"{name} has {count} parameters"
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
                    assert len(node.value.elts) <= MAX_RETURNED, f"{name} returns {len(node.value.elts)} values"


def test_exceptions_are_needed() -> None:
    names = {f"{path}:{function.name}" for path, tree, _ in files() for function in functions(tree)}
    assert set(EXCEPTIONS) <= names


def test_environment_is_read_in_one_place() -> None:
    for path, tree, _ in files():
        for node in ast.walk(tree):
            reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
            assert not reads or path == "env.py", f"{path}:{getattr(node, 'lineno', 0)} touches the environment"
    constants = [line for line in (PACKAGE / "env.py").read_text().splitlines() if ' = "MOELOOM_' in line]
    assert 1 <= len(constants) <= MAX_ENVIRONMENT_VARIABLES


def test_nothing_prints() -> None:
    for path, tree, _ in files():
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"), f"{path} prints"


def test_everything_is_typed_and_public_names_are_documented() -> None:
    for path, tree, _ in files():
        assert ast.get_docstring(tree), f"{path} does not say what lives there"
        for function in functions(tree):
            assert function.returns is not None, f"{path}:{function.name} has no return type"
        for node in tree.body:
            if isinstance(node, (*Function.__args__, ast.ClassDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}:{node.name} has no docstring"


def test_stages_have_matching_names() -> None:
    folders = {path.name: path for path in (PACKAGE / "backends").iterdir() if (path / "__init__.py").exists()}
    assert set(folders) == set(STAGES_OF)
    for name, folder in folders.items():
        assert tuple(stage for stage in STAGES if (folder / f"{stage}.py").exists()) == STAGES_OF[name]
        if STAGES_OF[name] != STAGES:
            with pytest.raises(CapabilityError, match=name):
                Runtime("self", backend=name)
    for stage in STAGES:
        assert (ROOT / f"tests/backend/test_{stage}.py").exists()
        assert (ROOT / f"benchmarks/bench_{stage}.py").exists()


def test_no_path_of_a_machine() -> None:
    for path in [*PACKAGE.rglob("*.py"), *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        text = path.read_text()
        assert "/work/" not in text and "/root/" not in text and "/home/" not in text, path


def test_import_is_cheap() -> None:
    """At most 0.3 s over `import torch`, and no command line or plotting library."""
    program = (
        "import sys, time, torch; start = time.perf_counter(); import moeloom; print(time.perf_counter() - start);"
        "print(*[name for name in ('typer', 'rich', 'click', 'matplotlib', 'transformers') if name in sys.modules])"
    )
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT) for _ in range(3)]
    assert all(run.returncode == 0 for run in runs), runs[0].stderr
    seconds = min(float(run.stdout.splitlines()[0]) for run in runs)
    assert seconds < 0.3, f"import moeloom takes {seconds:.2f} s"
    assert runs[0].stdout.splitlines()[1] == ""


def test_readme_code_runs(tmp_path: Path) -> None:
    """The README's Python, as a user would save and start it."""
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    script = tmp_path / "readme.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str([torch.Size([100 + rank, 64]) for rank in range(4)])
