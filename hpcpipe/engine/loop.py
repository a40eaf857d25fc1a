"""Executes one rank's actions: the only place where schedule, stages, checkpoints and observation meet.

It takes each action from the list, has the action's stage carry it out, and after an update looks whether there is
something to record, to cut or to end. It knows no schedule; what comes next is the list's business.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from hpcpipe.engine.runner import StageRunner
from hpcpipe.engine.steering import Steering
from hpcpipe.errors import NonFiniteError
from hpcpipe.observe.activity import Activity
from hpcpipe.schedule import Action, Op, Schedule


class Record(Protocol):
    """Whoever wants to know how training goes; only the first replica of the last stage calls it."""

    def minibatch_done(self, minibatch: int, loss: float) -> None:
        """The update of `minibatch` is done at the last stage; called once for each minibatch, in order."""

    def evaluated(self, minibatch: int, figures: Mapping[str, float]) -> None:
        """The evaluation behind U(minibatch) is done."""


class NoRecord:
    """The record of a rank that nobody listens to."""

    def minibatch_done(self, minibatch: int, loss: float) -> None:
        """Do nothing."""

    def evaluated(self, minibatch: int, figures: Mapping[str, float]) -> None:
        """Do nothing."""


class Keeper(Protocol):
    """Whoever takes checkpoints at cuts; see `checkpoints.Checkpoints`."""

    def take(self, runner: StageRunner) -> bool:
        """A stage has just passed a cut, as all its replicas do; True when it was the rank's last to do so."""

    def poll(self) -> None:
        """Look after what is being written."""


class NoCheckpoints:
    """A keeper for runs that leave nothing behind."""

    def take(self, runner: StageRunner) -> bool:
        """Keep nothing."""
        return True

    def poll(self) -> None:
        """There is nothing to look after."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a rank's loop ended: the last minibatch of its last update, and whether it was asked to stop there."""

    last_update: int
    stopped: bool


class Engine:
    """One rank at work.

    `runners` are the stages of which the rank is a replica. `norm_squared` sums squared gradient norms over all
    ranks, for clipping by the global norm in synchronous schedules; in asynchronous ones each stage clips by its
    own.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        runners: Mapping[int, StageRunner],
        steering: Steering,
        checkpoints: Keeper,
        record: Record,
        activity: Activity,
        progress: Callable[[], None],
        clip_norm: float | None,
        norm_squared: Callable[[float], float],
        stop_on_nonfinite: bool,
    ) -> None:
        self._schedule = schedule
        self._runners = runners
        self._steering = steering
        self._checkpoints = checkpoints
        self._record = record
        self._activity = activity
        self._progress = progress
        self._clip_norm = clip_norm
        self._norm_squared = norm_squared
        self._stop_on_nonfinite = stop_on_nonfinite
        self._waiting_for_norm: list[Action] = []
        self._do: Mapping[Op, Callable[[StageRunner, Action], None]] = {
            Op.FORWARD: StageRunner.forward,
            Op.BACKWARD: StageRunner.backward,
            Op.REDUCE: StageRunner.reduce,
            Op.UPDATE: self._update,
            Op.PREDICT: StageRunner.predict,
            Op.AVERAGE: StageRunner.average,
            Op.EVALUATE: self._evaluate,
            Op.COLLECT: self._collect,
            Op.RECEIVE_ACTIVATION: StageRunner.receive_activation,
            Op.SEND_ACTIVATION: StageRunner.send_activation,
            Op.RECEIVE_GRADIENT: StageRunner.receive_gradient,
            Op.SEND_GRADIENT: StageRunner.send_gradient,
            Op.RECEIVE_EVALUATION: StageRunner.receive_evaluation,
            Op.SEND_EVALUATION: StageRunner.send_evaluation,
        }

    def run(self, actions: Iterable[Action]) -> Ending:
        """Execute `actions` to their end, or to the cut at which the run is told to stop."""
        for action in actions:
            runner = self._runners[action.stage]
            if self._is_past_stop(runner):
                if all(self._is_past_stop(other) for other in self._runners.values()):
                    break
                continue
            began = time.perf_counter()
            self._activity.current = (action, began)
            self._do[action.op](runner, action)
            self._activity.note(action, began, time.perf_counter())
            self._progress()
        self._activity.current = None
        done = min(runner.next_update for runner in self._runners.values()) - 1
        return Ending(last_update=done, stopped=self._steering.stop_after is not None)

    def _is_past_stop(self, runner: StageRunner) -> bool:
        stop = self._steering.stop_after
        return stop is not None and runner.next_update > stop

    def _update(self, runner: StageRunner, action: Action) -> None:
        if self._clip_norm is None:
            self._apply(runner, action, 1.0)
        elif not self._schedule.synchronous:
            self._apply(runner, action, self._clip_factor(runner.gradient_norm_squared()))
        else:
            # One global norm needs the gradients of all stages; no stage goes on before its update.
            self._waiting_for_norm.append(action)
            if len(self._waiting_for_norm) == len(self._runners):
                actions, self._waiting_for_norm = self._waiting_for_norm, []
                # The replicas of a stage hold the same gradients: one of them counts.
                own = sum((r.gradient_norm_squared() for r in self._runners.values() if r.speaks), 0.0)
                factor = self._clip_factor(self._norm_squared(own))
                for waiting in actions:
                    self._apply(self._runners[waiting.stage], waiting, factor)

    def _clip_factor(self, norm_squared: float) -> float:
        """As torch.nn.utils.clip_grad_norm_ computes it."""
        assert self._clip_norm is not None
        return min(1.0, self._clip_norm / (math.sqrt(norm_squared) + 1e-6))

    def _apply(self, runner: StageRunner, action: Action, grad_scale: float) -> None:
        minibatch = action.minibatch
        losses = runner.take_losses(minibatch) if runner.is_last and runner.speaks else []
        for j, loss in losses:
            if self._stop_on_nonfinite and not math.isfinite(loss):
                raise NonFiniteError(
                    f"the loss of minibatch {j} is {loss}: lower optimizer.lr, clip gradients "
                    '(optimizer.clip_norm), or let it pass with optimizer.on_nonfinite = "continue"'
                )
        runner.update(action, grad_scale=grad_scale)
        for j, loss in losses:
            self._record.minibatch_done(j, loss)
        if self._steering.cuts_at(minibatch):
            self._refuse_to_keep_nonfinite(runner, minibatch)
            if self._checkpoints.take(runner):
                self._steering.passed(minibatch)
        self._checkpoints.poll()

    def _refuse_to_keep_nonfinite(self, runner: StageRunner, minibatch: int) -> None:
        # A gradient that overflowed shows in the loss minibatches later; a checkpoint in between would be lost.
        if self._stop_on_nonfinite and runner.speaks and not runner.weights.are_finite():
            raise NonFiniteError(
                f"the weights of stage {runner.stage.index} are not finite after minibatch {minibatch}, so no "
                "checkpoint is taken: lower optimizer.lr, clip gradients (optimizer.clip_norm), or let it pass "
                'with optimizer.on_nonfinite = "continue"'
            )

    def _evaluate(self, runner: StageRunner, action: Action) -> None:
        runner.evaluate(action)
        ends = action.microbatch == self._schedule.evaluation_batches - 1
        if runner.is_last and runner.replicas is None and ends:
            self._record.evaluated(action.minibatch, runner.take_evaluation())

    def _collect(self, runner: StageRunner, action: Action) -> None:
        runner.collect(action)
        figures = runner.take_evaluation()
        if runner.speaks:
            self._record.evaluated(action.minibatch, figures)
