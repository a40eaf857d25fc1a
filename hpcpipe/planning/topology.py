"""How ranks are joined: nested levels (a node, a rack, a cluster), each with its own bandwidth and latency.

It owns the record that `hpcpipe bench link` writes and that `plan` and `simulate` read: the hierarchy of
PipeDream's planner (SOSP'19, section 3.1). It measures nothing and prices nothing.

    ranks    0 1 2 3   4 5 6 7   8 9 10 11       levels 0 "node", size 4: groups 0-3, 4-7, 8-11
             `-node-'  `-node-'  `--node--'             1 "cluster", size 12: one group
             `----------cluster-----------'      ranks 2 and 3 meet at level 0, ranks 3 and 4 at level 1
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcpipe.errors import PlanError
from hpcpipe.planning import records

FORMAT = "hpcpipe-topology"
VERSION = 1
_FASTEST = 1e18
"""Bytes a second: beyond any link, and far enough from overflow."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """Groups of `size` consecutive ranks, and what a message costs between two ranks of one group.

    Raises PlanError: a size below 1, a bandwidth of 0 or less, a negative latency.
    """

    name: str
    size: int
    bandwidth: float
    """Bytes a second, one way, of one pair of ranks."""
    latency_s: float = 0.0
    allreduce_bandwidth: float | None = None
    """Bus bandwidth of an all-reduce in bytes a second; None: that of messages."""

    def __post_init__(self) -> None:
        records.text(self.name, "name")
        where = f"{records.shown(self.name)}: "
        records.count(self.size, where + "size", unit="ranks", least=1)
        records.number(self.latency_s, where + "latency_s")
        for key in ("bandwidth", "allreduce_bandwidth"):
            value = getattr(self, key)
            if value is None and key != "bandwidth":
                continue
            if records.number(value, where + key, unit="bytes a second", largest=_FASTEST) == 0:
                raise PlanError(f"{where}{key}: must be above 0 bytes a second, got 0")

    @property
    def reduce_bandwidth(self) -> float:
        """Bytes a second of an all-reduce, by itself or as that of messages."""
        return self.bandwidth if self.allreduce_bandwidth is None else self.allreduce_bandwidth


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The levels, innermost first; each group holds whole groups of the level before.

    Raises PlanError: no levels, two of one name, or a size that is no larger multiple of the one before.
    """

    levels: tuple[Level, ...]
    about: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Where the figures come from: hosts, MPI library, date."""

    def __post_init__(self) -> None:
        if not self.levels:
            raise PlanError("levels: must hold at least one level, got none")
        names = [level.name for level in self.levels]
        for index, (inner, outer) in enumerate(zip(self.levels, self.levels[1:], strict=False)):
            if outer.size % inner.size or outer.size == inner.size:
                raise PlanError(
                    f"levels[{index + 1}].size: must be a larger multiple of {inner.size}, the size of "
                    f"{records.shown(inner.name)}, got {outer.size}"
                )
            if outer.name in names[: index + 1]:
                raise PlanError(f"levels[{index + 1}].name: {records.shown(outer.name)} is there twice")

    @property
    def ranks(self) -> int:
        """How many ranks the outermost level joins."""
        return self.levels[-1].size

    def level_of(self, ranks: Sequence[int]) -> int:
        """Index of the smallest level with a group that holds all of `ranks` (not empty).

        Raises PlanError: they lie beyond the outermost group.
        """
        first, last = min(ranks), max(ranks)
        for index, level in enumerate(self.levels):
            if first // level.size == last // level.size:
                return index
        raise PlanError(
            f"rank {last} lies beyond the {self.ranks} ranks of the topology: give a larger outer level"
        )

    def check_holds(self, ranks: int) -> None:
        """Raise PlanError if the outermost level joins fewer than `ranks` ranks."""
        if ranks > self.ranks:
            outer = self.levels[-1]
            raise PlanError(
                f"the topology joins {self.ranks} ranks ({records.shown(outer.name)}), fewer than the {ranks} to "
                "plan for: give an outer level of that size"
            )


def flat(ranks: int, bandwidth: float, latency_s: float = 0.0) -> Topology:
    """A topology of one level, `bandwidth` in bytes a second between any two of `ranks` ranks."""
    return Topology(levels=(Level(name="link", size=ranks, bandwidth=bandwidth, latency_s=latency_s),))


def load_topology(path: str | os.PathLike[str]) -> Topology:
    """Return the topology at `path`, as `save_topology` writes it.

    Raises PlanError: the file cannot be read, or a value in it is wrong; file, key, got and expected.
    """
    text = records.read_text(path, "topology")
    return parse_topology(records.parse(text, path, FORMAT, VERSION), source=str(path))


def save_topology(topology: Topology, path: str | os.PathLike[str]) -> None:
    """Write `topology` to `path` as a whole or not at all. Raises PlanError: it cannot be written."""
    records.write(path, FORMAT, VERSION, topology_table(topology))


def topology_table(topology: Topology) -> dict[str, Any]:
    """Return the topology as JSON values."""
    return {"levels": [asdict(level) for level in topology.levels], "about": dict(topology.about)}


def parse_topology(found: Any, *, source: str) -> Topology:
    """Return the topology that `topology_table` made a table of; `source` stands before every message.

    Raises PlanError as `load_topology` does.
    """
    try:
        given = records.entries(found, Topology, "")
        levels = tuple(
            _level(entry, f"levels[{i}]") for i, entry in enumerate(records.listed(given["levels"], "levels"))
        )
        return Topology(levels=levels, about=dict(records.table(given.get("about", {}), "about")))
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from None


def _level(entry: Any, where: str) -> Level:
    given = records.entries(entry, Level, where)
    try:
        return Level(**given)
    except PlanError as error:
        raise PlanError(f"{where} {error}") from None
