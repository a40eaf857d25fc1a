"""Proves that one replica's list does what its policy says, by keeping the replica's books while reading the list.

Versions are counted from the updates in the list, distances come from the caller, who counts them on the unit
clock of all stages; what is due is stated in `demands`, and nothing is taken from the generator. Definitions:
PipeDream (SOSP'19, section 3.3) and SpecTrain (arXiv 1809.02839).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcpipe.schedule.actions import COMPUTES, RECEIVES, SENDS, Action, Op, Place, Prediction, Role
from hpcpipe.schedule.demands import Demands, Label
from hpcpipe.schedule.dryrun import ScheduleError
from hpcpipe.schedule.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class StageProof:
    """What is proved of one replica of one stage; what is per minibatch is so for the replica's own, in order.

    `warm_up`: forwards before the one that the first backward follows. `in_flight`: the most (minibatch,
    microbatch) pairs, and so stage inputs, held at once. `peak_versions`: the most weight versions held between
    two actions; a version made out of place needs one buffer more while it is written. `staleness`: per
    minibatch, updates between the weights its forward is computed from and those its gradient changes.
    `forward_distances` and `backward_distances`: per minibatch, updates that its passes are predicted ahead.
    `updates`, `predictions` and `evaluations`: how many are made.
    """

    stage: int
    replica: int
    actions: int
    warm_up: int
    in_flight: int
    peak_versions: int
    staleness: tuple[int, ...]
    forward_distances: tuple[int, ...]
    backward_distances: tuple[int, ...]
    updates: int
    predictions: int
    evaluations: int


def account(
    schedule: Schedule, place: Place, actions: Sequence[Action], aim: Callable[[int], int] | None = None
) -> StageProof:
    """Check every action of the complete list of `place`.

    `aim` gives the number of updates in the version at which both passes of a minibatch aim if they are predicted,
    but they never aim behind the version that the minibatch's own round finds, which is the default. Raises
    ScheduleError.
    """
    books = _Books(schedule, place, actions, aim)
    for index, action in enumerate(actions):
        books.enter(index, action)
    return books.close()


def alone(place: Place, prediction: Prediction) -> Action:
    """The action that makes nothing but `prediction`."""
    return Action(
        op=Op.PREDICT,
        stage=place.stage,
        minibatch=prediction.minibatch,
        replica=place.replica,
        version=prediction.version,
        predictions=(prediction,),
    )


class _Books:
    def __init__(
        self, schedule: Schedule, place: Place, actions: Sequence[Action], aim: Callable[[int], int] | None
    ) -> None:
        self._schedule = schedule
        self._place = place
        self._demands = Demands(schedule, place)
        self._aim = aim
        self._newest = schedule.first
        self._made_by = {schedule.first: 0}
        self._live = {schedule.first}
        self._last_reader = {
            action.version: index
            for index, action in enumerate(actions)
            if action.op in COMPUTES or action.op is Op.PREDICT
        }
        self._arrived: set[tuple[Op, Label]] = set()
        self._to_send: set[tuple[Op, Label]] = set()
        self._in_flight: set[Label] = set()
        self._done: dict[Op, set[Label]] = {op: set() for op in (*COMPUTES, Op.AVERAGE, Op.COLLECT)}
        self._forward_reads: dict[int, int] = {}
        self._distances: dict[Op, dict[int, int]] = {Op.FORWARD: {}, Op.BACKWARD: {}}
        self._fresh: dict[Role, Prediction] = {}
        self._reduced: int | None = None
        self._actions = len(actions)
        self._predictions = 0
        self._peak_versions = 1
        self._peak_in_flight = 0
        self._forwards_before_backward = 0

    def enter(self, index: int, action: Action) -> None:
        op = action.op
        label = action.minibatch, action.microbatch
        if self._reduced is not None and op is not Op.UPDATE:
            raise ScheduleError(f"U({self._reduced}) does not follow its R directly", action=action)
        if op in RECEIVES:
            self._reaches(action, label)
            self._arrived.add((op, label))
        elif op in SENDS:
            self._reaches(action, label)
            if (op, label) not in self._to_send:
                raise ScheduleError("it sends what no pass has just made", action=action)
            self._to_send.remove((op, label))
        elif op is Op.FORWARD:
            self._forward(action, label)
        elif op is Op.BACKWARD:
            self._backward(action, label)
        elif op is Op.EVALUATE:
            self._evaluate(action, label)
        elif op is Op.REDUCE:
            self._reduce(action)
        elif op is Op.UPDATE:
            self._update(index, action)
        elif op is Op.PREDICT:
            self._predict(action)
        else:
            self._evaluate_together(action, label)

    def close(self) -> StageProof:
        schedule, place, demands = self._schedule, self._place, self._demands
        for op, expected in (
            (Op.FORWARD, demands.passes),
            (Op.BACKWARD, demands.passes),
            (Op.EVALUATE, demands.evaluation_passes),
            (Op.AVERAGE, demands.common),
            (Op.COLLECT, demands.common if demands.last_stage else frozenset()),
        ):
            if missing := expected - self._done[op]:
                j, i = min(missing)
                raise ScheduleError(f"{place} never does {op.value}({j}.{i})", stage=place.stage)
        if self._newest != schedule.minibatches:
            raise ScheduleError(f"{place} never does U({self._due()})", stage=place.stage)
        if self._to_send or self._arrived:
            op, (j, i) = min(self._to_send | self._arrived, key=str)
            raise ScheduleError(f"{place} has no use for {op.value}({j}.{i})", stage=place.stage)
        self._nothing_fresh(f"at the end of {place}")
        own = sorted(self._forward_reads)
        return StageProof(
            stage=place.stage,
            replica=place.replica,
            actions=self._actions,
            warm_up=max(0, self._forwards_before_backward - 1),
            in_flight=self._peak_in_flight,
            peak_versions=self._peak_versions,
            staleness=tuple(demands.round_of(j) - self._made_by[self._forward_reads[j]] for j in own),
            forward_distances=tuple(self._distances[Op.FORWARD][j] for j in own),
            backward_distances=tuple(self._distances[Op.BACKWARD][j] for j in own),
            updates=len(self._made_by) - 1,
            predictions=self._predictions,
            evaluations=len(self._done[Op.EVALUATE]),
        )

    # -- passes and messages -------------------------------------------------------------------------------

    def _reaches(self, action: Action, label: Label) -> None:
        """The message comes from, or goes to, the replica whose minibatch it is."""
        evaluating = action.op in (Op.RECEIVE_EVALUATION, Op.SEND_EVALUATION)
        if not 0 <= action.peer < self._schedule.stages:
            raise ScheduleError("there is no stage at its other end", action=action)
        demands = self._demands
        owner = (demands.evaluation_owner if evaluating else demands.owner)(action.peer, label)
        if action.peer_replica != owner:
            raise ScheduleError(
                f"its other end is {action.peer_place}, must be {Place(action.peer, owner)}", action=action
            )

    def _forward(self, action: Action, label: Label) -> None:
        self._once(action, label, receives=Op.RECEIVE_ACTIVATION if self._place.stage > 0 else None)
        if action.minibatch == self._demands.refill(action.minibatch) and label[1] == 0 and self._in_flight:
            raise ScheduleError("the pipeline is not drained before it", action=action)
        self._reads(action, self._demands.forward_version(action.minibatch))
        if self._demands.finds_newest():
            self._newest_only(action)
        self._exists(action)
        self._on_prediction(action)
        self._forward_reads[action.minibatch] = action.version
        self._in_flight.add(label)
        self._peak_in_flight = max(self._peak_in_flight, len(self._in_flight))
        if not self._done[Op.BACKWARD]:
            self._forwards_before_backward += 1
        if not self._demands.last_stage:
            self._to_send.add((Op.SEND_ACTIVATION, label))

    def _backward(self, action: Action, label: Label) -> None:
        if label not in self._in_flight:
            raise ScheduleError("its forward has not been done", action=action)
        self._once(action, label, receives=None if self._demands.last_stage else Op.RECEIVE_GRADIENT)
        if action.minibatch not in self._round():
            raise ScheduleError(f"U({self._due()}) has not been done", action=action)
        keeps = self._demands.keeps_forward_weights()
        self._reads(action, self._forward_reads[action.minibatch] if keeps else self._newest)
        self._exists(action)
        self._on_prediction(action)
        self._in_flight.remove(label)
        if self._place.stage > 0:
            self._to_send.add((Op.SEND_GRADIENT, label))

    def _evaluate(self, action: Action, label: Label) -> None:
        self._once(action, label, receives=Op.RECEIVE_EVALUATION if self._place.stage > 0 else None)
        self._reads(action, action.minibatch + 1)
        self._newest_only(action)
        together = action.minibatch, 0
        if together in self._demands.common and together not in self._done[Op.AVERAGE]:
            raise ScheduleError("the replicas' buffers have not been averaged", action=action)
        if not self._demands.last_stage:
            self._to_send.add((Op.SEND_EVALUATION, label))

    def _evaluate_together(self, action: Action, label: Label) -> None:
        """Buffers are averaged before the replica's evaluation passes, figures are collected behind them."""
        collects = action.op is Op.COLLECT
        if label not in self._demands.common or (collects and not self._demands.last_stage):
            raise ScheduleError("the schedule has no such common action", action=action)
        if label in self._done[action.op]:
            raise ScheduleError("it is done twice", action=action)
        self._done[action.op].add(label)
        self._reads(action, action.minibatch + 1)
        self._newest_only(action)
        batches = range(self._place.replica, self._schedule.evaluation_batches, self._demands.replicas)
        for batch in batches if collects else ():
            if (action.minibatch, batch) not in self._done[Op.EVALUATE]:
                raise ScheduleError(f"E({action.minibatch}.{batch}) has not been done", action=action)

    def _once(self, action: Action, label: Label, *, receives: Op | None) -> None:
        """Each pass is one of the replica's, is done once, after its message."""
        op, demands = action.op, self._demands
        asked = label in demands.evaluation_passes if op is Op.EVALUATE else demands.asks_for(label)
        if not asked:
            raise ScheduleError("the schedule has no such pass here", action=action)
        if label in self._done[op]:
            raise ScheduleError("it is done twice", action=action)
        self._done[op].add(label)
        if receives is not None:
            if (receives, label) not in self._arrived:
                raise ScheduleError("its message has not been received", action=action)
            self._arrived.remove((receives, label))

    def _reads(self, action: Action, version: int) -> None:
        if action.version != version:
            policy = self._schedule.name if self._schedule.synchronous else self._schedule.policy.value
            raise ScheduleError(
                f"it reads version {action.version}, but by {policy} it must read {version}", action=action
            )

    def _newest_only(self, action: Action) -> None:
        if action.version != self._newest:
            raise ScheduleError(f"it does not read the newest version {self._newest}", action=action)

    def _exists(self, action: Action) -> None:
        if action.version > self._newest:
            raise ScheduleError(f"version {action.version} does not exist yet", action=action)
        if action.version not in self._live:
            raise ScheduleError(f"version {action.version} has been released", action=action)

    # -- updates and predictions ---------------------------------------------------------------------------

    def _round(self) -> range:
        """The minibatches of the update that is due; none behind the last."""
        rounds, done = self._demands.rounds, len(self._made_by) - 1
        return rounds[done] if done < len(rounds) else range(0)

    def _due(self) -> int:
        """The minibatch by which the update that is due is called."""
        return self._round()[-1] if self._round() else self._schedule.minibatches

    def _round_is_over(self, action: Action) -> None:
        """The update due is that of this round, and the replica has done all its backwards."""
        if action.minibatch != self._due() or not self._round():
            raise ScheduleError(f"the update due here is U({self._due()})", action=action)
        every = ((j, i) for j in self._round() for i in range(self._schedule.microbatches))
        undone = [
            label for label in every if self._demands.asks_for(label) and label not in self._done[Op.BACKWARD]
        ]
        if undone:
            j, i = undone[0]
            raise ScheduleError(f"B({j}.{i}) has not been done", action=action)

    def _reduce(self, action: Action) -> None:
        if self._demands.replicas == 1:
            raise ScheduleError("a stage with one replica has nothing to reduce", action=action)
        self._round_is_over(action)
        self._reduced = action.minibatch

    def _update(self, index: int, action: Action) -> None:
        self._round_is_over(action)
        if self._reduced is None and self._demands.replicas > 1:
            raise ScheduleError("its gradients have not been reduced", action=action)
        self._reduced = None
        k = action.minibatch
        if action.version != k + 1:
            raise ScheduleError(f"it makes version {action.version} instead of {k + 1}", action=action)
        self._nothing_fresh(f"before {action}")
        self._newest = k + 1
        self._made_by[self._newest] = len(self._made_by)
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
            if action == alone(self._place, prediction):
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
        distance = 0
        if self._schedule.predicts:
            own = self._demands.round_of(action.minibatch)
            aim = own if self._aim is None else max(own, self._aim(action.minibatch))
            distance = aim - self._made_by[action.version]
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
            raise ScheduleError(f"{prediction} is unused {when}", stage=self._place.stage)
