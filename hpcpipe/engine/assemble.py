"""Builds the stages of one rank from the configuration: layers, weights, update rule, channels, groups.

Everything that a `StageRunner` is made of comes together here; nothing runs yet. Who exchanges messages with whom
is read off the schedule's action lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hpcpipe.config import AdamwConfig, RunConfig, SgdConfig, check_groups, group_of
from hpcpipe.datasets.protocol import DataDescription, Dataset
from hpcpipe.engine.flight import Channels
from hpcpipe.engine.horizon import Horizon
from hpcpipe.engine.objective import Objective
from hpcpipe.engine.plan import Plan, make_plan, make_schedule
from hpcpipe.engine.runner import StageRunner
from hpcpipe.engine.stage import Stage
from hpcpipe.engine.steering import Steering
from hpcpipe.engine.weights import WeightStore
from hpcpipe.errors import ModelError
from hpcpipe.models.build import build_layers
from hpcpipe.models.layers import LayerSpec, inspect_layers, make_layers
from hpcpipe.models.loss import make_loss, make_metrics
from hpcpipe.optim.flat import FlatLayout
from hpcpipe.optim.rules import AdamOptions, RuleOptions, SgdOptions, make_rule
from hpcpipe.optim.schedules import LearningRate
from hpcpipe.planning.plan_file import PlanFile
from hpcpipe.schedule import Place, Schedule, StageProgram
from hpcpipe.schedule.rings import ring_depths
from hpcpipe.transport.message import ChannelId, Kind, Receiver, Sender
from hpcpipe.transport.transport import Transport

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def learning_rate(config: RunConfig, updates: int) -> LearningRate:
    """The learning-rate schedule of a run of `updates` updates."""
    schedule = config.lr_schedule
    options = schedule.model_dump(exclude={"name", "total", "warmup", "step_every", "min_lr"})
    if schedule.name in ("cosine", "linear"):
        options["total"] = max(schedule.total or updates, schedule.warmup + 1)
    if schedule.name == "cosine":
        options["minimum"] = schedule.min_lr
    if schedule.name == "step":
        options["every"] = schedule.step_every
    return LearningRate(base=config.optimizer.lr, schedule=schedule.name, warmup=schedule.warmup, **options)


def rule_options(optimizer: SgdConfig | AdamwConfig) -> RuleOptions:
    """Options of each parameter group: the optimizer's own first, then one for each of its groups."""
    decays = [optimizer.weight_decay] + [
        optimizer.weight_decay if group.weight_decay is None else group.weight_decay for group in optimizer.groups
    ]
    if isinstance(optimizer, AdamwConfig):
        return [
            AdamOptions(betas=optimizer.betas, eps=optimizer.eps, weight_decay=decay, maximize=optimizer.maximize)
            for decay in decays
        ]
    return [
        SgdOptions(
            momentum=optimizer.momentum,
            dampening=optimizer.dampening,
            weight_decay=decay,
            nesterov=optimizer.nesterov,
            maximize=optimizer.maximize,
        )
        for decay in decays
    ]


def lay_out(
    config: RunConfig, data: Dataset, ranks: int, file: PlanFile | None = None
) -> tuple[list[LayerSpec], Plan, Schedule]:
    """The model's layers, their split over `ranks` ranks (the one of `file`, if given), and the run's schedule.

    Raises ConfigError, ModelError or PlanError for what cannot be built, split or scheduled.
    """
    specs = build_layers(config.model, config.run.seed, data.describe())
    inspection = inspect_layers(specs, config.run.seed)
    check_groups(inspection.parameter_names, config.optimizer.groups)
    plan = make_plan(config, specs, inspection, ranks, file)
    return specs, plan, make_schedule(config, data, plan)


def build_runners(
    config: RunConfig,
    *,
    plan: Plan,
    specs: Sequence[LayerSpec],
    places: Sequence[Place],
    schedule: Schedule,
    data: Dataset,
    steering: Steering,
    device: torch.device,
) -> tuple[dict[int, StageRunner], list[str]]:
    """The runners of the rank that owns `places`, by stage, without channels; and what a user should know of them.

    Raises ModelError for a layer that cannot be trained.
    """
    runners: dict[int, StageRunner] = {}
    notes: list[str] = []
    description = data.describe()
    for index, replica in places:
        first, last = plan.bounds[index]
        stage = Stage(
            index,
            plan.layers_of(index),
            make_layers(specs[first:last], config.run.seed),
            seed=config.run.seed,
            device=device,
        )
        weights, note = _weights(config, stage, schedule, device)
        if note is not None and note not in notes:
            notes.append(note)
        runners[index] = StageRunner(
            stage=stage,
            weights=weights,
            schedule=schedule,
            data=data,
            objective=_objective(config, description),
            steering=steering,
            device=device,
            dtype=DTYPES[config.run.dtype],
            keep_derived=config.pipeline.derived == "keep_forward",
            replica=replica,
        )
    return runners, notes


def connect(
    config: RunConfig,
    runners: Mapping[int, StageRunner],
    transport: Transport,
    *,
    plan: Plan,
    schedule: Schedule,
    data: Dataset,
) -> None:
    """Make the channels and groups of this rank's stages, and have messages looked after as [transport] says.

    Replicas of a stage join each other, so all ranks call it.
    """
    if config.transport.progress == "layers":
        for runner in runners.values():
            runner.stage.between = transport.progress
    # Only the last minibatch of an epoch is short.
    full_pass = -(-data.rows(0) // schedule.microbatches)
    full_rows = {
        Kind.ACTIVATION: full_pass,
        Kind.GRADIENT: full_pass,
        Kind.EVALUATION: data.eval_rows(0) if data.eval_batches else None,
    }
    kinds = {kind.word: kind for kind in Kind}
    mine = {runner.place: runner.channels for runner in runners.values()}
    depths = ring_depths(schedule, [plan.places_of(rank) for rank in range(plan.ranks)])
    for (source, destination, word), depth in depths.items():
        kind = kinds[word]
        name = ChannelId(
            source=source.stage,
            destination=destination.stage,
            kind=kind,
            source_replica=source.replica,
            destination_replica=destination.replica,
        )
        if source in mine:
            sender = transport.sender(name, depth=depth, full_rows=full_rows[kind])
            _sending(mine[source], kind)[destination.replica] = sender
        if destination in mine:
            receiver = transport.receiver(name, depth=depth)
            _receiving(mine[destination], kind)[source.replica] = receiver
    for stage, runner in runners.items():
        if schedule.replicas_of(stage) > 1:
            runner.join(transport.group(stage), config.transport.bucket_bytes)


def _sending(channels: Channels, kind: Kind) -> dict[int, Sender]:
    return {
        Kind.ACTIVATION: channels.activations_out,
        Kind.GRADIENT: channels.gradients_out,
        Kind.EVALUATION: channels.evaluations_out,
    }[kind]


def _receiving(channels: Channels, kind: Kind) -> dict[int, Receiver]:
    return {
        Kind.ACTIVATION: channels.activations_in,
        Kind.GRADIENT: channels.gradients_in,
        Kind.EVALUATION: channels.evaluations_in,
    }[kind]


def _weights(
    config: RunConfig, stage: Stage, schedule: Schedule, device: torch.device
) -> tuple[WeightStore, str | None]:
    """The weights of a stage at version 0, as its layers were initialised."""
    dtype = DTYPES[config.run.dtype]
    masters = torch.float64 if dtype is torch.float64 else torch.float32
    trained = [(name, p) for name, p in stage.named_parameters() if p.requires_grad]
    for name, parameter in trained:
        if parameter.dtype is not torch.float32:
            raise ModelError(
                f"parameter {stage.public_name(name)!r} is {parameter.dtype}: build layers in float32 and choose "
                "what they compute in with run.dtype"
            )
    groups = config.optimizer.groups
    layout = FlatLayout(
        [(name, tuple(p.shape), group_of(stage.public_name(name), groups)) for name, p in trained], masters
    )
    options = rule_options(config.optimizer)
    rule, note = make_rule(
        options, layout, backend=config.optimizer.backend, device=device, keep_velocity=schedule.predicts
    )
    horizon = Horizon(
        learning_rate(config, schedule.minibatches),
        target=config.pipeline.target,
        updates_from=StageProgram(schedule, stage.index).updates_from,
        momentum=options[0].damping,
        scales=[1.0, *(group.lr_scale for group in groups)],
        decays=[group.decoupled_weight_decay for group in options],
    )
    weights = WeightStore(layout, rule=rule, horizon=horizon, device=device, dtype=dtype)
    weights.start_from(0, {name: parameter.detach() for name, parameter in trained}, updates=0)
    for parameter in stage.parameters():
        if parameter.requires_grad:
            # Never read again: the store's leaves take its place in every pass.
            parameter.data = parameter.data.new_empty(0)
        elif parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for buffer in stage.buffers():
        if buffer.is_floating_point():
            # As Module.to does; BatchNorm takes no statistics of another type than its weights.
            buffer.data = buffer.data.to(dtype)
    return weights, note


def _objective(config: RunConfig, description: DataDescription) -> Objective:
    return Objective(make_loss(config.loss), make_metrics(config.loss, config.model, description))
