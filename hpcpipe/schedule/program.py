"""A stage's program: the list of actions that the stage executes, from the first fill to the last drain.

The order of passes comes from `orders`, weight versions from `policies`, prediction distances from counts on the
unit clock. This module joins them: it puts messages around the passes, predictions into the updates that can
make them in the same pass over memory, and says when a version has had its last reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hpcpipe.errors import ConfigError
from hpcpipe.schedule.actions import Action, Op, Prediction, Role
from hpcpipe.schedule.clock import UnitClock
from hpcpipe.schedule.orders import SYNCHRONOUS, Step, order_named
from hpcpipe.schedule.policies import Policy, Target, backward_version, forward_version, warm_up


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
        return UnitClock(
            schedule=self.name, stages=self.stages, minibatches=length, microbatches=self.microbatches
        )


class StageProgram:
    """The actions of one stage of a schedule."""

    def __init__(self, schedule: Schedule, stage: int) -> None:
        self.schedule = schedule
        self.stage = stage

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
        if self.schedule.synchronous:
            return minibatch
        return forward_version(self.schedule.policy, **self._place(minibatch))

    def backward_version(self, minibatch: int) -> int:
        """Version that B(minibatch) reads or predicts from."""
        if self.schedule.synchronous:
            return minibatch
        return backward_version(self.schedule.policy, **self._place(minibatch))

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
        return first + self._clock(last - first).updates_before_return(self.stage, minibatch - first)

    def _clock(self, length: int) -> UnitClock:
        clock = self._clocks.get(length)
        if clock is None:
            clock = self._clocks[length] = self.schedule.clock(length)
        return clock

    @cached_property
    def _clocks(self) -> dict[int, UnitClock]:
        return {}

    def _place(self, minibatch: int) -> dict[str, int]:
        first, _ = self.schedule.segment(minibatch)
        return {"stage": self.stage, "stages": self.schedule.stages, "minibatch": minibatch, "first": first}

    def _segment(self, first: int, last: int, after: int | None) -> Iterator[Action]:
        schedule, stage = self.schedule, self.stage
        steps = order_named(schedule.name)(stage, schedule.stages, first, last, schedule.microbatches, after)
        lookahead = _Lookahead(steps)
        fresh: set[tuple[Role, int]] = set()
        oldest = first if after is None else self._oldest_needed(lookahead, after + 1)
        for op, j, i in lookahead:
            if op is Op.FORWARD:
                yield from self._predict_before(Role.FORWARD, j, fresh)
                if stage > 0:
                    yield Action(op=Op.RECEIVE_ACTIVATION, stage=stage, minibatch=j, microbatch=i)
                yield Action(
                    op=op,
                    stage=stage,
                    minibatch=j,
                    microbatch=i,
                    version=self.forward_version(j),
                    distance=self.forward_distance(j),
                )
                if stage < schedule.stages - 1:
                    yield Action(op=Op.SEND_ACTIVATION, stage=stage, minibatch=j, microbatch=i)
            elif op is Op.BACKWARD:
                yield from self._predict_before(Role.BACKWARD, j, fresh)
                if stage < schedule.stages - 1:
                    yield Action(op=Op.RECEIVE_GRADIENT, stage=stage, minibatch=j, microbatch=i)
                yield Action(
                    op=op,
                    stage=stage,
                    minibatch=j,
                    microbatch=i,
                    version=self.backward_version(j),
                    distance=self.backward_distance(j),
                )
                if stage > 0:
                    yield Action(op=Op.SEND_GRADIENT, stage=stage, minibatch=j, microbatch=i)
            else:
                needed = self._oldest_needed(lookahead, j + 1)
                predictions = self._predictions_after(lookahead)
                fresh = {(p.role, p.minibatch) for p in predictions}
                yield Action(
                    op=op,
                    stage=stage,
                    minibatch=j,
                    version=j + 1,
                    predictions=predictions,
                    releases=tuple(range(oldest, needed)),
                )
                oldest = needed
                if schedule.evaluates_after(j):
                    yield from self._evaluation(j)

    def _prediction(self, role: Role, minibatch: int) -> Prediction | None:
        forward = role is Role.FORWARD
        distance = self.forward_distance(minibatch) if forward else self.backward_distance(minibatch)
        if distance == 0:
            return None
        version = self.forward_version(minibatch) if forward else self.backward_version(minibatch)
        return Prediction(role=role, minibatch=minibatch, version=version, distance=distance)

    def _predict_before(self, role: Role, minibatch: int, fresh: set[tuple[Role, int]]) -> Iterator[Action]:
        """A prediction of its own for a pass that no update has predicted for."""
        if (role, minibatch) in fresh or not self.schedule.predicts:
            return
        prediction = self._prediction(role, minibatch)
        if prediction is not None:
            yield Action(
                op=Op.PREDICT,
                stage=self.stage,
                minibatch=minibatch,
                version=prediction.version,
                predictions=(prediction,),
            )

    def _predictions_after(self, lookahead: _Lookahead) -> tuple[Prediction, ...]:
        """What the update about to be made can predict: the next forward's and the next backward's weights."""
        if not self.schedule.predicts:
            return ()
        coming = (
            (Role.FORWARD, lookahead.next_minibatch(Op.FORWARD)),
            (Role.BACKWARD, lookahead.next_minibatch(Op.BACKWARD)),
        )
        made = (self._prediction(role, j) for role, j in coming if j is not None)
        return tuple(p for p in made if p is not None)

    def _oldest_needed(self, lookahead: _Lookahead, newest: int) -> int:
        """The oldest version that a coming pass reads; versions only grow from pass to pass."""
        needed = newest
        forward = lookahead.next_minibatch(Op.FORWARD)
        if forward is not None:
            needed = min(needed, self.forward_version(forward))
        backward = lookahead.next_minibatch(Op.BACKWARD)
        if backward is not None:
            needed = min(needed, self.backward_version(backward))
        return needed

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
