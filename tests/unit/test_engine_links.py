"""Which ranks stand for which level of a topology, told from their hosts alone."""

from __future__ import annotations

import pytest

from hpcpipe.engine.links import levels_of
from hpcpipe.errors import LauncherError


def test_one_host_is_one_level_of_neighbours() -> None:
    (node,) = levels_of(["a"] * 5)
    assert (node.name, node.size, node.alone) == ("node", 5, (0, 1))
    assert node.pairs == [(0, 1), (2, 3)]
    assert node.groups == [[0, 1, 2, 3, 4]]


def test_between_hosts_ranks_of_the_same_place_talk() -> None:
    node, network = levels_of(["a", "a", "b", "b", "c", "c"])
    assert node.pairs == [(0, 1), (2, 3), (4, 5)]
    assert node.groups == [[0, 1], [2, 3], [4, 5]]
    assert network.pairs == [(0, 2), (1, 3)]
    assert network.alone == (1, 2)
    assert network.groups == [[0, 1, 2, 3, 4, 5]]


def test_hosts_of_one_rank_each_have_no_level_within() -> None:
    (network,) = levels_of(["a", "b", "c"])
    assert (network.name, network.size, network.alone, network.pairs) == ("network", 3, (0, 1), [(0, 1)])


@pytest.mark.parametrize("hosts", ["aaab", "abab", "abba", "aabbc"])
def test_hosts_must_hold_equal_blocks_of_ranks(hosts: str) -> None:
    with pytest.raises(LauncherError, match="equally many consecutive ranks"):
        levels_of(list(hosts))


def test_a_topology_needs_two_ranks() -> None:
    with pytest.raises(LauncherError, match="needs 2 ranks or more"):
        levels_of(["a"])
