"""Topologies in memory and on disk: which level joins which ranks, and mistakes in one line that names where."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.errors import PlanError
from hpcpipe.planning.topology import Level, Topology, flat, load_topology, save_topology, topology_table

NODE = Level(name="node", size=4, bandwidth=1e10, latency_s=1e-6)
RACK = Level(name="rack", size=8, bandwidth=1e9, allreduce_bandwidth=5e8)
CLUSTER = Level(name="cluster", size=24, bandwidth=1e8, latency_s=1e-4)
TOPOLOGY = Topology(levels=(NODE, RACK, CLUSTER), about={"hosts": ["one", "two"]})

rates = st.floats(1e-3, 1e18)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    size, levels = 1, []
    for index in range(draw(st.integers(1, 4))):
        size *= draw(st.integers(2 if index else 1, 5))
        levels.append(
            Level(
                name=f"level {index}",
                size=size,
                bandwidth=draw(rates),
                latency_s=draw(st.floats(0, 1e9)),
                allreduce_bandwidth=draw(st.none() | rates),
            )
        )
    return Topology(levels=tuple(levels))


def written(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A good topology's file, changed by a function."""
    found: dict[str, Any] = {"format": "hpcpipe-topology", "version": 1, **topology_table(TOPOLOGY)}
    change(found)
    path.write_text(json.dumps(found))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(PlanError) as caught:
        load_topology(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


# -- levels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "level"),
    [
        ([5], 0),
        ([0, 3], 0),
        ([3, 0], 0),
        ([2, 4], 1),
        ([3, 4], 1),
        ([4, 5, 6, 7], 0),
        (range(8), 1),
        ([7, 8], 2),
        ([0, 23], 2),
    ],
)
def test_ranks_meet_at_the_smallest_level_whose_group_holds_them_all(ranks: list[int], level: int) -> None:
    assert TOPOLOGY.level_of(ranks) == level


@settings(max_examples=50, deadline=None)
@given(topology=topologies(), data=st.data())
def test_the_level_of_ranks_is_the_first_one_that_has_them_in_one_group(
    topology: Topology, data: st.DataObject
) -> None:
    ranks = data.draw(st.lists(st.integers(0, topology.ranks - 1), min_size=1, max_size=5))
    groups = [
        [set(range(start, start + level.size)) for start in range(0, topology.ranks, level.size)]
        for level in topology.levels
    ]

    expected = next(i for i, level in enumerate(groups) if any(set(ranks) <= group for group in level))

    assert topology.level_of(ranks) == expected


def test_ranks_beyond_the_outermost_group_are_refused() -> None:
    with pytest.raises(PlanError, match=r"^rank 24 lies beyond the 24 ranks of the topology: give a larger outer"):
        TOPOLOGY.level_of([0, 24])


def test_more_ranks_than_the_topology_joins_are_refused() -> None:
    TOPOLOGY.check_holds(24)

    with pytest.raises(PlanError, match=r'^the topology joins 24 ranks \("cluster"\), fewer than the 25 to plan'):
        TOPOLOGY.check_holds(25)


def test_an_all_reduce_has_the_bandwidth_of_messages_unless_it_has_its_own() -> None:
    assert (NODE.reduce_bandwidth, RACK.reduce_bandwidth) == (1e10, 5e8)


def test_a_flat_topology_has_one_level() -> None:
    topology = flat(6, 1e9, 2e-6)

    assert (topology.ranks, topology.level_of([0, 5])) == (6, 0)
    assert (topology.levels[0].bandwidth, topology.levels[0].latency_s) == (1e9, 2e-6)


# -- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 2, 6, 9])
def test_a_group_holds_several_whole_groups_of_the_level_before(size: int) -> None:
    with pytest.raises(PlanError) as caught:
        Topology(levels=(NODE, replace(RACK, size=size)))

    assert str(caught.value) == f'levels[1].size: must be a larger multiple of 4, the size of "node", got {size}'


def test_a_topology_has_levels() -> None:
    with pytest.raises(PlanError, match=r"^levels: must hold at least one level, got none$"):
        Topology(levels=())


@pytest.mark.parametrize(
    "levels", [(NODE, replace(RACK, name="node")), (NODE, RACK, replace(CLUSTER, name="node"))]
)
def test_two_levels_of_one_name_are_refused(levels: tuple[Level, ...]) -> None:
    with pytest.raises(PlanError, match=rf'^levels\[{len(levels) - 1}\]\.name: "node" is there twice$'):
        Topology(levels=levels)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", None])
def test_a_group_has_a_whole_number_of_ranks(value: Any) -> None:
    with pytest.raises(PlanError, match=r'^"node": size: must be a whole number of ranks, 1 to 2\^53, got '):
        replace(NODE, size=value)


@pytest.mark.parametrize("key", ["bandwidth", "allreduce_bandwidth"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "fast", True, 1e19])
def test_a_bandwidth_is_a_finite_number(key: str, value: Any) -> None:
    with pytest.raises(PlanError, match=rf'^"node": {key}: must be a number of bytes a second, 0 to 1e\+18, got '):
        replace(NODE, **{key: value})


@pytest.mark.parametrize("key", ["bandwidth", "allreduce_bandwidth"])
def test_a_bandwidth_is_not_zero(key: str) -> None:
    zero: dict[str, Any] = {key: 0}
    with pytest.raises(PlanError, match=rf'^"node": {key}: must be above 0 bytes a second, got 0$'):
        replace(NODE, **zero)


@pytest.mark.parametrize("value", [-1e-6, float("nan"), "1us", None])
def test_a_latency_is_a_number_of_seconds(value: Any) -> None:
    with pytest.raises(PlanError, match=r'^"node": latency_s: must be a number of seconds, 0 to 1e\+09, got '):
        replace(NODE, latency_s=value)


# -- files -------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(topology=topologies())
def test_a_topology_is_read_as_it_was_written(
    topology: Topology, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "topology.json"

    save_topology(topology, path)

    assert load_topology(path) == topology


def test_what_the_figures_come_from_is_kept(tmp_path: Path) -> None:
    save_topology(TOPOLOGY, tmp_path / "t.json")

    assert load_topology(tmp_path / "t.json").about == {"hosts": ["one", "two"]}


def test_keys_with_a_default_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    level = {"name": "link", "size": 2, "bandwidth": 1000}
    path.write_text(json.dumps({"format": "hpcpipe-topology", "version": 1, "levels": [level]}))

    assert load_topology(path) == flat(2, 1000.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda found: found["levels"][1].update(bandwidth="10GB/s"),
            'levels[1] "rack": bandwidth: must be a number of bytes a second, 0 to 1e+18, got "10GB/s"',
        ),
        (
            lambda found: found["levels"][0].update(bandwidth=0),
            'levels[0] "node": bandwidth: must be above 0 bytes a second, got 0',
        ),
        (
            lambda found: found["levels"][2].update(latency_s=-1),
            'levels[2] "cluster": latency_s: must be a number of seconds, 0 to 1e+09, got -1',
        ),
        (
            lambda found: found["levels"][0].update(size=0),
            'levels[0] "node": size: must be a whole number of ranks, 1 to 2^53, got 0',
        ),
        (
            lambda found: found["levels"][0].update(size=3),
            'levels[1].size: must be a larger multiple of 3, the size of "node", got 8',
        ),
        (
            lambda found: found["levels"][0].update(name=7),
            "levels[0] name: must be a string of one line, not empty, got 7",
        ),
        (lambda found: found["levels"][0].pop("size"), "levels[0].size: missing"),
        (lambda found: found.pop("levels"), "levels: missing"),
        (lambda found: found.update(levels=[]), "levels: must hold at least one level, got none"),
        (lambda found: found.update(levels={}), "levels: must be a list, got {}"),
        (lambda found: found.update(levels=[3]), "levels[0]: must be an object, got 3"),
        (lambda found: found.update(about=3), "about: must be an object, got 3"),
        (
            lambda found: found.update(format="hpcpipe-plan"),
            'must have the format "hpcpipe-topology", got "hpcpipe-plan"',
        ),
        (lambda found: found.update(version=2), "version must be 1, got 2; this hpcpipe cannot read it"),
    ],
)
def test_a_mistake_in_a_file_is_named_by_file_level_and_key(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    assert refusal(written(tmp_path / "t.json", change)) == says


def test_an_unknown_key_is_answered_with_the_closest_one(tmp_path: Path) -> None:
    path = written(tmp_path / "t.json", lambda found: found["levels"][0].update(latency=1e-6))

    assert refusal(path).startswith(
        'levels[0].latency: no such key; did you mean "latency_s"?; the keys are name, '
    )


def test_a_file_that_cannot_be_read_or_written_is_one_line(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.json") == "no such topology; name an existing file"
    assert refusal(tmp_path) == "cannot read the topology: Is a directory"
    with pytest.raises(PlanError, match=r"none/t\.json: cannot write it: No such file or directory$"):
        save_topology(TOPOLOGY, tmp_path / "none" / "t.json")
