"""Schedules to try: hypothesis strategies and small fixed ones, shared by the tests of hpcpipe.schedule."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from hpcpipe.schedule import Action, Op, Policy, Schedule, Target, rank_actions


@st.composite
def schedules(draw: st.DrawFn, *, stages: int = 8, minibatches: int = 40) -> Schedule:
    """Any schedule: also with fewer minibatches than stages, with evaluations, drains and a late start."""
    name = draw(st.sampled_from(["pipedream", "pipedream", "gpipe", "1f1b"]))
    last = draw(st.one_of(st.integers(0, 3), st.integers(0, minibatches)))
    return Schedule(
        name=name,
        stages=draw(st.integers(1, stages)),
        minibatches=last,
        first=draw(st.one_of(st.just(0), st.integers(0, last))),
        microbatches=1 if name == "pipedream" else draw(st.integers(1, 6)),
        policy=draw(st.sampled_from(Policy)),
        target=draw(st.sampled_from(Target)),
        evaluate_every=draw(st.integers(0, 7)),
        evaluate_at_end=draw(st.booleans()),
        evaluation_batches=draw(st.integers(0, 3)),
        drain_every=draw(st.sampled_from([0, 0, 1, 2, 3, 7, 20])),
    )


@st.composite
def groupings(draw: st.DrawFn, stages: int) -> list[list[int]] | None:
    """The stages of each rank: one each, or any dealing out at all."""
    if draw(st.booleans()):
        return None
    owners = draw(st.lists(st.integers(0, stages - 1), min_size=stages, max_size=stages))
    return [[stage for stage in range(stages) if owners[stage] == rank] for rank in sorted(set(owners))]


def pipedream(policy: Policy = Policy.STASH, *, stages: int = 3, minibatches: int = 6, **more: int) -> Schedule:
    return Schedule(name="pipedream", stages=stages, minibatches=minibatches, policy=policy, **more)


def lists_of(schedule: Schedule, ranks: list[list[int]] | None = None) -> list[list[Action]]:
    """The complete list of each rank."""
    groups = [[stage] for stage in range(schedule.stages)] if ranks is None else ranks
    return [list(rank_actions(schedule, stages)) for stages in groups]


def changed(lists: list[list[Action]], action: Action, **changes: object) -> list[list[Action]]:
    """The same lists with one action changed."""
    return [[replace(a, **changes) if a is action else a for a in actions] for actions in lists]


def find(lists: list[list[Action]], op: Op, stage: int, minibatch: int, microbatch: int = 0) -> Action:
    wanted = (op, stage, minibatch, microbatch)
    found = [a for actions in lists for a in actions if (a.op, a.stage, a.minibatch, a.microbatch) == wanted]
    (action,) = found
    return action
