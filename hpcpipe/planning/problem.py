"""What the partitioner is asked and what it answers.

It owns the question (profile, topology, ranks, memory, schedule) and its checks at the door, and the answer: which
layers and which ranks make up each stage. It searches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcpipe.errors import PlanError
from hpcpipe.planning import records
from hpcpipe.planning.costs import ALLREDUCE_VOLUME, PlanTime, StageCost, plan_time, stage_costs
from hpcpipe.planning.memory import Held, StageBytes, held, plan_bytes
from hpcpipe.planning.profile import Profile
from hpcpipe.planning.topology import Topology
from hpcpipe.schedule.orders import ORDERS, SYNCHRONOUS
from hpcpipe.schedule.policies import Policy


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Spread the layers of `profile` over `ranks` ranks of `topology`, all of them.

    `memory_bytes` is the limit of each rank, None for no limit. `straight`: one rank a stage. `max_stages`: None
    for any number. `microbatches` are those of a minibatch in a synchronous schedule; a pass of the profile is of
    one. `cut_in_flight`: checkpoints are cut without a drain, which holds weights longer.

    Raises PlanError: a value that makes no problem, or ranks that the topology does not join.
    """

    profile: Profile
    topology: Topology
    ranks: int
    memory_bytes: int | None = None
    schedule: str = "pipedream"
    policy: str = "spectrain"
    microbatches: int = 1
    straight: bool = False
    max_stages: int | None = None
    allreduce: str = "ring"
    cut_in_flight: bool = False

    def __post_init__(self) -> None:
        records.count(self.ranks, "ranks", unit="ranks", least=1)
        records.count(self.microbatches, "microbatches", unit="parts", least=1)
        for key in ("memory_bytes", "max_stages"):
            if getattr(self, key) is not None:
                records.count(getattr(self, key), key, unit=key.partition("_")[2], least=1)
        choices = (("schedule", ORDERS), ("policy", [p.value for p in Policy]), ("allreduce", ALLREDUCE_VOLUME))
        for key, known in choices:
            if getattr(self, key) not in known:
                records.wrong(key, f"one of {', '.join(known)}", getattr(self, key))
        if self.microbatches > 1 and not self.synchronous:
            raise PlanError(
                f"{self.schedule} updates after every minibatch: microbatches = {self.microbatches} needs one of "
                f"{', '.join(sorted(SYNCHRONOUS))}"
            )
        self.topology.check_holds(self.ranks)
        if self.straight and self.ranks > len(self.profile.layers):
            raise PlanError(
                f"a straight pipeline over {self.ranks} ranks needs a layer for each, but the profile has "
                f"{len(self.profile.layers)}: use fewer ranks, or let stages be replicated"
            )
        if self.straight and self.max_stages is not None and self.max_stages < self.ranks:
            raise PlanError(
                f"a straight pipeline over {self.ranks} ranks has as many stages, more than the {self.max_stages} "
                "allowed: use fewer ranks, or let stages be replicated"
            )

    @property
    def synchronous(self) -> bool:
        """Whether the schedule flushes before every update."""
        return self.schedule in SYNCHRONOUS

    @property
    def passes(self) -> int:
        """Passes of a minibatch, over all replicas of a stage."""
        return self.microbatches if self.synchronous else 1


@dataclass(frozen=True, kw_only=True)
class SplitStage:
    """A stage: its layers (indices in the profile) and its ranks."""

    layers: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Split:
    """A plan: the stages in order, with contiguous ranks, and its cost in seconds per minibatch.

    `seconds` is `bottleneck_s`, the largest cost of a stage or a cut, times the flush of a synchronous schedule.
    """

    stages: tuple[SplitStage, ...]
    bottleneck_s: float
    seconds: float

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of ranks of each stage."""
        return tuple(len(stage.ranks) for stage in self.stages)


def split_of(problem: Problem, layers: Sequence[tuple[int, ...]], replicas: Sequence[int]) -> Split:
    """The plan with these layers and this number of ranks in each stage, and what it costs.

    Raises PlanError: layers or ranks are missing or used twice.
    """
    starts = [sum(replicas[:stage]) for stage in range(len(replicas))]
    ranks = [tuple(range(start, start + count)) for start, count in zip(starts, replicas, strict=True)]
    time = time_of(problem, stage_costs(problem.profile, layers), ranks)
    return Split(
        stages=tuple(SplitStage(layers=a, ranks=b) for a, b in zip(layers, ranks, strict=True)),
        bottleneck_s=time.bottleneck_s,
        seconds=time.seconds,
    )


def time_of(problem: Problem, costs: Sequence[StageCost], ranks: Sequence[Sequence[int]]) -> PlanTime:
    """What stages of these costs and ranks take under the problem's schedule."""
    return plan_time(
        costs,
        ranks,
        problem.topology,
        schedule=problem.schedule,
        microbatches=problem.microbatches,
        allreduce=problem.allreduce,
    )


def held_by(problem: Problem, replicas: Sequence[int], stage: int) -> Held:
    """What a rank of `stage` holds at once, if stage s has `replicas[s]` ranks."""
    return held(
        problem.schedule,
        problem.policy,
        stage=stage,
        replicas=replicas,
        microbatches=problem.microbatches,
        cut_in_flight=problem.cut_in_flight,
    )


def bytes_of(problem: Problem, split: Split) -> tuple[StageBytes, ...]:
    """What a rank of each stage of a plan needs."""
    return plan_bytes(
        stage_costs(problem.profile, [stage.layers for stage in split.stages]),
        split.replicas,
        schedule=problem.schedule,
        policy=problem.policy,
        microbatches=problem.microbatches,
        cut_in_flight=problem.cut_in_flight,
    )
