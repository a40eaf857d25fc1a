"""One training run on one rank, from the configuration to the exit code.

Tells the story in order: agree on what to run, build this rank's stages, start or resume, run the schedule, leave
a last checkpoint and a summary. Decisions are taken by rank 0 and broadcast.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import hpcpipe
from hpcpipe.config import RunConfig, load_run, parse_run
from hpcpipe.datasets.build import build_dataset
from hpcpipe.datasets.protocol import Dataset
from hpcpipe.engine import restore
from hpcpipe.engine.assemble import build_runners, connect, learning_rate
from hpcpipe.engine.checkpoints import Checkpoints
from hpcpipe.engine.loop import Ending, Engine, NoRecord
from hpcpipe.engine.plan import Plan, describe, make_plan, make_schedule
from hpcpipe.engine.runner import StageRunner
from hpcpipe.engine.signals import on_signals, stop_file
from hpcpipe.engine.steering import Steering
from hpcpipe.errors import EXIT_DONE, EXIT_REQUEUE, HpcpipeError
from hpcpipe.models.build import build_layers
from hpcpipe.models.layers import LayerSpec, inspect_layers
from hpcpipe.observe.activity import Activity
from hpcpipe.observe.metrics import MetricsFile
from hpcpipe.observe.progress import Progress, say
from hpcpipe.observe.record import RunRecord
from hpcpipe.schedule import Action, Schedule, rank_actions
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


def train(world: World, options: TrainOptions) -> int:
    """Run one training job on this rank; the exit code, the same on all ranks.

    Raises UserError for wrong input, and whatever a rank meets on its way: the caller ends the job.
    """
    # Rank 0 alone reads the run file: one message if it is wrong, one version of it for all.
    tables = None
    if world.rank == 0:
        tables = load_run(options.run_file, options.overrides).model_dump(mode="json", exclude_none=True)
    tables = world.broadcast_json(tables, what="the run file from rank 0")
    return _Job(world, parse_run(tables, source=options.run_file), options).run()


class _Job:
    """The parts of one run on one rank, in the order in which they come to be."""

    def __init__(self, world: World, config: RunConfig, options: TrainOptions) -> None:
        self._world = world
        self._config = config
        self._options = options
        self._directory = Path(config.run.out)
        self._began = time.perf_counter()
        self._device = _choose_device(config, world)
        self._threads = _set_threads(config, world)
        self._waiter = Waiter(
            rank=world.rank,
            warn_after_s=config.run.stall_warning_s or float("inf"),
            abort_after_s=config.run.stall_abort_s or None,
        )
        world.waiter = self._waiter

    def run(self) -> int:
        data, specs, plan, schedule = self._prepare()
        resume = self._choose_start(plan, schedule)
        if resume is not None:
            schedule = replace(schedule, first=resume.first)
        stages = plan.stages_of(self._world.rank)
        self._waiter.describe = lambda: "stage " + ", ".join(str(stage) for stage in stages)
        transport, notes = self._transport(plan)
        steering, checkpoints = self._checkpointing(plan, schedule, len(stages))
        with self._world.together("building the stages"):
            runners, build_notes = build_runners(
                self._config,
                plan=plan,
                specs=specs,
                stages=stages,
                schedule=schedule,
                data=data,
                steering=steering,
                device=self._device,
            )
            notes += build_notes
            for runner in runners.values():
                runner.stage.between = self._progress_between_layers(transport)
        connect(
            runners,
            transport,
            plan=plan,
            ranks=self._world.size,
            schedule=schedule,
            data=data,
            rows=self._config.data.batch,
        )
        with self._world.together("loading the weights"):
            resends = self._load(runners, resume, schedule)
        self._announce(plan, schedule, resume, transport, notes)
        record = self._record(plan, schedule, resume, data)
        activity = Activity(rank=self._world.rank, origin=self._common_origin(), trace=self._config.run.trace)
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
        on_signals(self._config.run.stop_signals, steering.request)
        for resend in resends:
            runners[resend.stage].send_activation(resend)
        trained_from = time.perf_counter()
        ending = engine.run(rank_actions(schedule, stages, after=self._resume_after(resume)))
        trained_s = time.perf_counter() - trained_from
        transport.finish(discard=ending.stopped)
        committed = checkpoints.finish()
        if record is not None:
            record.close()
        self._summarise(plan, schedule, runners, transport, activity, record, ending, trained_s, committed)
        return self._exit_code(ending, committed)

    # -- before training --

    def _prepare(self) -> tuple[Dataset, list[LayerSpec], Plan, Schedule]:
        """Data, model and plan: the same on every rank, so what is wrong with them is said once."""
        with self._world.together("preparing data and model"):
            data = build_dataset(self._config.data, self._config.run.seed)
            specs = build_layers(self._config.model, self._config.run.seed, data.describe())
            inspection = inspect_layers(specs, self._config.run.seed)
            plan = make_plan(self._config, specs, inspection, self._world.size)
            schedule = make_schedule(self._config, data, stages=plan.stages)
        return data, specs, plan, schedule

    def _choose_start(self, plan: Plan, schedule: Schedule) -> restore.Resume | None:
        """Rank 0 looks for a checkpoint; everybody hears what was found."""
        resume = None
        if self._world.rank == 0:
            found = None
            if self._options.resume is not None:
                found = restore.find_checkpoint(self._options.resume, self._directory, self._say)
                if found is None:
                    self._say("no checkpoint to resume from: starting at step 0")
            elif not self._options.overwrite:
                restore.refuse_to_overwrite(self._directory)
            if found is not None:
                resume = restore.decide(found, plan, schedule, self._config.run.dtype)
            self._directory.mkdir(parents=True, exist_ok=True)
            if found is None and self._options.overwrite:
                restore.discard_checkpoints(self._directory)
            (self._directory / "run.toml").write_text(self._config.to_toml())
        found_json = self._world.broadcast_json(restore.as_json(resume), what="rank 0 to choose where to start")
        return None if found_json is None else restore.Resume(**found_json)

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
            rank_of_stage=plan.rank_of_stage,
            device=self._device,
            cuda_aware=aware,
            chunk_bytes=settings.chunk_bytes,
        )
        return transport, notes

    def _progress_between_layers(self, transport: Transport) -> Callable[[], None]:
        return transport.progress if self._config.transport.progress == "layers" else lambda: None

    def _checkpointing(self, plan: Plan, schedule: Schedule, stages: int) -> tuple[Steering, Checkpoints]:
        settings = self._config.checkpoint
        meta = {
            "fingerprint": plan.fingerprint,
            "pipeline": {
                **restore.pipeline_identity(plan, schedule, self._config.run.dtype),
                "first": schedule.first,
            },
            "minibatches": schedule.minibatches,
            "config": self._config.to_toml(),
            "hpcpipe": hpcpipe.__version__,
            "torch": torch.__version__,
            "mpi": self._world.library,
            "host": platform.node(),
        }
        checkpoints = Checkpoints(
            self._directory / "checkpoints",
            world=self._world,
            waiter=self._waiter,
            stages=stages,
            meta=meta,
            keep_last=settings.keep_last,
            keep_every=settings.keep_every or None,
            say=self._say,
        )

        def interval() -> float | None:
            if settings.mtbf_hours is not None:
                return checkpoints.optimal_interval(settings.mtbf_hours * 3600)
            return None if settings.minutes is None else settings.minutes * 60

        steering = Steering(
            every=settings.every,
            last=schedule.minibatches - 1,
            drain_every=schedule.drain_every,
            asked=stop_file(self._directory),
            seconds=interval,
        )
        return steering, checkpoints

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

    def _announce(
        self,
        plan: Plan,
        schedule: Schedule,
        resume: restore.Resume | None,
        transport: Transport,
        notes: list[str],
    ) -> None:
        """What will run, said once by rank 0."""
        everyone = self._world.gather_json(notes, what="the notes of all ranks")
        if everyone is None:
            return
        policy = "" if schedule.synchronous else f", policy {schedule.policy.value}"
        aim = f", target {schedule.target.value}" if schedule.predicts else ""
        self._say(
            f"hpcpipe {hpcpipe.__version__}: {schedule.minibatches} minibatches, schedule {schedule.name}"
            f"{policy}{aim}, {schedule.stages} stages on {self._world.size} ranks, {self._threads} threads each"
        )
        for line in describe(plan, schedule):
            self._say(line)
        self._say(f"transport: {transport.line}")
        if self._config.optimizer.clip_norm is not None:
            whose = "all stages together" if schedule.synchronous else "each stage alone"
            self._say(f"gradients are clipped by the norm of {whose}")
        if resume is not None:
            how = (
                "this run continues it to the bit"
                if resume.exact
                else "on another pipeline: this run is equivalent, not bit-identical; the pipeline is filled anew"
            )
            self._say(f"resuming from {resume.path} (step {resume.step}); {how}")
        for note in dict.fromkeys(note for rank in everyone for note in rank):
            self._say(note)
        for note in self._world.notes:
            self._say(note)

    def _record(
        self, plan: Plan, schedule: Schedule, resume: restore.Resume | None, data: Dataset
    ) -> RunRecord | None:
        """The one writer of metrics: the rank of the last stage."""
        if plan.rank_of_stage[-1] != self._world.rank:
            return None
        start = 0 if resume is None else resume.step
        return RunRecord(
            MetricsFile(self._directory / "metrics.jsonl", keep_until=start),
            Progress(mode=self._config.run.progress, total=schedule.minibatches, start=start),
            log_every=self._config.run.log_every,
            last=schedule.minibatches - 1,
            epoch=data.epoch,
            rows=data.rows,
            rate=learning_rate(self._config, schedule.minibatches),
        )

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

    # -- after training --

    def _summarise(
        self,
        plan: Plan,
        schedule: Schedule,
        runners: Mapping[int, StageRunner],
        transport: Transport,
        activity: Activity,
        record: RunRecord | None,
        ending: Ending,
        trained_s: float,
        committed: int | None,
    ) -> None:
        mine = {
            "rank": self._world.rank,
            "host": self._world.host,
            "stages": [
                {
                    "stage": index,
                    "layers": list(plan.layers_of(index)),
                    "staleness": runner.program.staleness(ending.last_update),
                    "peak_versions": runner.weights.peak_versions,
                    "weight_bytes": runner.weights.allocated_bytes,
                }
                for index, runner in runners.items()
            ],
            "busy_fraction": activity.busy_seconds() / trained_s if trained_s else 0.0,
            "bytes_sent": sum(stats.payload_bytes for stats in transport.sent.values()),
            "peak_memory_bytes": _peak_memory(self._device),
            "events": activity.events,
            "notes": [note for runner in runners.values() for note in runner.passes.notices],
            "final": None if record is None else record.final,
        }
        everyone = self._world.gather_json(mine, what="the summary of all ranks")
        if everyone is None:
            return
        final = next(entry["final"] for entry in everyone if entry["final"] is not None)
        events = [event for entry in everyone for event in entry.pop("events")]
        if self._config.run.trace:
            (self._directory / "trace.json").write_text(json.dumps({"traceEvents": events}))
        for entry in everyone:
            entry.pop("final")
        summary = {
            "steps": ending.last_update + 1,
            "stopped": ending.stopped,
            "schedule": schedule.name,
            "policy": None if schedule.synchronous else schedule.policy.value,
            "train_seconds": trained_s,
            "wall_seconds": time.perf_counter() - self._began,
            "checkpoint_step": committed,
            "figures": final,
            "ranks": everyone,
        }
        (self._directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        for note in dict.fromkeys(note for entry in everyone for note in entry["notes"]):
            self._say(note)
        figures = ", ".join(f"{name} {value:.4f}" for name, value in final.items())
        self._say(f"{ending.last_update + 1} steps in {trained_s:.1f} s: {figures}")
        self._say(f"metrics: {self._directory / 'metrics.jsonl'}; checkpoints: {self._directory / 'checkpoints'}")

    def _exit_code(self, ending: Ending, committed: int | None) -> int:
        if committed != ending.last_update + 1:
            if self._world.rank == 0:
                raise HpcpipeError(
                    f"{self._directory}: the last checkpoint (step {ending.last_update + 1}) was not written"
                )
            raise HpcpipeError("rank 0 reports that the last checkpoint could not be written")
        return EXIT_REQUEUE if ending.stopped else EXIT_DONE

    def _say(self, line: str) -> None:
        if self._config.run.progress != "off":
            say(line)


def _choose_device(config: RunConfig, world: World) -> torch.device:
    """The GPU of this rank by its place on its host, or the CPU. Raises HpcpipeError without one."""
    available = torch.cuda.is_available()
    if config.run.device == "cpu" or (config.run.device == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise HpcpipeError('run.device = "cuda", but torch sees no GPU; see `hpcpipe doctor`')
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _set_threads(config: RunConfig, world: World) -> int:
    """Compute threads of this rank: as asked, as OMP_NUM_THREADS says, or its share of the host's cores."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        neighbours = world.hosts.count(world.host)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // neighbours))
    return torch.get_num_threads()


def _peak_memory(device: torch.device) -> int:
    """Bytes: the device's peak on a GPU, else the process's peak resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
