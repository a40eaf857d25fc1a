"""Proves that one stage's list does what its policy says, by keeping the stage's books while reading the list.

Versions are counted from the updates in the list, distances come from the caller, who counts them on the unit
clock of all stages; nothing is taken from the generator. Definitions: PipeDream (SOSP'19, section 3.3) and
SpecTrain (arXiv 1809.02839).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcpipe.schedule.actions import COMPUTES, RECEIVES, SENDS, Action, Op, Prediction, Role
from hpcpipe.schedule.dryrun import Label, ScheduleError
from hpcpipe.schedule.policies import Policy
from hpcpipe.schedule.program import Schedule


@dataclass(frozen=True, kw_only=True)
class StageProof:
    """What is proved of one stage.

    `warm_up`: forwards before the one that the first backward follows. `in_flight`: the most (minibatch,
    microbatch) pairs, and so stage inputs, held at once. `peak_versions`: the most weight versions held between
    two actions; a version made out of place needs one buffer more while it is written. `staleness`: per
    minibatch, updates between the weights its forward is computed from and those its gradient changes.
    `forward_distances` and `backward_distances`: per minibatch, updates that its passes are predicted ahead.
    `predictions` and `evaluations`: how many are made.
    """

    stage: int
    actions: int
    warm_up: int
    in_flight: int
    peak_versions: int
    staleness: tuple[int, ...]
    forward_distances: tuple[int, ...]
    backward_distances: tuple[int, ...]
    predictions: int
    evaluations: int


def account(schedule: Schedule, stage: int, actions: Sequence[Action], aim: Callable[[int], int]) -> StageProof:
    """Check every action of the complete list of `stage`.

    `aim` gives the version that both passes of a minibatch aim at, if they are predicted. Raises ScheduleError.
    """
    books = _Books(schedule, stage, actions, aim)
    for index, action in enumerate(actions):
        books.enter(index, action)
    return books.close()


def alone(stage: int, prediction: Prediction) -> Action:
    """The action that makes nothing but `prediction`."""
    return Action(
        op=Op.PREDICT,
        stage=stage,
        minibatch=prediction.minibatch,
        version=prediction.version,
        predictions=(prediction,),
    )


class _Books:
    def __init__(
        self, schedule: Schedule, stage: int, actions: Sequence[Action], aim: Callable[[int], int]
    ) -> None:
        self._schedule = schedule
        self._stage = stage
        self._aim = aim
        self._last_stage = stage == schedule.stages - 1
        self._newest = schedule.first
        self._live = {schedule.first}
        self._last_reader = {
            action.version: index
            for index, action in enumerate(actions)
            if action.op in COMPUTES or action.op is Op.PREDICT
        }
        self._arrived: set[tuple[Op, Label]] = set()
        self._to_send: set[tuple[Op, Label]] = set()
        self._in_flight: set[Label] = set()
        self._passes: dict[Op, set[Label]] = {op: set() for op in COMPUTES}
        self._forward_reads: dict[int, int] = {}
        self._distances: dict[Op, dict[int, int]] = {Op.FORWARD: {}, Op.BACKWARD: {}}
        self._fresh: dict[Role, Prediction] = {}
        self._actions = len(actions)
        self._predictions = 0
        self._peak_versions = 1
        self._peak_in_flight = 0
        self._forwards_before_backward = 0

    def enter(self, index: int, action: Action) -> None:
        op = action.op
        label = action.minibatch, action.microbatch
        if op in RECEIVES:
            self._arrived.add((op, label))
        elif op in SENDS:
            if (op, label) not in self._to_send:
                raise ScheduleError("it sends what no pass has just made", action=action)
            self._to_send.remove((op, label))
        elif op is Op.FORWARD:
            self._forward(action, label)
        elif op is Op.BACKWARD:
            self._backward(action, label)
        elif op is Op.EVALUATE:
            self._evaluate(action, label)
        elif op is Op.UPDATE:
            self._update(index, action)
        else:
            self._predict(action)

    def close(self) -> StageProof:
        schedule, stage = self._schedule, self._stage
        for op, expected in (
            (Op.FORWARD, self._all_labels()),
            (Op.BACKWARD, self._all_labels()),
            (Op.EVALUATE, self._all_evaluations()),
        ):
            if missing := expected - self._passes[op]:
                j, i = min(missing)
                raise ScheduleError(f"stage {stage} never does {op.value}({j}.{i})", stage=stage)
        if self._newest != schedule.minibatches:
            raise ScheduleError(f"stage {stage} never does U({self._newest})", stage=stage)
        if self._to_send or self._arrived:
            op, (j, i) = min(self._to_send | self._arrived, key=str)
            raise ScheduleError(f"stage {stage} has no use for {op.value}({j}.{i})", stage=stage)
        self._nothing_fresh(f"at the end of stage {stage}")
        span = range(schedule.first, schedule.minibatches)
        return StageProof(
            stage=stage,
            actions=self._actions,
            warm_up=max(0, self._forwards_before_backward - 1),
            in_flight=self._peak_in_flight,
            peak_versions=self._peak_versions,
            staleness=tuple(j - self._forward_reads[j] for j in span),
            forward_distances=tuple(self._distances[Op.FORWARD][j] for j in span),
            backward_distances=tuple(self._distances[Op.BACKWARD][j] for j in span),
            predictions=self._predictions,
            evaluations=len(self._passes[Op.EVALUATE]),
        )

    # -- passes ------------------------------------------------------------------------------------------

    def _forward(self, action: Action, label: Label) -> None:
        self._once(action, label, receives=Op.RECEIVE_ACTIVATION if self._stage > 0 else None)
        refill = self._refill(action.minibatch)
        if action.minibatch == refill and label[1] == 0 and self._in_flight:
            raise ScheduleError("the pipeline is not drained before it", action=action)
        delay = 0
        if not self._schedule.synchronous:
            consistent = self._schedule.policy is Policy.VERTICAL_SYNC
            delay = self._schedule.stages - 1 - (0 if consistent else self._stage)
        self._reads(action, max(refill, action.minibatch - delay))
        if not self._schedule.synchronous and self._schedule.policy is Policy.VERTICAL_SYNC:
            self._exists(action)
        elif action.version != self._newest:
            raise ScheduleError(f"it does not read the newest version {self._newest}", action=action)
        first_read = self._forward_reads.setdefault(action.minibatch, action.version)
        if action.version != first_read:
            raise ScheduleError(
                f"microbatches of one minibatch read versions {first_read} and others", action=action
            )
        self._in_flight.add(label)
        self._peak_in_flight = max(self._peak_in_flight, len(self._in_flight))
        if not self._passes[Op.BACKWARD]:
            self._forwards_before_backward += 1
        if not self._last_stage:
            self._to_send.add((Op.SEND_ACTIVATION, label))

    def _backward(self, action: Action, label: Label) -> None:
        if label not in self._in_flight:
            raise ScheduleError("its forward has not been done", action=action)
        self._once(action, label, receives=None if self._last_stage else Op.RECEIVE_GRADIENT)
        if action.minibatch != self._newest:
            raise ScheduleError(f"U({self._newest}) has not been done", action=action)
        keeps = self._schedule.synchronous or self._schedule.policy in (Policy.STASH, Policy.VERTICAL_SYNC)
        self._reads(action, self._forward_reads[action.minibatch] if keeps else self._newest)
        self._exists(action)
        self._in_flight.remove(label)
        if self._stage > 0:
            self._to_send.add((Op.SEND_GRADIENT, label))

    def _evaluate(self, action: Action, label: Label) -> None:
        self._once(action, label, receives=Op.RECEIVE_EVALUATION if self._stage > 0 else None)
        self._reads(action, action.minibatch + 1)
        if action.version != self._newest:
            raise ScheduleError(f"it does not read the newest version {self._newest}", action=action)
        if not self._last_stage:
            self._to_send.add((Op.SEND_EVALUATION, label))

    def _once(self, action: Action, label: Label, *, receives: Op | None) -> None:
        """Each pass is one of the schedule's, is done once, after its message, on the prediction made for it."""
        op = action.op
        asked = self._is_evaluation(label) if op is Op.EVALUATE else self._is_label(label)
        if not asked:
            raise ScheduleError("the schedule has no such pass", action=action)
        if label in self._passes[op]:
            raise ScheduleError("it is done twice", action=action)
        self._passes[op].add(label)
        if receives is not None:
            if (receives, label) not in self._arrived:
                raise ScheduleError("its message has not been received", action=action)
            self._arrived.remove((receives, label))
        if op is not Op.EVALUATE:
            self._on_prediction(action)

    def _reads(self, action: Action, version: int) -> None:
        if action.version != version:
            policy = self._schedule.name if self._schedule.synchronous else self._schedule.policy.value
            raise ScheduleError(
                f"it reads version {action.version}, but by {policy} it must read {version}", action=action
            )

    def _exists(self, action: Action) -> None:
        if action.version > self._newest:
            raise ScheduleError(f"version {action.version} does not exist yet", action=action)
        if action.version not in self._live:
            raise ScheduleError(f"version {action.version} has been released", action=action)

    # -- updates and predictions ---------------------------------------------------------------------------

    def _update(self, index: int, action: Action) -> None:
        j = action.minibatch
        if j != self._newest or j >= self._schedule.minibatches:
            raise ScheduleError(f"the update due here is U({self._newest})", action=action)
        if action.version != j + 1:
            raise ScheduleError(f"it makes version {action.version} instead of {j + 1}", action=action)
        undone = [i for i in range(self._schedule.microbatches) if (j, i) not in self._passes[Op.BACKWARD]]
        if undone:
            raise ScheduleError(f"B({j}.{undone[0]}) has not been done", action=action)
        self._nothing_fresh(f"before {action}")
        self._newest = j + 1
        over = tuple(sorted(v for v in self._live if self._last_reader.get(v, -1) < index))
        if action.releases != over:
            early = sorted(set(action.releases) - set(over))
            what = (
                f"it releases {early}, still needed" if early else f"it keeps {sorted(set(over))}, needed no more"
            )
            raise ScheduleError(f"{what}; to release: {list(over)}", action=action)
        self._live.difference_update(over)
        self._live.add(self._newest)
        self._peak_versions = max(self._peak_versions, len(self._live))
        for prediction in action.predictions:
            self._made(action, prediction)

    def _predict(self, action: Action) -> None:
        for prediction in action.predictions[:1]:
            if action == alone(self._stage, prediction):
                self._made(action, prediction)
                return
        raise ScheduleError("it is not what predicts for one pass alone", action=action)

    def _made(self, action: Action, prediction: Prediction) -> None:
        if prediction.version != self._newest or prediction.distance < 1:
            raise ScheduleError(f"{prediction} is not ahead of version {self._newest}", action=action)
        if prediction.role in self._fresh:
            raise ScheduleError(f"{self._fresh[prediction.role]} is overwritten unused", action=action)
        self._fresh[prediction.role] = prediction
        self._predictions += 1

    def _on_prediction(self, action: Action) -> None:
        """The pass predicts as far as was counted, on exactly the prediction made for it."""
        forward = action.op is Op.FORWARD
        role = Role.FORWARD if forward else Role.BACKWARD
        distance = self._aim(action.minibatch) - action.version if self._schedule.predicts else 0
        if action.distance != distance:
            raise ScheduleError(
                f"it predicts {action.distance} updates ahead of version {action.version}, counted are {distance}",
                action=action,
            )
        self._distances[action.op][action.minibatch] = distance
        found = self._fresh.pop(role, None)
        needed = (
            Prediction(role=role, minibatch=action.minibatch, version=action.version, distance=distance)
            if distance
            else None
        )
        if found != needed:
            raise ScheduleError(f"it needs {needed} and finds {found}", action=action)

    def _nothing_fresh(self, when: str) -> None:
        for prediction in self._fresh.values():
            raise ScheduleError(f"{prediction} is unused {when}", stage=self._stage)

    # -- what the schedule asks for ------------------------------------------------------------------------

    def _refill(self, minibatch: int) -> int:
        """The minibatch with which the pipeline was last filled before `minibatch` went forward."""
        if self._schedule.synchronous:
            return minibatch
        every = self._schedule.drain_every
        return max(self._schedule.first, minibatch // every * every if every else 0)

    def _is_label(self, label: Label) -> bool:
        span = self._schedule.first <= label[0] < self._schedule.minibatches
        return span and 0 <= label[1] < self._schedule.microbatches

    def _is_evaluation(self, label: Label) -> bool:
        schedule, done = self._schedule, label[0] + 1
        regular = schedule.evaluate_every > 0 and done % schedule.evaluate_every == 0
        final = schedule.evaluate_at_end and done == schedule.minibatches
        return (regular or final) and 0 <= label[1] < schedule.evaluation_batches

    def _all_labels(self) -> set[Label]:
        span = range(self._schedule.first, self._schedule.minibatches)
        return {(j, i) for j in span for i in range(self._schedule.microbatches)}

    def _all_evaluations(self) -> set[Label]:
        span = range(self._schedule.first, self._schedule.minibatches)
        batches = range(self._schedule.evaluation_batches)
        return {label for label in ((j, i) for j in span for i in batches) if self._is_evaluation(label)}
