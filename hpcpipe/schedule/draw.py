"""Draws a schedule and its figures as text, read off the same lists that the ranks execute.

    stage 0   F0  F1  F2  F3   ·   ·   ·  B0  F4  B1
    weights    0   0   0   0               0   1   0

It knows no terminal: the caller says how wide a line may be and how a mark is coloured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hpcpipe.schedule.account import StageProof
from hpcpipe.schedule.actions import COMPUTES, Action, Op, Place
from hpcpipe.schedule.dryrun import dry_run
from hpcpipe.schedule.policies import Policy, Target
from hpcpipe.schedule.ranks import checked_groups, rank_actions
from hpcpipe.schedule.schedule import Schedule
from hpcpipe.schedule.verify import Proof

Paint = Callable[[str, "Op | None"], str]
"""(text, what it marks) -> text with colours; None marks what should stand back."""

_WEIGHTS = "weights"
_FIGURES = ("warm-up", "in flight", "staleness", "distance F", "distance B", "versions held")


def _plain(text: str, op: Op | None) -> str:
    return text


@dataclass(frozen=True, kw_only=True)
class _Cell:
    op: Op
    mark: str
    weights: str


def title(schedule: Schedule, groups: Sequence[Sequence[Place]] | None = None) -> str:
    """The schedule in words, one line."""
    count = schedule.ranks if groups is None else len(groups)
    stages = _counted(schedule.stages, "stage")
    if schedule.replicated:
        stages += f" ({', '.join(map(str, schedule.replica_counts))} replicas)"
    parts = [f"{schedule.name}, {stages} on {_counted(count, 'rank')}"]
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
    groups: Sequence[Sequence[Place]] | None = None,
    *,
    width: int = 100,
    paint: Paint = _plain,
) -> str:
    """One row of passes a replica over one row of the weights they use, time on the unit clock to the right.

    `groups` are the places of each rank, one each by default; a rank does one pass at a time. Lines are at most
    `width` characters long; what does not fit is cut off and the last line says so.
    """
    ranks = checked_groups(schedule, groups)
    # The passes that fit do not depend on minibatches that come after twice as many as fit.
    most = width * max(schedule.replica_counts) + 4 * schedule.ranks
    shown = min(schedule.minibatches, schedule.first + most)
    lists = [list(rank_actions(replace(schedule, minibatches=shown), places)) for places in ranks]
    grid, length = _grid(lists)
    names = {
        place: ("" if groups is None else f"rank {rank} ") + _name(schedule, place)
        for rank, places in enumerate(ranks)
        for place in places
    }
    margin = max(len(name) for name in [*names.values(), _WEIGHTS]) + 1
    cell = 1 + max((len(text) for c in grid.values() for text in (c.mark, c.weights)), default=2)
    columns = max(1, min(length, (width - margin) // cell))
    lines = [_axis(margin, cell, columns, paint)]
    for place, name in names.items():
        row = [grid.get((place, time)) for time in range(columns)]
        lines.append(name.ljust(margin) + "".join(_mark(c, cell, paint) for c in row).rstrip())
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
    made = "updates made so far"
    if schedule.replicated:
        after = "the replicas of a stage update together"
        made = "minibatches whose updates it holds"
    weights = [f"{_WEIGHTS}: the version that the pass above uses ({made})"]
    if schedule.predicts:
        weights.append("         4+2 is predicted from version 4, 2 updates ahead")
    return "\n".join([", ".join([*marks, f"{paint('·', None)} idle; {after}"]), *weights])


def table(stages: Sequence[StageProof]) -> str:
    """The figures of each stage: what its steady state needs and does, if the run is long enough to reach it.

    Replicas of a stage that have the same figures share a line.
    """
    several = any(proof.replica for proof in stages)
    head = ("stage", *(("replicas",) if several else ()), *_FIGURES)
    lines = ["  ".join(head)]
    for numbers, proof in _alike(stages, _figures):
        row = (proof.stage, *((numbers,) if several else ()), *_figures(proof))
        lines.append("  ".join(str(figure).rjust(len(name)) for figure, name in zip(row, head, strict=True)))
    return "\n".join(lines)


def report(proof: Proof) -> str:
    """What was proved, a line each, then the figures."""
    schedule, stages = proof.schedule, proof.stages
    passes = proof.minibatches * schedule.microbatches * schedule.stages
    made = sum(stage.predictions for stage in stages)
    updates = sum(stage.updates for stage in stages if stage.replica == 0)
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
        lines += _listed(schedule, stages, lambda stage: _runs(stage.staleness))
    if schedule.predicts:
        lines.append("prediction distances, forward and backward:")
        lines += _listed(
            schedule,
            stages,
            lambda stage: f"{_runs(stage.forward_distances)} and {_runs(stage.backward_distances)}",
        )
    if proof.ring_depths:
        lines.append("ring depths:")
        lines += [f"  {kind}: {depths}" for kind, depths in _depths(proof)]
    return "\n".join([*lines, "", table(stages)])


def _figures(proof: StageProof) -> tuple[int, ...]:
    return (
        proof.warm_up,
        proof.in_flight,
        max(proof.staleness, default=0),
        max(proof.forward_distances, default=0),
        max(proof.backward_distances, default=0),
        proof.peak_versions,
    )


def _alike(
    stages: Iterable[StageProof], figures: Callable[[StageProof], object]
) -> Iterator[tuple[str, StageProof]]:
    """One of each stage's neighbouring replicas with the same figures, with their numbers."""
    for _, group in groupby(stages, key=lambda proof: (proof.stage, figures(proof))):
        alike = list(group)
        numbers = str(alike[0].replica) if len(alike) == 1 else f"{alike[0].replica}-{alike[-1].replica}"
        yield numbers, alike[0]


def _listed(
    schedule: Schedule, stages: Iterable[StageProof], figures: Callable[[StageProof], str]
) -> Iterator[str]:
    for numbers, proof in _alike(stages, figures):
        plural = "s" if "-" in numbers else ""
        which = f" replica{plural} {numbers}" if schedule.replicas_of(proof.stage) > 1 else ""
        yield f"  stage {proof.stage}{which}: {figures(proof)}"


def _name(schedule: Schedule, place: Place) -> str:
    several = schedule.replicas_of(place.stage) > 1
    return f"stage {place.stage} replica {place.replica}" if several else f"stage {place.stage}"


def _grid(lists: Sequence[Sequence[Action]]) -> tuple[dict[tuple[Place, int], _Cell], int]:
    """The cell of each (place, time), and the time at which all is done."""
    start = dry_run(lists).start
    passes = [action for actions in lists for action in actions if action.op in COMPUTES]
    several = any(action.microbatch for action in passes if action.op is Op.FORWARD)
    grid = {(a.place, start[a.op, a.stage, a.minibatch, a.microbatch]): _cell(a, several) for a in passes}
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
    every = len(proof.boundaries)
    which = f"all {every}" if len(proof.cuts) == every else f"{len(proof.cuts)} of {every}"
    return f"{which} checked: a run resumed there does what the unbroken one does"


def _runs(values: Sequence[int]) -> str:
    """Values with repetitions counted: `0 1 2 3 x9`."""
    runs = [(value, len(list(group))) for value, group in groupby(values)]
    return " ".join(f"{value} x{times}" if times > 1 else str(value) for value, times in runs) or "none"


def _depths(proof: Proof) -> Iterable[tuple[str, str]]:
    def end(place: Place) -> str:
        return (
            f"{place.stage}.{place.replica}" if proof.schedule.replicas_of(place.stage) > 1 else f"{place.stage}"
        )

    by_kind: dict[str, list[str]] = {}
    for channel, depth in sorted(proof.ring_depths.items()):
        text = f"{end(channel.source)}->{end(channel.destination)} {depth}"
        by_kind.setdefault(channel.kind, []).append(text)
    return ((kind, ", ".join(texts)) for kind, texts in by_kind.items())
