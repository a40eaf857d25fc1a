"""The schedule of a run as a value: the numbers from which the program of each replica of each stage follows.

It owns who does what (replicas, rounds, stretches between drains) and where a run can be cut or evaluated. It
never makes an action. Rounds and round-robin replicas are those of PipeDream (SOSP'19, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm

from hpcpipe.errors import ConfigError
from hpcpipe.schedule.actions import Place
from hpcpipe.schedule.clock import UnitClock, unit_clock
from hpcpipe.schedule.orders import SYNCHRONOUS, order_named
from hpcpipe.schedule.policies import Policy, Target, warm_up


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Everything that decides what happens when: a value from which each replica's program is generated.

    `minibatches` ends the run; `first` starts it (a restart on another plan refills from there).
    `evaluate_every` counts minibatches between evaluations of `evaluation_batches` batches (0: none but the one
    after the last minibatch, if `evaluate_at_end`). `drain_every` empties the pipeline after that many
    minibatches (0: never). `replicas` is the number of replicas of each stage (empty: one each). Raises
    ConfigError for numbers that make no schedule.

    A *round* of a stage is the minibatches of one of its updates. A *boundary* is a minibatch whose update ends a
    round of every stage: there the weights of all stages hold the same minibatches.
    """

    name: str
    stages: int
    minibatches: int
    first: int = 0
    microbatches: int = 1
    policy: Policy = Policy.STASH
    target: Target = Target.ROUND_TRIP
    evaluate_every: int = 0
    evaluate_at_end: bool = False
    evaluation_batches: int = 0
    drain_every: int = 0
    replicas: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        order_named(self.name)
        if self.stages < 1:
            raise ConfigError(f"a schedule needs at least 1 stage, got {self.stages}")
        if self.replicas and len(self.replicas) != self.stages:
            raise ConfigError(
                f"replicas = {list(self.replicas)} count those of {len(self.replicas)} stages, "
                f"but there are {self.stages}: give one number a stage"
            )
        if any(count < 1 for count in self.replicas):
            raise ConfigError(f"a stage needs at least 1 replica, got replicas = {list(self.replicas)}")
        if self.minibatches < 0 or not 0 <= self.first <= self.minibatches:
            raise ConfigError(f"no minibatches from {self.first} to {self.minibatches}")
        if self.microbatches < 1:
            raise ConfigError(f"a minibatch needs at least 1 microbatch, got {self.microbatches}")
        if self.microbatches > 1 and not self.synchronous:
            raise ConfigError(
                f"{self.name} updates after every minibatch: microbatches = {self.microbatches} needs "
                f"one of {', '.join(sorted(SYNCHRONOUS))}"
            )

    # -- stages and their replicas -------------------------------------------------------------------------

    @cached_property
    def synchronous(self) -> bool:
        """Whether the pipeline is flushed before every update."""
        return self.name in SYNCHRONOUS

    @cached_property
    def predicts(self) -> bool:
        """Whether any pass may run on predicted weights."""
        return not self.synchronous and self.policy is Policy.SPECTRAIN

    @cached_property
    def replica_counts(self) -> tuple[int, ...]:
        """Number of replicas of each stage."""
        return self.replicas or (1,) * self.stages

    @cached_property
    def replicated(self) -> bool:
        """Whether any stage has several replicas."""
        return self.ranks > self.stages

    @cached_property
    def ranks(self) -> int:
        """Number of replicas of all stages together."""
        return sum(self.replica_counts)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Every replica of every stage, stage 0's first: place i is executed by rank i where each has a rank."""
        counts = self.replica_counts
        return tuple(Place(stage, replica) for stage, count in enumerate(counts) for replica in range(count))

    def replicas_of(self, stage: int) -> int:
        """Number of replicas of `stage`."""
        return self.replica_counts[stage]

    def round_length(self, stage: int) -> int:
        """Minibatches of one update of `stage`: one for each replica, 1 where the schedule is synchronous."""
        return 1 if self.synchronous else self.replica_counts[stage]

    def owner(self, stage: int, minibatch: int, microbatch: int = 0) -> int:
        """The replica of `stage` that does F and B of a microbatch."""
        dealt = microbatch if self.synchronous else minibatch - self.segment(minibatch)[0]
        return dealt % self.replica_counts[stage]

    def evaluation_owner(self, stage: int, batch: int) -> int:
        """The replica of `stage` that does E of an evaluation batch."""
        return batch % self.replica_counts[stage]

    # -- stretches, rounds and boundaries ------------------------------------------------------------------

    def segment(self, minibatch: int) -> tuple[int, int]:
        """[first, last) of the stretch from fill to drain that `minibatch` belongs to."""
        if not self.drain_every:
            return self.first, self.minibatches
        start = max(self.first, minibatch - minibatch % self.drain_every)
        return start, min(self.minibatches, minibatch - minibatch % self.drain_every + self.drain_every)

    def round_of(self, stage: int, minibatch: int) -> range:
        """The minibatches whose gradients go into the same update of `stage`; a stretch's last may be fewer."""
        length = self.round_length(stage)
        first, last = self.segment(minibatch)
        begin = minibatch - (minibatch - first) % length
        return range(begin, min(begin + length, last))

    @cached_property
    def common_round(self) -> int:
        """Minibatches after which the rounds of all stages end together."""
        return 1 if self.synchronous else lcm(*self.replica_counts)

    def is_boundary(self, minibatch: int) -> bool:
        """Whether U(minibatch) ends a round of every stage, so that the run can be cut or evaluated there."""
        return self.first <= minibatch < self.minibatches and self.next_boundary(minibatch) == minibatch

    def next_boundary(self, minibatch: int) -> int:
        """The first boundary at or past `minibatch`, which is one of this run's."""
        first, last = self.segment(minibatch)
        common = self.common_round
        return min(minibatch + common - 1 - (minibatch - first) % common, last - 1)

    def due(self, every: int, minibatch: int) -> bool:
        """Whether `minibatch` is the first boundary at or past a multiple of `every` minibatches (0: never)."""
        if not every or not self.is_boundary(minibatch):
            return False
        first, _ = self.segment(minibatch)
        since = minibatch - (minibatch - first) % self.common_round
        return (minibatch + 1) // every > since // every

    def evaluates_after(self, minibatch: int) -> bool:
        """Whether the stages evaluate, on version minibatch+1, after U(minibatch)."""
        if not self.evaluation_batches:
            return False
        if self.evaluate_at_end and minibatch + 1 == self.minibatches:
            return True
        return self.due(self.evaluate_every, minibatch)

    def clock(self, length: int) -> UnitClock:
        """The unit clock of a stretch of `length` minibatches."""
        return unit_clock(self.name, self.replica_counts, length, self.microbatches)


def warm_up_of(schedule: Schedule, stage: int) -> int:
    """Forwards in flight at each replica of `stage` in the steady state beside the one that goes backward next."""
    return 0 if schedule.synchronous else warm_up(stage, schedule.replica_counts)
