"""`Topology`: who shares memory with whom, who forwards for whom."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moeloom.topology
from moeloom import Topology


def test_the_examples_of_the_docstrings_run() -> None:
    result = doctest.testmod(moeloom.topology)
    assert result.attempted >= 2 and result.failed == 0


@pytest.mark.parametrize(
    ("num_ranks", "num_nodes", "nodes"),
    [
        (4, 2, ((0, 1), (2, 3))),
        (5, 2, ((0, 1, 2), (3, 4))),
        (5, 3, ((0, 1), (2, 3), (4,))),
        (3, 3, ((0,), (1,), (2,))),
        (3, 1, ((0, 1, 2),)),
    ],
)
def test_split(num_ranks: int, num_nodes: int, nodes: tuple) -> None:
    topology = Topology.split(num_ranks, num_nodes)
    assert topology.nodes == nodes
    assert (topology.num_ranks, topology.num_nodes) == (num_ranks, num_nodes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology.split(2, 3), "num_nodes is 3; allowed with 2 ranks: 1..2"),
        (lambda: Topology.split(2, 0), "num_nodes is 0; allowed with 2 ranks: 1..2"),
        (lambda: Topology.split(0, 1), "num_nodes is 1; allowed with 0 ranks"),
        (lambda: Topology(()), "must hold every rank 0..R-1 exactly once, no node empty"),
        (lambda: Topology(((0, 1), ())), "no node empty"),
        (lambda: Topology(((0, 2),)), "every rank 0..R-1 exactly once"),
        (lambda: Topology(((0, 1), (1, 2))), "exactly once"),
        (lambda: Topology(((1, 0),)), "the ranks of a node must ascend"),
        (lambda: Topology(((1, 2), (0, 3))), "nodes must be ordered by their first rank"),
        (lambda: Topology(((0, 1),), nics=("mlx5_0",)), "nics has 1 entries; one for each of 2 ranks"),
    ],
)
def test_what_cannot_be_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_from_names_groups_equal_names_wherever_they_are() -> None:
    assert Topology.from_names(["b", "a", "b", "c", "a"]).nodes == ((0, 2), (1, 4), (3,))
    assert Topology.from_names(["x"] * 3).nodes == ((0, 1, 2),)


def test_nics_are_kept() -> None:
    assert Topology(((0, 1),), nics=("mlx5_0", None)).nics == ("mlx5_0", None)


names = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(names)
def test_ranks_nodes_and_rails_agree(names: list[str]) -> None:
    topology = Topology.from_names(names)
    assert topology.num_ranks == len(names) and topology.num_nodes == len(set(names))
    for rank, name in enumerate(names):
        local = tuple(other for other, its in enumerate(names) if its == name)
        assert topology.local_ranks(rank) == topology.nodes[topology.node_of_rank[rank]] == local
        assert local[topology.local_index(rank)] == rank


@settings(max_examples=150, deadline=None, derandomize=True)
@given(names)
def test_each_source_has_one_forwarder_on_each_other_node(names: list[str]) -> None:
    topology = Topology.from_names(names)
    forwarders: dict[tuple[int, int], int] = {}
    for rank in range(topology.num_ranks):
        sources = topology.forwarded_sources(rank)
        assert list(sources) == sorted(sources)
        for source in sources:
            assert (source, topology.node_of_rank[rank]) not in forwarders
            forwarders[source, topology.node_of_rank[rank]] = rank
    others = {
        (source, node)
        for source in range(topology.num_ranks)
        for node in range(topology.num_nodes)
        if node != topology.node_of_rank[source]
    }
    assert forwarders == {(source, node): topology.forwarder(source, node) for source, node in others}
    counts = [len(topology.forwarded_sources(rank)) for rank in range(topology.num_ranks)]
    assert topology.max_forwarded_sources == max(counts)
    for source, node in others:  # on the source's own rail, where the node has one
        rail, ranks = topology.local_index(source), topology.nodes[node]
        if rail < len(ranks):
            assert forwarders[source, node] == ranks[rail]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(names)
def test_carriers_are_the_destination_or_its_forwarder(names: list[str]) -> None:
    topology = Topology.from_names(names)
    for rank in range(topology.num_ranks):
        for destination in range(topology.num_ranks):
            node = topology.node_of_rank[destination]
            direct, hybrid = (topology.carriers(rank, exchange)[destination] for exchange in ("direct", "hybrid"))
            if node == topology.node_of_rank[rank]:
                assert direct == hybrid == -1
            else:
                assert direct == destination
                assert hybrid == topology.forwarder(rank, node)


def test_rails_wrap_around_on_a_smaller_node() -> None:
    topology = Topology(((0, 1, 2), (3, 4), (5,)))
    assert [topology.forwarder(source, 1) for source in (0, 1, 2, 5)] == [3, 4, 3, 3]
    assert topology.forwarded_sources(3) == (0, 2, 5)
    assert topology.forwarded_sources(5) == (0, 1, 2, 3, 4)
    assert topology.max_forwarded_sources == 5


def test_it_says_what_it_is() -> None:
    assert str(Topology.split(5, 2)) == "5 ranks on 2 node(s), 2-3 per node"
    assert str(Topology.split(4, 1)) == "4 ranks on 1 node(s), 4 per node"
