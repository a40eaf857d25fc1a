"""`hpcpipe simulate`: what a plan would do, from its file alone: no model, no MPI, no GPU."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import click

from hpcpipe.errors import PlanError
from hpcpipe.planning.costs import ALLREDUCE_VOLUME
from hpcpipe.planning.plan_file import PlanFile, load_plan
from hpcpipe.planning.units import parse_size, show_size
from hpcpipe.schedule.orders import ORDERS, SYNCHRONOUS
from hpcpipe.schedule.policies import Policy, Target
from hpcpipe.schedule.schedule import Schedule
from hpcpipe.simulation.plot import save_timeline
from hpcpipe.simulation.predict import predict, schedule_of
from hpcpipe.simulation.result import Simulated
from hpcpipe.simulation.simulate import NOTHING, in_flight
from hpcpipe.simulation.trace import save_trace
from hpcpipe.simulation.whatif import WhatIf

_SHOWN_PASSES = 20_000
"""Of a timeline whose window is not said, and of what is recorded around a window."""


@click.command()
@click.argument("plan", metavar="PLAN.json", type=click.Path(dir_okay=False))
@click.option("--schedule", "name", type=click.Choice(list(ORDERS)), help="Another schedule than the plan's.")
@click.option("--policy", type=click.Choice([policy.value for policy in Policy]), help="Another than the plan's.")
@click.option(
    "--target",
    type=click.Choice([target.value for target in Target]),
    default=Target.ROUND_TRIP.value,
    show_default=True,
    help="Which coming version spectrain predicts.",
)
@click.option(
    "--minibatches",
    metavar="N",
    type=click.IntRange(1),
    help="Length of the run.  [default: 200, or more where the pipeline takes longer to fill]",
)
@click.option(
    "--microbatches",
    metavar="N",
    type=click.IntRange(1),
    help=f"Parts of a minibatch ({', '.join(sorted(SYNCHRONOUS))}); a pass of the profile is one of them.  "
    "[default: the plan's]",
)
@click.option("--allreduce", type=click.Choice(list(ALLREDUCE_VOLUME)), help="How gradients are summed.")
@click.option("--bucket", metavar="SIZE", default="25MiB", show_default=True, help="Of an all-reduce.")
@click.option(
    "--what-if",
    "what_if",
    metavar="SPEEDS",
    help="Another machine, by factors of speed: bandwidth=2x (twice the bytes a second), compute=0.5x (passes "
    "take twice as long), latency=2x (half the latency), allreduce=2x (collectives alone).",
)
@click.option("--timeline", metavar="FILE.png", type=click.Path(dir_okay=False), help="Draw a window of the run.")
@click.option(
    "--trace", metavar="FILE.json", type=click.Path(dir_okay=False), help="Chrome trace of a window, for Perfetto."
)
@click.option(
    "--window", metavar="A:B", help="Minibatches A to before B of timeline and trace.  [default: the first ones]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate(
    plan: str,
    name: str | None,
    policy: str | None,
    target: str,
    minibatches: int | None,
    microbatches: int | None,
    allreduce: str | None,
    bucket: str,
    what_if: str | None,
    timeline: str | None,
    trace: str | None,
    window: str | None,
    as_json: bool,
) -> None:
    """Simulate a plan: throughput, bubble, busy share and peak memory of each stage.

    The plan file holds the profile and the topology that it was made from; nothing is measured.
    """
    asked = _changed(load_plan(plan), name, policy, microbatches)
    options: dict[str, Any] = {
        "minibatches": minibatches,
        "target": Target(target),
        "bucket_bytes": parse_size(bucket),
        "allreduce": allreduce,
    }
    machine = None if what_if is None else WhatIf.parse(what_if)
    shown = _first_window(asked, minibatches) if window is None else _window(window)
    recorded = _around(shown, asked, minibatches) if timeline or trace else NOTHING
    found = predict(asked, what_if=machine, window=recorded, **options)
    baseline = predict(asked, **options) if machine is not None else None
    if trace:
        save_trace(found, trace)
    if timeline:
        save_timeline(found, timeline, window=shown)
    if as_json:
        click.echo(json.dumps(_described(asked, found, machine, baseline)))
    else:
        click.echo(_report(asked, found, machine, baseline))


def _changed(plan: PlanFile, name: str | None, policy: str | None, microbatches: int | None) -> PlanFile:
    """The plan with another schedule, policy or number of microbatches."""
    schedule = name or plan.schedule
    if microbatches is None:
        microbatches = plan.microbatches if schedule in SYNCHRONOUS else 1
    return replace(plan, schedule=schedule, policy=policy or plan.policy, microbatches=microbatches)


def _window(text: str) -> tuple[int, int]:
    """ "10:20", or "20" for the first 20."""
    first, colon, last = text.rpartition(":")
    if (first.isdecimal() or not first) and last.isdecimal() and (first or not colon):
        begin, end = int(first or 0), int(last)
        if begin < end:
            return begin, end
    raise PlanError(f'--window {text}: must be two numbers of minibatches as in "10:30", the second one larger')


def _first_window(plan: PlanFile, minibatches: int | None) -> tuple[int, int]:
    """The fill and some minibatches of the steady state, if that is not too much to look at."""
    schedule = schedule_of(plan, minibatches=minibatches)
    return 0, min(in_flight(schedule) * 3 + 4, _affordable(schedule))


def _around(window: tuple[int, int], plan: PlanFile, minibatches: int | None) -> tuple[int, int]:
    """The window and the minibatches that are in flight at its ends, too, if they are not too many."""
    schedule = schedule_of(plan, minibatches=minibatches)
    more = min(in_flight(schedule), _affordable(schedule))
    return max(0, window[0] - more), window[1] + more


def _affordable(schedule: Schedule) -> int:
    return max(1, _SHOWN_PASSES // (2 * schedule.stages * schedule.microbatches))


# -- what is printed ---------------------------------------------------------------------------------------


def _described(
    plan: PlanFile, found: Simulated, machine: WhatIf | None, baseline: Simulated | None
) -> dict[str, Any]:
    steady = found.steady
    return {
        "schedule": plan.schedule,
        "policy": None if found.schedule.synchronous else plan.policy,
        "stages": len(plan.stages),
        "replicas": list(plan.replicas),
        "ranks": plan.ranks,
        "minibatches": found.minibatches,
        "microbatches": plan.microbatches,
        "rows": plan.profile.rows,
        "unit": plan.profile.unit,
        "what_if": None if machine is None else asdict(machine),
        "samples_per_s": _finite(found.samples_per_s),
        "minibatches_per_s": _finite(found.minibatches_per_s),
        "samples_per_s_without_what_if": None if baseline is None else _finite(baseline.samples_per_s),
        "seconds": found.seconds,
        "steady": None if steady is None else [steady.begin, steady.end],
        "bubble": found.bubble,
        "whole_bubble": found.whole_bubble,
        "busy": list(found.busy),
        "steady_busy": None if steady is None else list(steady.busy),
        "peak_bytes": list(found.peak_bytes),
        "level_bytes": dict(found.level_bytes),
        "slowest": asdict(found.slowest),
    }


def _finite(rate: float) -> float | None:
    """JSON has no infinity, which is the rate of a profile whose layers take no time."""
    return rate if math.isfinite(rate) else None


def _report(plan: PlanFile, found: Simulated, machine: WhatIf | None, baseline: Simulated | None) -> str:
    schedule, steady = found.schedule, found.steady
    unit = plan.profile.unit
    size = f" of {found.samples} samples" if unit == "samples" else ""
    how = f"{plan.microbatches} microbatches" if schedule.synchronous else plan.policy
    lines = [
        f"{plan.schedule} ({how}), {_counted(schedule.stages, 'stage')} on {_counted(plan.ranks, 'rank')}, "
        f"{_counted(found.minibatches, 'minibatch', 'es')}{size}"
    ]
    if machine is not None:
        lines.append(f"what if: {machine}")
    part = (
        "the whole run, too short for a steady state"
        if steady is None
        else f"minibatches {steady.begin} to {steady.end}"
    )
    each = _time(1 / found.minibatches_per_s)
    lines += ["", f"throughput   {_rate(plan, found):.6g} {unit}/s, {each} a minibatch ({part})"]
    if baseline is not None:
        lines.append(f"             {_rate(plan, baseline):.6g} {unit}/s on the machine of the plan")
    lines += [
        f"bubble       {found.bubble:.1%} of the ranks' time; {found.whole_bubble:.1%} with fill and drain",
        f"slowest      {found.slowest.name}, in use {found.slowest.share:.0%} of the run",
        f"whole run    {_time(found.seconds)}; sent over "
        + ", ".join(f"{name} {show_size(nbytes)}" for name, nbytes in found.level_bytes.items()),
        "",
        *_table(plan, found),
    ]
    return "\n".join(lines)


def _table(plan: PlanFile, found: Simulated) -> list[str]:
    """A row per stage: the range of its ranks' busy shares and their largest peak of memory."""
    busy = found.busy if found.steady is None else found.steady.busy
    rows = [("stage", "ranks", "layers", "busy", "peak memory")]
    for index, stage in enumerate(plan.stages):
        shares = [busy[rank] for rank in stage.ranks]
        low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
        layers = stage.layers[0] if len(stage.layers) == 1 else f"{stage.layers[0]} .. {stage.layers[-1]}"
        rows.append(
            (
                str(index),
                str(len(stage.ranks)),
                layers if len(layers) <= 40 else f"{len(stage.layers)} layers",
                low if low == high else f"{low} to {high}",
                show_size(max(found.peak_bytes[rank] for rank in stage.ranks)),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _rate(plan: PlanFile, found: Simulated) -> float:
    return found.samples_per_s if plan.profile.unit == "samples" else found.minibatches_per_s


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} µs"


def _counted(number: int, thing: str, plural: str = "s") -> str:
    return f"{number} {thing}{'' if number == 1 else plural}"
