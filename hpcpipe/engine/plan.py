"""Which layers and which ranks make up each stage, and what the run's schedule is.

Pure decisions from the configuration or a plan file, the model's inspection and the number of ranks; builds
nothing and reads no file. Stages may be replicated (PipeDream, SOSP'19, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

from hpcpipe.config import PipelineConfig, RunConfig
from hpcpipe.datasets.protocol import Dataset
from hpcpipe.errors import ConfigError, ModelError, PlanError
from hpcpipe.models.build import split_layers
from hpcpipe.models.layers import Inspection, LayerSpec
from hpcpipe.planning.plan_file import PlanFile
from hpcpipe.schedule import Place, Policy, Schedule, Target
from hpcpipe.schedule.ranks import spread

Bounds = tuple[tuple[int, int], ...]
Ranks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The pipeline of a run.

    `bounds[s]` are the first and last+1 layer of stage s; `ranks_of_stage[s][q]` is the rank of its replica q.
    """

    names: tuple[str, ...]
    parameter_counts: tuple[int, ...]
    shared: tuple[tuple[str, str, str], ...]
    """(earlier layer, later layer, name in the later one) of what layers of the same stage share."""
    bounds: Bounds
    ranks_of_stage: Ranks
    fingerprint: str

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.bounds)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of replicas of each stage."""
        return tuple(len(ranks) for ranks in self.ranks_of_stage)

    @property
    def ranks(self) -> int:
        """Number of ranks; each owns a stage, or a replica of one."""
        return 1 + max(rank for ranks in self.ranks_of_stage for rank in ranks)

    @property
    def recording_rank(self) -> int:
        """The one rank that writes metrics: that of the last stage's first replica."""
        return self.ranks_of_stage[-1][0]

    def layers_of(self, stage: int) -> tuple[str, ...]:
        """Names of the layers of `stage`."""
        first, last = self.bounds[stage]
        return self.names[first:last]

    def places_of(self, rank: int) -> tuple[Place, ...]:
        """What `rank` owns, in order of stages."""
        return tuple(
            Place(stage, replica)
            for stage, ranks in enumerate(self.ranks_of_stage)
            for replica, owner in enumerate(ranks)
            if owner == rank
        )


def make_plan(
    config: RunConfig,
    specs: Sequence[LayerSpec],
    inspection: Inspection,
    ranks: int,
    file: PlanFile | None = None,
) -> Plan:
    """Split the model over `ranks` ranks, as [pipeline] says or as `file` does, which it names.

    Raises ConfigError, ModelError or PlanError when it cannot be split that way, or when layers of different
    stages share storage: each stage would update its own copy.
    """
    names = tuple(spec.name for spec in specs)
    if file is None:
        ranks_of_stage = _ranks_of_stage(config.pipeline, ranks)
        bounds = tuple(split_layers(config.pipeline, inspection.parameter_counts, len(ranks_of_stage)))
    else:
        source = str(config.pipeline.plan)
        bounds = _bounds_of(file, source, names, inspection.fingerprint)
        ranks_of_stage = _ranks_of(file, source, ranks)
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
        shared=inspection.shared,
        bounds=bounds,
        ranks_of_stage=ranks_of_stage,
        fingerprint=inspection.fingerprint,
    )


def _ranks_of_stage(pipeline: PipelineConfig, ranks: int) -> Ranks:
    """Contiguous ranks for each stage, as [pipeline] asks for a job of `ranks` ranks."""
    if pipeline.replicas is not None:
        needed = sum(pipeline.replicas)
        if needed != ranks:
            raise ConfigError(
                f"pipeline.replicas is {list(pipeline.replicas)}, which makes {needed} ranks, but {ranks} were "
                f"started: start {needed}, or change it"
            )
        ends = accumulate(pipeline.replicas)
        return tuple(tuple(range(end - count, end)) for end, count in zip(ends, pipeline.replicas, strict=True))
    stages = pipeline.stages or ranks
    if stages < ranks:
        raise ConfigError(
            f"pipeline.stages is {stages}, but {ranks} ranks were started: start at most {stages}, "
            "leave pipeline.stages out, or replicate stages with pipeline.replicas"
        )
    return tuple((rank,) for rank, owned in enumerate(spread(stages, ranks)) for _ in owned)


def _bounds_of(file: PlanFile, source: str, names: Sequence[str], fingerprint: str) -> Bounds:
    listed = [name for stage in file.stages for name in stage.layers]
    again = "profile and plan this run file again"
    for index, (ours, theirs) in enumerate(zip_longest(names, listed)):
        if ours != theirs:
            missing, more = "the plan has no such layer", "the model has no such layer"
            held = missing if theirs is None else f"the plan has {theirs!r}"
            wanted = more if ours is None else f"the model has {ours!r}"
            raise PlanError(f"{source}: is for another model: as layer {index} {held}, {wanted}; {again}")
    made_for = file.profile.about.get("fingerprint")
    if made_for is not None and made_for != fingerprint:
        raise PlanError(f"{source}: is for another model: layers of these names, but of other shapes; {again}")
    ends = [*accumulate(len(stage.layers) for stage in file.stages)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _ranks_of(file: PlanFile, source: str, ranks: int) -> Ranks:
    if file.ranks != ranks:
        text = f"is for {file.ranks} ranks, but {ranks} were started: start {file.ranks}, or plan for {ranks}"
        raise PlanError(f"{source}: {text}")
    return tuple(stage.ranks for stage in file.stages)


def make_schedule(config: RunConfig, data: Dataset, plan: Plan) -> Schedule:
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
        stages=plan.stages,
        minibatches=minibatches,
        microbatches=pipeline.microbatches,
        policy=Policy(pipeline.policy),
        target=Target(pipeline.target),
        evaluate_every=evaluation.every or per_epoch,
        evaluate_at_end=evaluation.at_end,
        evaluation_batches=batches,
        drain_every=config.checkpoint.every if draining else 0,
        replicas=plan.replicas if max(plan.replicas) > 1 else (),
    )
