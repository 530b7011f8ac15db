"""Messages between nodes: gloo, in a private group whose waits are ours."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work

from moeloom.backends.control import Control
from moeloom.backends.peers import POLL_SECONDS

WORD_BYTES = 8


class Wire:
    """Two private gloo groups over all ranks of a Runtime: one for rows to higher ranks, one for rows to lower ones.

    gloo's own wait cannot be interrupted and kills the group when it times out, so operations are started and then
    polled by `Control.wait`, which also notices another rank's failure. On one connection gloo's all-to-all is often
    half duplex: who comes second writes its rows before the notice that it is ready for the other's.
    """

    def __init__(self, store: Store, control: Control, timeout: float) -> None:
        self._control = control
        self._num_ranks = control.peers.num_ranks
        limit = timedelta(seconds=timeout)
        self._rank = control.peers.rank
        self._groups: list[Any] = []
        try:
            for name in ("up", "down"):
                store_of_group = PrefixStore(f"gloo {name}", store)
                self._groups.append(ProcessGroupGloo(store_of_group, self._rank, self._num_ranks, limit))
        except RuntimeError as error:
            control.fail("connecting the nodes", _first_line(error))
        self._works: list[Work] = []  # begun, and not seen to end
        self._records: list[Work] = []  # of these, records that were sent without waiting

    def exchange(self, rows: Tensor, sent: list[int], received: list[int], phase: str, out: Tensor) -> None:
        """Send `rows [sum(sent), ...]`, grouped by destination rank; fill `out [sum(received), ...]` by source rank."""
        self.finish(self.begin(rows, sent, received, out), phase)

    def begin(self, rows: Tensor, sent: list[int], received: list[int], out: Tensor) -> list[Work]:
        """`exchange`, begun; `out` is filled when `finish` returns."""
        mine, none = self._rank, [0] * self._num_ranks
        s, r = sum(sent[:mine]), sum(received[: mine + 1])
        up = self._start(0, out[:r], rows[s:], received[: mine + 1] + none[mine + 1 :], none[:mine] + sent[mine:])
        down = self._start(1, out[r:], rows[:s], none[: mine + 1] + received[mine + 1 :], sent[:mine] + none[mine:])
        return [up, down]

    def gather(self, record: bytes, width: int, wait: bool) -> list[bytes]:
        """Every rank's record of at most `width` bytes. Without `wait` it is only sent, as long as it is the only one.

        An all-to-all of copies: with four ranks on two cores gloo's ring all-gather takes four times as long.
        """
        while self._records:
            self.finish([self._records.pop()], "agreement")
        line = torch.zeros(WORD_BYTES + width, dtype=torch.uint8)
        line[:WORD_BYTES].view(torch.int64)[0] = len(record)
        line[WORD_BYTES : WORD_BYTES + len(record)] = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        lines = line.repeat(self._num_ranks, 1)
        table = torch.empty_like(lines)
        ones = [1] * self._num_ranks
        work = self._start(0, table, lines, ones, ones)
        if not wait:
            self._records.append(work)
            return []
        self.finish([work], "agreement")
        lengths = table[:, :WORD_BYTES].contiguous().view(torch.int64)[:, 0].tolist()
        return [bytes(row[WORD_BYTES : WORD_BYTES + n].tolist()) for row, n in zip(table, lengths, strict=True)]

    def close(self) -> None:
        """Leave the group at once. gloo ends a group only when all that was begun has ended; a thread waits for
        that.
        """
        if self._control.failure is not None:
            for group in self._groups:
                group.abort()
        if self._works:
            threading.Thread(target=_wait_for, args=(self._works, self._groups), daemon=True).start()
        self._groups = []

    def _start(self, group: int, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> Work:
        try:
            self._works.append(self._groups[group].alltoall_base(out, rows, received, sent))
        except RuntimeError as error:
            self._control.fail("start of an exchange", _first_line(error))
        return self._works[-1]

    def finish(self, works: list[Work], phase: str) -> None:
        """Wait for what was begun."""
        self._control.wait(lambda: all(work.is_completed() for work in works), phase)
        for work in works:
            self._works.remove(work)
            try:
                work.wait()
            except RuntimeError as error:
                self._control.fail(phase, _first_line(error))


def _wait_for(works: list[Work], groups: list[ProcessGroupGloo]) -> None:
    """Keep the groups until its works have ended: done, failed or at gloo's own deadline."""
    while not all(work.is_completed() for work in works):
        time.sleep(POLL_SECONDS)


def _first_line(error: BaseException) -> str:
    """gloo's messages are long; the part after the source location, up to the first full stop, says it."""
    text = str(error).splitlines()[0]
    return text.split("] ", 1)[-1].split(". ", 1)[0]
