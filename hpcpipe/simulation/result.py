"""What a simulation found: throughput, idle time, memory and the slowest resource."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hpcpipe.schedule import Place, Schedule
from hpcpipe.simulation.events import Event, Transfer


@dataclass(frozen=True, kw_only=True)
class Steady:
    """The middle of a run, between its fill and its drain: each rank from its update that makes version `begin`
    to the one that makes version `end`."""

    begin: int
    end: int
    seconds: float
    """Of the last stage."""
    busy: tuple[float, ...]
    """Share of its time that each rank computes."""

    @property
    def bubble(self) -> float:
        """Share of the time that ranks do not compute, all together."""
        return 1.0 - sum(self.busy) / len(self.busy)


@dataclass(frozen=True, kw_only=True)
class Resource:
    """A rank, a link or an all-reduce, and the share of the run in which it was in use."""

    name: str
    share: float


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A run in simulated time. Seconds, bytes, shares of 1; ranks by index.

    `busy` is the share of the whole run that a rank computes, `peak_bytes` the most memory it holds.
    `level_bytes` are sent over the links of each level of the topology, messages and all-reduces. `events` and
    `transfers` are those of the window asked for.
    """

    schedule: Schedule
    ranks_of_stage: tuple[tuple[int, ...], ...]
    seconds: float
    samples: int
    """Of one minibatch."""
    steady: Steady | None
    """None where the run is too short to have one."""
    busy: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    level_bytes: Mapping[str, int]
    slowest: Resource
    events: Sequence[Event] = ()
    transfers: Sequence[Transfer] = ()

    @cached_property
    def places(self) -> dict[int, tuple[Place, ...]]:
        """What each rank executes."""
        found: dict[int, tuple[Place, ...]] = {}
        for stage, ranks in enumerate(self.ranks_of_stage):
            for replica, rank in enumerate(ranks):
                found[rank] = (*found.get(rank, ()), Place(stage, replica))
        return found

    @property
    def minibatches(self) -> int:
        """Minibatches of the whole run."""
        return self.schedule.minibatches - self.schedule.first

    @property
    def minibatches_per_s(self) -> float:
        """In the steady state; over the whole run where it has none. Infinite where nothing takes time."""
        if self.steady is None:
            return _rate(self.minibatches, self.seconds)
        return _rate(self.steady.end - self.steady.begin, self.steady.seconds)

    @property
    def samples_per_s(self) -> float:
        """Samples a second, as `minibatches_per_s`."""
        return self.samples * self.minibatches_per_s

    @property
    def whole_bubble(self) -> float:
        """Idle share of all ranks over the whole run, with fill and drain."""
        return 1.0 - sum(self.busy) / len(self.busy)

    @property
    def bubble(self) -> float:
        """Idle share of all ranks in the steady state; over the whole run where it has none."""
        return self.whole_bubble if self.steady is None else self.steady.bubble


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else float("inf")
