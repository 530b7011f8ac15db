"""The throttled link between nodes: what goes through arrives unchanged, not earlier and not much later than said."""

from __future__ import annotations

import multiprocessing
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from moeloom import Plan, Runtime, Topology
from tests.support.failure import die, layer_of, over_four
from tests.support.pool import Ranks, group_of
from tests.support.throttle import HOSTS, PORT, ThrottledLink, route, throttled

SLACK = 0.5  # a busy machine
LATENCY, ROUNDS = 0.02, 5


def over_link(address: int, ranks: int) -> Any:
    """A Runtime of so many ranks on two nodes, with the link between them; None on the other ranks."""
    group = group_of(tuple(range(ranks)))
    with throttled(address):
        return group and Runtime(group, topology=Topology.split(ranks, 2), timeout=30.0)


def compare(address: int, exchange: Any) -> tuple[bool, int] | None:
    """Whether the layer's result is the same with the link and without it; what this rank sent to the other node."""
    linked, plain = over_link(address, 4), over_four(2)
    if linked is None or plain is None:
        return None
    with linked, plain:
        mine = layer_of(plain, tokens=200, hidden=512).but(plan=Plan(exchange=exchange))
        mine = mine.but(x=torch.randn(mine.x.shape, generator=torch.Generator().manual_seed(plain.rank)))
        same = torch.equal(mine.run(linked), mine.run(plain)) and torch.equal(mine.run(linked), mine.run(plain))
        return same, sum(stage.scale_out_bytes for stage in linked.stats().values())


@pytest.mark.parametrize("exchange", ["direct", "hybrid"])
def test_same_bits(ranks: Ranks, exchange: str) -> None:
    with ThrottledLink(bytes_per_second=200e6, latency_seconds=1e-3) as link:
        same, sent = zip(*ranks.run(compare, link.address, exchange)[:4], strict=True)
        forwarded = link.forwarded()
    assert all(same) and all(sent)
    for through, payload in zip(forwarded, (sum(sent[:2]), sum(sent[2:])), strict=True):
        assert payload <= through <= 1.2 * payload  # with agreements, of 4 kB each


def send_over(address: int, num_bytes: int, rounds: int) -> tuple[float, float]:
    """From each rank of node 0 to each of node 1 so many bytes; when that began and ended. On six ranks."""
    with over_link(address, 6) as rt:
        here, wire = rt.topology.node_of_rank[rt.rank], rt.backend.wire
        sent = [num_bytes * (here < node) for node in rt.topology.node_of_rank]
        received = [num_bytes * (node < here) for node in rt.topology.node_of_rank]
        rows, out = (torch.full((sum(counts),), rt.rank, dtype=torch.uint8) for counts in (sent, received))
        rt.backend.gather("begin", {})
        begin = time.monotonic()
        for _ in range(rounds):
            wire.exchange(rows, sent, received, "rows", out)
        end = time.monotonic()
        assert torch.equal(out, torch.arange(6, dtype=torch.uint8).repeat_interleave(torch.tensor(received)))
        rt.backend.gather("end", {})
        return begin, end


def test_bandwidth_of_an_exchange(ranks: Ranks) -> None:
    num_bytes = 2_000_000
    with ThrottledLink(bytes_per_second=9 * num_bytes / 0.6) as link:
        begins, ends = zip(*ranks.run(send_over, link.address, num_bytes, 1), strict=True)
        forwarded = link.forwarded()
    assert 0.6 <= max(ends) - min(begins) <= 1.3 * 0.6 + SLACK
    assert forwarded[0] >= 9 * num_bytes > 10 * forwarded[1]


def test_latency_of_an_exchange(ranks: Ranks) -> None:
    with ThrottledLink(latency_seconds=LATENCY) as link:
        begins, ends = zip(*ranks.run(send_over, link.address, 1, ROUNDS), strict=True)
    # there and back: gloo's receiver says first that it is ready
    assert ROUNDS * LATENCY <= max(ends) - min(begins) <= 1.3 * 2 * ROUNDS * LATENCY + SLACK


def receive(end: socket.socket, num_bytes: int, moments: list[float]) -> None:
    """So many bytes, all zero, and when the last one came."""
    if end.recv(num_bytes, socket.MSG_WAITALL) == bytes(num_bytes):
        moments.append(time.monotonic())


def test_directions_are_independent_and_connections_share() -> None:
    num_bytes = 5_000_000
    with socket.create_server((HOSTS[0], 0)) as server, ThrottledLink(bytes_per_second=2 * num_bytes) as link:
        (port,) = PORT.unpack(route(link.address, PORT.pack(server.getsockname()[1])))
        pairs = [(socket.create_connection((HOSTS[0], port)), server.accept()[0]) for _ in range(2)]
        ends = [end for pair in pairs for end in pair]
        moments: list[float] = []
        begin = time.monotonic()
        threads = [Thread(target=receive, args=(end, num_bytes, moments)) for end in ends]
        threads += [Thread(target=end.sendall, args=(bytes(num_bytes),)) for end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for end in ends:
            end.close()
        assert link.forwarded() == (2 * num_bytes, 2 * num_bytes)
    assert len(moments) == 4
    assert 1 <= max(moments) - begin <= 1.3 + SLACK  # 2 if they were one


def test_end_of_a_connection_arrives_behind_the_data() -> None:
    with socket.create_server((HOSTS[0], 0)) as server, ThrottledLink(latency_seconds=LATENCY) as link:
        (port,) = PORT.unpack(route(link.address, PORT.pack(server.getsockname()[1])))
        with socket.create_connection((HOSTS[0], port)) as near:
            far = server.accept()[0]
            near.sendall(b"last")
        with far:
            assert far.recv(8, socket.MSG_WAITALL) == b"last"


# ---- what is left of it


def open_link_and_die(connection: Connection) -> None:
    connection.send(ThrottledLink().process.pid)
    die()


def test_closing_leaves_no_process() -> None:
    with ThrottledLink() as link:
        process = Path(f"/proc/{link.process.pid}")
        assert process.exists()
    assert link.process.exitcode == 0 and not process.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOSTS[0], link.address))


def test_killed_owner_leaves_no_process() -> None:
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    owner = context.Process(target=open_link_and_die, args=(there,))
    owner.start()
    process = Path(f"/proc/{here.recv()}")
    owner.join()
    end = time.monotonic() + 10
    while process.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not process.exists()


@pytest.mark.parametrize("wrong", [{"bytes_per_second": 0}, {"latency_seconds": -1}, {"latency_seconds": float("inf")}])
def test_wrong_links(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        ThrottledLink(**wrong)
