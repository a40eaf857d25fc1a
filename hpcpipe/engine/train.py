"""One training run on one rank, from the configuration to the exit code.

Tells the story in order: agree on what to run, build this rank's stages, start or resume, run the schedule, leave
a last checkpoint and a summary. Decisions are taken by rank 0 and broadcast.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import hpcpipe
from hpcpipe.config import RunConfig
from hpcpipe.datasets.build import build_dataset
from hpcpipe.datasets.protocol import Dataset
from hpcpipe.engine import restore
from hpcpipe.engine.assemble import build_runners, connect, lay_out, learning_rate
from hpcpipe.engine.autoplan import PLAN_NAME, auto_plan
from hpcpipe.engine.checkpoints import Checkpoints
from hpcpipe.engine.committing import Committer
from hpcpipe.engine.folder import RunFolder
from hpcpipe.engine.loop import Engine, NoRecord
from hpcpipe.engine.placement import find_placement
from hpcpipe.engine.plan import Plan
from hpcpipe.engine.planned import plan_named, remarks
from hpcpipe.engine.report import announce, rank_summary, summarise
from hpcpipe.engine.resources import choose_device, set_threads, shared_devices
from hpcpipe.engine.run_file import agreed_run, naming
from hpcpipe.engine.runner import StageRunner
from hpcpipe.engine.shared_checkpoints import (
    SharedCheckpoints,
    ranks_of_one_file,
    refuse_without_parallel_hdf5,
)
from hpcpipe.engine.signals import StopSignals
from hpcpipe.engine.steering import Steering
from hpcpipe.engine.stopping import Stopping, taken_up
from hpcpipe.errors import EXIT_DONE, EXIT_REQUEUE
from hpcpipe.models.layers import LayerSpec
from hpcpipe.observe.activity import Activity
from hpcpipe.observe.metrics import MetricsFile
from hpcpipe.observe.progress import Progress, say
from hpcpipe.observe.record import RunRecord
from hpcpipe.planning.plan_file import PlanFile, save_plan
from hpcpipe.schedule import Action, Place, Schedule, rank_actions
from hpcpipe.transport.cuda import detect
from hpcpipe.transport.transport import Transport
from hpcpipe.transport.wait import Waiter
from hpcpipe.transport.world import World


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What the command line says beside the run file. `resume`: "auto", a path, or None for a fresh start."""

    run_file: str
    overrides: tuple[str, ...] = ()
    resume: str | None = None
    overwrite: bool = False


def train(world: World, options: TrainOptions, signals: StopSignals | None = None) -> int:
    """Run one training job on this rank; the exit code, the same on all ranks.

    `signals` are the stop signals of this process; without them only a STOP file and the time can stop the run.

    Raises UserError for wrong input, and whatever a rank meets on its way: the caller ends the job.
    """
    return _Job(world, agreed_run(world, options.run_file, options.overrides), options, signals).run()


class _Job:
    """The parts of one run on one rank, in the order in which they come to be."""

    def __init__(
        self, world: World, config: RunConfig, options: TrainOptions, signals: StopSignals | None
    ) -> None:
        self._world = world
        self._config = config
        self._options = options
        self._directory = Path(config.run.out)
        self._began = time.perf_counter()
        placement = find_placement(world)
        with world.together("looking for what the run needs"), naming(options.run_file):
            self._device = choose_device(config, placement)
            if config.checkpoint.file == "shared":
                refuse_without_parallel_hdf5()
        self._threads = set_threads(config, placement)
        shared = shared_devices(world, self._device)
        # Which number a rank has on its host decides about its GPU alone.
        numbering = placement.remarks if self._device.type == "cuda" else ()
        self._placement_notes = [self._threads.line, *numbering, *shared]
        self._waiter = Waiter(
            rank=world.rank,
            warn_after_s=config.run.stall_warning_s or float("inf"),
            abort_after_s=config.run.stall_abort_s or None,
        )
        world.waiter = self._waiter
        self._stopping = Stopping(world, config, signals, say=self._say)

    def run(self) -> int:
        with RunFolder(
            self._directory,
            world=self._world,
            resume=self._options.resume,
            overwrite=self._options.overwrite,
            say=self._say,
        ) as folder:
            folder.claim()
            return self._train(folder)

    def _train(self, folder: RunFolder) -> int:
        data, specs, plan, schedule, notes = self._prepare(folder)
        resume = folder.choose_start(plan, schedule, self._config)
        if resume is not None:
            schedule = replace(schedule, first=resume.first)
        places = plan.places_of(self._world.rank)
        self._waiter.describe = lambda: _named(places)
        self._world.name_ranks(lambda rank: f"rank {rank} ({_named(plan.places_of(rank))})")
        transport, transport_notes = self._transport(plan)
        steering, checkpoints, committer = self._checkpointing(folder, plan, schedule, resume, len(places))
        self._stopping.direct_to(steering)
        with self._world.together("building the stages"):
            runners, build_notes = build_runners(
                self._config,
                plan=plan,
                specs=specs,
                places=places,
                schedule=schedule,
                data=data,
                steering=steering,
                device=self._device,
            )
            notes += [*transport_notes, *build_notes]
        connect(self._config, runners, transport, plan=plan, schedule=schedule, data=data)
        with self._world.together("loading the weights"):
            resends = self._load(runners, resume, schedule)
        announce(
            self._world,
            self._config,
            plan,
            schedule,
            resume,
            [self._stopping.line(schedule), f"transport: {transport.line}", *self._placement_notes, *notes],
            threads=self._threads.count,
            say=self._say,
        )
        with self._recording(plan, schedule, resume, data) as record:
            activity = Activity(rank=self._world.rank, origin=self._common_origin(), trace=self._config.run.trace)
            self._waiter.task = activity.task
            engine = Engine(
                schedule=schedule,
                runners=runners,
                steering=steering,
                checkpoints=checkpoints,
                record=record or NoRecord(),
                activity=activity,
                progress=transport.progress,
                clip_norm=self._config.optimizer.clip_norm,
                norm_squared=self._sum_over_ranks,
                stop_on_nonfinite=self._config.optimizer.on_nonfinite == "stop",
            )
            for resend in resends:
                runners[resend.stage].send_activation(resend)
            trained_from = time.perf_counter()
            ending = engine.run(rank_actions(schedule, places, after=self._resume_after(resume)))
            trained_s = time.perf_counter() - trained_from
            transport.finish(discard=ending.stopped)
            for runner in runners.values():
                # Graphs that a stop has left hold on to the weights, out of reach of Python's collector.
                runner.in_flight.clear()
            committed = checkpoints.finish()
        mine = rank_summary(self._world, self._device, plan, runners, transport, activity, record, trained_s)
        summary = {
            "steps": ending.last_update + 1,
            "stopped": ending.stopped,
            "schedule": schedule.name,
            "policy": None if schedule.synchronous else schedule.policy.value,
            "train_seconds": trained_s,
            "wall_seconds": time.perf_counter() - self._began,
            "checkpoint_step": committed,
        }
        summarise(self._world, folder, mine, summary, trace=self._config.run.trace, say=self._say)
        with self._world.together("looking at the last checkpoint"):
            committer.demand(ending.last_update + 1, committed)
        return EXIT_REQUEUE if ending.stopped else EXIT_DONE

    # -- before training --

    def _prepare(self, folder: RunFolder) -> tuple[Dataset, list[LayerSpec], Plan, Schedule, list[str]]:
        """Data, model and plan: the same on every rank, so what is wrong with them is said once; and remarks."""
        config = self._config
        with self._world.together("preparing the data"), naming(self._options.run_file):
            data = build_dataset(config.data, config.run.seed)
        file = self._plan_file(folder, data)
        with self._world.together("preparing model and plan"), naming(self._options.run_file):
            specs, plan, schedule = lay_out(config, data, self._world.size, file)
        return data, specs, plan, schedule, [] if file is None else remarks(file, config, self._device)

    def _plan_file(self, folder: RunFolder, data: Dataset) -> PlanFile | None:
        """The plan to train by; None where [pipeline] itself says how to split."""
        chosen = self._config.pipeline.plan
        if chosen is None:
            return None
        if chosen != "auto":
            return plan_named(chosen, self._world)
        resuming = self._options.resume is not None
        file = auto_plan(self._config, self._world, data, device=self._device, resuming=resuming, say=self._say)
        with self._world.together("keeping the plan"):
            if self._world.rank == 0:
                folder.keep(PLAN_NAME, lambda path: save_plan(file, path))
        return file

    def _transport(self, plan: Plan) -> tuple[Transport, list[str]]:
        """The transport, and what a user should know about how it was chosen."""
        settings = self._config.transport
        aware, notes = False, []
        if self._device.type == "cuda":
            found = detect(settings.cuda_aware, self._world.library, memory_kinds=self._world.memory_kinds)
            aware = found.enabled
            notes = [f"CUDA-aware MPI: {'yes' if aware else 'no'}, {found.how}", *found.warnings]
        transport = Transport(
            self._world,
            self._waiter,
            ranks_of_stage=plan.ranks_of_stage,
            device=self._device,
            cuda_aware=aware,
            chunk_bytes=settings.chunk_bytes,
        )
        return transport, notes

    def _checkpointing(
        self, folder: RunFolder, plan: Plan, schedule: Schedule, resume: restore.Resume | None, places: int
    ) -> tuple[Steering, Checkpoints | SharedCheckpoints, Committer]:
        settings = self._config.checkpoint
        shared = settings.file == "shared"
        meta = {
            "run": folder.run,
            "fingerprint": plan.fingerprint,
            "first": schedule.first,
            "identity": restore.identity(plan, schedule, self._config),
            "minibatches": schedule.minibatches,
            "ranks": ranks_of_one_file(plan.ranks_of_stage) if shared else plan.ranks_of_stage,
            "config": self._config.to_toml(),
            "hpcpipe": hpcpipe.__version__,
            "torch": torch.__version__,
            "mpi": self._world.library,
            "host": platform.node(),
        }
        committer = Committer(
            folder.checkpoints,
            meta=meta,
            keep_last=settings.keep_last,
            keep_every=settings.keep_every or None,
            say=say,
            max_failures=settings.max_failures,
            check=folder.check,
        )
        committer.committed = None if resume is None else resume.step
        kind = SharedCheckpoints if shared else Checkpoints
        checkpoints = kind(committer, world=self._world, waiter=self._waiter, places=places)

        def interval() -> float | None:
            if settings.mtbf_hours is not None:
                return checkpoints.optimal_interval(settings.mtbf_hours * 3600)
            return None if settings.minutes is None else settings.minutes * 60

        steering = Steering(
            schedule,
            every=settings.every,
            asked=self._stopping.asked,
            taken_up=lambda request, minibatch: self._say(taken_up(request, minibatch, schedule, self._config)),
            seconds=interval,
        )
        return steering, checkpoints, committer

    def _load(
        self, runners: Mapping[int, StageRunner], resume: restore.Resume | None, schedule: Schedule
    ) -> list[Action]:
        """Weights to start from; the sends that an exact restart repeats."""
        if resume is None:
            if self._config.run.init_from is not None:
                restore.start_from_weights(runners, Path(self._config.run.init_from))
            return []
        found = restore.open_resume(resume)
        if resume.exact:
            return [
                send for runner in runners.values() for send in restore.restore_exactly(runner, found, schedule)
            ]
        for runner in runners.values():
            restore.restore_weights(runner, found)
        return []

    @staticmethod
    def _resume_after(resume: restore.Resume | None) -> int | None:
        return resume.step - 1 if resume is not None and resume.exact else None

    @contextmanager
    def _recording(
        self, plan: Plan, schedule: Schedule, resume: restore.Resume | None, data: Dataset
    ) -> Iterator[RunRecord | None]:
        """The one writer of metrics, on the rank of the last stage's first replica; None on the others."""
        if plan.recording_rank != self._world.rank:
            yield None
            return
        start = 0 if resume is None else resume.step
        record = RunRecord(
            MetricsFile(self._directory / "metrics.jsonl", keep_until=start),
            Progress(mode=self._config.run.progress, total=schedule.minibatches, start=start),
            log_every=self._config.run.log_every,
            last=schedule.minibatches - 1,
            epoch=data.epoch,
            rows=data.rows,
            rate=learning_rate(self._config, schedule.minibatches),
        )
        try:
            yield record
        finally:
            record.close()

    # -- while training --

    def _common_origin(self) -> float:
        """This rank's clock when all ranks have come here: where its timeline starts."""
        self._world.barrier("all ranks to be ready")
        return time.perf_counter()

    def _sum_over_ranks(self, value: float) -> float:
        if self._world.size == 1:
            return value
        total = self._world.all_reduce_sum(np.array([value]), what="the gradient norm of all stages")
        return float(total[0])

    def _say(self, line: str) -> None:
        if self._config.run.progress != "off":
            say(line)


def _named(places: Sequence[Place]) -> str:
    """What a rank owns, in words."""
    if len(places) == 1:
        return str(places[0])
    return "stage " + ", ".join(str(place.stage) for place in places)
