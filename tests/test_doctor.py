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


def test_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "version"
    monkeypatch.setattr(doctor, "DRIVER", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no NVIDIA driver" in doctor.check_gpus().found
    driver.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version:\n"
    )
    assert doctor.check_gpus().found.startswith("driver 570.86.15 is there, but torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert doctor.check_gpus().found == "2: NVIDIA H200; not used in this version"
    assert all(check().state in ("ok", "note") for check in (doctor.check_nccl, doctor.check_nvrtc, doctor.check_gpus))


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
    assert "SM90" in doctor.check_backend(True).found


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
