"""The other ranks, reached out of band through the group's store: to meet at construction, and when something fails.

Nothing here runs in a healthy operation; a rank that has waited long looks for news a few times a second.
"""

from __future__ import annotations

import json
import time

from torch.distributed import DistError, Store

from moeloom.errors import MoeloomError, PeerTimeout, from_record, to_record

POLL_SECONDS = 0.02
MAX_ROLL_CALL_SECONDS = 1.0
MESSAGE_CHARS = 600  # of an error, on its way to other ranks
NO_STORE = "the group's store does not answer; the process that hosts it, often rank 0's, has ended"


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
        try:
            return self._gather(self.store, topic, record)
        except DistError:
            raise PeerTimeout(f"Runtime construction: {NO_STORE} (phase: {topic})") from None

    def _gather(self, store: Store, topic: str, record: dict) -> list[dict]:
        keys = [f"{topic}/{rank}" for rank in range(self.num_ranks)]
        store.set(keys[self.rank], json.dumps(record))
        deadline = time.monotonic() + self.timeout
        missing = list(range(self.num_ranks))
        while missing := [rank for rank in missing if not store.check([keys[rank]])]:
            self.raise_if_aborted()
            if time.monotonic() > deadline:
                names = ", ".join(map(str, missing))
                error = PeerTimeout(
                    f"Runtime construction: rank(s) {names} of {self.num_ranks} did not come within {self.timeout:g} s"
                    f" (phase: {topic})"
                )
                raise self.abort(error)
            time.sleep(POLL_SECONDS)
        return [json.loads(store.get(key)) for key in keys]

    def abort(self, error: BaseException) -> Exception:
        """Tell all ranks that this Runtime has failed. Returns the error that was told first, the same everywhere."""
        if self.store is None:
            return from_record(to_record(error))
        told = to_record(error)
        try:
            told = json.loads(self.store.compare_set("abort", "", json.dumps(told)))
            self.store.set("attention", "1")
        except DistError:
            pass  # nobody can be told; the others find that out by themselves
        return from_record(told)

    def refuse(self, error: BaseException) -> Exception:
        """Tell all ranks why this one cannot take part in the construction. Returns what they all raise, as `abort`."""
        return self.abort(from_record(self.name_rank(error)))

    def name_rank(self, error: BaseException) -> dict[str, str]:
        """The error's record, saying which rank is at fault. So does the error itself, if the others raise it alike."""
        record = to_record(error)
        if self.num_ranks > 1:
            prefix = f"rank {self.rank}: "
            record["message"] = (prefix + record["message"].removeprefix(prefix))[:MESSAGE_CHARS]
            if record["error"] == type(error).__name__:
                error.args = (record["message"],)
        return record

    def raise_if_aborted(self) -> None:
        """Look for news: raise what another rank reported, answer a roll call. `DistError` if the store has gone."""
        if self.store is None or not self.store.check(["attention"]):
            return
        if self.store.check(["abort"]):
            raise from_record(json.loads(self.store.get("abort")))
        self.store.set(f"here/{self.rank}", "1")

    def say_closed(self) -> None:
        """Let a later roll call know why this rank is not there."""
        try:
            if self.store is not None:
                self.store.set(f"closed/{self.rank}", "1")
        except DistError:
            pass  # nobody is left to call the roll

    def blame(self, waiting_for: str, seconds: float) -> Exception:
        """Call the roll and abort, naming who did not answer: the rank that waits need not be the one that is late.

        seconds: how long the others have been given.
        """
        if self.store is None:
            return MoeloomError(f"{waiting_for}: failed on the only rank")
        try:
            return self._call_roll(self.store, waiting_for, seconds)
        except DistError:
            return PeerTimeout(f"{waiting_for}: {NO_STORE}")

    def _call_roll(self, store: Store, waiting_for: str, seconds: float) -> Exception:
        store.set(f"here/{self.rank}", "1")
        store.set("attention", "1")
        end = time.monotonic() + self.roll_call_seconds
        while time.monotonic() < end:
            try:
                self.raise_if_aborted()
            except (MoeloomError, ValueError) as known:
                return known
            time.sleep(POLL_SECONDS)
        silent = [rank for rank in range(self.num_ranks) if not store.check([f"here/{rank}"])]
        if not silent:
            return self.abort(PeerTimeout(f"{waiting_for}: no progress within {seconds:g} s, though all ranks answer"))
        closed = [rank for rank in silent if store.check([f"closed/{rank}"])]
        names = ", ".join(f"{rank} (has closed its Runtime)" if rank in closed else str(rank) for rank in silent)
        return self.abort(PeerTimeout(f"{waiting_for}: rank(s) {names} did not come within {seconds:g} s"))
