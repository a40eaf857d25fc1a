"""A replica's program: the list of actions that one replica of one stage executes, from first fill to last drain.

The order of passes comes from `orders`, weight versions and prediction distances from `reads`. This module joins
them: it puts messages and the replicas' common actions around the passes, predictions into the updates that can
make them in the same pass over memory, and says when a version has had its last reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from hpcpipe.schedule.actions import Action, Op, Prediction, Role
from hpcpipe.schedule.orders import Share, Step, order_named
from hpcpipe.schedule.reads import Reads, Releases
from hpcpipe.schedule.schedule import Schedule, warm_up_of

__all__ = ["Schedule", "StageProgram", "warm_up_of"]

# What the constructor of a named tuple calls, in a third of its time: programs are long, and reading one is little
# else than making its actions.
_make = tuple.__new__
# An attribute of an Enum takes as long.
FORWARD, UPDATE = Op.FORWARD, Op.UPDATE
FOR_FORWARD, FOR_BACKWARD = Role.FORWARD, Role.BACKWARD


class StageProgram:
    """The actions of one replica of one stage of a schedule. Versions are labels, distances count updates."""

    def __init__(self, schedule: Schedule, stage: int, replica: int = 0) -> None:
        self.schedule = schedule
        self.stage = stage
        self.replica = replica
        self._replicas = schedule.replicas_of(stage)
        self._upstream = schedule.replicas_of(stage - 1) if stage > 0 else 0
        self._downstream = schedule.replicas_of(stage + 1) if stage < schedule.stages - 1 else 0
        self._reads_from = lru_cache(maxsize=4)(lambda first, last: Reads(schedule, stage, first, last))

    def actions(self, *, after: int | None = None) -> Iterator[Action]:
        """All actions in order; with `after=k` only those behind U(k), as a run resumed at the cut k needs.

        Raises ValueError if k is no boundary of the schedule.
        """
        schedule = self.schedule
        if after is not None:
            if not schedule.is_boundary(after):
                raise ValueError(f"a run cannot go on behind U({after}), where some stage is amid a round")
            if schedule.evaluates_after(after):
                yield from self._evaluation(after)
        start = schedule.first if after is None else after + 1
        while start < schedule.minibatches:
            first, last = schedule.segment(start)
            yield from self._stretch(first, last, after if after is not None and after >= first else None)
            start, after = last, None

    def forward_version(self, minibatch: int) -> int:
        """Version that F(minibatch) reads or predicts from."""
        reads = self._reads(minibatch)
        return reads.label(reads.forward(minibatch))

    def backward_version(self, minibatch: int) -> int:
        """Version that B(minibatch) reads or predicts from."""
        reads = self._reads(minibatch)
        return reads.label(reads.backward(minibatch))

    def forward_distance(self, minibatch: int) -> int:
        """Updates from the version F(minibatch) finds to the one it aims at (SpecTrain's s_f)."""
        reads = self._reads(minibatch)
        return reads.aim(minibatch) - reads.forward(minibatch) if self.schedule.predicts else 0

    def backward_distance(self, minibatch: int) -> int:
        """Updates from the version B(minibatch) finds to the one it aims at (SpecTrain's s_b)."""
        reads = self._reads(minibatch)
        return reads.aim(minibatch) - reads.backward(minibatch) if self.schedule.predicts else 0

    def staleness(self, minibatch: int) -> int:
        """Updates between the weights F(minibatch) is computed from and those its gradient changes."""
        reads = self._reads(minibatch)
        return reads.round_of(minibatch) - reads.forward(minibatch)

    def updates_from(self, version: int, distance: int) -> tuple[int, ...]:
        """Labels (last minibatches) of the next `distance` updates of this stage's `version`.

        A learning rate is a function of the label. Raises ValueError if the run makes fewer updates.
        """
        labels: list[int] = []
        while len(labels) < distance:
            if version >= self.schedule.minibatches:
                raise ValueError(f"the run ends {distance - len(labels)} updates before those asked for")
            labels.append(self.schedule.round_of(self.stage, version)[-1])
            version = labels[-1] + 1
        return tuple(labels)

    def _reads(self, minibatch: int) -> Reads:
        return self._reads_from(*self.schedule.segment(minibatch))

    def _stretch(self, first: int, last: int, after: int | None) -> Iterator[Action]:
        schedule, stage, replica = self.schedule, self.stage, self.replica
        reads = self._reads_from(first, last)
        releases = Releases(reads, replica) if reads.keeps else None
        predicts, evaluates = schedule.predicts, schedule.evaluation_batches > 0
        forward_side = Op.RECEIVE_ACTIVATION, self._upstream, Op.SEND_ACTIVATION, self._downstream
        backward_side = Op.RECEIVE_GRADIENT, self._downstream, Op.SEND_GRADIENT, self._upstream
        steps = order_named(schedule.name)(
            Share(
                stage=stage,
                replica=replica,
                replicas=schedule.replica_counts,
                first=first,
                last=last,
                microbatches=schedule.microbatches,
                after=after,
            )
        )
        synchronous = schedule.synchronous
        newest = first if after is None else after + 1
        # No update precedes the first passes that could predict for them.
        unpredicted = predicts
        fresh: dict[Op, Prediction] = {}
        current: Iterable[Step] = steps
        while current:
            coming: list[Step] = []
            for op, j, i in current:
                if op is UPDATE:
                    if self._replicas > 1:
                        yield Action(Op.REDUCE, stage, j, 0, replica)
                    over = releases.at(reads.round_of(j)) if releases else (newest,)
                    newest, unpredicted = j + 1, False
                    made: tuple[Prediction, ...] = ()
                    if predicts:
                        coming = _to_update(steps)
                        fresh = _predictions(reads, newest, coming)
                        made = tuple(fresh.values())
                    yield _make(Action, (op, stage, j, 0, replica, newest, 0, made, over, 0))
                    if evaluates and schedule.evaluates_after(j):
                        yield from self._evaluation(j)
                    if predicts:
                        break
                    continue
                if unpredicted:
                    fresh = _predictions(reads, newest, [(op, j, i)])
                    if fresh:
                        yield Action(Op.PREDICT, stage, j, 0, replica, newest, 0, tuple(fresh.values()))
                distance = fresh.pop(op).distance if op in fresh else 0
                if op is FORWARD:
                    version = reads.label(reads.forward(j)) if reads.consistent else newest
                    receive, before, send, behind = forward_side
                else:
                    version = reads.label(reads.backward(j)) if releases else newest
                    receive, before, send, behind = backward_side
                dealt = i if synchronous else j - first
                if before:
                    yield _make(Action, (receive, stage, j, i, replica, 0, 0, (), (), dealt % before))
                yield _make(Action, (op, stage, j, i, replica, version, distance, (), (), 0))
                if behind:
                    yield _make(Action, (send, stage, j, i, replica, 0, 0, (), (), dealt % behind))
            current = coming

    def _evaluation(self, minibatch: int) -> Iterator[Action]:
        """Forward passes over the evaluation batches on version minibatch+1; nothing in flight is drained."""
        stage, replica, version = self.stage, self.replica, minibatch + 1
        if self._replicas > 1:
            yield Action(Op.AVERAGE, stage, minibatch, 0, replica, version)
        for batch in range(replica, self.schedule.evaluation_batches, self._replicas):
            if self._upstream:
                peer = batch % self._upstream
                yield Action(Op.RECEIVE_EVALUATION, stage, minibatch, batch, replica, version, peer_replica=peer)
            yield Action(Op.EVALUATE, stage, minibatch, batch, replica, version)
            if self._downstream:
                peer = batch % self._downstream
                yield Action(Op.SEND_EVALUATION, stage, minibatch, batch, replica, version, peer_replica=peer)
        if self._replicas > 1 and not self._downstream:
            yield Action(Op.COLLECT, stage, minibatch, 0, replica, version)


def _to_update(steps: Iterator[Step]) -> list[Step]:
    """The steps up to the next update and it; none behind the last."""
    taken: list[Step] = []
    for step in steps:
        taken.append(step)
        if step[0] is UPDATE:
            break
    return taken


def _predictions(reads: Reads, newest: int, steps: list[Step]) -> dict[Op, Prediction]:
    """What version `newest` is to predict for the passes among `steps`, which find it as the newest."""
    made: dict[Op, Prediction] = {}
    held = reads.round_of(newest - 1) + 1
    for op, j, _ in steps:
        if op is not UPDATE and (distance := reads.aim(j) - held):
            role = FOR_FORWARD if op is FORWARD else FOR_BACKWARD
            made[op] = _make(Prediction, (role, j, newest, distance))
    return made
