"""The order of the fused kernel's communication, and the one order of all ranks' tasks in which nothing can deadlock.

See `tile_order` for the tiles that it serves.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from moeloom.schedule.tile_order import Phase, Tile, TileOrder

Kind = Literal["push", "fan_out", "combine", "sum"]


class CommTask(NamedTuple):
    """A piece of communication done by `rank`. block: which of the pieces for or from `peer`.

    push: tokens to a peer. fan_out: a peer's tokens (or own ones) into the rows of their experts, for one pass.
    combine: sums of a peer's tokens over the rows here, to that peer. sum: own tokens, peer is the rank itself.
    """

    kind: Kind
    rank: int
    peer: int
    number: int  # of the pass; 0 but for fan_out
    block: int


@dataclass(frozen=True)
class Traffic:
    """The routing as far as it orders communication, the same on all ranks.

    first, last: `[R][R][E]`, tokens of a source rank whose lowest (highest) expert on another rank is this one. A rank
    pushes tokens to a peer sorted by the first and combines those of a peer sorted by the last.
    tokens: `[R]`, of each rank, routed or not. ValueError: first and last are not about the same tokens.
    """

    first: tuple[tuple[tuple[int, ...], ...], ...]
    last: tuple[tuple[tuple[int, ...], ...], ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        ranks = len(self.tokens)
        for name in ("first", "last"):
            shape = [[len(experts) for experts in row] for row in getattr(self, name)]
            if [len(row) for row in shape] != [ranks] * ranks or len({size for row in shape for size in row}) > 1:
                raise ValueError(f"{name} has experts {shape}; allowed: one number of them, {ranks} x {ranks} times")
        sums = [[[sum(experts) for experts in row] for row in table] for table in (self.first, self.last)]
        if sums[0] != sums[1] or any(max(row) > own for row, own in zip(sums[0], self.tokens, strict=True)):
            raise ValueError(f"first, last sum to {sums}; allowed: the same, and per source at most {self.tokens}")


@dataclass(frozen=True)
class Stage:
    """A stretch of the communication stream: pieces of several peers, merged by expert.

    number: of the pass. peers: who comes first among equals. tokens: `[peers][E]`. piece: tokens in a piece.
    experts: a piece comes with the first of them that needs it (combine: that completes it); what only experts before
    this range would need may hold rows for it too, and comes with its first.
    """

    kind: Kind
    rank: int
    number: int
    peers: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    piece: int
    experts: range

    @cached_property
    def sums(self) -> tuple[tuple[int, ...], ...]:
        """Tokens up to and with each expert."""
        return tuple(tuple(accumulate(row)) for row in self.tokens)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Pieces of all peers up to and with each of `experts`."""
        return tuple(sum(self.reached(at, expert) for at in range(len(self.peers))) for expert in self.experts)

    @property
    def size(self) -> int:
        """Number of pieces."""
        return self.ends[-1] if self.ends else 0

    def reached(self, at: int, expert: int) -> int:
        """Pieces of the peer at a place up to and with an expert: with combine, only whole ones before the end."""
        if expert < self.experts.start:
            return 0
        tokens, everything = self.sums[at][expert], self.sums[at][-1]
        whole = self.kind == "combine" and tokens < everything
        return tokens // self.piece if whole else -(-tokens // self.piece)

    def task(self, ticket: int) -> CommTask:
        """The piece with this number within the stage."""
        index = bisect_right(self.ends, ticket)
        rest = ticket - (self.ends[index - 1] if index else 0)
        for at, peer in enumerate(self.peers):
            before, after = (self.reached(at, self.experts[index] + shift) for shift in (-1, 0))
            if rest < after - before:
                return CommTask(self.kind, self.rank, peer, self.number, before + rest)
            rest -= after - before
        raise ValueError(f"ticket is {ticket}; allowed: 0..{self.size - 1}")

    def expert(self, task: CommTask) -> int:
        """The expert a piece comes with."""
        at = self.peers.index(task.peer)
        return next(expert for expert in self.experts if self.reached(at, expert) > task.block)


@dataclass(frozen=True)
class CommOrder:
    """The second stream of one rank, and what the tasks of both of its streams wait for.

    push_tokens, combine_tokens: tokens under one flag. ValueError: the tiles' counts do not go with the traffic.
    """

    rank: int
    traffic: Traffic
    tiles: TileOrder
    push_tokens: int = 64
    combine_tokens: int = 16

    def __post_init__(self) -> None:
        counts = self.tiles.counts
        for name in ("first", "last"):
            tokens = [
                sum(column) for column in zip(*(row[self.rank] for row in getattr(self.traffic, name)), strict=True)
            ]
            if len(tokens) != len(counts) or any(own > rows for own, rows in zip(tokens, counts, strict=True)):
                raise ValueError(f"counts are {counts}; allowed: rows for the tokens in {name}, {tokens}, or more")

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """In the order of tickets. The first peer to push to is the next rank, so the rank before arrives first."""
        rank, traffic, tiles = self.rank, self.traffic, self.tiles
        ranks = len(traffic.tokens)
        after = tuple((rank + step) % ranks for step in range(1, ranks))
        before = tuple((rank - step) % ranks for step in range(ranks))  # and the rank itself, which waits for nobody
        experts = range(len(tiles.counts))

        pushed = tuple(traffic.first[rank][peer] for peer in after)
        arriving = tuple(traffic.first[peer][rank] for peer in before)
        leaving = tuple(traffic.last[peer][rank] for peer in after)
        stages = [Stage("push", rank, 0, after, pushed, self.push_tokens, experts)]
        for number, blocks in enumerate(tiles.passes):
            part = range(tiles.expert_of(blocks.start), tiles.expert_of(blocks[-1]) + 1)
            stages.append(Stage("fan_out", rank, number, before, arriving, self.push_tokens, part))
        stages.append(Stage("combine", rank, 0, after, leaving, self.combine_tokens, experts))
        stages.append(Stage("sum", rank, 0, (rank,), ((traffic.tokens[rank],),), self.combine_tokens, range(1)))
        return tuple(stages)

    @property
    def num_tickets(self) -> int:
        """Tasks of the second stream."""
        return sum(stage.size for stage in self.stages)

    def task(self, ticket: int) -> CommTask:
        """What a ticket of the second stream stands for. ValueError: there is no such ticket."""
        rest = ticket
        for stage in self.stages:
            if 0 <= rest < stage.size:
                return stage.task(rest)
            rest -= stage.size
        raise ValueError(f"ticket is {ticket}; allowed: 0..{self.num_tickets - 1}")

    def position(self, task: Tile | CommTask) -> tuple[int, int, tuple[int, ...]]:
        """The place of a task of this rank among those of all: pushes; by pass fan-out, then tiles; combines; sums.

        Compared as tuples (stage, pass, place within); those of different tasks differ, also between ranks.
        """
        if isinstance(task, Tile):
            number = self.tiles.pass_of(self.tiles.first_block[task.expert] + task.m)
            return (1, number, (1, self.tiles.ticket(task), self.rank))
        stage = self._stage(task)
        order = {"push": 0, "fan_out": 1, "combine": 2, "sum": 3}[task.kind]
        within = (0, stage.expert(task), stage.peers.index(task.peer), task.block, self.rank)
        return (order, task.number, within)

    def waits_for(self, task: Tile | CommTask) -> tuple[Tile | CommTask, ...]:
        """What must have ended before a task of this rank: tiles of this rank, communication of this and of others.

        May name more than the rows of one tile or token need: a kernel that waits for fewer is covered by the proof.
        """
        tiles, ranks = self.tiles, len(self.traffic.tokens)
        if isinstance(task, Tile):
            if task.phase == "down":
                return tiles.waits_for(task)
            stage = self.stages[1 + tiles.pass_of(tiles.first_block[task.expert] + task.m)]
            arrived = stage.ends[task.expert - stage.experts.start]
            return (*tiles.waits_for(task), *(stage.task(ticket) for ticket in range(arrived)))
        if task.kind == "push":
            return ()
        if task.kind == "fan_out":
            pushed = (CommTask("push", task.peer, self.rank, 0, task.block),) if task.peer != self.rank else ()
            return (*pushed, *(self._tiles("up_gate", tiles.passes[task.number - 1]) if task.number else ()))
        if task.kind == "combine":
            return self._tiles("down", range(tiles.first_block[self._stage(task).expert(task) + 1]))
        own = self.traffic.last[self.rank]
        arriving = (
            CommTask("combine", peer, self.rank, 0, block)
            for peer in range(ranks)
            if peer != self.rank
            for block in range(-(-sum(own[peer]) // self.combine_tokens))
        )
        return (*self._tiles("down", range(tiles.first_block[-1])), *arriving)

    def _stage(self, task: CommTask) -> Stage:
        """The stage that holds a task."""
        return next(stage for stage in self.stages if (stage.kind, stage.number) == (task.kind, task.number))

    def _tiles(self, phase: Phase, blocks: range) -> tuple[Tile, ...]:
        """All tiles of blocks in one phase."""
        columns = self.tiles.up_tiles if phase == "up_gate" else self.tiles.down_tiles
        return tuple(self.tiles.tile(phase, block, n) for block in blocks for n in range(columns))
