"""The other ranks, reached out of band through the group's store: to meet at construction, and when something fails.

Nothing here runs in a healthy operation; a rank that has waited long looks for news a few times a second.
"""

from __future__ import annotations

import json
import time

from torch.distributed import Store

from moeloom.errors import MoeloomError, PeerTimeout, from_record, to_record

POLL_SECONDS = 0.02
MAX_ROLL_CALL_SECONDS = 1.0


class Peers:
    """All ranks of one Runtime, as seen from `rank`. `store` is None for a Runtime of one rank."""

    def __init__(self, store: Store | None, rank: int, num_ranks: int, timeout: float) -> None:
        self.store, self.rank, self.num_ranks, self.timeout = store, rank, num_ranks, timeout

    @property
    def roll_call_seconds(self) -> float:
        """How long a roll call lasts; waits end that much before the deadline, so that the error comes within it."""
        return min(MAX_ROLL_CALL_SECONDS, self.timeout / 4)

    def gather(self, topic: str, record: dict) -> list[dict]:
        """Every rank's record, in rank order. Each topic can be used once; used in construction only."""
        if self.store is None:
            return [record]
        keys = [f"{topic}/{rank}" for rank in range(self.num_ranks)]
        self.store.set(keys[self.rank], json.dumps(record))
        deadline = time.monotonic() + self.timeout
        missing = list(range(self.num_ranks))
        while missing := [rank for rank in missing if not self.store.check([keys[rank]])]:
            self.raise_if_aborted()
            if time.monotonic() > deadline:
                names = ", ".join(map(str, missing))
                error = PeerTimeout(
                    f"Runtime construction: rank(s) {names} of {self.num_ranks} did not come within {self.timeout:g} s"
                    f" (phase: {topic})"
                )
                raise self.abort(error)
            time.sleep(POLL_SECONDS)
        return [json.loads(self.store.get(key)) for key in keys]

    def abort(self, error: BaseException) -> Exception:
        """Tell all ranks that this Runtime has failed. Returns the error that was told first, the same on every rank."""
        if self.store is None:
            return from_record(to_record(error))
        told = self.store.compare_set("abort", "", json.dumps(to_record(error)))
        self.store.set("attention", "1")
        return from_record(json.loads(told))

    def raise_if_aborted(self) -> None:
        """Look for news: raise what another rank reported, answer a roll call."""
        if self.store is None or not self.store.check(["attention"]):
            return
        if self.store.check(["abort"]):
            raise from_record(json.loads(self.store.get("abort")))
        self.store.set(f"here/{self.rank}", "1")

    def say_closed(self) -> None:
        """Let a later roll call know why this rank is not there."""
        if self.store is not None:
            self.store.set(f"closed/{self.rank}", "1")

    def blame(self, waiting_for: str) -> Exception:
        """Call the roll and abort, naming who did not answer: the rank that waits need not be the one that is late."""
        if self.store is None:
            return MoeloomError(f"{waiting_for}: failed on the only rank")
        self.store.set(f"here/{self.rank}", "1")
        self.store.set("attention", "1")
        end = time.monotonic() + self.roll_call_seconds
        while time.monotonic() < end:
            try:
                self.raise_if_aborted()
            except MoeloomError as known:
                return known
            time.sleep(POLL_SECONDS)
        silent = [rank for rank in range(self.num_ranks) if not self.store.check([f"here/{rank}"])]
        if not silent:
            return self.abort(PeerTimeout(f"{waiting_for}: no progress within {self.timeout:g} s, though all ranks answer"))
        closed = [rank for rank in silent if self.store.check([f"closed/{rank}"])]
        names = ", ".join(f"{rank} (has closed its Runtime)" if rank in closed else str(rank) for rank in silent)
        return self.abort(PeerTimeout(f"{waiting_for}: rank(s) {names} did not come within {self.timeout:g} s"))
