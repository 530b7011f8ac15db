"""What kernels have found, in memory of the host: read without waiting for the GPU, at the next call."""

from __future__ import annotations

import ctypes
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
        # the same memory: to read an element of a tensor takes many times as long, and this is done in every call
        self._words, self._read = words, (ctypes.c_int32 * 4 * len(words)).from_address(words.data_ptr())
        self.given: Callable[[int], int] = int  # the caller's id of one that a kernel has refused

    def take(self) -> Exception | None:
        """What was wrong in an earlier call of this rank, once."""
        rank = self._control.peers.rank
        strict, lenient = self._read[-2], self._read[-1]
        for words in (strict, lenient):
            if words[ROW]:
                row, slot, value = words[ROW] - 1, words[SLOT], self.given(words[VALUE])
                words[ROW] = 0  # the last that is read: from now on the kernels may write anew
                return ValueError(
                    f"rank {rank}: in an earlier call topk_idx[{row}, {slot}] was {value}; allowed: the ids of the"
                    " placement, or -1 for not routed"
                )
        dropped = strict[DROPPED]
        if dropped:  # only then: a kernel may be about to write the first
            strict[DROPPED] = 0
            return CapacityError(
                f"rank {rank}: in an earlier call {dropped} rows did not fit into the capacity; raise capacity, or pass"
                " overflow='drop'"
            )
        return None

    def raise_failure(self) -> None:
        """If a launch gave up waiting, this Runtime has failed: tell all ranks and raise what was told first."""
        for number, stage in enumerate(STAGES):
            words = self._read[number]
            if words[WHY]:
                peers = self._control.peers
                error = given_up(stage, peers.rank, words[PEER], words[PHASE], peers.timeout)
                told = peers.abort(error)
                self._control.failure = to_record(told)
                raise told
