"""The tile order of the fused kernel: which tile a ticket stands for. `comm_order` has the communication beside it.

The CTAs of a rank take tickets 0, 1, 2, ... from one counter, their spare warps from a second one. What a ticket means
is integer arithmetic over prefix sums of the routing, so a device function can do the same. Rows are cut into blocks,
numbered expert by expert, and blocks into units. Up/gate of a unit is followed by down of the unit `lag` before:

    two blocks of expert 0, one of expert 1, one tile wide, unit 1, lag 1 (e.m is block m of expert e):
    tiles          up 0.0, up 0.1, down 0.0, up 1.0, down 0.1, down 1.0
    communication  push, fan_out, combine, sum

Nothing can deadlock, given one worker per stream and rank: `CommOrder.position` puts the tasks of all ranks into one
order that both streams follow, in which each task waits only for earlier ones. Before the first unfinished task all
have ended. So it need not wait, and a worker has its ticket or will take it, since no worker of its stream is held up
by an earlier one. That stays true if workers fetch tickets in advance, as long as they use them in order. The routing
itself is exchanged before the first ticket.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

MENU = (16, 32, 64, 128)

Phase = Literal["up_gate", "down"]


class Tile(NamedTuple):
    """A tile of the first stream: `rows` rows of an expert from its row `row` on (block m), and columns of tile n."""

    phase: Phase
    expert: int
    m: int
    n: int
    row: int
    rows: int


def tile_rows(rows: int, menu: Sequence[int] = MENU) -> int:
    """The tile height of an expert with so many rows: as few blocks as the tallest of the (ascending) menu gives,
    because each block reads the weights again, and of the heights that need no more, the lowest. Padding is below it.
    """
    blocks = -(-rows // menu[-1])
    return next(height for height in menu if blocks * height >= rows)


def lag_for(tickets: int, unit: int, up_tiles: int) -> int:
    """The smallest lag, in units, that puts `tickets` tickets between up/gate and down of a unit, except at the end.

    A good value for `tickets` is what all CTAs hold together: twice their number if the next one is prefetched.
    """
    return -(-tickets // (unit * up_tiles))


def passes(counts: Sequence[int], pool_rows: int, menu: Sequence[int] = MENU) -> tuple[range, ...]:
    """Ranges of blocks whose rows, with padding, fit into `pool_rows` rows together.

    An expert that fits into the pool is not split, so that its weights are read once. A larger one is split by blocks,
    not refused: counts are data, and training must survive a hot expert. ValueError: the pool cannot hold one tile.
    """
    if pool_rows < menu[-1]:
        raise ValueError(f"pool_rows is {pool_rows}; allowed: {menu[-1]} (the tallest tile) and more")
    ranges = []
    begin = end = used = 0
    for rows in counts:
        height = tile_rows(rows, menu)
        blocks = -(-rows // height)
        step = max(blocks, 1) if blocks * height <= pool_rows else 1
        for _ in range(blocks // step):
            if used + step * height > pool_rows:
                ranges.append(range(begin, end))
                begin, used = end, 0
            end += step
            used += step * height
    return (*ranges, range(begin, end)) if end else ()


@dataclass(frozen=True)
class TileOrder:
    """The first stream of one rank.

    counts: rows per local expert. up_tiles, down_tiles: tiles side by side in the two products. lag: in units.
    unit: blocks whose tiles run together; there m is inner, so that neighbours share a tile of weights, the larger
    operand. A unit may begin in one expert and end in the next, which keeps all of one size and lets division find
    them. pool_rows: rows of the input pool, None for all. ValueError: a number out of range.
    """

    counts: tuple[int, ...]
    up_tiles: int
    down_tiles: int
    lag: int
    unit: int = 8
    menu: tuple[int, ...] = MENU
    pool_rows: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("up_tiles", 1), ("down_tiles", 1), ("lag", 0), ("unit", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: {least} and more")
        if min(self.counts, default=0) < 0:
            raise ValueError(f"counts are {self.counts}; allowed: 0 and more")
        if not self.menu or self.menu[0] < 1 or list(self.menu) != sorted(set(self.menu)):
            raise ValueError(f"menu is {self.menu}; allowed: ascending heights from 1 on")
        self.passes  # noqa: B018  refuses a pool that is too small

    @cached_property
    def heights(self) -> tuple[int, ...]:
        """Rows of each expert's tiles: `[E]`."""
        return tuple(tile_rows(rows, self.menu) for rows in self.counts)

    @cached_property
    def first_block(self) -> tuple[int, ...]:
        """Of each expert; one entry more, the number of all blocks: `[E + 1]`."""
        return (0, *accumulate(-(-rows // height) for rows, height in zip(self.counts, self.heights, strict=True)))

    @cached_property
    def first_row(self) -> tuple[int, ...]:
        """Rows, with padding, before each expert; one entry more, all rows: `[E + 1]`."""
        return (
            0,
            *accumulate(-(-rows // height) * height for rows, height in zip(self.counts, self.heights, strict=True)),
        )

    @cached_property
    def passes(self) -> tuple[range, ...]:
        """The blocks of each pass."""
        everything = max(self.first_row[-1], self.menu[-1])
        return passes(self.counts, everything if self.pool_rows is None else self.pool_rows, self.menu)

    @property
    def num_tickets(self) -> int:
        """Tiles of both phases."""
        return self.first_block[-1] * (self.up_tiles + self.down_tiles)

    @property
    def ring_blocks(self) -> int:
        """Most blocks between their first up/gate ticket and their last down ticket: the smallest ring of results.

        Block b uses slot b % ring_blocks. A larger ring also works, and spares up/gate some waiting.
        """
        return max((min(len(blocks), (self.lag + 1) * self.unit) for blocks in self.passes), default=0)

    def pass_of(self, block: int) -> int:
        """The number of the pass in which a block is done."""
        return bisect_right(self.passes, block, key=lambda blocks: blocks.start) - 1

    def expert_of(self, block: int) -> int:
        """The expert whose rows are in a block."""
        return bisect_right(self.first_block, block) - 1

    def tile(self, phase: Phase, block: int, n: int) -> Tile:
        """The tile of a block, by the number of the block among all."""
        expert = self.expert_of(block)
        height, m = self.heights[expert], block - self.first_block[expert]
        return Tile(phase, expert, m, n, m * height, min(height, self.counts[expert] - m * height))

    def pool_row(self, tile: Tile) -> int:
        """Where the tile's rows begin in the pool: after the padded rows of the blocks before it in its pass."""
        block = self.first_block[tile.expert] + tile.m
        begin = self.passes[self.pass_of(block)].start
        return self._padded_row(block) - self._padded_row(begin)

    def task(self, ticket: int) -> Tile:
        """What a ticket stands for. ValueError: there is no such ticket."""
        if not 0 <= ticket < self.num_tickets:
            raise ValueError(f"ticket is {ticket}; allowed: 0..{self.num_tickets - 1}")
        both = self.up_tiles + self.down_tiles
        blocks = self.passes[self.pass_of(ticket // both)]
        rest = ticket - blocks.start * both
        units, lag = self._units(blocks)
        if rest < self._start(blocks, lag):  # up/gate alone
            step = rest // (self.unit * self.up_tiles)
        elif rest < self._start(blocks, units):  # up/gate, then down
            step = lag + (rest - self._start(blocks, lag)) // (self.unit * both)
        else:  # down alone
            step = units + (rest - self._start(blocks, units)) // (self.unit * self.down_tiles)
        rest -= self._start(blocks, step)
        up = self._width(blocks, step) * self.up_tiles
        phase: Phase = "up_gate" if rest < up else "down"
        if phase == "down":
            rest, step = rest - up, step - lag
        n, m = divmod(rest, self._width(blocks, step))
        return self.tile(phase, blocks.start + step * self.unit + m, n)

    def ticket(self, tile: Tile) -> int:
        """The inverse of `task`."""
        block = self.first_block[tile.expert] + tile.m
        blocks = self.passes[self.pass_of(block)]
        step, m = divmod(block - blocks.start, self.unit)
        rest = tile.n * self._width(blocks, step) + m
        if tile.phase == "down":
            step += self._units(blocks)[1]
            rest += self._width(blocks, step) * self.up_tiles
        return blocks.start * (self.up_tiles + self.down_tiles) + self._start(blocks, step) + rest

    def waits_for(self, tile: Tile) -> tuple[Tile, ...]:
        """Tiles that must have ended: for down all columns of its block, for up/gate those who read its ring slot."""
        block = self.first_block[tile.expert] + tile.m
        if tile.phase == "down":
            return tuple(self.tile("up_gate", block, n) for n in range(self.up_tiles))
        block -= self.ring_blocks
        return tuple(self.tile("down", block, n) for n in range(self.down_tiles)) if block >= 0 else ()

    def _padded_row(self, block: int) -> int:
        """Rows, with padding, of all blocks before."""
        expert = self.expert_of(block)
        return self.first_row[expert] + (block - self.first_block[expert]) * self.heights[expert]

    def _units(self, blocks: range) -> tuple[int, int]:
        """Units of a pass, and its lag: no more than its units."""
        units = -(-len(blocks) // self.unit)
        return units, min(self.lag, units)

    def _width(self, blocks: range, step: int) -> int:
        """Blocks in a unit of a pass: all have the same number but for the last."""
        return max(0, min(self.unit, len(blocks) - step * self.unit))

    def _start(self, blocks: range, step: int) -> int:
        """Tickets of a pass before up/gate of unit `step`: its up/gate units before, and the down units due."""
        due = max(0, step - self._units(blocks)[1])
        before, downs = (min(count * self.unit, len(blocks)) for count in (step, due))
        return before * self.up_tiles + downs * self.down_tiles
