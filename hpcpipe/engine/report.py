"""What a run says of itself: before it trains, and in summary.json when it is done.

Rank 0 speaks for all; the others hand in what only they know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import hpcpipe
from hpcpipe.config import RunConfig
from hpcpipe.durable import replace_file
from hpcpipe.engine.describe import describe, kept_for_cuts, uneven_rounds
from hpcpipe.engine.folder import RunFolder
from hpcpipe.engine.plan import Plan
from hpcpipe.engine.resources import peak_memory_bytes
from hpcpipe.engine.restore import Resume
from hpcpipe.engine.runner import StageRunner
from hpcpipe.observe.activity import Activity
from hpcpipe.observe.record import RunRecord
from hpcpipe.schedule import Schedule
from hpcpipe.transport.transport import Transport
from hpcpipe.transport.world import World

Say = Callable[[str], None]


def announce(
    world: World,
    config: RunConfig,
    plan: Plan,
    schedule: Schedule,
    resume: Resume | None,
    notes: Sequence[str],
    *,
    threads: int,
    say: Say,
) -> None:
    """Say what will run: plan, staleness and distances per stage, transport, clipping, fallbacks, where it starts.

    `notes` are lines of this rank; a line that several ranks hand in is said once.
    """
    everyone = world.gather_json([*notes, *world.notes], what="the notes of all ranks")
    if everyone is None:
        return
    policy = "" if schedule.synchronous else f", policy {schedule.policy.value}"
    aim = f", target {schedule.target.value}" if schedule.predicts else ""
    replicas = f" of {'-'.join(map(str, plan.replicas))} replicas" if max(plan.replicas) > 1 else ""
    say(
        f"hpcpipe {hpcpipe.__version__}: {schedule.minibatches} minibatches, schedule {schedule.name}{policy}"
        f"{aim}, {schedule.stages} stages{replicas} on {world.size} ranks, "
        f"{threads} thread{'s' if threads > 1 else ''} each"
    )
    for line in (*describe(plan, schedule), *uneven_rounds(schedule)):
        say(line)
    for remark in (kept_for_cuts(plan, schedule, config), _clipping(config, schedule), _start(resume)):
        if remark is not None:
            say(remark)
    for note in dict.fromkeys(note for rank in everyone for note in rank):
        say(note)


def _clipping(config: RunConfig, schedule: Schedule) -> str | None:
    if config.optimizer.clip_norm is None:
        return None
    whose = "all stages together" if schedule.synchronous else "each stage alone"
    return f"gradients are clipped to norm {config.optimizer.clip_norm:g}, that of {whose}"


def _start(resume: Resume | None) -> str | None:
    if resume is None:
        return None
    how = "this run continues it to the bit"
    if not resume.exact:
        how = (
            f"what differs now: {', '.join(resume.differs)}; "
            "this run is equivalent, not bit-identical, and fills its pipeline anew"
        )
    return f"resuming from {resume.path} (step {resume.step}); {how}"


def rank_summary(
    world: World,
    device: torch.device,
    plan: Plan,
    runners: Mapping[int, StageRunner],
    transport: Transport,
    activity: Activity,
    record: RunRecord | None,
    trained_s: float,
) -> dict[str, Any]:
    """This rank's part of the summary, as JSON."""
    return {
        "rank": world.rank,
        "host": world.host,
        "device": str(device),
        "stages": [
            {
                "stage": index,
                "replica": runner.place.replica,
                "layers": list(plan.layers_of(index)),
                "staleness": runner.program.staleness(runner.next_update - 1),
                "peak_versions": runner.weights.peak_versions,
                "weight_bytes": runner.weights.allocated_bytes,
            }
            for index, runner in runners.items()
        ],
        "busy_fraction": activity.busy_seconds() / trained_s if trained_s else 0.0,
        "bytes_sent": sum(stats.payload_bytes for stats in transport.sent.values()),
        "peak_memory_bytes": peak_memory_bytes(device),
        "notes": [note for runner in runners.values() for note in runner.passes.notices],
        "events": activity.events,
        "figures": None if record is None else record.final,
    }


def summarise(
    world: World, folder: RunFolder, mine: dict[str, Any], summary: dict[str, Any], *, trace: bool, say: Say
) -> None:
    """Write summary.json, and trace.json if asked, from what every rank hands in; say the figures.

    What the disk does not take is said, and costs nothing else.
    """
    everyone = world.gather_json(mine, what="the summary of all ranks")
    if everyone is None:
        return
    events = [event for entry in everyone for event in entry.pop("events")]
    parts = [entry.pop("figures") for entry in everyone]
    figures: dict[str, float] = next(part for part in parts if part is not None)
    if trace:
        timeline = json.dumps({"traceEvents": events})
        folder.keep("trace.json", lambda path: replace_file(path, timeline.encode()))
    whole = json.dumps({**summary, "figures": figures, "ranks": everyone}, indent=2) + "\n"
    folder.keep("summary.json", lambda path: replace_file(path, whole.encode()))
    for note in dict.fromkeys(note for entry in everyone for note in entry["notes"]):
        say(note)
    shown = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
    say(f"{summary['steps']} steps in {summary['train_seconds']:.1f} s: {shown}")
    say(f"metrics: {folder.path / 'metrics.jsonl'}; checkpoints: {folder.checkpoints}")
    folder.remind()
