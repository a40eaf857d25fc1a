"""What a plan will do: its schedule, costs and ranks put together and simulated.

It owns how long a run must be to show its steady state, and what of a plan can be asked for otherwise. It neither
plans nor prints.
"""

from __future__ import annotations

from dataclasses import replace

from hpcpipe.planning.costs import ALLREDUCE_VOLUME
from hpcpipe.planning.plan_file import PlanFile
from hpcpipe.schedule import Policy, Schedule, Target
from hpcpipe.simulation.costs import costs_of
from hpcpipe.simulation.result import Simulated
from hpcpipe.simulation.simulate import BUCKET_BYTES, NOTHING, in_flight, simulate
from hpcpipe.simulation.whatif import WhatIf

SHORTEST = 200
"""Minibatches of a simulation, if it is not said how many."""
_ACTIONS = 20_000_000
"""More would take a minute."""
_PER_PASS = 7
"""F, B and U, and four messages."""


def actions_of(schedule: Schedule) -> int:
    """About how many actions a simulation of `schedule` goes through, over all ranks."""
    return schedule.minibatches * schedule.stages * schedule.microbatches * _PER_PASS


def schedule_of(plan: PlanFile, *, minibatches: int | None = None, target: Target = Target.ROUND_TRIP) -> Schedule:
    """The schedule by which a plan is run; by default long enough for a steady state, if that is not too long."""
    schedule = Schedule(
        name=plan.schedule,
        stages=len(plan.stages),
        minibatches=SHORTEST,
        microbatches=plan.microbatches,
        policy=Policy(plan.policy),
        target=target,
        replicas=plan.replicas,
    )
    if minibatches is None:
        long = replace(schedule, minibatches=max(SHORTEST, 4 * in_flight(schedule)))
        return schedule if actions_of(long) > _ACTIONS else long
    return replace(schedule, minibatches=minibatches)


def predict(
    plan: PlanFile,
    *,
    minibatches: int | None = None,
    target: Target = Target.ROUND_TRIP,
    what_if: WhatIf | None = None,
    window: tuple[int, int] = NOTHING,
    bucket_bytes: int = BUCKET_BYTES,
    allreduce: str | None = None,
) -> Simulated:
    """Simulate a plan on the topology that it was made for.

    `minibatches`: None for enough to show the steady state. `allreduce`: "ring" or "server"; None is what the plan
    was made with. Otherwise as `simulate`.

    Raises PlanError: stages that do not follow the profile's edges, or more ranks than the topology has.
    """
    schedule = schedule_of(plan, minibatches=minibatches, target=target)
    number = {layer.name: index for index, layer in enumerate(plan.profile.layers)}
    if allreduce is None:
        asked = plan.about.get("allreduce")
        allreduce = asked if asked in ALLREDUCE_VOLUME else "ring"
    return simulate(
        schedule,
        costs_of(plan.profile, [[number[name] for name in stage.layers] for stage in plan.stages], schedule),
        plan.topology,
        [stage.ranks for stage in plan.stages],
        samples=plan.profile.rows * plan.microbatches,
        what_if=what_if,
        window=window,
        bucket_bytes=bucket_bytes,
        allreduce=allreduce,
    )
