"""What happens when something goes wrong: the same readable error everywhere, in time, and everything usable again."""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from moeloom import MoeloomError, Plan, RankPool, Runtime, Topology
from moeloom.launch import RankFailed
from tests.support.failure import FOUR, HIDDEN, Attempt, Layer, attempt, die, layer_of, over_four, the_same, works
from tests.support.pool import Ranks, group_of

TIMEOUT = 3.0
SLACK = 3.0  # a busy machine
SOON = 5.0  # much less than the deadline of a test that uses it

on_nodes = pytest.mark.parametrize("nodes", [1, 2])


# ---- ranks that die, or come late


def lose_two_ranks(nodes: int) -> tuple[list[Attempt], bool]:
    """Rank 3 dies before an operation, then rank 1 between dispatch and combine; the others go on without them."""
    group, members, attempts = None, [0, 1, 2, 3], []
    for victim, moment in ((3, "before"), (1, "between")):
        rt = Runtime(group, topology=Topology.split(len(members), nodes), timeout=TIMEOUT)
        assert works(rt)

        def flow(rt: Runtime = rt, victim: int = victim, moment: str = moment) -> None:
            mine = layer_of(rt)
            if dist.get_rank() == victim and moment == "before":
                die()
            received, handle = rt.dispatch(mine.x, mine.routing, 2 * len(members))
            if dist.get_rank() == victim:
                die()
            rt.combine(received.rows, handle, weighted=True)

        attempts.append(attempt(flow))
        rt.close()
        members.remove(victim)
        group = dist.new_group(members, use_local_synchronization=True)
    with Runtime(group, topology=Topology.split(2, nodes), timeout=TIMEOUT) as rt:
        return attempts, works(rt)


@on_nodes
def test_killed_rank(nodes: int) -> None:
    with RankPool(4, nodes) as pool:
        outcomes = pool.outcomes(lose_two_ranks, nodes, timeout=60)
    assert [isinstance(outcome, RankFailed) for outcome in outcomes] == [False, True, False, True], outcomes
    attempts = [outcomes[rank][0] for rank in (0, 2)]
    for number, where in enumerate(
        (r"dispatch #3, phase [a-z]+.*rank\(s\) 3 did", r"combine #4, phase [a-z]+.*rank\(s\) 1 did")
    ):
        told = the_same([each[number] for each in attempts])
        assert told.error == "PeerTimeout" and re.search(where, told.text), told
        assert max(each[number].seconds for each in attempts) < TIMEOUT + SLACK
    assert outcomes[0][1] and outcomes[2][1]


def lose_the_store(port: int) -> tuple[Attempt, Attempt, Attempt]:
    """Rank 0 hosts the store of the process group, as without a launcher, and dies. Clean-up must not fail for that."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    rt = Runtime(timeout=TIMEOUT)
    assert works(rt)
    if rank == 0:
        die()

    def leave() -> None:
        with rt:
            raise KeyError("keys")

    return attempt(works, rt), attempt(works, rt), attempt(leave)


@on_nodes
def test_killed_rank_takes_the_store_along(nodes: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with RankPool(3, nodes) as pool:
        survivors = pool.outcomes(lose_the_store, port, timeout=60)[1:]
    for told, again, left in survivors:
        assert left.error == "KeyError"
        assert again.text == told.text  # a failed Runtime says so, and tries nothing
        assert told.error == "PeerTimeout", told
        assert "dispatch #3, phase" in told.text and "store does not answer" in told.text, told
        assert told.seconds < TIMEOUT + SLACK


def construct_late(late: int, seconds: float) -> tuple[Attempt, bool] | None:
    group = group_of(FOUR)
    if group is None:
        return None
    if dist.get_rank() == late:
        time.sleep(seconds)
    first = attempt(lambda: Runtime(group, timeout=1.0))
    with Runtime(group) as rt:
        return first, works(rt)


def test_rank_that_does_not_come_to_construction(ranks: Ranks) -> None:
    attempts, usable = zip(*ranks.run(construct_late, 2, 1.6)[:4], strict=True)
    told = the_same(list(attempts))
    assert told.error == "PeerTimeout", told
    assert re.search(r"construction: rank\(s\) 2 of 4 did not come within 1 s \(phase: arrival\)", told.text), told
    assert max(each.seconds for each in attempts) < 1 + SLACK
    assert all(usable)


def call_late(nodes: int, late: int, seconds: float, timeout: float) -> tuple[Attempt, Attempt] | None:
    rt = over_four(nodes, timeout=timeout)
    if rt is None:
        return None
    with rt:
        assert works(rt)
        if rt.rank == late:
            time.sleep(seconds)
        mine = layer_of(rt)
        return attempt(mine.run, rt), attempt(mine.run, rt)


@on_nodes
def test_rank_that_comes_too_late(ranks: Ranks, nodes: int) -> None:
    attempts = [each for both in ranks.run(call_late, nodes, 2, 1.6, 1.0)[:4] for each in both]
    told = the_same(attempts)  # the late rank hears it too, and so does every further call
    assert told.error == "PeerTimeout", told
    assert "dispatch #3, phase agreement: rank(s) 2 did not come within 1 s" in told.text, told
    assert max(each.seconds for each in attempts) < 1 + SLACK


@on_nodes
def test_rank_that_comes_just_in_time(ranks: Ranks, nodes: int) -> None:
    attempts = [each for both in ranks.run(call_late, nodes, 2, 1.0, 4.0)[:4] for each in both]
    assert the_same(attempts).error == ""
    assert max(each.seconds for each in attempts) >= 0.9  # somebody did wait


# ---- wrong arguments


def with_id(value: int) -> Callable[[Layer], Layer]:
    def change(right: Layer) -> Layer:
        topk_idx = right.topk_idx.clone()
        topk_idx[3, 1] = value
        return right.but(topk_idx=topk_idx)

    return change


def with_activation(activation: Callable) -> Callable[[Layer], Layer]:
    return lambda right: right.but(
        experts=type(right.experts)(right.experts.gate_up, right.experts.down, activation=activation)
    )


def with_experts(gate_up: tuple[int, ...], down: tuple[int, ...]) -> Callable[[Layer], Layer]:
    return lambda right: right.but(experts=type(right.experts)(torch.zeros(gate_up), torch.zeros(down)))


def explode(*_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("boom")


# what rank 1 does wrong, and what all ranks raise: at once on rank 1
WRONG: dict[str, tuple[Callable[[Layer], Layer], str, str]] = {
    "x of one dimension": (lambda right: right.but(x=right.x[0]), "ValueError", "rank 1: x is [8]"),
    "dtype of x": (lambda right: right.but(x=right.x.double()), "ValueError", "rank 1: x has dtype torch.float64"),
    "id too large": (with_id(8), "ValueError", "rank 1: topk_idx[3, 1] is 8; allowed: 0..7"),
    "id too small": (with_id(-2), "ValueError", "rank 1: topk_idx[3, 1] is -2; allowed: 0..7"),
    "id beyond int32": (with_id(1 << 40), "ValueError", f"rank 1: topk_idx[3, 1] is {1 << 40}"),
    "dtype of ids": (
        lambda right: right.but(topk_idx=right.topk_idx.short()),
        "ValueError", "rank 1: topk_idx has dtype",
    ),
    "fewer ids than tokens": (
        lambda right: right.but(topk_idx=right.topk_idx[:-1]),
        "ValueError", "rank 1: topk_idx is [4, 2]",
    ),
    "dtype of weights": (
        lambda right: right.but(topk_weights=right.topk_weights.bfloat16()),
        "ValueError", "rank 1: topk_weights has dtype",
    ),
    "weights for local experts only": (
        lambda right: right.but(topk_weights=right.topk_weights[:, :1]), "ValueError", "rank 1: topk_weights is [5, 1]",
    ),
    "too many tokens": (
        lambda right: right.but(
            x=torch.ones(9, HIDDEN), topk_idx=torch.zeros(9, 2).long(), topk_weights=torch.ones(9, 2)
        ),
        "CapacityError", "rank 1: 9 tokens, but max_tokens is 8",
    ),
    "experts of other hidden": (with_experts((2, 24, 12), (2, 12, 12)), "ValueError", "rank 1: gate_up is [2, 24, 12]"),
    "down turned": (with_experts((2, 24, 8), (2, 12, 8)), "ValueError", "rank 1: gate_up is [2, 24, 8]"),
    "no experts object": (lambda right: right.but(experts=None), "MoeloomError", "rank 1: AttributeError"),
}  # fmt: skip
# what only the others can notice: said by all, with both values
DIFFERENT: dict[str, tuple[Callable[[Layer], Layer], str]] = {
    "top-k": (
        lambda right: right.but(topk_idx=right.topk_idx[:, :1], topk_weights=right.topk_weights[:, :1]),
        "top-k differs between ranks: rank 0 has 2, rank 1 has 1",
    ),
    "hidden": (
        lambda right: with_experts((2, 6, 12), (2, 12, 3))(right.but(x=torch.ones(5, 12))),
        "hidden differs between ranks: rank 0 has 8, rank 1 has 12",
    ),
    "dtype": (lambda right: right.but(x=right.x.bfloat16()), "dtype differs between ranks: rank 0 has torch.float32"),
    "placement": (with_experts((3, 16, 8), (3, 8, 8)), "placement differs between ranks"),
    "exchange": (lambda right: right.but(plan=Plan(exchange="hybrid")), "rank 0 has direct, rank 1 has hybrid"),
}


def call_wrongly(nodes: int, names: list[str]) -> list[tuple[Attempt, bool, bool]] | None:
    """Rank 1 calls each of these ways, early; then all ranks call correctly."""
    rt = over_four(nodes, max_tokens=8)
    if rt is None:
        return None
    results = []
    with rt:
        for name in names:
            mine = layer_of(rt).but(plan=Plan(exchange="direct"))
            if rt.rank == 1:
                mine = (WRONG.get(name) or DIFFERENT[name])[0](mine)
            else:
                time.sleep(0.3)
            out = torch.zeros(mine.x.shape, dtype=mine.x.dtype)
            told = attempt(mine.run, rt, out)
            results.append((told, bool(out.isnan().all()), works(rt)))
    return results


@on_nodes
def test_wrong_arguments(ranks: Ranks, nodes: int) -> None:
    results = ranks.run(call_wrongly, nodes, list(WRONG))[:4]
    alone = sorted(told.seconds for told, _, _ in results[1])
    assert alone[len(alone) // 2] < 0.2, "rank 1 waited for the others"
    for number, (name, (_, error, text)) in enumerate(WRONG.items()):
        attempts, poisoned, usable = zip(*(result[number] for result in results), strict=True)
        if error != "MoeloomError":  # rank 1 itself raises what happened
            assert the_same(list(attempts)).error == error, name
        assert all(text in each.text for each in attempts[2:]) and all(poisoned) and all(usable), (name, results)
        assert max(each.seconds for each in attempts) < SOON


@on_nodes
def test_different_arguments(ranks: Ranks, nodes: int) -> None:
    results = ranks.run(call_wrongly, nodes, list(DIFFERENT))[:4]
    for number, (name, (_, text)) in enumerate(DIFFERENT.items()):
        attempts, poisoned, usable = zip(*(result[number] for result in results), strict=True)
        told = the_same(list(attempts))
        assert told.error == "ValueError" and text in told.text and "dispatch #" in told.text, (name, told)
        assert all(poisoned) and all(usable), name


def refuse_in_a_row(nodes: int, count: int) -> tuple[list[Attempt], bool] | None:
    """Rank 1 is wrong several times, as fast as it can, while the others take their time."""
    rt = over_four(nodes)
    if rt is None:
        return None
    with rt:
        attempts = []
        for number in range(count):
            mine = layer_of(rt)
            if rt.rank == 1:
                mine = with_id(100 + number)(mine)
            else:
                time.sleep(0.1)
            attempts.append(attempt(mine.run, rt))
        return attempts, works(rt)


@on_nodes
def test_wrong_arguments_several_times_in_a_row(ranks: Ranks, nodes: int) -> None:
    attempts, usable = zip(*ranks.run(refuse_in_a_row, nodes, 5)[:4], strict=True)
    for number in range(5):
        assert f"topk_idx[3, 1] is {100 + number}" in the_same([each[number] for each in attempts]).text
    assert all(usable)


def fail_in_experts(nodes: int) -> tuple[Attempt, bool] | None:
    rt = over_four(nodes)
    if rt is None:
        return None
    with rt:
        mine = layer_of(rt, tokens=40)  # every rank gets rows
        told = attempt(with_activation(explode)(mine).run if rt.rank == 1 else mine.run, rt)
        return told, works(rt)


@on_nodes
def test_error_in_an_activation(ranks: Ranks, nodes: int) -> None:
    attempts, usable = zip(*ranks.run(fail_in_experts, nodes)[:4], strict=True)
    told = the_same([attempts[rank] for rank in (0, 2, 3)])
    assert (told.error, told.text) == ("MoeloomError", "rank 1: RuntimeError: boom")
    assert (attempts[1].error, attempts[1].text) == ("RuntimeError", "boom")  # the user's own, with its traceback
    assert all(usable)


def refuse_and_close(nodes: int) -> tuple[Attempt, float] | None:
    """Rank 1 is wrong and gives up, long before the others come."""
    rt = over_four(nodes, timeout=4.0)
    if rt is None:
        return None
    mine = layer_of(rt)
    if rt.rank == 1:
        mine = with_id(8)(mine)
    else:
        time.sleep(1.6)
    told = attempt(mine.run, rt)
    return told, attempt(rt.close).seconds


@on_nodes
def test_wrong_arguments_then_close(ranks: Ranks, nodes: int) -> None:
    attempts, seconds = zip(*ranks.run(refuse_and_close, nodes)[:4], strict=True)
    assert attempts[1].error == "ValueError" and max(seconds) < 1
    assert the_same(list(attempts)).text == attempts[1].text  # what it said still reaches them


# ---- ranks that leave


def leave(nodes: int) -> Attempt | None:
    """Rank 2 fails between dispatch and combine, within a Runtime's block; the deadline is far away."""
    rt = over_four(nodes)
    if rt is None:
        return None

    def flow() -> None:
        with rt:
            mine = layer_of(rt)
            received, handle = rt.dispatch(mine.x, mine.routing, 8)
            if rt.rank == 2:
                raise KeyError("keys")
            rt.combine(received.rows, handle, weighted=True)

    return attempt(flow)


@on_nodes
def test_error_between_dispatch_and_combine(ranks: Ranks, nodes: int) -> None:
    attempts = ranks.run(leave, nodes)[:4]
    told = the_same([attempts[rank] for rank in (0, 1, 3)])
    assert (told.error, told.text) == ("MoeloomError", "rank 2 left: KeyError: 'keys'")
    assert (attempts[2].error, attempts[2].text) == ("KeyError", "'keys'")
    assert max(each.seconds for each in attempts) < SOON


def interrupt(nodes: int) -> tuple[Attempt, Attempt] | None:
    """Rank 1 is interrupted while it waits for rank 0 in the middle of an operation."""
    rt = over_four(nodes)
    if rt is None:
        return None
    try:
        if rt.rank == 0:
            time.sleep(0.8)
        if rt.rank == 1:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        return attempt(works, rt), attempt(works, rt)
    finally:
        rt.close()


@on_nodes
def test_interrupted_while_waiting(ranks: Ranks, nodes: int) -> None:
    first, second = zip(*ranks.run(interrupt, nodes)[:4], strict=True)
    assert first[1].error == "KeyboardInterrupt"
    told = the_same([first[0], *first[2:], *second])
    assert told.error == "MoeloomError" and "rank 1 left an operation unfinished: KeyboardInterrupt" in told.text
    assert max(each.seconds for each in first) < SOON


def close_early() -> list[Attempt] | None:
    rt = over_four(1, timeout=1.0)
    if rt is None:
        return None
    assert works(rt)
    attempts = []
    if rt.rank != 1:
        attempts.append(attempt(works, rt))
    rt.close()
    rt.close()
    return [*attempts, attempt(works, rt), attempt(rt.symmetric_bytes)]


def test_closed_runtime(ranks: Ranks) -> None:
    attempts = ranks.run(close_early)[:4]
    told = the_same([attempts[rank][0] for rank in (0, 2, 3)])
    assert told.error == "PeerTimeout" and "rank(s) 1 (has closed its Runtime) did not come" in told.text
    after = the_same([each for rank in FOUR for each in attempts[rank][-2:]])
    assert (after.error, after.text) == (MoeloomError.__name__, "this Runtime is closed")
