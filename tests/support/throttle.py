"""A link of a given bandwidth and latency between two declared nodes of this machine. For tests and benchmarks.

A proxy process carries what gloo sends between the nodes; ranks of one node stay connected directly. gloo finds
peers by the addresses they leave in a store, and of two ranks the one with the higher address connects to the other.
So node 0 listens on 127.0.0.1 and node 1 on 127.0.0.2, and where a rank of node 1 looks up one of node 0, it is told
a port of the proxy instead, on 127.0.0.1 too: who connects to whom stays as it was, and only one side needs a lie.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any
from unittest import mock

from torch.distributed import ProcessGroupGloo, Store

from moeloom.backends.control import Control
from moeloom.backends.cpu import backend, wire

HOSTS = ("127.0.0.1", "127.0.0.2")  # of node 0, node 1
LIMIT_SECONDS = 10.0  # for the proxy to start, to answer or to end
CHUNK_SECONDS = 1e-3  # what is forwarded at a time
CHUNK_BYTES = (4096, 1 << 18)  # at least, at most
BACKLOG_SECONDS = 4e-3  # how far reading runs ahead of the line: a thread that wakes late must not cost bandwidth
PORT = struct.Struct("!H")
SIZE = struct.Struct("=Q")
SOCKET_ADDRESS = struct.Struct("=H2s4s")  # the beginning of a sockaddr_in: family, port, host


class ThrottledLink:
    """The link, up while it is open: `with ThrottledLink(bytes_per_second=50e6) as link`.

    Ranks get `link.address`, see `throttled`. bytes_per_second: of each of the two directions, which do not share it,
    while all connections of one direction do. latency_seconds: one way, on top of what the proxy itself takes.
    process: the proxy. It also ends when this process does.
    """

    def __init__(self, *, bytes_per_second: float = math.inf, latency_seconds: float = 0.0) -> None:
        if not bytes_per_second > 0 or not 0 <= latency_seconds < math.inf:
            raise ValueError(
                f"bytes_per_second is {bytes_per_second}; allowed: more than 0. latency_seconds is {latency_seconds};"
                " allowed: 0 or more, finite"
            )
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["moeloom"])  # as RankPool does: whoever comes first starts the server
        self._connection, there = context.Pipe()
        args = (there, bytes_per_second, latency_seconds)
        self.process = context.Process(target=_serve, args=args, daemon=True, name="throttled link")
        self.process.start()
        there.close()
        try:
            self.address: int = self._receive(60.0)  # the server may have to load torch first
        except BaseException:
            self.close()
            raise

    def forwarded(self) -> tuple[int, int]:
        """Bytes so far from node 0 to node 1, and back: payload, and what gloo adds to it."""
        self._connection.send("forwarded")
        return self._receive(LIMIT_SECONDS)

    def close(self) -> None:
        """End the proxy; connections that are still open break."""
        self._connection.close()
        self.process.join(LIMIT_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def __enter__(self) -> ThrottledLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, seconds: float) -> Any:
        if not self._connection.poll(seconds):
            raise TimeoutError(f"the throttled link does not answer within {seconds:g} s")
        return self._connection.recv()


@contextmanager
def throttled(address: int) -> Iterator[None]:
    """In a rank: a Runtime over two nodes that is made inside has the link of this address between them, for life.

    All its ranks must make it so; the link has to stay open until they have closed it. Messages both ways between two
    ranks may take turns: gloo's all-to-all queues its readiness to receive behind what it sends if that can begin.
    """

    def through_link(store: Store, control: Control, timeout: float) -> wire.Wire:
        node = int(0 not in control.local_ranks)  # nodes are ordered by their first rank

        def group(store: Store, rank: int, size: int, limit: timedelta) -> ProcessGroupGloo:
            return _LinkedGroup(_LinkedStore(store, node, address), rank, size, limit, HOSTS[node])

        with mock.patch.object(wire, "ProcessGroupGloo", group):
            return wire.Wire(store, control, timeout)

    with mock.patch.object(backend, "Wire", through_link):
        yield


class _LinkedGroup(ProcessGroupGloo):
    """gloo, listening on this host. Holds the store: C++ does not keep the Python half of it alive."""

    def __init__(self, store: Store, rank: int, size: int, limit: timedelta, host: str) -> None:
        self._store = store
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
        options._timeout = limit
        super().__init__(store, rank, size, options)


class _LinkedStore(Store):
    """What gloo needs of a store, where ranks of node 1 find a port of the proxy in place of each rank of node 0."""

    def __init__(self, store: Store, node: int, address: int) -> None:
        super().__init__()
        self._store, self._node, self._address = store, node, address

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def wait(self, keys: list[str], *limit: timedelta) -> None:
        self._store.wait(keys, *limit)

    def has_extended_api(self) -> bool:
        return False  # no multi_get

    def get(self, key: str) -> bytes:
        """A rank's machine (size, name), address (size, bytes) and numbers of its connections."""
        value = self._store.get(key)
        place = SIZE.size + SIZE.unpack_from(value)[0] + SIZE.size
        family, port, host = SOCKET_ADDRESS.unpack_from(value, place)
        assert family == socket.AF_INET and socket.inet_ntoa(host) in HOSTS, "not in gloo's format, or not throttled"
        if self._node == 0 or socket.inet_ntoa(host) == HOSTS[self._node]:
            return value
        lie = SOCKET_ADDRESS.pack(family, route(self._address, port), host)
        return value[:place] + lie + value[place + len(lie) :]


def route(address: int, port: bytes) -> bytes:
    """The port of the proxy at this address that leads to a port of node 0; both as they are in a socket address."""
    with socket.create_connection((HOSTS[0], address), LIMIT_SECONDS) as proxy:
        proxy.sendall(port)
        return proxy.recv(PORT.size, socket.MSG_WAITALL)


# ---- in the proxy's process


def _serve(connection: Connection, bytes_per_second: float, latency_seconds: float) -> None:
    """The proxy's life: until the other end of the connection is closed, or its owner ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the owner, which ends us
    proxy = _Proxy(bytes_per_second, latency_seconds)
    connection.send(proxy.address)
    owner = multiprocessing.parent_process()
    assert owner is not None
    with suppress(EOFError, OSError):
        while wait([connection, owner.sentinel]) == [connection]:
            connection.recv()
            connection.send(tuple(direction.forwarded for direction in proxy.directions))
    os._exit(0)  # whatever its threads do


class _Proxy:
    """Tells who asks at its address which port leads to a port of node 0, and forwards what comes there."""

    def __init__(self, bytes_per_second: float, latency_seconds: float) -> None:
        self.directions = [_Direction(bytes_per_second, latency_seconds) for _ in HOSTS]
        self._routes: dict[int, int] = {}
        listener = socket.create_server((HOSTS[0], 0), backlog=128)
        self.address: int = listener.getsockname()[1]
        _start(self._answer, listener)

    def _answer(self, listener: socket.socket) -> None:
        while True:
            asking, _ = listener.accept()
            with asking, suppress(OSError, struct.error):
                asking.settimeout(LIMIT_SECONDS)
                (port,) = PORT.unpack(asking.recv(PORT.size, socket.MSG_WAITALL))
                if port not in self._routes:
                    entry = socket.create_server((HOSTS[0], 0), backlog=128)
                    self._routes[port] = entry.getsockname()[1]
                    _start(self._accept, entry, port)
                asking.sendall(PORT.pack(self._routes[port]))

    def _accept(self, listener: socket.socket, port: int) -> None:
        while True:
            near, _ = listener.accept()
            _start(self._connect, near, port)

    def _connect(self, near: socket.socket, port: int) -> None:
        with near, suppress(ConnectionError), socket.create_connection((HOSTS[0], port)) as far:
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threads = [*self.directions[0].carry(far, near), *self.directions[1].carry(near, far)]
            for thread in threads:
                thread.join()


class _Direction:
    """A line that sends one byte after another. It is shared in the order in which chunks come.

    Nothing is ever sent early to make up for time in which the line was idle, and nothing late by more than a thread
    wakes late: the times are those of an ideal line.
    """

    def __init__(self, bytes_per_second: float, latency_seconds: float) -> None:
        self._rate, self._latency = bytes_per_second, latency_seconds
        low, high = CHUNK_BYTES
        self._chunk = int(min(max(low, bytes_per_second * CHUNK_SECONDS), high))
        self._free_at = 0.0  # when the line will have sent what it was given
        self._lock = threading.Lock()
        self.forwarded = 0

    def carry(self, source: socket.socket, target: socket.socket) -> list[threading.Thread]:
        """Forward from now on; two threads that end with the connection."""
        # without a bound: gloo does not send before the peer has said where to, so a living target takes everything
        queue: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
        return [_start(self._read, source, queue), _start(self._write, queue, source, target)]

    def _read(self, source: socket.socket, queue: SimpleQueue[tuple[float, bytes]]) -> None:
        chunk = b"-"
        while chunk:
            _sleep_until(self._free_at - BACKLOG_SECONDS)  # the rest waits in the kernel, and then at the sender
            try:
                chunk = source.recv(self._chunk)
            except OSError:
                chunk = b""  # gloo resets connections instead of closing them
            with self._lock:
                self._free_at = max(self._free_at, time.monotonic()) + len(chunk) / self._rate
                due = self._free_at + self._latency
            queue.put((due, chunk))

    def _write(self, queue: SimpleQueue[tuple[float, bytes]], source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while True:
                due, chunk = queue.get()
                _sleep_until(due)
                if not chunk:
                    break
                with self._lock:
                    self.forwarded += len(chunk)
                target.sendall(chunk)
        for end in (target, source):  # gloo knows no connection of one direction
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _sleep_until(moment: float) -> None:
    seconds = moment - time.monotonic()
    if seconds > 0:
        time.sleep(seconds)


def _start(target: Any, *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread
