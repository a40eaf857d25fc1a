"""The choice of a plan: what the partitioner finds, simulated beside the plans that a user would have tried.

The cost model hides all-reduces behind all computing of a stage, the simulation behind the backward passes that
they can run beside. So a simple plan may clearly beat the one of the lowest cost; then it is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

from hpcpipe.planning.alternatives import Alternative, alternatives, fewer_ranks, is_allowed, limits, work_s
from hpcpipe.planning.figures import Forecast, Report, Row
from hpcpipe.planning.plan_file import plan_of
from hpcpipe.planning.problem import Problem, Split
from hpcpipe.planning.search import partition
from hpcpipe.simulation.predict import SHORTEST, actions_of, predict, schedule_of
from hpcpipe.simulation.simulate import in_flight

_SIMULATED = 500_000
"""Actions: a second or two. What is larger is forecast by its slowest part alone."""


def best_plan(problem: Problem, notes: Sequence[str] = (), *, by_cost: bool = False) -> Report:
    """The plan of the lowest cost, or a simple one that clearly beats it in the simulation, and all about it.

    `by_cost`: the former in any case. `notes` are lines about what was assumed, for the report. Raises PlanError
    where no plan fits.
    """
    # The simple plans are often one and the same, and the one of the lowest cost.
    forecast_of = cache(partial(_forecast, problem))
    split = partition(problem)
    forecast = forecast_of(split)
    rows = [
        Row(alternative=each, forecast=None if each.split is None else forecast_of(each.split))
        for each in alternatives(problem)
    ]
    if not by_cost:
        cheapest = Row(alternative=Alternative(name="lowest cost", split=split), forecast=forecast)
        for row in rows:
            other = row.alternative.split
            if other is None or row.forecast is None or not is_allowed(problem, other):
                continue
            if row.forecast.beats(forecast):
                split, forecast = other, row.forecast
        if split is not cheapest.alternative.split:
            rows.insert(0, cheapest)
            notes = [*notes, "the simulation chose a simpler plan than the cost model (see below: lowest cost)"]
    fewer = fewer_ranks(problem, split)
    if fewer is not None and forecast.beats(_forecast(replace(problem, ranks=sum(fewer.replicas)), fewer)):
        fewer = None
    return Report(
        problem=problem,
        split=split,
        forecast=forecast,
        rows=tuple(rows),
        limits=limits(problem, split),
        fewer=fewer,
        notes=tuple(notes),
    )


def _forecast(problem: Problem, split: Split) -> Forecast:
    """What the simulator says of a plan's steady state, or its slowest part where that would take long."""
    asked = plan_of(problem, split)
    short = schedule_of(asked, minibatches=SHORTEST)
    # Long enough to fill, and for several rounds that all stages end together.
    minibatches = max(SHORTEST, 4 * in_flight(short), 8 * short.common_round)
    if actions_of(replace(short, minibatches=minibatches)) <= _SIMULATED:
        found = predict(asked, minibatches=minibatches)
        if found.steady is not None:
            return Forecast(
                minibatches_per_s=found.minibatches_per_s, bubble=found.bubble, minibatches=found.minibatches
            )
    return Forecast(
        minibatches_per_s=1 / split.seconds if split.seconds else math.inf,
        bubble=1 - work_s(problem) / (problem.ranks * split.seconds) if split.seconds else 0.0,
    )
