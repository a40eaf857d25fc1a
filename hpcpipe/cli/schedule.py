"""`hpcpipe schedule`: shows a schedule or proves it, from numbers alone: no model, no MPI, no GPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import click

from hpcpipe.errors import EXIT_FAILURE, ConfigError
from hpcpipe.schedule.actions import COMPUTES, RECEIVES, SENDS, Action, Op, Place
from hpcpipe.schedule.draw import draw, legend, report, table, title
from hpcpipe.schedule.orders import ORDERS, SYNCHRONOUS
from hpcpipe.schedule.policies import Policy, Target
from hpcpipe.schedule.ranks import checked_groups, rank_actions, spread
from hpcpipe.schedule.rings import short_run
from hpcpipe.schedule.schedule import Schedule
from hpcpipe.schedule.verify import Proof, ScheduleError, verify

_Command = TypeVar("_Command", bound=Callable[..., None])
_COLOURS = {Op.FORWARD: "cyan", Op.BACKWARD: "yellow", Op.EVALUATE: "magenta"}
_ON_WEIGHTS = frozenset({*COMPUTES, Op.UPDATE, Op.PREDICT})

_OPTIONS = (
    click.option(
        "--schedule",
        "name",
        type=click.Choice(list(ORDERS)),
        default="pipedream",
        show_default=True,
        help="pipedream is asynchronous, the others flush before every update.",
    ),
    click.option(
        "--stages",
        metavar="N",
        type=click.IntRange(1),
        help="[default: 4, or as many as --replicas has numbers]",
    ),
    click.option(
        "--replicas",
        metavar="N,N,...",
        help="Replicas of each stage, each on a rank of its own.  [default: one each]",
    ),
    click.option("--minibatches", metavar="N", type=click.IntRange(0), default=8, show_default=True),
    click.option(
        "--microbatches",
        metavar="N",
        type=click.IntRange(1),
        help=f"Parts of a minibatch.  [default: as many as stages for {' and '.join(sorted(SYNCHRONOUS))}]",
    ),
    click.option(
        "--policy",
        type=click.Choice([policy.value for policy in Policy]),
        default=Policy.SPECTRAIN.value,
        show_default=True,
        help="Which weights the passes of pipedream use.",
    ),
    click.option(
        "--target",
        type=click.Choice([target.value for target in Target]),
        default=Target.ROUND_TRIP.value,
        show_default=True,
        help="Which coming version spectrain predicts.",
    ),
    click.option(
        "--evaluate-every",
        metavar="N",
        type=click.IntRange(0),
        default=0,
        help="Minibatches between two evaluations.  [default: none]",
    ),
    click.option(
        "--evaluation-batches",
        metavar="N",
        type=click.IntRange(0),
        default=1,
        show_default=True,
        help="Batches of an evaluation.",
    ),
    click.option(
        "--drain-every",
        metavar="N",
        type=click.IntRange(0),
        default=0,
        help="Minibatches between two drains.  [default: no drain]",
    ),
    click.option(
        "--ranks",
        metavar="N",
        type=click.IntRange(1),
        help="Ranks that share the stages, where none has replicas.  [default: one each]",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
)


def _schedule_options(command: _Command) -> _Command:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.group()
def schedule() -> None:
    """Show or verify a schedule."""


@schedule.command()
@_schedule_options
def show(ranks: int | None, as_json: bool, **numbers: Any) -> None:
    """Draw what each stage does when, and on which weights."""
    asked = _schedule(**numbers)
    groups = _groups(asked, ranks)
    if as_json:
        _print({**_described(asked, groups), "actions": _listed(asked, groups)})
        return
    # A long run's figures are those of a short one with the same fill, steady state and drain.
    figures = verify(short_run(asked), groups).stages
    parts = [
        title(asked, groups),
        draw(asked, groups, width=shutil.get_terminal_size((100, 24)).columns, paint=_paint),
        legend(asked, paint=_paint),
        table(figures),
    ]
    click.echo("\n\n".join(parts))


@schedule.command("verify")
@_schedule_options
def verify_command(ranks: int | None, as_json: bool, **numbers: Any) -> None:
    """Prove that a schedule does what it says.

    No deadlock, every message received, the right weight versions, predictions and releases, and exact cuts. Ends
    with exit code 1 and the fault if it is not so.
    """
    asked = _schedule(**numbers)
    groups = _groups(asked, ranks)
    try:
        proof = verify(asked, groups)
    except ScheduleError as fault:
        if as_json:
            _print({**_described(asked, groups), "proved": False, "fault": str(fault)})
        else:
            click.echo(f"{title(asked, groups)}\nfault: {fault}")
        raise click.exceptions.Exit(EXIT_FAILURE) from None
    if as_json:
        _print({**_described(asked, groups), "proved": True, **_figures(proof)})
    else:
        click.echo(f"{title(asked, groups)}\n\n{report(proof)}")


def _schedule(
    *,
    name: str,
    stages: int | None,
    replicas: str | None,
    minibatches: int,
    microbatches: int | None,
    policy: str,
    target: str,
    evaluate_every: int,
    evaluation_batches: int,
    drain_every: int,
) -> Schedule:
    counts = _counts(replicas)
    stages = stages or len(counts) or 4
    return Schedule(
        name=name,
        stages=stages,
        replicas=counts,
        minibatches=minibatches,
        microbatches=microbatches or (stages if name in SYNCHRONOUS else 1),
        policy=Policy(policy),
        target=Target(target),
        evaluate_every=evaluate_every,
        evaluation_batches=evaluation_batches,
        drain_every=drain_every,
    )


def _counts(replicas: str | None) -> tuple[int, ...]:
    """The numbers in `--replicas`. Raises ConfigError for anything else."""
    if replicas is None:
        return ()
    try:
        return tuple(int(count) for count in replicas.split(","))
    except ValueError:
        raise ConfigError(f"--replicas {replicas}: give one number a stage with commas between, as 3,1") from None


def _groups(schedule: Schedule, ranks: int | None) -> list[list[Place]] | None:
    """The places of each rank where stages share ranks. Raises ConfigError where there are replicas, too."""
    if ranks is None:
        return None
    if schedule.replicated:
        raise ConfigError("--ranks and --replicas exclude each other: every replica has a rank of its own")
    return [[Place(stage) for stage in stages] for stages in spread(schedule.stages, ranks)]


def _described(schedule: Schedule, groups: Sequence[Sequence[Place]] | None) -> dict[str, Any]:
    return {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "replicas": list(schedule.replica_counts),
        "minibatches": schedule.minibatches,
        "microbatches": schedule.microbatches,
        "policy": None if schedule.synchronous else schedule.policy.value,
        "target": schedule.target.value if schedule.predicts else None,
        "evaluate_every": schedule.evaluate_every,
        "evaluation_batches": schedule.evaluation_batches,
        "drain_every": schedule.drain_every,
        "ranks": [[place.stage for place in places] for places in checked_groups(schedule, groups)],
    }


def _listed(schedule: Schedule, groups: Sequence[Sequence[Place]] | None) -> list[list[dict[str, Any]]]:
    """The actions of each rank in order."""
    checked = checked_groups(schedule, groups)
    return [[_action(action) for action in rank_actions(schedule, places)] for places in checked]


def _action(action: Action) -> dict[str, Any]:
    entry: dict[str, Any] = {"op": action.op.name.lower(), **action.place._asdict()}
    entry["minibatch"] = action.minibatch
    entry["microbatch"] = action.microbatch
    if action.op in SENDS or action.op in RECEIVES:
        entry["peer_replica"] = action.peer_replica
    if action.op in _ON_WEIGHTS:
        entry["version"] = action.version
        entry["distance"] = action.distance
    if action.predictions:
        entry["predictions"] = [{**made._asdict(), "role": made.role.value} for made in action.predictions]
    if action.releases:
        entry["releases"] = list(action.releases)
    return entry


def _figures(proof: Proof) -> dict[str, Any]:
    return {
        "actions": proof.actions,
        "messages": sum(proof.messages.values()),
        "channels": [
            {
                "source": channel.source.stage,
                "source_replica": channel.source.replica,
                "destination": channel.destination.stage,
                "destination_replica": channel.destination.replica,
                "kind": channel.kind,
                "messages": messages,
                "ring_depth": proof.ring_depths[channel],
            }
            for channel, messages in proof.messages.items()
        ],
        "cuts_checked": len(proof.cuts),
        "per_stage": [asdict(stage) for stage in proof.stages],
    }


def _print(found: dict[str, Any]) -> None:
    click.echo(json.dumps(found))


def _paint(text: str, op: Op | None) -> str:
    """Colours that click removes again where the output is no terminal."""
    return click.style(text, dim=True) if op is None else click.style(text, fg=_COLOURS[op], bold=True)
