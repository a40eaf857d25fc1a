"""A run's plan and schedule in words: the table of stages, and what a user should know about rounds and cuts.

It decides nothing: staleness and distances come from the schedule's own programs and count updates. A round is
what a replicated stage makes one update from (PipeDream, SOSP'19, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import lcm

from hpcpipe.config import RunConfig
from hpcpipe.engine.plan import Plan
from hpcpipe.schedule import Schedule, StageProgram
from hpcpipe.schedule.policies import keeps_forward_weights
from hpcpipe.schedule.program import warm_up_of

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
LONGEST_LOOK = 64
"""Minibatches looked at to tell how distances vary; they repeat with the least common multiple of the replicas."""


def describe(plan: Plan, schedule: Schedule) -> list[str]:
    """The plan as a table for people: one line a stage, with the ranks of its replicas where there are several."""
    replicated = max(plan.replicas) > 1
    owner = "replicas  ranks    " if replicated else "rank"
    lines = [f"stage  {owner}  {'layers':32s}  parameters  in flight  staleness  predicts F, B"]
    for stage, ranks in enumerate(plan.ranks_of_stage):
        first, last = plan.bounds[stage]
        names = plan.layers_of(stage)
        span = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
        owner = f"{len(ranks):8d}  {_list_of(ranks):9.9s}" if replicated else f"{ranks[0]:4d}"
        passes = [
            (StageProgram(schedule, stage, schedule.owner(stage, minibatch)), minibatch)
            for minibatch in _steady_minibatches(schedule)
        ]
        staleness = _span(program.staleness(j) for program, j in passes)
        forward = _span(program.forward_distance(j) for program, j in passes)
        backward = _span(program.backward_distance(j) for program, j in passes)
        lines.append(
            f"{stage:5d}  {owner}  {span:32.32s}  {sum(plan.parameter_counts[first:last]):10,d}  "
            f"{warm_up_of(schedule, stage) + 1:9d}  {staleness:>9s}  "
            f"{f'{forward}, {backward} ahead' if schedule.predicts else '-'}"
        )
    return lines


def _steady_minibatches(schedule: Schedule) -> Sequence[int]:
    """One of each kind of minibatch of the steady state, or of the middle of a run too short to have one."""
    first, last = schedule.segment(schedule.first)
    start = min(first + 2 * schedule.ranks, (first + last) // 2)
    kinds = lcm(*schedule.replica_counts)
    return range(start, max(start + 1, min(start + min(kinds, LONGEST_LOOK), last)))


def _span(values: Iterable[int]) -> str:
    found = sorted(set(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def _list_of(ranks: Sequence[int]) -> str:
    if tuple(ranks) == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return _span(ranks)
    return ",".join(str(rank) for rank in ranks)


def uneven_rounds(schedule: Schedule) -> Iterator[str]:
    """A line for each stage whose replicas do not all get the same work, with what becomes of the rest."""
    stretches = {schedule.segment(j) for j in (schedule.first, schedule.minibatches - 1)}
    lengths = sorted({last - first for first, last in stretches})
    where = "from one drain to the next " if schedule.drain_every else ""
    for stage in range(schedule.stages):
        replicas = schedule.replicas_of(stage)
        if schedule.synchronous:
            yield from _uneven_microbatches(stage, replicas, schedule.microbatches)
            continue
        for length in lengths:
            if rest := length % replicas:
                yield (
                    f"stage {stage}: {length} minibatches {where}are no multiple of its {replicas} replicas: "
                    f"none is dropped, the last update averages {rest}"
                )


def _uneven_microbatches(stage: int, replicas: int, microbatches: int) -> Iterator[str]:
    if microbatches < replicas:
        idle = replicas - microbatches
        yield (
            f"stage {stage}: a minibatch has {microbatches} microbatch{'es' if microbatches > 1 else ''} for "
            f"{replicas} replicas, so {idle} of them {'have' if idle > 1 else 'has'} nothing to compute: raise "
            "pipeline.microbatches or take fewer replicas"
        )
    elif microbatches % replicas:
        yield (
            f"stage {stage}: {microbatches} microbatches are no multiple of its {replicas} replicas, so some wait "
            "for others in every minibatch"
        )


def kept_for_cuts(plan: Plan, schedule: Schedule, config: RunConfig) -> str | None:
    """What cuts cost in memory where a forward's weights are not kept anyway, in words; None if nothing."""
    cuts = config.checkpoint
    if schedule.synchronous or keeps_forward_weights(schedule.policy) or schedule.drain_every:
        return None
    if not cuts.repeats:
        return None
    item = DTYPE_BYTES[config.run.dtype]
    sizes = [
        warm_up_of(schedule, stage) * item * sum(plan.parameter_counts[slice(*plan.bounds[stage])])
        for stage in range(plan.stages)
    ]
    if not any(sizes):
        return None
    return (
        f"a checkpoint keeps the weights of forwards in flight meanwhile: {max(sizes) / 1e6:.1f} MB on stage "
        f'{sizes.index(max(sizes))} (checkpoint.cut = "drain" does without)'
    )
