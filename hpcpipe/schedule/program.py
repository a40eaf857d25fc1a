"""A stage's program: the list of actions that the stage executes, from the first fill to the last drain.

The order of passes comes from `orders`, weight versions from `policies`, prediction distances from counts on the
unit clock. This module joins them: it puts messages around the passes, predictions into the updates that can
make them in the same pass over memory, and says when a version has had its last reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from hpcpipe.errors import ConfigError
from hpcpipe.schedule.actions import Action, Op, Prediction, Role
from hpcpipe.schedule.clock import UnitClock, unit_clock
from hpcpipe.schedule.orders import SYNCHRONOUS, Step, order_named
from hpcpipe.schedule.policies import Policy, Target, backward_delay, forward_delay, warm_up


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Everything that decides what happens when: a value from which each stage's program is generated.

    `minibatches` ends the run; `first` starts it (a restart on another plan refills from there).
    `evaluate_every` counts minibatches between evaluations of `evaluation_batches` batches (0: none but the one
    after the last minibatch, if `evaluate_at_end`). `drain_every` empties the pipeline after that many
    minibatches (0: never). Raises ConfigError for numbers that make no schedule.
    """

    name: str
    stages: int
    minibatches: int
    first: int = 0
    microbatches: int = 1
    policy: Policy = Policy.STASH
    target: Target = Target.ROUND_TRIP
    evaluate_every: int = 0
    evaluate_at_end: bool = False
    evaluation_batches: int = 0
    drain_every: int = 0

    def __post_init__(self) -> None:
        order_named(self.name)
        if self.stages < 1:
            raise ConfigError(f"a schedule needs at least 1 stage, got {self.stages}")
        if self.minibatches < 0 or not 0 <= self.first <= self.minibatches:
            raise ConfigError(f"no minibatches from {self.first} to {self.minibatches}")
        if self.microbatches < 1:
            raise ConfigError(f"a minibatch needs at least 1 microbatch, got {self.microbatches}")
        if self.microbatches > 1 and not self.synchronous:
            raise ConfigError(
                f"{self.name} updates after every minibatch: microbatches = {self.microbatches} needs "
                f"one of {', '.join(sorted(SYNCHRONOUS))}"
            )

    @property
    def synchronous(self) -> bool:
        """Whether the pipeline is flushed before every update."""
        return self.name in SYNCHRONOUS

    @property
    def predicts(self) -> bool:
        """Whether any pass may run on predicted weights."""
        return not self.synchronous and self.policy is Policy.SPECTRAIN

    def segment(self, minibatch: int) -> tuple[int, int]:
        """[first, last) of the stretch from fill to drain that `minibatch` belongs to."""
        if not self.drain_every:
            return self.first, self.minibatches
        start = max(self.first, minibatch - minibatch % self.drain_every)
        return start, min(self.minibatches, minibatch - minibatch % self.drain_every + self.drain_every)

    def evaluates_after(self, minibatch: int) -> bool:
        """Whether the stages evaluate, on version minibatch+1, after U(minibatch)."""
        if not self.evaluation_batches:
            return False
        if self.evaluate_every and (minibatch + 1) % self.evaluate_every == 0:
            return True
        return self.evaluate_at_end and minibatch + 1 == self.minibatches

    def clock(self, length: int) -> UnitClock:
        """The unit clock of a stretch of `length` minibatches."""
        return unit_clock(self.name, self.stages, length, self.microbatches)


class StageProgram:
    """The actions of one stage of a schedule."""

    def __init__(self, schedule: Schedule, stage: int) -> None:
        self.schedule = schedule
        self.stage = stage
        place = {"stage": stage, "stages": schedule.stages}
        self._forward_delay = 0 if schedule.synchronous else forward_delay(schedule.policy, **place)
        self._backward_delay = 0 if schedule.synchronous else backward_delay(schedule.policy, **place)

    def actions(self, *, after: int | None = None) -> Iterator[Action]:
        """All actions in order; with `after=k` only those behind U(k), as a run resumed at the cut k needs."""
        schedule = self.schedule
        if after is not None and schedule.evaluates_after(after):
            yield from self._evaluation(after)
        start = schedule.first if after is None else after + 1
        while start < schedule.minibatches:
            first, last = schedule.segment(start)
            yield from self._segment(first, last, after if after is not None and after >= first else None)
            start, after = last, None

    def forward_version(self, minibatch: int) -> int:
        """Version that F(minibatch) reads or predicts from."""
        return max(self.schedule.segment(minibatch)[0], minibatch - self._forward_delay)

    def backward_version(self, minibatch: int) -> int:
        """Version that B(minibatch) reads or predicts from."""
        return max(self.schedule.segment(minibatch)[0], minibatch - self._backward_delay)

    def forward_distance(self, minibatch: int) -> int:
        """Updates from the version F(minibatch) finds to the one it aims at (SpecTrain's s_f)."""
        return self._aim(minibatch) - self.forward_version(minibatch) if self.schedule.predicts else 0

    def backward_distance(self, minibatch: int) -> int:
        """Updates from the version B(minibatch) finds to the one it aims at (SpecTrain's s_b)."""
        return self._aim(minibatch) - self.backward_version(minibatch) if self.schedule.predicts else 0

    def staleness(self, minibatch: int) -> int:
        """Versions between the weights F(minibatch) is computed from and those its gradient updates."""
        return minibatch - self.forward_version(minibatch)

    def _aim(self, minibatch: int) -> int:
        """The version at which both passes of `minibatch` aim."""
        if self.schedule.target is not Target.ROUND_TRIP:
            return minibatch
        first, last = self.schedule.segment(minibatch)
        clock = self.schedule.clock(last - first)
        return first + clock.updates_before_return(self.stage, minibatch - first)

    def _segment(self, first: int, last: int, after: int | None) -> Iterator[Action]:
        schedule, stage = self.schedule, self.stage
        order = order_named(schedule.name)
        steps = _Lookahead(order(stage, schedule.stages, first, last, schedule.microbatches, after))
        fresh: dict[Role, Prediction] = {}
        for op, j, i in steps:
            if op is Op.UPDATE:
                fresh = self._predictions_after(steps)
                yield Action(
                    op=op,
                    stage=stage,
                    minibatch=j,
                    version=j + 1,
                    predictions=tuple(fresh.values()),
                    releases=self._releases(j, last),
                )
                if schedule.evaluates_after(j):
                    yield from self._evaluation(j)
                continue
            forward = op is Op.FORWARD
            role = Role.FORWARD if forward else Role.BACKWARD
            prediction = fresh.pop(role, None)
            if prediction is None and (prediction := self._prediction(role, j)):
                yield Action(
                    op=Op.PREDICT,
                    stage=stage,
                    minibatch=j,
                    version=prediction.version,
                    predictions=(prediction,),
                )
            upstream, downstream = stage > 0, stage < schedule.stages - 1
            if upstream if forward else downstream:
                receive = Op.RECEIVE_ACTIVATION if forward else Op.RECEIVE_GRADIENT
                yield Action(op=receive, stage=stage, minibatch=j, microbatch=i)
            yield Action(
                op=op,
                stage=stage,
                minibatch=j,
                microbatch=i,
                version=self.forward_version(j) if forward else self.backward_version(j),
                distance=prediction.distance if prediction else 0,
            )
            if downstream if forward else upstream:
                send = Op.SEND_ACTIVATION if forward else Op.SEND_GRADIENT
                yield Action(op=send, stage=stage, minibatch=j, microbatch=i)

    def _prediction(self, role: Role, minibatch: int) -> Prediction | None:
        """The prediction that a pass needs; None where it runs on true weights."""
        if not self.schedule.predicts:
            return None
        forward = role is Role.FORWARD
        version = self.forward_version(minibatch) if forward else self.backward_version(minibatch)
        distance = self._aim(minibatch) - version
        if distance == 0:
            return None
        return Prediction(role=role, minibatch=minibatch, version=version, distance=distance)

    def _predictions_after(self, steps: _Lookahead) -> dict[Role, Prediction]:
        """What the update about to be made can predict: the next forward's and the next backward's weights."""
        made: dict[Role, Prediction] = {}
        if self.schedule.predicts:
            for role, op in ((Role.FORWARD, Op.FORWARD), (Role.BACKWARD, Op.BACKWARD)):
                j = steps.next_minibatch(op)
                if j is not None and (prediction := self._prediction(role, j)):
                    made[role] = prediction
        return made

    def _releases(self, minibatch: int, last: int) -> tuple[int, ...]:
        """Versions up to `minibatch` that are there at U(minibatch) and that nothing reads behind it.

        No forward reads an older version than the next backward, nor a newer one than the last backward unless
        it is the newest there is, so the backwards to come say which versions are still needed. While a stage
        drains, it makes versions that only the next update reads.
        """
        newest_read = self.backward_version(last - 1)
        there = [v for v in range(self.backward_version(minibatch), minibatch) if v <= newest_read]
        there.append(minibatch)
        if minibatch + 1 == last:
            return tuple(there)
        oldest_read = self.backward_version(minibatch + 1)
        return tuple(v for v in there if not oldest_read <= v <= newest_read)

    def _evaluation(self, minibatch: int) -> Iterator[Action]:
        """Forward passes over the evaluation batches on version minibatch+1; nothing in flight is drained."""

        def act(op: Op, batch: int) -> Action:
            return Action(op=op, stage=self.stage, minibatch=minibatch, microbatch=batch, version=minibatch + 1)

        for batch in range(self.schedule.evaluation_batches):
            if self.stage > 0:
                yield act(Op.RECEIVE_EVALUATION, batch)
            yield act(Op.EVALUATE, batch)
            if self.stage < self.schedule.stages - 1:
                yield act(Op.SEND_EVALUATION, batch)


class _Lookahead(Iterator[Step]):
    """An order with a view of the next forward and the next backward, which are never far away."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps
        self._queue: deque[Step] = deque()

    def __next__(self) -> Step:
        return self._queue.popleft() if self._queue else next(self._steps)

    def next_minibatch(self, op: Op) -> int | None:
        """Minibatch of the next step of kind `op`, None if there is none left."""
        for queued in self._queue:
            if queued[0] is op:
                return queued[1]
        for step in self._steps:
            self._queue.append(step)
            if step[0] is op:
                return step[1]
        return None


def warm_up_of(schedule: Schedule, stage: int) -> int:
    """Forwards in flight at `stage` in the steady state beside the one that goes backward next."""
    return 0 if schedule.synchronous else warm_up(stage, schedule.stages)
