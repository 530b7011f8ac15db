"""What `moeloom measure` times on GPUs moves the right bytes, gives up in time, and finds a machine to plan with."""

from __future__ import annotations

import ctypes
import json
import time
from pathlib import Path

import numpy
import pytest
import torch
from typer.testing import CliRunner

from moeloom import machine_cache
from moeloom.backends.sm90 import probe as probes
from moeloom.backends.sm90.probe import PIECE, WAYS, Memory, Pair, Probe, ProbePassed, gpus_with_kernels, neighbours
from moeloom.cli import doctor
from moeloom.cli.app import app
from moeloom.errors import KernelError
from moeloom.plan.machines import machine_of_gpu
from moeloom.plan.measured import Measured

pytestmark = pytest.mark.gpu

POISON = 0xAB


@pytest.fixture(scope="module")
def probe() -> Probe:
    return Probe(torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture
def pair() -> Pair:
    gpus = neighbours(gpus_with_kernels())
    if not gpus:
        pytest.skip("needs two GPUs that reach each other")
    found = Pair((Probe(torch.device("cuda", gpus[0])), Probe(torch.device("cuda", gpus[1]))), 64 * PIECE)
    yield found
    found.close()


def random_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)


@pytest.mark.parametrize(("pieces", "passes"), [(0, 1), (1, 1), (131, 1), (300, 3), (300, 2)])
def test_read_sees_every_word(probe: Probe, pieces: int, passes: int) -> None:
    data = random_bytes(pieces * PIECE, probe.device)
    total = torch.zeros(1, dtype=torch.int32, device=probe.device)
    probe.read(data.data_ptr(), len(data), passes, total)
    words = numpy.bitwise_xor.reduce(data.cpu().numpy().view(numpy.int32)) if passes % 2 and pieces else 0
    assert int(total) == words


@pytest.mark.parametrize("way", ["copy", "bulk_copy"])
@pytest.mark.parametrize(("pieces", "sms"), [(0, 4), (1, 1), (1, 132), (2, 1), (5, 3), (7, 7), (40, 132)])
def test_copies_move_what_they_are_told(probe: Probe, way: str, pieces: int, sms: int) -> None:
    data = random_bytes(pieces * PIECE, probe.device)
    target = torch.full(((pieces + 2) * PIECE,), POISON, dtype=torch.uint8, device=probe.device)
    late = torch.zeros(1, dtype=torch.int32, device=probe.device)
    more = (late,) if way == "bulk_copy" else ()
    getattr(probe, way)(target.data_ptr() + PIECE, data.data_ptr(), len(data), sms, *more)
    assert torch.equal(target[PIECE : (pieces + 1) * PIECE], data) and int(late) == 0
    assert bool((target[:PIECE] == POISON).all() and (target[-PIECE:] == POISON).all())


def test_only_whole_pieces(probe: Probe) -> None:
    with pytest.raises(ValueError, match=f"num_bytes is 100; allowed: multiples of {PIECE}"):
        probe.copy(0, 0, 100, 1)


def passed_by(tensor: torch.Tensor) -> ProbePassed:
    return ProbePassed.from_buffer_copy(tensor.cpu().numpy().tobytes())


@pytest.mark.parametrize("begins", [(True, False), (True, True)])
def test_signals_go_to_and_fro(probe: Probe, begins: tuple[bool, bool]) -> None:
    """Between two kernels on one GPU; the second conversation goes on with the words of the first."""
    words = torch.zeros(2, 32, dtype=torch.int32, device=probe.device)
    passed = [torch.zeros(ctypes.sizeof(ProbePassed), dtype=torch.uint8, device=probe.device) for _ in range(2)]
    torch.cuda.synchronize()
    for first, rounds in ((1, 100), (101, 7)):
        for index in range(2):
            with torch.cuda.stream(torch.cuda.Stream(probe.device)):
                own, theirs = words[index].data_ptr(), words[1 - index].data_ptr()
                probe.signal(own, theirs, begins[index], first, rounds, passed[index])
        torch.cuda.synchronize()
        assert [passed_by(each).rounds for each in passed] == [rounds] * 2
        assert words[:, 0].tolist() == [first + rounds - 1] * 2


def test_a_signal_that_does_not_come(probe: Probe) -> None:
    words = torch.zeros(2, 32, dtype=torch.int32, device=probe.device)
    passed = torch.full((ctypes.sizeof(ProbePassed),), POISON, dtype=torch.uint8, device=probe.device)
    torch.cuda.synchronize()
    start = time.perf_counter()
    probe.signal(words[0].data_ptr(), words[1].data_ptr(), True, 1, 5, passed, wait_ns=50_000_000)
    torch.cuda.synchronize()
    assert 0.05 <= time.perf_counter() - start < 1.0
    assert passed_by(passed).rounds == 0


def test_one_gpus_rates_are_possible(probe: Probe) -> None:
    read, copy, cached = probes.time_memory(probe, 3)
    known = machine_of_gpu(torch.cuda.get_device_name(probe.device))
    most = known.memory_bandwidth if known else 10e12
    assert 0.5 * most < copy < most and 0.5 * most < read < most and read < cached < 20e12
    launches = probes.time_launches(probe, 3)
    assert 1e-7 < launches.graph_node < 1.5 * launches.in_stream < launches.until_done < 1e-3
    assert 1e-7 < launches.host < launches.until_done
    flops = probes.time_products(probe, 3)
    assert 0 < flops["fp32"] < flops["bf16"] < flops["fp8"]
    if known:
        assert all(0.4 * known.flops[name] < rate < known.flops[name] for name, rate in flops.items())


def test_memory_is_given_back(probe: Probe) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info(probe.device)[0]
    for _ in range(3):
        memory = Memory(probe.device, 1 << 30)
        assert memory.tensor().data_ptr() == memory.address and len(memory.tensor()) == 1 << 30
        assert torch.cuda.mem_get_info(probe.device)[0] <= before - (1 << 30)
        memory.free()
    assert abs(torch.cuda.mem_get_info(probe.device)[0] - before) < 64 << 20


@pytest.mark.parametrize("way", [*WAYS, "engine"])
def test_the_link_moves_what_it_is_told(pair: Pair, way: str) -> None:
    """Both ways at once, pieces 1..37 of 64; the rest stays as it was."""
    for target in pair.target:
        target.tensor().fill_(POISON)
    for device in pair.devices:
        torch.cuda.synchronize(device)
    for index in range(2):
        pair.move(way, index, 5, PIECE, 37 * PIECE)
    for device in pair.devices:
        torch.cuda.synchronize(device)
    for index in range(2):
        sent, came = pair.source[index].tensor().cpu(), pair.target[1 - index].tensor().cpu()
        assert torch.equal(came[PIECE : 38 * PIECE], sent[PIECE : 38 * PIECE])
        assert bool((came[:PIECE] == POISON).all() and (came[38 * PIECE :] == POISON).all())
    assert [int(late) for late in pair.late] == [0, 0]


def test_a_link_is_timed(pair: Pair) -> None:
    few, many = (pair.rate("stores", sms, 3) for sms in (1, 8))
    assert 1e9 < few.both_ways < many.both_ways < 450e9 and few.one_way < 100e9
    assert 1e-7 < pair.signal_seconds(3) < 1e-4


def test_a_peer_that_does_not_answer(pair: Pair) -> None:
    pair.exchange((False, False), 3, wait_ns=20_000_000)  # both wait for the other to begin
    with pytest.raises(KernelError, match="0 of 3 signals, all bytes"):
        pair.check(3)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start = time.perf_counter()
    result = CliRunner().invoke(app, ["measure", "--json", "--times", "3"])
    assert result.exit_code == 0, result.output
    assert time.perf_counter() - start < 60
    found = json.loads(result.stdout)
    measured = Measured.from_json(found)
    assert measured == machine_cache.load("sm90") and measured.machine.name == torch.cuda.get_device_name()
    assert machine_cache.load() == machine_cache.built_in("cpu")
    assert bool(found["probes"]["link"]) is bool(neighbours(gpus_with_kernels()))
    assert measured.for_ranks(8, 2).machine == measured.machine


def test_the_doctor() -> None:
    findings = [doctor.check_gpus(), *doctor.check_peer_access(), *doctor.check_driver(), doctor.check_nvrtc()]
    findings += doctor.check_kernels()
    assert [finding.state for finding in findings] == ["ok"] * len(findings), findings
    assert "sm_90" in findings[0].found and findings[-1].name == "kernels"
