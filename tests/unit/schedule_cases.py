"""Schedules to try: hypothesis strategies and small fixed ones, shared by the tests of hpcpipe.schedule."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from hpcpipe.schedule import Action, Op, Place, Policy, Schedule, Target, rank_actions


@st.composite
def schedules(draw: st.DrawFn, *, stages: int = 8, minibatches: int = 40, replicas: int = 1) -> Schedule:
    """Any schedule: also with fewer minibatches than stages, with evaluations, drains and a late start.

    Each stage has up to `replicas` replicas.
    """
    name = draw(st.sampled_from(["pipedream", "pipedream", "gpipe", "1f1b"]))
    last = draw(st.one_of(st.integers(0, 3), st.integers(0, minibatches)))
    count = draw(st.integers(1, stages))
    return Schedule(
        name=name,
        stages=count,
        minibatches=last,
        first=draw(st.one_of(st.just(0), st.integers(0, last))),
        microbatches=1 if name == "pipedream" else draw(st.integers(1, 6)),
        policy=draw(st.sampled_from(Policy)),
        target=draw(st.sampled_from(Target)),
        evaluate_every=draw(st.integers(0, 7)),
        evaluate_at_end=draw(st.booleans()),
        evaluation_batches=draw(st.integers(0, 3 if replicas == 1 else 5)),
        drain_every=draw(st.sampled_from([0, 0, 1, 2, 3, 7, 20])),
        replicas=tuple(draw(st.integers(1, replicas)) for _ in range(count)) if replicas > 1 else (),
    )


@st.composite
def groupings(draw: st.DrawFn, stages: int) -> list[list[Place]] | None:
    """The places of each rank where no stage is replicated: one each, or any dealing out at all."""
    if draw(st.booleans()):
        return None
    owners = draw(st.lists(st.integers(0, stages - 1), min_size=stages, max_size=stages))
    return [[Place(stage) for stage in range(stages) if owners[stage] == rank] for rank in sorted(set(owners))]


def pipedream(
    policy: Policy = Policy.STASH,
    *,
    stages: int = 3,
    minibatches: int = 6,
    replicas: tuple[int, ...] = (),
    **more: int,
) -> Schedule:
    """An asynchronous schedule, with as many stages as `replicas` has numbers if it has any."""
    return Schedule(
        name="pipedream",
        stages=len(replicas) or stages,
        minibatches=minibatches,
        policy=policy,
        replicas=replicas,
        **more,
    )


def lists_of(
    schedule: Schedule, groups: Sequence[Sequence[Place]] | None = None, *, after: int | None = None
) -> list[list[Action]]:
    """The complete list of each rank, or what is behind U(`after`)."""
    ranks = [[place] for place in schedule.places] if groups is None else groups
    return [list(rank_actions(schedule, places, after=after)) for places in ranks]


def changed(lists: list[list[Action]], action: Action, **changes: object) -> list[list[Action]]:
    """The same lists with one action changed."""
    return [[a._replace(**changes) if a is action else a for a in actions] for actions in lists]


def find(
    lists: list[list[Action]], op: Op, stage: int, minibatch: int, microbatch: int = 0, *, replica: int = 0
) -> Action:
    wanted = (op, stage, minibatch, microbatch, replica)
    (action,) = [action for actions in lists for action in actions if action[:5] == wanted]
    return action
