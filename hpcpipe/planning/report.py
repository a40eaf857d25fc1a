"""A plan in words: the table of stages, the forecast, what it was chosen over and what limits it.

It owns the wording of `hpcpipe plan` on a terminal; every figure comes from `figures`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from hpcpipe.planning.alternatives import Alternative, work_s
from hpcpipe.planning.figures import Forecast, Report, Row, stage_figures
from hpcpipe.planning.topology import Level, Topology
from hpcpipe.planning.units import show_size

LONGEST_NAME = 22
"""Characters of a layer's name in the table."""
_CLEARLY = 0.99
"""Less than this share of another time is worth to be called faster."""


def report_text(report: Report) -> str:
    """The report for a terminal."""
    parts = [_head(report), _stage_table(report), _outlook(report), _alternative_table(report)]
    return "\n\n".join("\n".join(part) for part in parts)


def show_time(seconds: float) -> str:
    """Return a time in the largest unit that leaves at least one: "1.5 s", "44.16 ms", "20 µs"."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} µs" if seconds else "0"


def show_split(replicas: Sequence[int]) -> str:
    """Return the ranks of each stage as "15-1"; runs of equal ones are counted: "2 and 14 times 1"."""
    if len(replicas) <= 8:
        return "-".join(str(count) for count in replicas)
    runs = [(count, len(list(run))) for count, run in groupby(replicas)]
    return ", ".join(f"{count}" if times == 1 else f"{times} x {count}" for count, times in runs[:6]) + (
        f", ... ({len(replicas)} stages)" if len(runs) > 6 else ""
    )


def show_topology(topology: Topology) -> str:
    """Return the levels with their sizes and speeds, innermost first."""
    if len(topology.levels) == 1:
        return f"links at {_speed(topology.levels[0])}"
    return "; ".join(
        f"{level.name} of {level.size} rank{'s' * (level.size > 1)} at {_speed(level)}"
        for level in topology.levels
    )


def _speed(level: Level) -> str:
    latency = f", {show_time(level.latency_s)}" if level.latency_s else ""
    return f"{level.bandwidth / 1e9:.4g} GB/s{latency}"


def _head(report: Report) -> list[str]:
    problem = report.problem
    profile = problem.profile
    rows = "" if profile.unit != "samples" else f" of {report.samples} samples"
    way = f"{problem.microbatches} microbatches" if problem.synchronous else problem.policy
    count = len(profile.layers)
    return [
        f"{count} layer{'s' * (count > 1)}{'' if profile.is_chain else ' in a branching graph'}: "
        f"{show_time(work_s(problem))} for a minibatch{rows} on one rank, "
        f"{show_size(sum(layer.parameter_bytes for layer in profile.layers))} of parameters",
        f"{problem.schedule} ({way}) on {problem.ranks} rank{'s' * (problem.ranks > 1)}: "
        f"{show_topology(problem.topology)}",
        *report.notes,
    ]


def _stage_table(report: Report) -> list[str]:
    limit = report.problem.memory_bytes
    head = ("stage", "layers", "replicas", "ranks", "compute", "all-reduce", "cut", "memory", "share", "staleness")
    rows = [head]
    for index, figures in enumerate(stage_figures(report.problem, report.split)):
        memory = show_size(figures.memory_bytes)
        rows.append(
            (
                str(index),
                _span(figures.layers),
                str(len(figures.ranks)),
                _ranks(figures.ranks),
                show_time(figures.compute_s),
                show_time(figures.allreduce_s) if len(figures.ranks) > 1 else "-",
                "-" if figures.cut_s is None else show_time(figures.cut_s),
                f"{memory} ({figures.memory_bytes / limit:.0%})" if limit else memory,
                f"{figures.share:.0%}",
                str(figures.staleness),
            )
        )
    return [
        *_aligned(rows, left={1}),
        "times are of one minibatch, shared by the replicas; the cut is to the stage behind and back; memory",
        "is of each rank; share is that of the slowest part; staleness counts updates",
    ]


def _outlook(report: Report) -> list[str]:
    forecast, split = report.forecast, report.split
    how = f"simulated, {forecast.minibatches} minibatches" if forecast.minibatches else "by the slowest part alone"
    work = work_s(report.problem)
    speedup = (
        f", {work * forecast.minibatches_per_s:.3g} times one rank" if work and report.problem.ranks > 1 else ""
    )
    lines = [
        f"predicted    {_rate(report, forecast)}{speedup}; bubble {forecast.bubble:.1%} ({how})",
        f"limited by   {report.limits[0]}, {show_time(report.limits[0].seconds)} a minibatch"
        + (f"; next {report.limits[1]}, {show_time(report.limits[1].seconds)}" if len(report.limits) > 1 else ""),
    ]
    if report.fewer is not None:
        ranks, seconds = sum(report.fewer.replicas), report.fewer.seconds
        faster = f"faster, {show_time(seconds)} instead of {show_time(split.seconds)} a minibatch"
        lines.append(
            f"fewer ranks  {ranks} rank{'s' * (ranks > 1)} ({show_split(report.fewer.replicas)}) would be "
            + (faster if seconds < _CLEARLY * split.seconds else "as fast")
        )
    faster_rows = [row for row in report.rows if row.forecast is not None and row.forecast.beats(forecast)]
    if faster_rows:
        named = [f"{row.alternative.name} ({_rate(report, row.forecast)})" for row in faster_rows if row.forecast]
        lines.append(f"but          faster in the simulation: {', '.join(named)}")
    return lines


def _alternative_table(report: Report) -> list[str]:
    head = ("plan", "ranks of the stages", "slowest", f"{report.problem.profile.unit}/s", "bubble")
    chosen = Row(alternative=Alternative(name="this plan", split=report.split), forecast=report.forecast)
    rows, refused = [head], []
    for row in (chosen, *report.rows):
        split, forecast = row.alternative.split, row.forecast
        if split is None or forecast is None:
            refused.append(f"{row.alternative.name}: none, {row.alternative.why_not}")
            continue
        same = row is not chosen and split.stages == report.split.stages
        rows.append(
            (
                row.alternative.name + " (the same)" * same,
                show_split(split.replicas),
                show_time(split.seconds),
                _number(report.samples * forecast.minibatches_per_s) + "~" * (not forecast.minibatches),
                f"{forecast.bubble:.1%}",
            )
        )
    return [*_aligned(rows, left={0, 1}), *refused]


def _rate(report: Report, forecast: Forecast) -> str:
    return f"{_number(report.samples * forecast.minibatches_per_s)} {report.problem.profile.unit}/s"


def _number(rate: float) -> str:
    return f"{rate:.4g}" if rate < 1e4 else f"{rate:.0f}" if math.isfinite(rate) else "any number of"


def _span(layers: Sequence[str]) -> str:
    first, last = (_short(layers[index]) for index in (0, -1))
    return first if len(layers) == 1 else f"{first} … {last} ({len(layers)})"


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _ranks(ranks: Sequence[int]) -> str:
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _aligned(rows: Sequence[tuple[str, ...]], left: set[int]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
