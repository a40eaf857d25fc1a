"""Links as shared resources: which ports a message or an all-reduce occupies, and for how long.

A topology's level joins groups of ranks (at the innermost level, single ranks) through full-duplex ports: what
leaves a group waits for the group's way out, what enters another waits for that one's way in. Inside the innermost
level only the sender's way out is counted. A port serves requests in the order in which they come. This module
keeps the time of ports and knows no action.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpcpipe.planning.costs import allreduce_s
from hpcpipe.planning.topology import Topology


class Port:
    """One direction of a link: `free` is when it can take the next transfer, `busy` its seconds of use so far."""

    __slots__ = ("busy", "free", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.free = 0.0
        self.busy = 0.0


@dataclass(frozen=True, kw_only=True)
class Path:
    """The way from one rank to another.

    `shared`: others use its ports, too, so that its requests must be made in the order of their time.
    """

    level: int
    bandwidth: float
    latency_s: float
    egress: Port
    ingress: Port | None
    shared: bool


class Network:
    """The ports of a topology, made when something first goes through them."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._ports: dict[tuple[int, int, bool], Port] = {}

    @property
    def ports(self) -> list[Port]:
        """Every port that is used."""
        return list(self._ports.values())

    def path(self, source: int, destination: int) -> Path:
        """The way from rank to rank; none through a link from a rank to itself.

        Raises PlanError for ranks beyond the topology.
        """
        if source == destination:
            return Path(
                level=0, bandwidth=math.inf, latency_s=0.0, egress=Port("memory"), ingress=None, shared=False
            )
        index = self.topology.level_of((source, destination))
        level = self.topology.levels[index]
        return Path(
            level=index,
            bandwidth=level.bandwidth,
            latency_s=level.latency_s,
            egress=self._port(index, source, out=True),
            ingress=self._port(index, destination, out=False) if index else None,
            shared=index > 0,
        )

    def ring(self, ranks: Sequence[int]) -> tuple[int, list[Port]]:
        """The level at which `ranks` meet, and the ports that an all-reduce among them occupies."""
        index = self.topology.level_of(ranks)
        groups = {rank // self._group_size(index): rank for rank in ranks}
        ports = [self._port(index, rank, out=True) for rank in groups.values()]
        if index:
            ports += [self._port(index, rank, out=False) for rank in groups.values()]
        return index, ports

    def allreduce_s(self, level: int, nbytes: float, ranks: int, kind: str) -> float:
        """Seconds of an all-reduce of `nbytes` bytes among `ranks` ranks that meet at `level`."""
        return allreduce_s(self.topology.levels[level], nbytes, ranks, kind)

    def _group_size(self, level: int) -> int:
        return self.topology.levels[level - 1].size if level else 1

    def _port(self, level: int, rank: int, *, out: bool) -> Port:
        size = self._group_size(level)
        key = level, rank // size, out
        port = self._ports.get(key)
        if port is None:
            first = rank // size * size
            end = f"rank {first}" if size == 1 else f"ranks {first} to {first + size - 1}"
            port = Port(f"{self.topology.levels[level].name} link {'out of' if out else 'into'} {end}")
            self._ports[key] = port
        return port
