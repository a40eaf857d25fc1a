"""Executes the actions of one stage: the place where passes, weights, data and messages of a stage meet.

Each method carries out one kind of action of the stage's program, with the versions and distances that the action
names. It never decides what comes next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from hpcpipe.engine.objective import Evaluation, Objective
from hpcpipe.engine.passes import ForwardPass, Passes
from hpcpipe.engine.stage import Stage
from hpcpipe.engine.steering import Steering
from hpcpipe.engine.weights import WeightStore
from hpcpipe.schedule import Action, Role, Schedule, StageProgram
from hpcpipe.transport.message import Message, Receiver, Sender


class StageData(Protocol):
    """What a stage reads of the data set: inputs at the first stage, targets at the last."""

    def inputs(self, minibatch: int) -> tuple[Tensor, ...]:
        """Model inputs of a minibatch, rows first."""

    def targets(self, minibatch: int) -> Tensor:
        """Targets of a minibatch, rows first."""

    def rows(self, minibatch: int) -> int:
        """Rows of a minibatch; the last one of an epoch may have fewer."""

    def eval_rows(self, batch: int) -> int:
        """Rows of an evaluation batch."""

    def eval_inputs(self, batch: int) -> tuple[Tensor, ...]:
        """Model inputs of an evaluation batch."""

    def eval_targets(self, batch: int) -> Tensor:
        """Targets of an evaluation batch."""


@dataclass(kw_only=True)
class Channels:
    """The message channels of one stage; None where there is no neighbour."""

    activations_in: Receiver | None = None
    activations_out: Sender | None = None
    gradients_in: Receiver | None = None
    gradients_out: Sender | None = None
    evaluations_in: Receiver | None = None
    evaluations_out: Sender | None = None


@dataclass(kw_only=True)
class InFlight:
    """A minibatch (or microbatch) between its F and its B at this stage."""

    forward: ForwardPass
    message: Message | None
    """The ring slot that the inputs lie in; None at the first stage and after a restart."""
    buffers_before: dict[str, Tensor] | None
    """The stage's buffers before F, where a cut will need them."""
    input_gradients: tuple[Tensor | None, ...] = ()


@dataclass(kw_only=True)
class Losses:
    """Losses at the last stage: of the minibatch in work, and of the running evaluation."""

    parts: list[tuple[Tensor, int]] = field(default_factory=list)
    evaluation: Evaluation | None = None

    def take_minibatch(self) -> float:
        """Mean over the microbatches of the minibatch that just ended, by what each counts."""
        total = sum(count for _, count in self.parts)
        value = sum(float(loss) * count for loss, count in self.parts) / total if total else 0.0
        self.parts.clear()
        return value


class StageRunner:
    """One stage of the pipeline at work."""

    def __init__(
        self,
        *,
        stage: Stage,
        weights: WeightStore,
        schedule: Schedule,
        data: StageData,
        objective: Objective,
        steering: Steering,
        device: torch.device,
        dtype: torch.dtype,
        keep_derived: bool,
    ) -> None:
        self.stage = stage
        self.weights = weights
        self.passes = Passes(stage, keep_derived=keep_derived)
        self.buffers = dict(stage.named_buffers())
        self.in_flight: dict[tuple[int, int], InFlight] = {}
        self.losses = Losses()
        self.channels = Channels()
        self.program = StageProgram(schedule, stage.index)
        self.is_first = stage.index == 0
        self.is_last = stage.index == schedule.stages - 1
        self.next_update = schedule.first
        self._microbatches = schedule.microbatches
        self._data = data
        # The microbatches of a minibatch come one after another and are parts of the same tensors.
        self._inputs = lru_cache(maxsize=1)(lambda minibatch: self._to_device(data.inputs(minibatch)))
        self._targets = lru_cache(maxsize=1)(lambda minibatch: data.targets(minibatch).to(device))
        self._objective = objective
        self._steering = steering
        self.device = device
        self._dtype = dtype
        self._arrived: dict[tuple[int, int], Message] = {}
        self._arrived_gradient: Message | None = None
        self._gradients: list[Tensor | None] = []
        self._accumulator: list[Tensor] | None = None
        self._evaluation_input: Message | None = None
        self._evaluation_output: tuple[Tensor, ...] = ()

    # -- messages --

    def receive_activation(self, action: Action) -> None:
        """Wait for the stage inputs of a minibatch."""
        assert self.channels.activations_in is not None
        message = self.channels.activations_in.receive(minibatch=action.minibatch, microbatch=action.microbatch)
        self._steering.arrived_with_activation(message.control)
        self._arrived[action.minibatch, action.microbatch] = message

    def send_activation(self, action: Action) -> None:
        """Start sending the outputs of a forward pass."""
        assert self.channels.activations_out is not None
        outputs = self.in_flight[action.minibatch, action.microbatch].forward.outputs
        self.channels.activations_out.send(
            [output.detach() for output in outputs],
            minibatch=action.minibatch,
            microbatch=action.microbatch,
            control=self._steering.activation_word(),
            requires_grad=[output.requires_grad for output in outputs],
            rows=self._rows(action),
        )

    def receive_gradient(self, action: Action) -> None:
        """Wait for the gradients of a minibatch's outputs."""
        assert self.channels.gradients_in is not None
        self._arrived_gradient = self.channels.gradients_in.receive(
            minibatch=action.minibatch, microbatch=action.microbatch
        )
        self._steering.arrived_with_gradient(self._arrived_gradient.control)

    def send_gradient(self, action: Action) -> None:
        """Start sending the gradients of the stage inputs."""
        assert self.channels.gradients_out is not None
        done = self.in_flight.pop((action.minibatch, action.microbatch))
        self.channels.gradients_out.send(
            done.input_gradients,
            minibatch=action.minibatch,
            microbatch=action.microbatch,
            control=self._steering.gradient_word(),
            rows=self._rows(action),
        )

    def receive_evaluation(self, action: Action) -> None:
        """Wait for the stage inputs of an evaluation batch."""
        assert self.channels.evaluations_in is not None
        self._evaluation_input = self.channels.evaluations_in.receive(
            minibatch=action.minibatch, microbatch=action.microbatch
        )

    def send_evaluation(self, action: Action) -> None:
        """Start sending the outputs of an evaluation batch."""
        assert self.channels.evaluations_out is not None
        self.channels.evaluations_out.send(
            self._evaluation_output,
            minibatch=action.minibatch,
            microbatch=action.microbatch,
            rows=self._data.eval_rows(action.microbatch),
        )

    # -- passes and updates --

    def forward(self, action: Action) -> None:
        """F: run the stage on the weights that the action names, and keep what its B needs."""
        key = (action.minibatch, action.microbatch)
        if self.is_first:
            self._steering.decide(action.minibatch)
            inputs = tuple(self._part(t, action.microbatch) for t in self._inputs(action.minibatch))
            self.run_forward(action, inputs, None)
        else:
            message = self._arrived.pop(key)
            self.run_forward(action, _leaves(message), message)

    def run_forward(self, action: Action, inputs: tuple[Tensor, ...], message: Message | None) -> None:
        """F on given stage inputs (leaves), as `forward` and a restart need it."""
        minibatch = action.minibatch
        cut_ahead = self._steering.cut_between(self.next_update, minibatch)
        before = {name: t.clone() for name, t in self.buffers.items()} if cut_ahead else None
        same_backward = action.version == self.program.backward_version(
            minibatch
        ) and action.distance == self.program.backward_distance(minibatch)
        forward = self.passes.forward(
            minibatch,
            action.microbatch,
            inputs,
            self.weights.weights_of(Role.FORWARD, minibatch, action.version),
            substitute=not same_backward,
            head=(lambda outputs: self._loss(action, outputs)) if self.is_last else None,
        )
        self.in_flight[minibatch, action.microbatch] = InFlight(
            forward=forward, message=message, buffers_before=before
        )
        if same_backward:
            return
        if cut_ahead:
            self.weights.keep_forward_weights(minibatch, action.version)
        else:
            self.weights.drop(Role.FORWARD, minibatch)

    def backward(self, action: Action) -> None:
        """B: gradients of the stage's inputs and weights, on the weights that the action names."""
        key = (action.minibatch, action.microbatch)
        flight = self.in_flight.pop(key) if self.is_first else self.in_flight[key]
        message = self._arrived_gradient
        weights = self.weights.weights_of(Role.BACKWARD, action.minibatch, action.version)
        of_inputs, of_weights = self.passes.backward(
            flight.forward, weights, None if message is None else message.tensors
        )
        self._accumulate(of_weights)
        flight.input_gradients = _apart_from(message, of_inputs)
        # The graph and the outputs go; the inputs' ring slot can be posted again.
        flight.forward.outputs = ()
        if flight.message is not None:
            assert self.channels.activations_in is not None
            self.channels.activations_in.release(flight.message)
        if self._microbatches > 1:
            self._release_gradient()
        for role in Role:
            self.weights.drop(role, action.minibatch)

    def update(self, action: Action, *, grad_scale: float = 1.0) -> None:
        """U: make the next version from this minibatch's gradients, and the predictions that follow from it."""
        # The update itself still reads its own version; the buffers of older ones are free for the new version.
        older = [version for version in action.releases if version < action.minibatch]
        self.weights.release(older)
        self.weights.update(action.minibatch, self._gradients, action.predictions, grad_scale=grad_scale)
        self._gradients = []
        self._release_gradient()
        self.weights.release([version for version in action.releases if version not in older])
        self.next_update = action.minibatch + 1

    def predict(self, action: Action) -> None:
        """P: predictions that no update could make."""
        self.weights.predict(action.predictions)

    def evaluate(self, action: Action) -> None:
        """E: a forward pass in evaluation mode on the true weights."""
        if action.microbatch == 0:
            self.losses.evaluation = Evaluation(self._objective)
        message, self._evaluation_input = self._evaluation_input, None
        inputs = (
            self._to_device(self._data.eval_inputs(action.microbatch)) if message is None else _present(message)
        )
        outputs = self.passes.evaluate(inputs, self.weights.versions[action.version])
        if self.is_last:
            targets = self._data.eval_targets(action.microbatch).to(self.device)
            assert self.losses.evaluation is not None
            with torch.no_grad():
                self.losses.evaluation.add(outputs, targets)
        else:
            self._evaluation_output = tuple(t for t in _apart_from(message, outputs) if t is not None)
        if message is not None:
            assert self.channels.evaluations_in is not None
            self.channels.evaluations_in.release(message)

    def gradient_norm_squared(self) -> float:
        """Sum of squares of this minibatch's gradients, over all parameters of the stage."""
        present = [gradient for gradient in self._gradients if gradient is not None]
        return float(torch.nn.utils.get_total_norm(present)) ** 2 if present else 0.0

    def evaluation_figures(self) -> dict[str, float]:
        """Figures of the evaluation that just ended; only the last stage has them."""
        assert self.losses.evaluation is not None
        return self.losses.evaluation.figures()

    def _to_device(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(
            tensor.to(self.device, self._dtype if tensor.is_floating_point() else None) for tensor in tensors
        )

    def _rows(self, action: Action) -> int:
        """Rows of one pass."""
        whole, extra = divmod(self._data.rows(action.minibatch), self._microbatches)
        return whole + (action.microbatch < extra)

    def _part(self, tensor: Tensor, microbatch: int) -> Tensor:
        """The rows of one microbatch: sizes differ by one at most, the larger first."""
        if self._microbatches == 1:
            return tensor
        return torch.tensor_split(tensor, self._microbatches)[microbatch]

    def _loss(self, action: Action, outputs: tuple[Tensor, ...]) -> Tensor:
        """Mean loss of this pass, scaled to its share of the minibatch."""
        whole = self._targets(action.minibatch)
        targets = self._part(whole, action.microbatch)
        loss = self._objective.loss(outputs, targets)
        count = self._objective.count(targets)
        self.losses.parts.append((loss.detach(), count))
        if self._microbatches == 1:
            return loss
        return loss * (count / max(1, self._objective.count(whole)))

    def _accumulate(self, found: Sequence[Tensor | None]) -> None:
        if self._microbatches == 1:
            self._gradients = list(found)
            return
        # Gradients from autograd may share memory with each other, so they are summed in memory of our own, and as
        # precisely as the optimizer will use them.
        if self._accumulator is None:
            layout = self.weights.layout
            self._accumulator = layout.view_list(layout.allocate(self.device))
        if not self._gradients:
            self._gradients = [None] * len(found)
        for i, (gradient, total) in enumerate(zip(found, self._accumulator, strict=True)):
            if gradient is None:
                continue
            if self._gradients[i] is None:
                self._gradients[i] = total.copy_(gradient)
            else:
                total.add_(gradient)

    def _release_gradient(self) -> None:
        """The ring slot of the last gradient; weight gradients may lie in it until they have been used."""
        if self._arrived_gradient is not None:
            assert self.channels.gradients_in is not None
            self.channels.gradients_in.release(self._arrived_gradient)
            self._arrived_gradient = None


def _leaves(message: Message) -> tuple[Tensor, ...]:
    """The received tensors as leaves of a new graph; only those that want a gradient get one."""
    return tuple(
        tensor.detach().requires_grad_(wants)
        for tensor, wants in zip(_present(message), message.requires_grad, strict=True)
    )


def _present(message: Message) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in message.tensors if tensor is not None)


def _apart_from(message: Message | None, tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """`tensors`, copied where they lie in the memory of `message`, which will be posted again."""
    if message is None:
        return tuple(tensors)
    posted = {t.untyped_storage().data_ptr() for t in message.tensors if t is not None}
    return tuple(t.clone() if t is not None and t.untyped_storage().data_ptr() in posted else t for t in tensors)
