"""Several ranks on this machine: `launch(fn, ranks=4, nodes=2)`, and the pool of ranks behind it."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from moeloom import env
from moeloom.errors import CapabilityError, MoeloomError
from moeloom.topology import Topology

START_SECONDS = 120.0
GRACE_SECONDS = 10.0  # after one rank's failure the others may still report what they noticed
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
IMPORTABLE = (
    "ranks import what they are given: take functions of a module, or of a script file guarded by"
    ' `if __name__ == "__main__"`'
)


class RankFailed(MoeloomError):
    """A function raised on a rank, or its process ended. `__cause__` is the error, if there is one."""


class RankEnded(RankFailed):
    """A rank's process ended."""


class RankLate(RankFailed):
    """A rank had not finished when its time was over."""


def launch(
    fn: Callable[..., Any],
    ranks: int,
    nodes: int = 1,
    args: tuple = (),
    *,
    timeout: float | None = None,
    device: str = "cpu",
) -> list[Any]:
    """Run `fn(*args)` on `ranks` new processes of this machine, declared to be on `nodes` nodes.

    In each of them `torch.distributed` is initialised (gloo; with device="cuda" also NCCL, and rank r's current GPU is
    number r modulo the GPUs there are). fn and args must be picklable: a function of an
    importable module, or of a script guarded by `if __name__ == "__main__"`. Returns the results in rank order; raises
    `RankFailed` if one fails. timeout: seconds for the whole run.
    """
    with RankPool(ranks, nodes, device) as pool:
        return pool.run(fn, *args, timeout=timeout)


class RankPool:
    """Ranks that stay alive between calls, started from a server process that has torch loaded (0.2 s, not 7)."""

    def __init__(self, ranks: int, nodes: int = 1, device: str = "cpu") -> None:
        if device not in BACKENDS:
            raise ValueError(f"device is {device!r}; allowed: {', '.join(BACKENDS)}")
        topology = Topology.split(ranks, nodes)
        _check_program()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["moeloom"])
        _start_server()
        # this process hosts the store, so that any rank may die without taking it along
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        threads = max(1, torch.get_num_threads() // ranks)
        self._ranks: list[_Rank] = []
        try:
            for rank in range(ranks):
                here, there = context.Pipe()
                settings = _Settings(rank, ranks, str(topology.node_of_rank[rank]), self._store.port, threads, device)
                process = context.Process(target=_serve, args=(settings, there), daemon=True, name=f"rank {rank}")
                process.start()
                there.close()
                self._ranks.append(_Rank(process, here))
            _raise_first(self._collect(START_SECONDS, GRACE_SECONDS))
        except RankEnded as error:
            self.close()
            raise RankFailed(f"{error}, before it had begun; {IMPORTABLE}") from None
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> list[multiprocessing.process.BaseProcess]:
        """The ranks' processes."""
        return [rank.process for rank in self._ranks]

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """`fn(*args)` on every rank; the results in rank order. Raises `RankFailed`, after which the pool is closed.

        When a rank has failed, the others get a few seconds to report what they noticed, however long the timeout.
        """
        self._send((fn, args))
        try:
            return _raise_first(self._collect(timeout, GRACE_SECONDS))
        except RankFailed:
            self.close()
            raise

    def outcomes(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Like `run`, but a rank's exception is its result; the ranks that have not died stay usable.

        At the timeout the pool is closed, and the result of the ranks that have not finished is a `RankLate`.
        """
        self._send((fn, args))
        return self._collect(timeout)

    def stream(self, fn: Callable[..., Iterator[Any]], *args: Any) -> Iterator[Any]:
        """Run a generator function on every rank and yield what rank 0 yields, as it comes."""
        self._send((fn, args))
        results: list[Any] = [None] * len(self._ranks)
        items: list[Any] = []
        pending = set(range(len(self._ranks)))
        while pending:
            self._receive(pending, results, items, None)
            while items:
                yield items.pop(0)
            try:
                _raise_first(results)
            except RankFailed:
                self.close()
                raise

    def close(self) -> None:
        """End all ranks."""
        self._send(None)
        end = time.monotonic() + GRACE_SECONDS
        for rank in self._ranks:
            rank.process.join(max(0.0, min(1.0, end - time.monotonic())))
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
            rank.connection.close()
        self._ranks = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, message: object) -> None:
        for rank in self._ranks:
            rank.send(message)

    def _collect(self, timeout: float | None, grace: float | None = None) -> list[Any]:
        """Every rank's result, or the exception in its place. grace: seconds left to the others once a rank failed."""
        results: list[Any] = [None] * len(self._ranks)
        deadline = None if timeout is None else time.monotonic() + timeout
        pending = set(range(len(self._ranks)))
        while pending:
            self._receive(pending, results, [], deadline)
            if grace is not None and any(isinstance(result, BaseException) for result in results):
                soon, grace = time.monotonic() + grace, None
                deadline = soon if deadline is None else min(deadline, soon)
        return results

    def _receive(self, pending: set[int], results: list[Any], items: list[Any], deadline: float | None) -> None:
        """Wait for one message; move ranks that have finished from pending to results."""
        # a rank that has ended need not close its connection: its children, of a DataLoader for instance, hold it too
        sources: dict[Any, int] = {self._ranks[rank].connection: rank for rank in pending}
        sources |= {self._ranks[rank].process.sentinel: rank for rank in pending}
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = {sources[source] for source in wait(list(sources), left)}
        if not ready:
            names = ", ".join(map(str, sorted(pending)))
            self.close()
            for rank in pending:
                results[rank] = RankLate(f"rank(s) {names} did not finish in time")
            pending.clear()
        for rank in ready:
            kind, value = self._ranks[rank].receive() or ("done", self._ended(rank))
            if kind == "item":
                if rank == 0:
                    items.append(value)
                continue
            results[rank] = value
            pending.discard(rank)

    def _ended(self, rank: int) -> RankEnded:
        process = self._ranks[rank].process
        process.join()
        return RankEnded(f"the process of rank {rank} ended with exit code {process.exitcode}")


def _raise_first(outcomes: list[Any]) -> list[Any]:
    """The outcomes if all are results; else raise the first failure. That a rank is late is the last thing to say."""
    failed = [rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)]
    if not failed:
        return outcomes
    rank = min(failed, key=lambda rank: isinstance(outcomes[rank], RankLate))
    cause = outcomes[rank]
    text = str(cause) if isinstance(cause, RankFailed) else f"rank {rank}: {type(cause).__name__}: {cause}"
    raise (RankEnded if isinstance(cause, RankEnded) else RankFailed)(text) from cause


def _check_program() -> None:
    """Raise if ranks could not start from this program: `python -` names a file that is not there."""
    program = sys.modules["__main__"]
    path = getattr(program, "__file__", None)
    if getattr(program, "__spec__", None) is None and path is not None and not os.path.exists(path):
        raise CapabilityError(f"ranks cannot start from a program without a file ({path}); save it to one")


def _start_server() -> None:
    """Start the server process deaf to Ctrl-C: while it loads torch it would die of it with a traceback."""
    resource_tracker.ensure_running()  # the server would start it, and that unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    except OSError as error:  # its socket is a file in the temporary folder
        raise CapabilityError(f"cannot start ranks: {error}; set TMPDIR to a writable folder of a short path") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class _Rank:
    process: multiprocessing.process.BaseProcess
    connection: Connection

    def send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except OSError:
            pass  # it has ended; receiving says so
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            name = getattr(message[0], "__qualname__", message[0])
            raise ValueError(f"{name} or its arguments cannot be sent to ranks ({error}); {IMPORTABLE}") from None

    def receive(self) -> tuple[str, Any] | None:
        """Its message, which is there unless it has ended: then None."""
        try:
            return self.connection.recv() if self.connection.poll() else None
        except (EOFError, ConnectionResetError):
            return None


@dataclass(frozen=True)
class _Settings:
    rank: int
    num_ranks: int
    node: str
    port: int
    threads: int
    device: str


def _serve(settings: _Settings, connection: Connection) -> None:
    """A rank's life: join the others, then do what the pool's owner asks until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the owner, which ends us
    threading.Thread(target=_end_with_owner, daemon=True).start()
    multiprocessing.current_process().daemon = False  # a daemon must not have children; a DataLoader has
    connection.send(("done", _outcome(_join, (settings,), connection)))
    while (message := _next_message(connection)) is not None:
        outcome = message if isinstance(message, RankFailed) else _outcome(message[0], message[1], connection)
        try:
            connection.send(("done", outcome))
        except Exception as error:  # it does not pickle; nothing has been sent
            connection.send(("done", RankFailed(f"rank {settings.rank}: its result cannot be sent: {error}")))
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(settings: _Settings) -> None:
    """Become a rank of `torch.distributed`."""
    torch.set_num_threads(settings.threads)
    env.declare_node(settings.node)
    env.use_loopback()
    store = dist.TCPStore("127.0.0.1", settings.port, is_master=False, timeout=timedelta(seconds=START_SECONDS))
    if settings.device == "cuda":
        torch.cuda.set_device(settings.rank % torch.cuda.device_count())
    dist.init_process_group(BACKENDS[settings.device], store=store, rank=settings.rank, world_size=settings.num_ranks)


def _next_message(connection: Connection) -> Any:
    """What the owner wants next: (fn, args), None to end; or why it cannot be understood."""
    try:
        return connection.recv()
    except EOFError:
        return None
    except Exception as error:
        return RankFailed(f"{type(error).__name__}: {error}; {IMPORTABLE}")


def _outcome(fn: Callable[..., Any], args: tuple, connection: Connection) -> object:
    try:
        result = fn(*args)
        if inspect.isgenerator(result):
            for item in result:
                connection.send(("item", item))
            return None
        return result
    except Exception as error:
        error.add_note("".join(traceback.format_exception(error)))
        return _sendable(error)


def _sendable(error: Exception) -> Exception:
    """The error, or what it says if it would not survive the way to another process."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RankFailed(f"{type(error).__name__}: {error}")


def _end_with_owner() -> None:
    """No orphans: end when the process that owns the pool ends, however it does."""
    owner = multiprocessing.parent_process()
    if owner is not None:
        wait([owner.sentinel])
        os._exit(1)
