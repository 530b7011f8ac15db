"""`moeloom doctor`: each finding made on purpose, what is printed, and the exit code."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from moeloom import env
from moeloom.cli import app as command
from moeloom.cli import doctor
from moeloom.cli.app import app
from moeloom.cli.doctor import Finding
from moeloom.cli.findings import as_json, print_findings, verdict
from moeloom.errors import CapabilityError
from moeloom.runtime import _backend_name
from tests.support.nvrtc import needs_nvrtc

ROOT = Path(__file__).parent.parent
OK = Finding("python", "ok", "3.12.1")
NOTE = Finding("cores", "note", "2 core(s)", "start fewer")
PROBLEM = Finding("shared memory", "problem", "/dev/shm is not writable " + "and more " * 12, "set MOELOOM_SHM_DIR")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.SHARED_MEMORY_DIR, str(tmp_path))
    return tmp_path


@pytest.fixture
def mounted(folder: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a tmpfs with these options in the folder; skips where that is not permitted."""

    def mount(options: str) -> Path:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "moeloom-test", str(folder)], capture_output=True)
        if done.returncode:
            pytest.skip(f"mounting is not permitted: {done.stderr.decode().strip()}")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True)


def report(*findings: Finding, **options: object) -> str:
    out = io.StringIO()
    print_findings(Console(file=out, width=80, **options), list(findings))
    return out.getvalue()


# ---- what is found


def test_python_and_torch() -> None:
    assert doctor.check_python().state == "ok"
    old = doctor.check_python((3, 9, 2))
    assert (old.state, old.found, old.advice) == ("problem", "3.9.2", "install Python 3.11 or newer")
    assert doctor.check_torch().state == "ok" or "MKL" in doctor.check_torch().found
    old = doctor.check_torch("2.9.1+cu128")
    assert old.state == "problem" and "pip install 'torch>=2.11'" in old.advice and "2.9.1+cu128" in old.found
    assert doctor.check_torch("3.0.0a0+git1").state == doctor.check_torch().state


def test_torch_without_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    finding = doctor.check_torch()
    assert finding.state == "note" and "no MKL" in finding.found and "test_experts" in finding.advice


def test_other_platforms() -> None:
    assert doctor.check_platform("linux", "x86_64").state == "ok"
    for system, machine in (("linux", "aarch64"), ("darwin", "arm64"), ("win32", "AMD64")):
        finding = doctor.check_platform(system, machine)
        assert finding.state == "problem" and f"{system} on {machine}: several ranks are refused" in finding.found


def test_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "CPU_LIMIT", tmp_path / "absent")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert doctor.check_cores(2).state == "ok"
    crowded = doctor.check_cores(4)
    assert crowded.state == "note" and "too many threads" in crowded.found and "OMP_NUM_THREADS=2" in crowded.advice
    many = doctor.check_cores(16)
    assert many.state == "note" and "16 ranks will take turns" in many.found and "8 rank(s) or fewer" in many.advice
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(doctor, "CPU_LIMIT", tmp_path / "cpu.max")
    assert "1.5 core(s)" in doctor.check_cores(2).found
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert doctor.num_cores() == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set())
    assert doctor.check_cores(2).state == "note" and "does not say" in doctor.check_cores(2).found


def test_shared_memory_works_and_leaves_nothing(folder: Path) -> None:
    finding = doctor.check_shared_memory()
    assert finding.state in ("ok", "note") and str(folder) in finding.found
    assert list(folder.iterdir()) == []


def test_shared_memory_folder_is_missing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv(env.SHARED_MEMORY_DIR, str(folder / "no"))
    finding = doctor.check_shared_memory()
    assert finding.state == "problem" and "no is not a folder" in finding.found and "MOELOOM_SHM_DIR" in finding.advice


def test_shared_memory_is_read_only(mounted: Callable[[str], Path]) -> None:
    mounted("ro")
    finding = doctor.check_shared_memory()
    assert finding.state == "problem" and "is not writable" in finding.found and "MOELOOM_SHM_DIR" in finding.advice


def test_shared_memory_is_denied(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "is not writable" in doctor.check_shared_memory().found


def test_shared_memory_without_tmpfile(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "open", refuse)
    finding = doctor.check_shared_memory()
    assert finding.state == "problem" and "takes no O_TMPFILE (Operation not supported)" in finding.found


def test_shared_memory_is_tiny(mounted: Callable[[str], Path]) -> None:
    folder = mounted("size=64k")
    finding = doctor.check_shared_memory()
    assert finding.state == "problem" and "(tmpfs), 64 KiB, 64 KiB free" in finding.found
    assert "1048576 bytes needed" in finding.found and "--shm-size" in finding.advice
    assert list(folder.iterdir()) == []


def test_shared_memory_is_full(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    finding = doctor.check_shared_memory()
    assert finding.state == "problem" and "1048576 bytes needed" in finding.found and "--shm-size" in finding.advice


def test_shared_memory_is_small_or_not_in_memory(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(doctor, "file_system", lambda _: "ext4")
    slow = doctor.check_shared_memory()
    assert slow.state == "note" and "(ext4)" in slow.found and "slower" in slow.found and "tmpfs" in slow.advice
    little = SimpleNamespace(f_blocks=8192, f_frsize=4096, f_bavail=8000)
    monkeypatch.setattr(os, "statvfs", lambda _: little)
    small = doctor.check_shared_memory()
    assert small.state == "note" and "little for real layers" in small.found and "--shm-size" in small.advice


def test_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("d / ext4 rw 0 0\nt /dev tmpfs rw 0 0\ns /dev/shm ramfs rw 0 0\nx /dev/shm2 xfs rw 0 0\n")
    for folder, kind in (("/usr", "ext4"), ("/dev", "tmpfs"), ("/dev/shm", "ramfs"), ("/dev/shm2/a", "xfs")):
        assert doctor.file_system(folder, mounts) == kind
    assert doctor.file_system("/usr", tmp_path / "absent") == "unknown"


def test_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/tmp")
    assert doctor.check_temporary_folder() == Finding("temporary folder", "ok", "/tmp")
    monkeypatch.setattr(tempfile, "gettempdir", none)
    missing = doctor.check_temporary_folder()
    assert missing.state == "problem" and "No usable temporary" in missing.found and "TMPDIR" in missing.advice
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/" + "long" * 20)
    long = doctor.check_temporary_folder()
    assert long.state == "problem" and "too long" in long.found and "shorter" in long.advice


def test_host_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere")
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    finding = doctor.check_host()
    assert finding.state == "note" and finding.found == "nowhere does not resolve (Name or service not known)"
    assert "GLOO_SOCKET_IFNAME" in finding.advice and "/etc/hosts" in finding.advice


def test_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert doctor.check_interface().state == "ok"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert doctor.check_interface() == Finding("interface", "ok", "lo, by GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    finding = doctor.check_interface()
    assert finding.state == "problem" and "names eth77" in finding.found and "lo" in finding.advice


def test_ranks_work() -> None:
    assert doctor.check_ranks().state == "ok"


def test_gloo_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user would see it who skips the check of the interface."""
    code = "from moeloom.cli.doctor import check_ranks; f = check_ranks(); print(f.state, f.found, f.advice, sep='|')"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=100)
    state, found, advice = done.stdout.strip().split("|")
    assert state == "problem" and "Unable to find address for: eth77" in found and "--debug" in advice
    assert done.stderr == ""


def test_ranks_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise CapabilityError("cannot\nstart ranks: " + "x" * 400)

    monkeypatch.setattr(doctor, "RankPool", fail)
    finding = doctor.check_ranks()
    assert finding.state == "problem" and "cannot start ranks: xxx" in finding.found and len(finding.found) < 400


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the driver says its version; there is none yet."""
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "version")
    return tmp_path / "version"


def say_driver(file: Path, version: str) -> None:
    file.write_text(
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\nGCC version:\n"
    )


def fake_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int], apart: tuple[tuple, ...] = ()) -> None:
    """As many GPUs; those pairs (from, to) do not reach each other."""

    def properties(gpu: int) -> SimpleNamespace:
        major, minor = capabilities[gpu]
        return SimpleNamespace(name=f"GPU of {major}", major=major, minor=minor, total_memory=140 << 30)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capabilities[gpu])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) not in apart)


def test_no_gpus(monkeypatch: pytest.MonkeyPatch, driver: Path) -> None:
    fake_gpus(monkeypatch)
    assert "no NVIDIA driver" in doctor.check_gpus().found and doctor.check_gpus().state == "note"
    assert doctor.check_peer_access() == doctor.check_driver() == doctor.check_kernels() == []
    say_driver(driver, "570.86.15")
    monkeypatch.setattr(torch.version, "cuda", None)
    finding = doctor.check_gpus()
    assert finding.found == "driver 570.86.15 is there, but torch is a CPU build" and "CUDA build" in finding.advice
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    finding = doctor.check_gpus()
    assert "torch cannot use it" in finding.found and "CUDA 13.0 may need a newer driver" in finding.advice
    assert all(check().state in ("ok", "note") for check in (doctor.check_nccl, doctor.check_nvrtc, doctor.check_gpus))


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, (9, 0), (9, 0), (8, 0))
    expected = "2 x GPU of 9 (sm_90, 140 GiB), 1 x GPU of 8 (sm_80, 140 GiB)"
    assert doctor.check_gpus() == Finding("gpus", "ok", expected)
    fake_gpus(monkeypatch, (10, 0))
    finding = doctor.check_gpus()
    assert finding.state == "note" and finding.found == "1 x GPU of 10 (sm_100, 140 GiB): none that has kernels"
    assert "sm_90a" in finding.advice and doctor.check_kernels() == doctor.check_driver() == []


def test_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, (9, 0))
    assert doctor.check_peer_access() == []
    fake_gpus(monkeypatch, (9, 0), (9, 0), (8, 0), (9, 0), apart=((0, 2), (0, 3), (3, 1)))
    (finding,) = doctor.check_peer_access()
    assert finding.state == "note" and finding.found == "missing between GPUs 0-3, 1-3" and "topo" in finding.advice
    fake_gpus(monkeypatch, (9, 0), (9, 0), (9, 0))
    assert doctor.check_peer_access() == [Finding("peer access", "ok", "between all 3 GPUs")]


def test_driver(monkeypatch: pytest.MonkeyPatch, driver: Path) -> None:
    fake_gpus(monkeypatch, (9, 0))
    assert doctor.check_driver() == []
    say_driver(driver, "580.159.04")
    assert doctor.check_driver() == [Finding("driver", "ok", "580.159.04")]
    say_driver(driver, "575.1.02")
    (finding,) = doctor.check_driver()
    assert finding.state == "note" and "driver 580 or newer" in finding.advice


def test_the_gpu_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise CapabilityError("kernels are compiled by NVRTC 13, found: No module named 'cuda'")

    monkeypatch.setattr(doctor.compiler, "version", missing)
    monkeypatch.setattr(doctor, "package_version", lambda _: None)
    monkeypatch.setattr(doctor.jit, "declared_in", lambda _: [])
    monkeypatch.setattr(doctor.jit, "prewarm", lambda _: missing())
    fake_gpus(monkeypatch)
    finding = doctor.check_nvrtc()
    assert finding.state == "note" and finding.found.startswith("cuda-bindings is not installed: ")
    assert finding.advice == "only for GPUs: pip install 'moeloom[gpu]'"
    fake_gpus(monkeypatch, (9, 0))
    assert doctor.check_nvrtc().advice.startswith("pip install 'moeloom[gpu]': it lets kernels run")
    (finding,) = doctor.check_kernels()
    assert finding.state == "note" and "No module named 'cuda'" in finding.found and "moeloom[gpu]" in finding.advice


@needs_nvrtc
def test_versions_of_the_compiler() -> None:
    finding = doctor.check_nvrtc()
    assert finding.state == "ok" and re.search(r"V\d+\.\d+\S*, cuda-bindings \d+\.\d+", finding.found)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert doctor.check_cache().state == "ok" and str(tmp_path / ".cache") in doctor.check_cache().found
    monkeypatch.setenv("HOME", "/nonexistent/user")
    assert doctor.check_cache().state == "note" and "cannot be made or written" in doctor.check_cache().found
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert doctor.check_cache().state == "note"


def test_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"transformers": "5.22.1", "accelerate": "1.0"}
    monkeypatch.setattr(doctor, "package_version", versions.get)
    transformers, accelerate, matplotlib = doctor.check_extras()
    assert transformers.state == "note" and "too old" in transformers.found and ">=5.23" in transformers.advice
    assert accelerate.state == "ok" and (matplotlib.state, matplotlib.advice) == ("note", "pip install matplotlib")
    assert doctor.check_extras()[0].state == "note"
    versions["transformers"] = "5.23.0"
    assert doctor.check_extras()[0].state == "ok"


def test_ranks_are_not_tried_behind_a_problem(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv(env.SHARED_MEMORY_DIR, str(folder / "no"))
    monkeypatch.setattr(doctor, "check_ranks", lambda: pytest.fail("tried"))
    findings = {finding.name: finding for finding in doctor.examine()}
    assert findings["ranks"].found == "not tried: see shared memory"
    assert findings["backend"].state == "note" and not doctor.works(list(findings.values()))


@pytest.fixture(params=[True, False], ids=["kernels run", "kernels fail"])
def kernels(request: pytest.FixtureRequest) -> Finding:
    return Finding("kernels", "ok", "20 compiled") if request.param else Finding("kernels", "note", "do not run", "why")


def test_what_a_runtime_would_use(monkeypatch: pytest.MonkeyPatch, kernels: Finding) -> None:
    runs, both = kernels.state == "ok", "sm90 on GPU 0, 1 (GPU of 9); cpu in groups without NCCL"
    for gpus in ((), ((8, 0),), ((10, 0), (12, 0))):  # none, an A100, a B200 beside another
        fake_gpus(monkeypatch, *gpus)
        assert doctor.check_backend([OK, NOTE]) == Finding("backend", "ok", "cpu: torch sees no H100 or H200")
    fake_gpus(monkeypatch, (9, 0), (9, 0))
    finding = doctor.check_backend([OK, kernels, NOTE])
    assert finding.found == both + ("" if runs else "; but kernels do not run")
    assert (finding.state, finding.advice) == (("ok", "") if runs else ("note", "see kernels, or pass backend='cpu'"))
    fake_gpus(monkeypatch, (8, 0), (9, 0))
    if runs:
        finding = doctor.check_backend([OK, kernels])
        assert finding.state == "ok" and finding.found.startswith("sm90 on GPU 1 (GPU of 9); cpu in groups")
        assert finding.found.endswith("cpu where a rank's current GPU is another") and "set_device" in finding.advice
    told = [kernels, doctor.check_backend([kernels])]
    assert verdict(told) == "moeloom works here" + ("" if runs else " with the CPU backend only: see backend")
    finding = doctor.check_backend([PROBLEM, kernels])
    assert finding.state == "note" and finding.found.startswith("none with several ranks")


def test_what_it_says_is_what_a_runtime_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for capabilities in ((), ((8, 0),), ((9, 0),), ((10, 0),)):
        fake_gpus(monkeypatch, *capabilities)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu=0, all=capabilities: all[gpu])
        said = doctor.check_backend([OK]).found
        assert re.match(_backend_name("auto", "self"), said), (capabilities, said)


# ---- what is printed


def test_plain_lines() -> None:
    text = report(OK, NOTE, PROBLEM, Finding("host name", "note", "Zürich"))
    assert text.isascii() and max(map(len, text.splitlines())) <= 80 and not re.search(r" $", text, re.MULTILINE)
    lines = text.splitlines()
    assert lines[:4] == ["ok      python: 3.12.1", "note    cores: 2 core(s)", "        -> start fewer", lines[3]]
    assert lines[3].startswith("problem shared memory: /dev/shm") and "        -> set MOELOOM_SHM_DIR" in lines
    assert "note    host name: Z\\xfcrich" in lines
    assert lines[-1] == "moeloom does not work here with several ranks: shared memory"


def test_table_on_a_terminal() -> None:
    text = report(OK, NOTE, PROBLEM, force_terminal=True, color_system=None, legacy_windows=False)
    assert "╭" in text and max(map(len, text.splitlines())) <= 80
    assert re.search(r"│ problem │ shared memory │ /dev/shm is not writable", text) and "-> set MOELOOM_SHM_DIR" in text


def test_json_and_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for findings, code in (([OK, NOTE], 0), ([OK, PROBLEM], 1)):
        monkeypatch.setattr(command, "examine", lambda ranks, findings=findings: findings)
        result = CliRunner().invoke(app, ["doctor", "--json"])
        told = json.loads(result.stdout)
        assert result.exit_code == code and told["works"] is (code == 0) and len(told["findings"]) == 2
        assert told == json.loads(as_json(findings))
        plain = CliRunner().invoke(app, ["doctor", "--ranks", "3"])
        assert plain.exit_code == code and plain.stdout.rstrip().endswith(verdict(findings))


def test_this_machine(tmp_path: Path) -> None:
    """The whole command, without a home and a terminal, and where only ASCII can be written."""
    bare = {**os.environ, "HOME": "/nonexistent", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "TERM": "dumb"}
    for name in ("XDG_CACHE_HOME", "FORCE_COLOR", "COLUMNS"):
        bare.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "moeloom", "doctor"],
        capture_output=True, cwd=ROOT, env=bare, stdin=subprocess.DEVNULL, timeout=150,
    )  # fmt: skip
    out = done.stdout.decode("ascii")
    assert done.returncode == 0 and done.stderr == b"", (out, done.stderr)
    assert out.endswith("moeloom works here\n") and "two ranks ran a layer over shared memory and over gloo" in out
    assert "note    cache folder: /nonexistent/.cache cannot be made" in out
