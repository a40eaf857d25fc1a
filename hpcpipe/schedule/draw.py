"""Draws a schedule and its figures as text, read off the same lists that the ranks execute.

    stage 0   F0  F1  F2  F3   ·   ·   ·  B0  F4  B1
    weights    0   0   0   0               0   1   0

It knows no terminal: the caller says how wide a line may be and how a mark is coloured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hpcpipe.schedule.account import StageProof
from hpcpipe.schedule.actions import COMPUTES, Action, Op
from hpcpipe.schedule.dryrun import Channel, dry_run
from hpcpipe.schedule.policies import Policy, Target
from hpcpipe.schedule.program import Schedule
from hpcpipe.schedule.ranks import rank_actions
from hpcpipe.schedule.verify import Proof

Paint = Callable[[str, "Op | None"], str]
"""(text, what it marks) -> text with colours; None marks what should stand back."""

_WEIGHTS = "weights"


def _plain(text: str, op: Op | None) -> str:
    return text


@dataclass(frozen=True, kw_only=True)
class _Cell:
    op: Op
    mark: str
    weights: str


def title(schedule: Schedule, ranks: Sequence[Sequence[int]] | None = None) -> str:
    """The schedule in words, one line."""
    count = schedule.stages if ranks is None else len(ranks)
    parts = [f"{schedule.name}, {_counted(schedule.stages, 'stage')} on {_counted(count, 'rank')}"]
    batches = _counted(schedule.minibatches - schedule.first, "minibatch")
    if schedule.synchronous:
        parts.append(f"{batches} of {_counted(schedule.microbatches, 'microbatch')}, flushed before every update")
    else:
        target = f" ({schedule.target.value})" if schedule.policy is Policy.SPECTRAIN else ""
        parts.append(f"{batches}, {schedule.policy.value}{target}")
    if schedule.drain_every:
        parts.append(f"drained every {schedule.drain_every}")
    return ", ".join(parts)


def draw(
    schedule: Schedule,
    ranks: Sequence[Sequence[int]] | None = None,
    *,
    width: int = 100,
    paint: Paint = _plain,
) -> str:
    """One row of passes a stage over one row of the weights they use, time on the unit clock to the right.

    `ranks` are the stages of each rank, one stage each by default; a rank does one pass at a time. Lines are at
    most `width` characters long; what does not fit is cut off and the last line says so.
    """
    groups = [[stage] for stage in range(schedule.stages)] if ranks is None else ranks
    # The passes that fit do not depend on minibatches that come after twice as many as fit.
    shown = min(schedule.minibatches, schedule.first + width + 4 * schedule.stages)
    lists = [list(rank_actions(replace(schedule, minibatches=shown), stages)) for stages in groups]
    grid, length = _grid(lists)
    names = {
        stage: f"stage {stage}" if ranks is None else f"rank {rank} stage {stage}"
        for rank, stages in enumerate(groups)
        for stage in stages
    }
    margin = max(len(name) for name in [*names.values(), _WEIGHTS]) + 1
    cell = 1 + max((len(text) for c in grid.values() for text in (c.mark, c.weights)), default=2)
    columns = max(1, min(length, (width - margin) // cell))
    lines = [_axis(margin, cell, columns, paint)]
    for stages in groups:
        for stage in stages:
            row = [grid.get((stage, time)) for time in range(columns)]
            lines.append(names[stage].ljust(margin) + "".join(_mark(c, cell, paint) for c in row).rstrip())
            weights = "".join((c.weights if c else "").rjust(cell) for c in row)
            lines.append(paint((_WEIGHTS.ljust(margin) + weights).rstrip(), None))
    if columns < length or shown < schedule.minibatches:
        lines.append(f"cut off after {columns} units of time: ask for fewer minibatches or widen the terminal")
    return "\n".join(lines)


def legend(schedule: Schedule, *, paint: Paint = _plain) -> str:
    """What the marks in the drawing mean."""
    micro = schedule.microbatches > 1
    number = "3.1" if micro else "3"
    of = "microbatch 1 of minibatch 3" if micro else "minibatch 3"
    marks = [
        f"{paint(f'F{number}', Op.FORWARD)} forward of {of}",
        f"{paint(f'B{number}', Op.BACKWARD)} backward",
    ]
    if schedule.evaluation_batches and (schedule.evaluate_every or schedule.evaluate_at_end):
        marks.append(f"{paint('E0', Op.EVALUATE)} evaluation batch 0")
    after = f"an update follows B3.{schedule.microbatches - 1}" if micro else "an update follows each B"
    weights = [f"{_WEIGHTS}: the version that the pass above uses (updates made so far)"]
    if schedule.predicts:
        weights.append("         4+2 is predicted from version 4, 2 updates ahead")
    return "\n".join([", ".join([*marks, f"{paint('·', None)} idle; {after}"]), *weights])


def table(stages: Iterable[StageProof]) -> str:
    """The figures of each stage: what its steady state needs and does, if the run is long enough to reach it."""
    head = ("stage", "warm-up", "in flight", "staleness", "distance F", "distance B", "versions held")
    rows = [
        (
            proof.stage,
            proof.warm_up,
            proof.in_flight,
            max(proof.staleness, default=0),
            max(proof.forward_distances, default=0),
            max(proof.backward_distances, default=0),
            proof.peak_versions,
        )
        for proof in stages
    ]
    lines = ["  ".join(head)]
    lines += [
        "  ".join(str(figure).rjust(len(name)) for figure, name in zip(row, head, strict=True)) for row in rows
    ]
    return "\n".join(lines)


def report(proof: Proof) -> str:
    """What was proved, a line each, then the figures."""
    schedule, stages = proof.schedule, proof.stages
    passes = proof.minibatches * schedule.microbatches * schedule.stages
    made = sum(stage.predictions for stage in stages)
    updates = proof.minibatches * schedule.stages
    deepest = max(proof.ring_depths.values(), default=0)
    lines = [
        f"no deadlock: {_counted(len(proof.ranks), 'rank')} end their {_counted(proof.actions, 'action')}, "
        f"also with rings of at most {_counted(deepest, 'message')}",
        f"every send received: {_counted(sum(proof.messages.values()), 'message')} on "
        f"{_counted(len(proof.messages), 'channel')}, once and in order",
        f"every pass done once: {_counted(passes, 'forward')}, {_counted(passes, 'backward')}, "
        f"{_counted(updates, 'update')}, {_counted(sum(s.evaluations for s in stages), 'evaluation')}",
        f"versions: each pass reads one that exists, and the one that {_definition(schedule)}",
        "releases: nothing is read after its release, nothing is held after its last reader's update",
        f"predictions: {_predictions(schedule, made)}",
        f"cuts: {_cuts(proof)}",
    ]
    if not schedule.synchronous:
        lines.append("staleness from minibatch to minibatch:")
        lines += [f"  stage {stage.stage}: {_runs(stage.staleness)}" for stage in stages]
    if schedule.predicts:
        lines.append("prediction distances, forward and backward:")
        lines += [
            f"  stage {stage.stage}: {_runs(stage.forward_distances)} and {_runs(stage.backward_distances)}"
            for stage in stages
        ]
    if proof.ring_depths:
        lines.append("ring depths:")
        lines += [f"  {kind}: {depths}" for kind, depths in _depths(proof.ring_depths)]
    return "\n".join([*lines, "", table(stages)])


def _grid(lists: Sequence[Sequence[Action]]) -> tuple[dict[tuple[int, int], _Cell], int]:
    """The cell of each (stage, time), and the time at which all is done."""
    start = dry_run(lists).start
    passes = [action for actions in lists for action in actions if action.op in COMPUTES]
    several = any(action.microbatch for action in passes if action.op is Op.FORWARD)
    grid = {(a.stage, start[a.op, a.stage, a.minibatch, a.microbatch]): _cell(a, several) for a in passes}
    return grid, 1 + max((time for _, time in grid), default=-1)


def _cell(action: Action, several: bool) -> _Cell:
    """`several`: minibatches have several microbatches, so a mark names both."""
    number = f"{action.minibatch}.{action.microbatch}" if several else str(action.minibatch)
    return _Cell(
        op=action.op,
        mark=f"{action.op.value}{action.microbatch if action.op is Op.EVALUATE else number}",
        weights=f"{action.version}+{action.distance}" if action.distance else str(action.version),
    )


def _mark(cell: _Cell | None, width: int, paint: Paint) -> str:
    if cell is None:
        return paint("·".rjust(width), None)
    return " " * (width - len(cell.mark)) + paint(cell.mark, cell.op)


def _axis(margin: int, cell: int, columns: int, paint: Paint) -> str:
    ticks = "".join((str(time) if time % 5 == 0 else "").rjust(cell) for time in range(columns))
    return paint(("time".ljust(margin) + ticks).rstrip(), None)


def _counted(number: int, thing: str) -> str:
    plural = "" if number == 1 else "es" if thing.endswith("ch") else "s"
    return f"{number} {thing}{plural}"


def _definition(schedule: Schedule) -> str:
    return "the flush before it made" if schedule.synchronous else f"{schedule.policy.value} defines"


def _predictions(schedule: Schedule, made: int) -> str:
    if not schedule.predicts:
        return "none, every pass runs on true weights"
    clock = "counted on the unit clock" if schedule.target is Target.ROUND_TRIP else "counted"
    return f"{made}, each used once, as many updates ahead as {clock}"


def _cuts(proof: Proof) -> str:
    if not proof.cuts:
        return "none to check"
    which = (
        f"all {len(proof.cuts)}"
        if len(proof.cuts) == proof.minibatches
        else f"{len(proof.cuts)} of {proof.minibatches}"
    )
    return f"{which} checked: a run resumed there does what the unbroken one does"


def _runs(values: Sequence[int]) -> str:
    """Values with repetitions counted: `0 1 2 3 x9`."""
    runs = [(value, len(list(group))) for value, group in groupby(values)]
    return " ".join(f"{value} x{times}" if times > 1 else str(value) for value, times in runs) or "none"


def _depths(depths: dict[Channel, int]) -> Iterable[tuple[str, str]]:
    by_kind: dict[str, list[str]] = {}
    for (source, destination, kind), depth in sorted(depths.items()):
        by_kind.setdefault(kind, []).append(f"{source}->{destination} {depth}")
    return ((kind, ", ".join(texts)) for kind, texts in by_kind.items())
