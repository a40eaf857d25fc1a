"""A plan in figures: what each stage takes, what is forecast, what the plan was chosen over.

It owns what `hpcpipe plan` prints and writes into plan files, as data. Seconds and bytes come from `costs` and
`memory`, forecasts from its caller; it chooses and simulates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpcpipe.planning.alternatives import Alternative, Limit
from hpcpipe.planning.costs import stage_costs
from hpcpipe.planning.problem import Problem, Split, bytes_of, time_of
from hpcpipe.schedule import Policy, Schedule, StageProgram

_CLEARLY = 1.01
"""A difference below this factor may come from where the steady state was cut out."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Throughput of a plan and the idle share of its ranks.

    `minibatches`: how many were simulated; 0 where the figures follow from the slowest part alone.
    """

    minibatches_per_s: float
    bubble: float
    minibatches: int = 0

    def beats(self, other: Forecast) -> bool:
        """Whether this plan is clearly faster; only simulations say so."""
        simulated = self.minibatches and other.minibatches
        return bool(simulated) and self.minibatches_per_s > _CLEARLY * other.minibatches_per_s


@dataclass(frozen=True, kw_only=True)
class StageFigures:
    """One row of the table: seconds a minibatch, bytes on each rank.

    `compute_s` and `allreduce_s` are shares of a minibatch: those of one rank over the minibatches of a round.
    `cut_s` is that of the cut behind, None at the last stage. `share` is that of the slowest stage or cut.
    """

    layers: tuple[str, ...]
    ranks: tuple[int, ...]
    compute_s: float
    allreduce_s: float
    cut_s: float | None
    cut_level: str | None
    memory_bytes: int
    memory: dict[str, int]
    share: float
    staleness: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """An alternative with its forecast, or without a plan."""

    alternative: Alternative
    forecast: Forecast | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything about a plan that a user is told. `notes` are lines about what was assumed."""

    problem: Problem
    split: Split
    forecast: Forecast
    rows: tuple[Row, ...]
    limits: tuple[Limit, ...]
    fewer: Split | None = None
    notes: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """What a minibatch counts for: its samples, or 1 where nobody knows them."""
        profile = self.problem.profile
        return self.problem.passes * profile.rows if profile.unit == "samples" else 1


def stage_figures(problem: Problem, split: Split) -> tuple[StageFigures, ...]:
    """The row of each stage of a plan."""
    costs = stage_costs(problem.profile, [stage.layers for stage in split.stages])
    time = time_of(problem, costs, [stage.ranks for stage in split.stages])
    figures = []
    for index, (stage, memory) in enumerate(zip(split.stages, bytes_of(problem, split), strict=True)):
        spent = time.stages[index]
        shared = 1 if problem.synchronous else len(stage.ranks)
        cut = time.cuts[index] if index < len(time.cuts) else None
        figures.append(
            StageFigures(
                layers=tuple(problem.profile.layers[layer].name for layer in stage.layers),
                ranks=stage.ranks,
                compute_s=spent.compute_s / shared,
                allreduce_s=spent.allreduce_s / shared,
                cut_s=None if cut is None else cut.seconds,
                cut_level=None if cut is None else problem.topology.levels[cut.level].name,
                memory_bytes=memory.total,
                memory=asdict(memory),
                share=spent.seconds / time.bottleneck_s if time.bottleneck_s else 0.0,
                staleness=staleness(problem, split.replicas, index),
            )
        )
    return tuple(figures)


def staleness(problem: Problem, replicas: Sequence[int], stage: int) -> int:
    """Updates that a forward pass of the stage lags behind in the steady state, the most there is."""
    ranks = sum(replicas)
    schedule = Schedule(
        name=problem.schedule,
        stages=len(replicas),
        # Long enough to be full, and for each replica to have had its turn.
        minibatches=6 * ranks,
        microbatches=problem.microbatches,
        # What spectrain predicts across is what a forward pass without prediction would lag behind.
        policy=Policy.NONE if problem.policy == Policy.SPECTRAIN.value else Policy(problem.policy),
        replicas=tuple(replicas),
    )
    program = StageProgram(schedule, stage)
    return max(program.staleness(minibatch) for minibatch in range(4 * ranks, 6 * ranks))


def report_table(report: Report) -> dict[str, Any]:
    """The report as JSON values; a rate is null where nothing takes time."""
    problem, split = report.problem, report.split
    return {
        "ranks": problem.ranks,
        "replicas": list(split.replicas),
        "schedule": problem.schedule,
        "policy": None if problem.synchronous else problem.policy,
        "microbatches": problem.passes,
        "bottleneck_s": split.bottleneck_s,
        "seconds": split.seconds,
        "unit": problem.profile.unit,
        **_forecast(report, report.forecast),
        "limit": asdict(report.limits[0]),
        "stages": [asdict(figures) for figures in stage_figures(problem, split)],
        "alternatives": [
            {
                "name": row.alternative.name,
                "replicas": None if row.alternative.split is None else list(row.alternative.split.replicas),
                "bottleneck_s": None if row.alternative.split is None else row.alternative.split.bottleneck_s,
                "seconds": None if row.alternative.split is None else row.alternative.split.seconds,
                "why_not": row.alternative.why_not or None,
                **({} if row.forecast is None else _forecast(report, row.forecast)),
            }
            for row in report.rows
        ],
        "fewer_ranks": None if report.fewer is None else sum(report.fewer.replicas),
        "notes": list(report.notes),
    }


def _forecast(report: Report, forecast: Forecast) -> dict[str, Any]:
    rate = forecast.minibatches_per_s
    finite = math.isfinite(rate)
    known = report.problem.profile.unit == "samples"
    return {
        "minibatches_per_s": rate if finite else None,
        "samples_per_s": report.samples * rate if finite and known else None,
        "bubble": forecast.bubble,
        "simulated_minibatches": forecast.minibatches,
    }
