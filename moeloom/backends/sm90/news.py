"""What kernels have found, in memory of the host: read without waiting for the GPU, at the next call."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moeloom.backends.control import Control
from moeloom.backends.sm90.member import STAGES, given_up
from moeloom.errors import CapacityError, to_record

DROPPED, ROW, SLOT, VALUE = range(4)  # words of problems
WHY, PHASE, PEER, _EPOCH = range(4)  # words of a failure


class News:
    """Of one rank. failures: `[2, 4]`, of dispatch and of combine. strict: problems of launches that may drop nothing;
    lenient: of those that may.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        words = torch.zeros(len(STAGES) + 2, 4, dtype=torch.int32, pin_memory=True)
        self.failures, self.strict, self.lenient = words[: len(STAGES)], words[-2], words[-1]
        self.given: Callable[[int], int] = int  # the caller's id of one that a kernel has refused

    def take(self) -> Exception | None:
        """What was wrong in an earlier call of this rank, once."""
        rank = self._control.peers.rank
        for words in (self.strict, self.lenient):
            if words[ROW]:
                row, slot, value = int(words[ROW]) - 1, int(words[SLOT]), self.given(int(words[VALUE]))
                words.zero_()
                return ValueError(
                    f"rank {rank}: in an earlier call topk_idx[{row}, {slot}] was {value}; allowed: the ids of the"
                    " placement, or -1 for not routed"
                )
        dropped = int(self.strict[DROPPED])
        self.strict[DROPPED] = self.lenient[DROPPED] = 0
        if dropped:
            return CapacityError(
                f"rank {rank}: in an earlier call {dropped} rows did not fit into the capacity; raise capacity, or pass"
                " overflow='drop'"
            )
        return None

    def raise_failure(self) -> None:
        """If a launch gave up waiting, this Runtime has failed: tell all ranks and raise what was told first."""
        for stage, words in zip(STAGES, self.failures, strict=True):
            if words[WHY]:
                peers = self._control.peers
                error = given_up(stage, peers.rank, int(words[PEER]), int(words[PHASE]), peers.timeout)
                told = peers.abort(error)
                self._control.failure = to_record(told)
                raise told
