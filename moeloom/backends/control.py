"""How ranks agree, wait and fail: every wait of a host is here, and every wait has a deadline.

An operation begins with one round in which all ranks show each other what they want to do. Nobody writes for operation
n before everybody has entered it, hence has finished reading n-1: that is why one symmetric buffer without banks or
slots is enough, however many handles are outstanding.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch.distributed import DistError

from moeloom.backends.peers import Peers
from moeloom.backends.shared_memory import SharedFile
from moeloom.errors import MoeloomError, from_record, to_record

SPINS = 100  # polls that only yield the core (9 us for four ranks on two cores), before sleeping between polls
MAX_SLEEP_SECONDS = 1e-3
NEWS_SECONDS = 0.05
WORD = 8


def publish(words: memoryview, index: int, value: int) -> None:
    """Announce everything written before. One 8-byte store by the word's only writer.

    x86-64 keeps stores in program order, and the interpreter is between us and any compiler that might not.
    """
    words[index] = value


class Between(Protocol):
    """What joins the nodes."""

    def gather(self, record: bytes, width: int, wait: bool) -> list[bytes]:
        """Every rank's record of at most `width` bytes; an empty list without waiting."""


class Control:
    """Rounds, flags and deadlines of this rank. `wire` joins the nodes; None on a single node."""

    def __init__(self, peers: Peers, local_ranks: tuple[int, ...]) -> None:
        self.peers, self.local_ranks = peers, local_ranks
        self.wire: Between | None = None
        self.number, self.kind = 0, "construction"
        self.failure: dict[str, str] | None = None  # a record: an exception would keep all frames it passed alive
        self._shown = False  # whether the others have this rank's record of the operation
        self._rounds = self._meetings = 0
        # a slot per local rank: meeting word, then two banks of (round word, length word, record)
        self._record_bytes = -(-(4096 + 24 * peers.num_ranks) // WORD) * WORD
        self._slot_words = 1 + 2 * (2 + self._record_bytes // WORD)
        self._bytes = memoryview(b"")
        self._words = memoryview(b"")

    def attach(self) -> None:
        """Make the memory of the node's flags. There are none yet to meet by: the ranks meet through the store."""
        num_bytes = len(self.local_ranks) * self._slot_words * WORD
        created, record = None, {}
        if self.peers.rank == self.local_ranks[0]:
            try:
                created = SharedFile.create(num_bytes)
                record = {"path": created.path}
            except MoeloomError as error:
                raise self.peers.refuse(error) from None
        try:
            paths = self.peers.gather("control memory", record)
            memory = created or SharedFile.open(paths[self.local_ranks[0]]["path"], num_bytes)
            self.peers.gather("mapped", {})
        finally:
            if created is not None:
                created.unlink()
        self._bytes = memoryview(memory.map)
        self._words = self._bytes.cast("q")

    def detach(self) -> None:
        """Let go of the memory."""
        self._words = self._bytes = memoryview(b"")

    @contextmanager
    def operation(self, kind: str) -> Iterator[None]:
        """One collective operation. An exception inside reaches the other ranks, whenever it happens."""
        if self.failure is not None:
            raise from_record(self.failure)
        self.number, self.kind, self._shown = self.number + 1, kind, False
        try:
            yield
        except AgreedError as agreed:
            raise from_record(agreed.record) from None
        except BaseException as error:
            if self.failure is None and self.peers.num_ranks > 1:
                self._tell(error)
            raise

    @contextmanager
    def resumed(self, kind: str, number: int) -> Iterator[None]:
        """The second half of an operation whose first half ended without waiting; others may have begun since."""
        if self.failure is not None:
            raise from_record(self.failure)
        now = self.kind, self.number, self._shown
        self.kind, self.number, self._shown = kind, number, True
        try:
            yield
        except BaseException as error:
            if self.failure is None and self.peers.num_ranks > 1:
                self._tell(error)
            raise
        finally:
            self.kind, self.number, self._shown = now

    def _tell(self, error: BaseException) -> None:
        """Tell why this rank leaves the operation: with the record it still owes, or out of band if that has been
        shown.
        """
        if self._shown:
            left = MoeloomError(f"rank {self.peers.rank} left an operation unfinished: {type(error).__name__}: {error}")
            self.failure = to_record(self.peers.abort(left))
        else:
            self._send({"call": self.kind, **self.peers.name_rank(error)}, wait=False)

    def agree(self, same: dict, own: dict | None = None, error: Exception | None = None) -> list[dict]:
        """Show every rank what this one wants; returns all `own` records in rank order.

        Raises the same error on all ranks if one of them reports an error, or if a value of `same` differs.
        """
        wish = {"same": same, "own": own or {}} if error is None else self.peers.name_rank(error)
        records = self._send({"call": self.kind, **wish}, wait=True)
        calls = [record["call"] for record in records]
        for rank in range(len(calls)):
            if calls[rank] != calls[0]:
                message = f"operation #{self.number}: rank 0 called {calls[0]}, rank {rank} called {calls[rank]}"
                raise AgreedError(to_record(MoeloomError(message)))
        for record in records:
            if "error" in record:
                raise AgreedError(record)
        for rank, record in enumerate(records):
            for name, value in records[0]["same"].items():
                if record["same"][name] != value:
                    message = (
                        f"{self.kind} #{self.number}: {name} differs between ranks:"
                        f" rank 0 has {value}, rank {rank} has {record['same'][name]}"
                    )
                    raise AgreedError(to_record(ValueError(message)))
        return [record["own"] for record in records]

    def meet(self, phase: str) -> None:
        """Announce what this rank has written and wait for the other ranks of the node."""
        self.await_others(self.announce(), phase)

    def announce(self) -> int:
        """The first half of `meet`: announce what this rank has written. Returns what `await_others` waits for."""
        self._meetings += 1
        if len(self.local_ranks) > 1:
            publish(self._words, self.local_ranks.index(self.peers.rank) * self._slot_words, self._meetings)
        return self._meetings

    def await_others(self, meeting: int, phase: str) -> None:
        """The second half of `meet`: wait until every rank of the node has announced as much."""
        if len(self.local_ranks) == 1:
            return
        words, slots = self._words, range(0, len(self.local_ranks) * self._slot_words, self._slot_words)
        self.wait(lambda: all(words[slot] >= meeting for slot in slots), phase)

    def wait(self, ready: Callable[[], bool], phase: str) -> None:
        """Poll until `ready()`, backing off; raise what another rank reports, or `PeerTimeout` at the deadline."""
        for _ in range(SPINS):
            if ready():
                return
            os.sched_yield()
        start = time.monotonic()
        deadline = start + self.peers.timeout - self.peers.roll_call_seconds
        next_news, pause = start + NEWS_SECONDS, 5e-5
        while not ready():
            time.sleep(pause)
            pause = min(pause * 1.2, MAX_SLEEP_SECONDS)
            now = time.monotonic()
            if now > deadline:
                self.fail(phase)
            if now > next_news:
                next_news = now + NEWS_SECONDS
                self._look_for_news(phase)

    def fail(self, phase: str, reason: str = "") -> None:
        """Give up this Runtime: raise the error that all ranks will raise. reason: why before the deadline."""
        where = f"{self.kind} #{self.number}, phase {phase}" + (f" ({reason})" if reason else "")
        error = self.peers.blame(where, self.peers.roll_call_seconds if reason else self.peers.timeout)
        self.failure = to_record(error)
        raise error

    def _look_for_news(self, phase: str) -> None:
        try:
            self.peers.raise_if_aborted()
        except DistError:
            self.fail(phase)
        except Exception as told:
            self.failure = to_record(told)
            raise

    def _send(self, record: dict, wait: bool) -> list[dict]:
        """One round: this rank's record out, all records in (an empty list without waiting)."""
        data = json.dumps(record).encode()
        if len(data) > self._record_bytes:
            raise MoeloomError(f"{self.kind}: a record of {len(data)} bytes is longer than {self._record_bytes}")
        if self.peers.num_ranks == 1:
            return [record]
        if self.wire is not None:
            self._shown = True
            return [json.loads(data) for data in self.wire.gather(data, self._record_bytes, wait)]
        # who did not wait in earlier rounds waits here: the bank is free when all have entered the round before
        self.wait(lambda: self._all_in_round(self._rounds), "agreement")
        self._rounds += 1
        self._shown = True
        slot = self._slots(self._rounds)[self.local_ranks.index(self.peers.rank)]
        self._words[slot + 1] = len(data)
        self._bytes[(slot + 2) * WORD : (slot + 2) * WORD + len(data)] = data
        publish(self._words, slot, self._rounds)
        if not wait:
            return []
        self.wait(lambda: self._all_in_round(self._rounds), "agreement")
        return [json.loads(self._read(slot)) for slot in self._slots(self._rounds)]

    def _slots(self, number: int) -> range:
        """Where each local rank's record of a round is."""
        bank = 1 + (number % 2) * (2 + self._record_bytes // WORD)
        return range(bank, len(self.local_ranks) * self._slot_words, self._slot_words)

    def _all_in_round(self, number: int) -> bool:
        """Whether every rank of the node has shown its record of a round."""
        return all(self._words[slot] == number for slot in self._slots(number))

    def _read(self, slot: int) -> bytes:
        begin = (slot + 2) * WORD
        return bytes(self._bytes[begin : begin + self._words[slot + 1]])


class AgreedError(Exception):
    """Carries an error that every rank is about to raise; it never leaves `Control.operation`."""

    def __init__(self, record: dict) -> None:
        super().__init__(record["message"])
        self.record = record
