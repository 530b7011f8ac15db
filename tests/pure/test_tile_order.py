"""The tile order against plain loops, its waits against the tokens themselves, and simulated workers."""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeloom.schedule.comm_order import CommOrder, CommTask, Traffic
from moeloom.schedule.tile_order import Tile, TileOrder, lag_for, passes, tile_rows

COUNTS = (0, 1, 15, 16, 17, 64, 65)
FAMILY = [counts for experts in range(4) for counts in itertools.product(COUNTS, repeat=experts)]
MENUS = ((16, 32, 64, 128), (16,), (16, 48))

# a task with the rank that does it
Node = tuple[int, Tile | CommTask]


# ---- what is expected, by plain loops


def lowest_height(rows: int, menu: tuple[int, ...]) -> int:
    """The lowest height with as few blocks as any."""
    needed = {height: len(range(0, rows, height)) for height in menu}
    return min(height for height in menu if needed[height] == min(needed.values()))


def blocks_of(order: TileOrder) -> list[tuple[int, int, int, int]]:
    """(expert, m, first row, rows) of each block."""
    found = []
    for expert, rows in enumerate(order.counts):
        height = lowest_height(rows, order.menu)
        starts = range(0, rows, height)
        found += [(expert, m, start, min(height, rows - start)) for m, start in enumerate(starts)]
    return found


def enumerated(order: TileOrder) -> list[Tile]:
    """All tiles in order: what `task` says in closed form."""
    everything = blocks_of(order)
    tiles = []
    for part in order.passes:
        blocks = [everything[block] for block in part]
        units = [blocks[start : start + order.unit] for start in range(0, len(blocks), order.unit)]
        waiting: deque[list[tuple[int, int, int, int]]] = deque()

        def emit(phase, unit, columns):
            tiles.extend(Tile(phase, e, m, n, row, rows) for n in range(columns) for e, m, row, rows in unit)

        for unit in units:
            emit("up_gate", unit, order.up_tiles)
            waiting.append(unit)
            if len(waiting) > order.lag:
                emit("down", waiting.popleft(), order.down_tiles)
        for unit in waiting:
            emit("down", unit, order.down_tiles)
    return tiles


def most_alive(tiles: list[Tile]) -> int:
    """Most blocks between their first up/gate tile and their last down tile, when tiles are done one by one."""
    last = {(tile.expert, tile.m): place for place, tile in enumerate(tiles)}
    alive: set[tuple[int, int]] = set()
    most = 0
    for place, tile in enumerate(tiles):
        block = (tile.expert, tile.m)
        alive.add(block)
        most = max(most, len(alive))
        if last[block] == place:
            assert tile.phase == "down"
            alive.remove(block)
    return most


# ---- checks and simulation, for any number of ranks


@dataclass
class System:
    """streams: tasks in the order of their tickets, two per rank. waits: of each task. place: in the global order."""

    streams: list[list[Node]]
    waits: dict[Node, list[Node]]
    place: dict[Node, tuple]

    def check(self) -> None:
        nodes = [node for stream in self.streams for node in stream]
        assert len(set(nodes)) == len(nodes) == len(self.waits)
        assert len(set(self.place.values())) == len(nodes)
        for stream in self.streams:
            places = [self.place[node] for node in stream]
            assert places == sorted(places), "a stream does not follow the global order"
        for node, others in self.waits.items():
            late = [other for other in others if self.place[other] >= self.place[node]]
            assert not late, f"{node} waits for later {late[:3]}"


def system_of(orders: list[CommOrder]) -> System:
    streams: list[list[Node]] = []
    for rank, order in enumerate(orders):
        streams.append([(rank, order.tiles.task(ticket)) for ticket in range(order.tiles.num_tickets)])
        streams.append([(rank, order.task(ticket)) for ticket in range(order.num_tickets)])
    nodes = [node for stream in streams for node in stream]

    def owner(rank: int, task: Tile | CommTask) -> Node:
        return (task.rank if isinstance(task, CommTask) else rank, task)

    waits = {(rank, task): [owner(rank, other) for other in orders[rank].waits_for(task)] for rank, task in nodes}
    place = {(rank, task): orders[rank].position(task) for rank, task in nodes}
    return System(streams, waits, place)


def unfinished(system: System, workers: int, seed: int, fetched: int = 1, stuck: bool = False) -> int:
    """Tasks left when `workers` workers of each stream can do no more.

    Each holds up to `fetched` tickets and uses them in order. Who is next is drawn at random; a stuck worker, the first
    of each stream, moves only when nobody else can.
    """
    draw = random.Random(seed)
    left = {node: len(set(others)) for node, others in system.waits.items()}
    wanted_by: dict[Node, list[Node]] = {node: [] for node in left}
    for node, others in system.waits.items():
        for other in set(others):
            wanted_by[other].append(node)
    tickets = [deque(stream) for stream in system.streams]
    held: dict[tuple[int, int], deque[Node]] = {
        (stream, worker): deque() for stream in range(len(tickets)) for worker in range(workers)
    }
    holder: dict[Node, tuple[int, int]] = {}
    able: list[tuple[int, int]] = []  # workers whose first task waits for nothing more

    def fetch(who: tuple[int, int]) -> None:
        while len(held[who]) < fetched and tickets[who[0]]:
            held[who].append(tickets[who[0]].popleft())
        if held[who]:
            holder[held[who][0]] = who
            if not left[held[who][0]]:
                able.append(who)

    names = list(held)
    draw.shuffle(names)
    for who in names:
        fetch(who)
    done = 0
    while able:
        quick = [who for who in able if who[1] > 0] if stuck else able
        who = draw.choice(quick or able)
        able.remove(who)
        node = held[who].popleft()
        done += 1
        for other in wanted_by[node]:
            left[other] -= 1
            if not left[other] and other in holder:
                able.append(holder[other])
        fetch(who)
    return len(left) - done


# ---- routing


Routing = list[list[list[int]]]  # [rank][token] -> experts, numbered over all ranks


def routing_of(seed: int, ranks: int, experts: int, tokens: tuple[int, ...], hot: float = 0.0) -> Routing:
    """Each token names 0..3 different experts; with probability `hot` the first one of rank 0 is among them."""
    draw = random.Random(seed)

    def token() -> list[int]:
        chosen = set(draw.sample(range(ranks * experts), draw.randint(0, min(3, ranks * experts))))
        return sorted(chosen | ({0} if draw.random() < hot else set()))

    return [[token() for _ in range(tokens[rank])] for rank in range(ranks)]


def local(token: list[int], rank: int, experts: int) -> list[int]:
    return [expert - rank * experts for expert in token if expert // experts == rank]


def traffic_of(routing: Routing, experts: int) -> Traffic:
    ranks = range(len(routing))

    def table(end: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        named = {
            (src, dst): [local(t, dst, experts)[end] for t in routing[src] if experts and local(t, dst, experts)]
            for src in ranks
            for dst in ranks
        }
        return tuple(tuple(tuple(named[s, d].count(e) for e in range(experts)) for d in ranks) for s in ranks)

    return Traffic(table(0), table(-1), tuple(len(tokens) for tokens in routing))


def rows_of(routing: Routing, rank: int, experts: int) -> list[list[tuple[int, int]]]:
    """(source, token) of each row of each expert of a rank, by source and token."""
    return [
        [(s, t) for s, tokens in enumerate(routing) for t, token in enumerate(tokens) if rank * experts + e in token]
        for e in range(experts)
    ]


def orders_of(routing: Routing, experts: int, **options) -> list[CommOrder]:
    traffic = traffic_of(routing, experts)
    options = {"up_tiles": 2, "down_tiles": 2, "lag": 1, "unit": 2, "menu": (2, 4), **options}
    counts = [tuple(len(rows) for rows in rows_of(routing, rank, experts)) for rank in range(len(routing))]
    return [CommOrder(rank, traffic, TileOrder(counts[rank], **options), 4, 3) for rank in range(len(routing))]


CASES = [
    # ranks, experts, tokens, hot, options
    (1, 3, (20,), 0.0, {}),
    (1, 1, (9,), 1.0, {"pool_rows": 4, "lag": 0}),
    (2, 3, (13, 20), 0.0, {"lag": 0}),
    (2, 2, (17, 9), 1.0, {"pool_rows": 8, "lag": 2}),  # the hot expert is larger than the pool
    (2, 3, (0, 12), 0.2, {"unit": 1, "up_tiles": 3}),
    (2, 4, (0, 0), 0.0, {}),
    (3, 2, (11, 0, 14), 0.5, {"pool_rows": 12, "unit": 3, "down_tiles": 3}),
    (3, 3, (8, 9, 10), 0.0, {"pool_rows": 6, "unit": 1, "up_tiles": 1, "down_tiles": 1, "lag": 3}),
    (3, 1, (30, 1, 2), 0.0, {"pool_rows": 10, "lag": 1}),
    (1, 0, (5,), 0.0, {}),
]
SYSTEMS = [(case, seed) for case in CASES for seed in range(4)]


def orders_for(case: tuple, seed: int) -> tuple[Routing, list[CommOrder]]:
    ranks, experts, tokens, hot, options = case
    routing = routing_of(seed, ranks, experts, tokens, hot)
    return routing, orders_of(routing, experts, **options)


# ---- tiles


def check_tiles(order: TileOrder) -> None:
    """Everything about the tiles of one rank: order, coverage, waits, ring."""
    tiles = enumerated(order)
    assert [order.task(ticket) for ticket in range(order.num_tickets)] == tiles
    place = {tile: ticket for ticket, tile in enumerate(tiles)}
    assert [order.ticket(tile) for tile in tiles] == list(range(len(tiles)))

    blocks = blocks_of(order)
    wanted = {
        Tile(phase, e, m, n, row, rows)
        for phase, columns in (("up_gate", order.up_tiles), ("down", order.down_tiles))
        for e, m, row, rows in blocks
        for n in range(columns)
    }
    assert set(tiles) == wanted and len(tiles) == len(wanted)

    ring = order.ring_blocks
    assert ring == most_alive(tiles)
    number = {(expert, m): block for block, (expert, m, _, _) in enumerate(blocks)}
    readers: dict[tuple[int, int], set[Tile]] = {}
    writers: dict[tuple[int, int], set[Tile]] = {}
    for tile in tiles:
        (readers if tile.phase == "down" else writers).setdefault((tile.expert, tile.m), set()).add(tile)
    in_slot: dict[int, tuple[int, int]] = {}  # the block before in a ring slot
    before = {}
    for block, of in number.items():
        before[block] = in_slot.get(of % ring)
        in_slot[of % ring] = block
    for tile in tiles:
        block = (tile.expert, tile.m)
        needed = writers[block] if tile.phase == "down" else readers.get(before[block], set())
        waits = order.waits_for(tile)
        assert set(waits) == needed and len(waits) == len(needed)
        assert all(place[other] < place[tile] for other in waits)


def test_tiles_exhaustively() -> None:
    pools = itertools.cycle((None, 128, 160, 64, None))  # five, so that each meets all of the rest
    for counts, lag, columns, unit, menu in itertools.product(FAMILY, range(4), (1, 2, 3), (1, 3), MENUS):
        pool = next(pools)
        check_tiles(TileOrder(counts, columns, 4 - columns, lag, unit, menu, pool and max(pool, menu[-1])))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 700), max_size=9),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 9),
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(128, 2000)),
)
def test_tiles_of_larger_counts(counts, up, down, lag, unit, pool) -> None:
    check_tiles(TileOrder(tuple(counts), up, down, lag, unit, pool_rows=pool))


def test_the_example_of_the_docstring() -> None:
    order = TileOrder((2, 1), up_tiles=1, down_tiles=1, lag=1, unit=1, menu=(1,))
    found = [(t.phase, t.expert, t.m) for t in map(order.task, range(order.num_tickets))]
    up = [("up_gate", 0, 0), ("up_gate", 0, 1), ("up_gate", 1, 0)]
    down = [("down", expert, m) for _, expert, m in up]
    assert found == [up[0], up[1], down[0], up[2], down[1], down[2]]


@pytest.mark.parametrize("menu", MENUS)
def test_tile_rows(menu: tuple[int, ...]) -> None:
    for rows in range(0, 700):
        height = tile_rows(rows, menu)
        assert height == lowest_height(rows, menu)
        assert -(-rows // height) == -(-rows // menu[-1])
        assert -rows % height < height == min(h for h in menu if h * -(-rows // menu[-1]) >= rows)
    assert [tile_rows(rows) for rows in (0, 1, 16, 17, 64, 65, 128, 129, 9999)] == [
        16,
        16,
        16,
        32,
        64,
        128,
        128,
        128,
        128,
    ]


def test_passes_fit_and_split_only_what_must_be_split() -> None:
    for counts, pool, menu in itertools.product(FAMILY, (128, 130, 160, 208), MENUS):
        heights = [lowest_height(rows, menu) for rows in counts]
        blocks = [expert for expert, rows in enumerate(counts) for _ in range(0, rows, heights[expert])]
        found = passes(counts, pool, menu)
        assert [block for part in found for block in part] == list(range(len(blocks)))
        assert all(found)
        sizes = [sum(heights[blocks[block]] for block in part) for part in found]
        assert max(sizes, default=0) <= pool
        for part, size, after in zip(found, sizes, found[1:], strict=False):
            expert = blocks[after[0]]
            whole = blocks.count(expert) * heights[expert]
            split = blocks[part[-1]] == expert
            assert not split or whole > pool
            assert size + (heights[expert] if whole > pool else whole) > pool  # no room was left
    assert passes((300, 5), 128) == (range(0, 1), range(1, 2), range(2, 3), range(3, 4))


def test_rows_of_a_pass_lie_side_by_side_in_the_pool() -> None:
    for counts, pool in itertools.product(FAMILY, (None, 128, 208)):
        order = TileOrder(counts, 1, 1, 1, menu=(16, 48), pool_rows=pool)
        tiles = (order.tile("up_gate", block, 0) for block in range(order.first_block[-1]))
        for part in order.passes:
            row = 0
            for _ in part:
                tile = next(tiles)
                assert order.pool_row(tile) == row
                row += lowest_height(counts[tile.expert], (16, 48))
            assert pool is None or row <= pool


@pytest.mark.parametrize("tickets", [0, 1, 7, 12, 50])
@pytest.mark.parametrize(("unit", "up"), [(1, 1), (2, 3), (8, 4)])
def test_lag_for(tickets: int, unit: int, up: int) -> None:
    def distance(lag: int) -> int:
        """Fewest tickets between up/gate and down of a unit, of those that lag full units follow."""
        order = TileOrder((16 * unit * (lag + 4),), up, 2, lag, unit, (16,))
        tiles = enumerated(order)
        found = []
        for first in range(0, 4 * unit, unit):
            ups, downs = (
                [place for place, t in enumerate(tiles) if t.phase == phase and first <= t.m < first + unit]
                for phase in ("up_gate", "down")
            )
            found.append(downs[0] - ups[-1] - 1)
        return min(found)

    lag = lag_for(tickets, unit, up)
    assert distance(lag) >= tickets
    assert lag == 0 or distance(lag - 1) < tickets


# ---- communication


def expected_comm(order: CommOrder) -> list[CommTask]:
    """The second stream by plain loops: all pieces, sorted by the expert that wants or completes them."""
    rank, traffic, ranks = order.rank, order.traffic, len(order.traffic.tokens)

    def pieces(kind: str, tables: dict[int, tuple[int, ...]], number: int, clip: range | None) -> list[CommTask]:
        found = []
        for at, (peer, counts) in enumerate(tables.items()):
            tokens = [expert for expert, count in enumerate(counts) for _ in range(count)]
            size = order.combine_tokens if kind == "combine" else order.push_tokens
            for block, start in enumerate(range(0, len(tokens), size)):
                own = tokens[start : start + size]
                expert = own[-1] if kind == "combine" else own[0]
                if clip is None or expert < clip.stop:
                    expert = expert if clip is None else max(expert, clip.start)
                    found.append(((expert, at, block), CommTask(kind, rank, peer, number, block)))
        return [task for _, task in sorted(found)]

    nexts = [(rank + step) % ranks for step in range(1, ranks)]
    sources = [rank] + [(rank - step) % ranks for step in range(1, ranks)]
    stream = pieces("push", {peer: traffic.first[rank][peer] for peer in nexts}, 0, None)
    owners = [expert for expert, _, _, _ in blocks_of(order.tiles)]
    for number, part in enumerate(order.tiles.passes):
        clip = range(owners[part[0]], owners[part[-1]] + 1)
        stream += pieces("fan_out", {peer: traffic.first[peer][rank] for peer in sources}, number, clip)
    stream += pieces("combine", {peer: traffic.last[peer][rank] for peer in nexts}, 0, None)
    return stream + [
        CommTask("sum", rank, rank, 0, block)
        for block, _ in enumerate(range(0, traffic.tokens[rank], order.combine_tokens))
    ]


@pytest.mark.parametrize(("case", "seed"), SYSTEMS)
def test_communication_in_closed_form(case: tuple, seed: int) -> None:
    for order in orders_for(case, seed)[1]:
        assert [order.task(ticket) for ticket in range(order.num_tickets)] == expected_comm(order)
        check_tiles(order.tiles)


def needs(routing: Routing, orders: list[CommOrder], system: System) -> dict[Node, set[Node]]:
    """What each task must not begin before, derived from the tokens: rows it reads, rows it overwrites."""
    experts = len(orders[0].tiles.counts)
    found: dict[Node, set[Node]] = {node: set() for node in system.waits}
    for rank, order in enumerate(orders):
        tiles, rows = order.tiles, rows_of(routing, rank, experts)
        block_of: dict[tuple[str, int, int], int] = {}  # (kind, source, token) -> its piece
        for source, tokens in enumerate(routing):
            here = [t for t, token in enumerate(tokens) if experts and local(token, rank, experts)]
            for kind, end, size in (("push", 0, order.push_tokens), ("combine", -1, order.combine_tokens)):
                by = sorted(here, key=lambda t: local(tokens[t], rank, experts)[end])
                block_of |= {(kind, source, t): place // size for place, t in enumerate(by)}
        mine = [task for owner, task in system.waits if owner == rank]
        part = {tile: tiles.pass_of(tiles.first_block[tile.expert] + tile.m) for tile in mine if isinstance(tile, Tile)}
        filled: dict[int, list[tuple[int, Node]]] = {}  # pool row -> up/gate tiles that read it, by pass
        for tile in part:
            at = tiles.pool_row(tile)
            for row in range(tile.rows if tile.phase == "up_gate" else 0):
                filled.setdefault(at + row, []).append((part[tile], (rank, tile)))
        for tile in part:
            own = found[rank, tile]
            if tile.phase == "down":
                own |= {(rank, t) for t in part if t.phase == "up_gate" and (t.expert, t.m) == (tile.expert, tile.m)}
            for offset, (source, token) in enumerate(rows[tile.expert][tile.row : tile.row + tile.rows]):
                if tile.phase == "up_gate":
                    block = block_of["push", source, token]
                    fan_out = (rank, CommTask("fan_out", rank, source, part[tile], block))
                    own.add(fan_out)
                    if source != rank:
                        found[fan_out].add((source, CommTask("push", source, rank, 0, block)))
                    pool_row = tiles.pool_row(tile) + offset
                    found[fan_out] |= {node for number, node in filled[pool_row] if number < part[tile]}
                elif source == rank:
                    found[rank, CommTask("sum", rank, rank, 0, token // order.combine_tokens)].add((rank, tile))
                else:
                    combine = (rank, CommTask("combine", rank, source, 0, block_of["combine", source, token]))
                    found[combine].add((rank, tile))
                    found[source, CommTask("sum", source, source, 0, token // order.combine_tokens)].add(combine)
    return found


@pytest.mark.parametrize(("case", "seed"), SYSTEMS)
def test_waits_cover_what_tokens_need(case: tuple, seed: int) -> None:
    """Every need is waited for, directly or through another wait; and every wait is for an earlier task."""
    routing, orders = orders_for(case, seed)
    system = system_of(orders)
    system.check()
    bit = {node: 1 << place for place, node in enumerate(sorted(system.waits, key=lambda node: system.place[node]))}
    covered: dict[Node, int] = {}
    for node in bit:  # in order
        covered[node] = 0
        for other in system.waits[node]:
            covered[node] |= bit[other] | covered[other]
    for node, others in needs(routing, orders, system).items():
        assert all(covered[node] & bit[other] for other in others), node


@pytest.mark.parametrize(("case", "seed"), SYSTEMS)
def test_any_number_of_workers_finishes(case: tuple, seed: int) -> None:
    system = system_of(orders_for(case, seed)[1])
    for workers, fetched, stuck in itertools.product((1, 2, 3, 4), (1, 2), (False, True)):
        assert unfinished(system, workers, 100 * seed + workers, fetched, stuck) == 0


def test_one_rank_with_every_small_count() -> None:
    """Tokens with one expert each, three ranks of which two have none: waits and simulation."""
    for counts, lag in itertools.product(itertools.product((0, 1, 4, 5), repeat=3), (0, 1, 3)):
        tokens = [[expert] for expert, count in enumerate(counts) for _ in range(count)]
        system = system_of(orders_of([[], tokens, []], 1, lag=lag, pool_rows=4))
        system.check()
        assert unfinished(system, 1, lag) == unfinished(system, 2, lag, 2, True) == 0


# ---- tests of the tests: a wrong order is seen


class SmallRing(TileOrder):
    """A ring one slot too small."""

    @property
    def ring_blocks(self) -> int:
        return super().ring_blocks - 1


def caught(system: System) -> bool:
    """Both the check and the simulation with one worker say that this order is wrong."""
    try:
        system.check()
    except AssertionError:
        return unfinished(system, 1, 0) > 0
    return False


def sound_system() -> System:
    routing = routing_of(1, 2, 3, (12, 10))
    return system_of(orders_of(routing, 3))


def test_down_before_its_up_gate_is_caught() -> None:
    system = sound_system()
    assert not caught(system) and unfinished(system, 1, 0) == 0
    tiles = system.streams[0]
    for place, (_, tile) in enumerate(tiles):
        if tile.phase == "down":
            first = min(at for at, (_, t) in enumerate(tiles) if t[1:3] == tile[1:3])
            moved = [*tiles[:first], tiles[place], *tiles[first:place], *tiles[place + 1 :]]
            assert caught(System([moved, *system.streams[1:]], system.waits, system.place))


def test_a_ring_that_is_too_small_is_caught() -> None:
    attained = 0
    for counts, lag, unit in itertools.product(FAMILY, range(4), (1, 2)):
        order = SmallRing(counts, 2, 1, lag, unit, (16,))
        if order.ring_blocks >= 1:
            tiles = [order.task(ticket) for ticket in range(order.num_tickets)]
            place = {tile: ticket for ticket, tile in enumerate(tiles)}
            assert any(place[other] > place[tile] for tile in tiles for other in order.waits_for(tile))
            attained += 1
            if len(counts) == 2:
                waits = {(0, t): [(0, other) for other in order.waits_for(t)] for t in tiles}
                streams = [[(0, t) for t in tiles]]
                assert caught(System(streams, waits, {(0, t): (ticket,) for t, ticket in place.items()}))
    assert attained > 1000


@pytest.mark.parametrize("kind", ["push", "fan_out", "combine"])
def test_communication_too_late_is_caught(kind: str) -> None:
    """Both ranks do one kind last: the ranks, or the two streams of one, then wait for each other."""
    system = sound_system()
    streams = list(system.streams)
    for comm in (1, 3):
        late = [node for node in streams[comm] if node[1].kind == kind]
        streams[comm] = [node for node in streams[comm] if node[1].kind != kind] + late
        assert late
    assert caught(System(streams, system.waits, system.place))


def test_one_missing_task_is_caught() -> None:
    system = sound_system()
    system.streams[1] = system.streams[1][1:]
    with pytest.raises(AssertionError):
        system.check()
    assert unfinished(system, 4, 0) > 0


# ---- errors


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"up_tiles": 0}, "up_tiles is 0; allowed: 1 and more"),
        ({"down_tiles": 0}, "down_tiles is 0"),
        ({"lag": -1}, "lag is -1; allowed: 0 and more"),
        ({"unit": 0}, "unit is 0"),
        ({"counts": (3, -1)}, "counts are \\(3, -1\\)"),
        ({"menu": ()}, "menu is \\(\\)"),
        ({"menu": (32, 16)}, "menu is \\(32, 16\\); allowed: ascending"),
        ({"menu": (0, 16)}, "menu is"),
        ({"pool_rows": 127}, "pool_rows is 127; allowed: 128"),
    ],
)
def test_tile_order_errors(change: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TileOrder(**{"counts": (5, 6), "up_tiles": 1, "down_tiles": 1, "lag": 1, **change})


def test_traffic_and_ticket_errors() -> None:
    table = (((1, 0),),)
    with pytest.raises(ValueError, match="first has experts"):
        Traffic((), table, (1,))
    with pytest.raises(ValueError, match="last has experts"):
        Traffic(table, (((1,), (1,)),), (1,))
    with pytest.raises(ValueError, match="first has experts"):
        Traffic((((1,), (1, 2)),) * 2, (((1,), (1,)),) * 2, (9, 9))
    with pytest.raises(ValueError, match="first, last sum to"):
        Traffic(table, (((0, 2),),), (2,))
    with pytest.raises(ValueError, match="at most \\(0,\\)"):
        Traffic(table, table, (0,))
    traffic = Traffic(table, table, (1,))
    with pytest.raises(ValueError, match="counts are \\(0, 4\\)"):
        CommOrder(0, traffic, TileOrder((0, 4), 1, 1, 0))
    with pytest.raises(ValueError, match="counts are \\(1,\\)"):
        CommOrder(0, traffic, TileOrder((1,), 1, 1, 0))
    order = CommOrder(0, traffic, TileOrder((1, 0), 1, 1, 0))
    for ticket in (-1, 2):
        with pytest.raises(ValueError, match=f"ticket is {ticket}; allowed: 0..1"):
            order.task(ticket)
        with pytest.raises(ValueError, match=f"ticket is {ticket}; allowed: 0..1"):
            order.tiles.task(ticket)
