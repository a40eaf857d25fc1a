"""Which layers and which ranks make up each stage, what the run's schedule is, and both in words.

Pure decisions from the configuration, the model's inspection and the number of ranks; builds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcpipe.config import RunConfig
from hpcpipe.datasets.protocol import Dataset
from hpcpipe.errors import ConfigError, ModelError
from hpcpipe.models.build import split_layers
from hpcpipe.models.layers import Inspection, LayerSpec
from hpcpipe.schedule import Policy, Schedule, StageProgram, Target
from hpcpipe.schedule.program import warm_up_of
from hpcpipe.schedule.ranks import spread

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The pipeline of a run: `bounds[s]` are the first and last+1 layer of stage s, `rank_of_stage[s]` owns it."""

    names: tuple[str, ...]
    parameter_counts: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    rank_of_stage: tuple[int, ...]
    fingerprint: str

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.bounds)

    @property
    def ranks(self) -> int:
        """Number of ranks; each owns a stage."""
        return self.rank_of_stage[-1] + 1

    def layers_of(self, stage: int) -> tuple[str, ...]:
        """Names of the layers of `stage`."""
        first, last = self.bounds[stage]
        return self.names[first:last]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` owns, in order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)


def make_plan(config: RunConfig, specs: Sequence[LayerSpec], inspection: Inspection, ranks: int) -> Plan:
    """Split the model over `ranks` ranks.

    Raises ConfigError or ModelError when it cannot be split that way, or when layers of different stages share
    storage: each stage would update its own copy.
    """
    stages = config.pipeline.stages or ranks
    if stages < ranks:
        raise ConfigError(
            f"pipeline.stages is {stages}, but {ranks} ranks were started: start at most {stages}, "
            "or leave pipeline.stages out"
        )
    bounds = split_layers(config.pipeline, inspection.parameter_counts, stages)
    names = tuple(spec.name for spec in specs)
    stage_of = {name: stage for stage, (first, last) in enumerate(bounds) for name in names[first:last]}
    for earlier, later, parameter in inspection.shared:
        if stage_of[earlier] != stage_of[later]:
            raise ModelError(
                f"layers {earlier!r} and {later!r} share {parameter!r}, but lie on stages {stage_of[earlier]} and "
                f"{stage_of[later]}: untie them, or put both on one stage with pipeline.balance"
            )
    return Plan(
        names=names,
        parameter_counts=inspection.parameter_counts,
        bounds=tuple(bounds),
        rank_of_stage=tuple(rank for rank, owned in enumerate(spread(stages, ranks)) for _ in owned),
        fingerprint=inspection.fingerprint,
    )


def make_schedule(config: RunConfig, data: Dataset, *, stages: int) -> Schedule:
    """The schedule of a run from its first minibatch to its last.

    Raises ConfigError for a run without a minibatch, or with minibatches too small for their microbatches.
    """
    per_epoch = data.minibatches_per_epoch
    minibatches = config.run.epochs * per_epoch
    if config.run.max_steps is not None:
        minibatches = min(minibatches, config.run.max_steps)
    if minibatches < 1:
        raise ConfigError(
            "the run has 0 minibatches: data.batch is larger than the training data; lower it, "
            "or unset data.drop_last"
        )
    pipeline, evaluation = config.pipeline, config.eval
    smallest = data.rows(per_epoch - 1)
    if pipeline.microbatches > smallest:
        raise ConfigError(
            f"the last minibatch of an epoch has {smallest} rows, fewer than pipeline.microbatches = "
            f"{pipeline.microbatches}: set data.drop_last = true or change data.batch"
        )
    batches = data.eval_batches if evaluation.batches is None else min(evaluation.batches, data.eval_batches)
    draining = config.checkpoint.cut == "drain" and pipeline.schedule == "pipedream"
    if draining and not config.checkpoint.every:
        raise ConfigError('checkpoint.cut = "drain" drains every checkpoint.every minibatches: set that too')
    return Schedule(
        name=pipeline.schedule,
        stages=stages,
        minibatches=minibatches,
        microbatches=pipeline.microbatches,
        policy=Policy(pipeline.policy),
        target=Target(pipeline.target),
        evaluate_every=evaluation.every or per_epoch,
        evaluate_at_end=evaluation.at_end,
        evaluation_batches=batches,
        drain_every=config.checkpoint.every if draining else 0,
    )


def describe(plan: Plan, schedule: Schedule) -> list[str]:
    """The plan as a table for people: one line a stage."""
    lines = ["stage  rank  layers                            parameters  in flight  staleness  predicts F, B"]
    steady = _steady_minibatch(schedule)
    for stage in range(plan.stages):
        program = StageProgram(schedule, stage)
        first, last = plan.bounds[stage]
        names = plan.layers_of(stage)
        span = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
        ahead = (
            f"{program.forward_distance(steady)}, {program.backward_distance(steady)} ahead"
            if schedule.predicts
            else "-"
        )
        lines.append(
            f"{stage:5d}  {plan.rank_of_stage[stage]:4d}  {span:32.32s}  "
            f"{sum(plan.parameter_counts[first:last]):10,d}  {warm_up_of(schedule, stage) + 1:9d}  "
            f"{program.staleness(steady):9d}  {ahead}"
        )
    return lines


def kept_for_cuts(plan: Plan, schedule: Schedule, config: RunConfig) -> str | None:
    """What cuts cost in memory where a forward's weights are not kept anyway, in words; None if nothing."""
    cuts = config.checkpoint
    if schedule.synchronous or schedule.policy in (Policy.STASH, Policy.VERTICAL_SYNC) or schedule.drain_every:
        return None
    if not (cuts.every or cuts.minutes or cuts.auto):
        return None
    item = DTYPE_BYTES[config.run.dtype]
    sizes = [
        warm_up_of(schedule, stage) * item * sum(plan.parameter_counts[slice(*plan.bounds[stage])])
        for stage in range(plan.stages)
    ]
    return (
        f"a checkpoint keeps the weights of forwards in flight meanwhile: {max(sizes) / 1e6:.1f} MB on stage "
        f'{sizes.index(max(sizes))} (checkpoint.cut = "drain" does without)'
    )


def _steady_minibatch(schedule: Schedule) -> int:
    """A minibatch of the steady state, or the middle of a run too short to have one."""
    first, last = schedule.segment(schedule.first)
    return min(first + 2 * schedule.stages, (first + last) // 2)
