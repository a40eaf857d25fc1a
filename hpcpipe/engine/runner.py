"""Executes the actions of one replica of one stage: where passes, weights, data and messages of a stage meet.

Each method carries out one kind of action of the replica's program, with the versions, distances and peers that
the action names. It never decides what comes next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hpcpipe.engine.batches import Batches, StageData
from hpcpipe.engine.flight import Arrival, Channels, InFlight, apart_from
from hpcpipe.engine.objective import Evaluation, Losses, Objective, mean_loss
from hpcpipe.engine.passes import Passes
from hpcpipe.engine.replicas import Replicas, Row
from hpcpipe.engine.stage import Stage
from hpcpipe.engine.steering import Steering
from hpcpipe.engine.weights import WeightStore
from hpcpipe.schedule import Action, Place, Role, Schedule, StageProgram
from hpcpipe.transport.group import StageGroup


class StageRunner:
    """One replica of one stage at work.

    `next_update` is the first minibatch whose update is still to come. `replicas` is what `join` makes of it, None
    at a stage of one replica.
    """

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
        replica: int = 0,
    ) -> None:
        self.place = Place(stage.index, replica)
        self.stage = stage
        self.weights = weights
        self.passes = Passes(stage, keep_derived=keep_derived)
        self.buffers = dict(stage.named_buffers())
        self.in_flight: dict[tuple[int, int], InFlight] = {}
        self.losses = Losses()
        self.channels = Channels()
        self.replicas: Replicas | None = None
        self.program = StageProgram(schedule, stage.index, replica)
        self.is_first = stage.index == 0
        self.is_last = stage.index == schedule.stages - 1
        self.next_update = schedule.first
        self._schedule = schedule
        self._batches = Batches(data, microbatches=schedule.microbatches, device=device, dtype=dtype)
        owners = (schedule.owner(stage.index, schedule.first, i) for i in range(schedule.microbatches))
        own = [i for i, owner in enumerate(owners) if owner == replica]
        self._last_microbatch = max(own, default=0)
        self._objective = objective
        self._steering = steering
        self.device = device
        self._arrived: dict[tuple[int, int], Arrival] = {}
        self._arrived_gradient: Arrival | None = None
        self._gradients: list[Tensor | None] = []
        self._accumulator: list[Tensor] | None = None
        self._share = 1.0
        self._round_losses: list[tuple[int, float]] = []
        self._evaluation_input: Arrival | None = None
        self._evaluation_output: tuple[Tensor, ...] = ()
        self._averaged_buffers: dict[str, Tensor] | None = None

    def join(self, group: StageGroup, bucket_bytes: int) -> None:
        """Become one of the several replicas in `group`; each of them calls it, before its first pass.

        Gradients are summed over the replicas in parts of about `bucket_bytes`. Raises TransportError where the
        replicas differ.
        """
        self.replicas = Replicas(
            group,
            self.weights,
            bucket_bytes=bucket_bytes,
            device=self.device,
            between=lambda: self.stage.between(),
        )

    @property
    def speaks(self) -> bool:
        """Whether this replica speaks for its stage: what all of them find is said once."""
        return self.place.replica == 0

    # -- messages --

    def receive_activation(self, action: Action) -> None:
        """Wait for the stage inputs of a minibatch."""
        receiver = self.channels.activations_in[action.peer_replica]
        message = receiver.receive(minibatch=action.minibatch, microbatch=action.microbatch)
        self._steering.arrived_with_activation(message.control)
        self._arrived[action.minibatch, action.microbatch] = Arrival(receiver, message)

    def send_activation(self, action: Action) -> None:
        """Start sending the outputs of a forward pass."""
        outputs = self.in_flight[action.minibatch, action.microbatch].forward.outputs
        self.channels.activations_out[action.peer_replica].send(
            [output.detach() for output in outputs],
            minibatch=action.minibatch,
            microbatch=action.microbatch,
            control=self._steering.activation_word(),
            requires_grad=[output.requires_grad for output in outputs],
            rows=self._batches.rows(action.minibatch, action.microbatch),
        )

    def receive_gradient(self, action: Action) -> None:
        """Wait for the gradients of a minibatch's outputs."""
        receiver = self.channels.gradients_in[action.peer_replica]
        message = receiver.receive(minibatch=action.minibatch, microbatch=action.microbatch)
        self._steering.arrived_with_gradient(message.control)
        self._arrived_gradient = Arrival(receiver, message)

    def send_gradient(self, action: Action) -> None:
        """Start sending the gradients of the stage inputs."""
        done = self.in_flight.pop((action.minibatch, action.microbatch))
        self.channels.gradients_out[action.peer_replica].send(
            done.input_gradients,
            minibatch=action.minibatch,
            microbatch=action.microbatch,
            control=self._steering.gradient_word(),
            rows=self._batches.rows(action.minibatch, action.microbatch),
        )

    def receive_evaluation(self, action: Action) -> None:
        """Wait for the stage inputs of an evaluation batch."""
        receiver = self.channels.evaluations_in[action.peer_replica]
        message = receiver.receive(minibatch=action.minibatch, microbatch=action.microbatch)
        self._evaluation_input = Arrival(receiver, message)

    def send_evaluation(self, action: Action) -> None:
        """Start sending the outputs of an evaluation batch."""
        self.channels.evaluations_out[action.peer_replica].send(
            self._evaluation_output,
            minibatch=action.minibatch,
            microbatch=action.microbatch,
            rows=self._batches.eval_rows(action.microbatch),
        )

    # -- passes and updates --

    def forward(self, action: Action) -> None:
        """F: run the stage on the weights that the action names, and keep what its B needs."""
        key = (action.minibatch, action.microbatch)
        if self.is_first:
            if self.speaks:
                self._steering.decide(action.minibatch)
            self.run_forward(action, self._batches.inputs(action.minibatch, action.microbatch), None)
        else:
            arrival = self._arrived.pop(key)
            self.run_forward(action, arrival.leaves(), arrival)

    def run_forward(self, action: Action, inputs: tuple[Tensor, ...], arrival: Arrival | None) -> None:
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
            forward=forward, arrival=arrival, buffers_before=before
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
        arrival = self._arrived_gradient
        given = None if arrival is None else arrival.message.tensors
        weights = self.weights.weights_of(Role.BACKWARD, action.minibatch, action.version)
        if self.replicas is None:
            of_inputs, of_weights = self.passes.backward(flight.forward, weights, given)
            self._accumulate(of_weights)
        else:
            with self.replicas.backward(last=action.microbatch == self._last_microbatch):
                of_inputs, _ = self.passes.backward(flight.forward, weights, given)
        flight.input_gradients = apart_from(arrival, of_inputs)
        # The graph and the outputs go; the inputs' ring slot can be posted again.
        flight.forward.outputs = ()
        if flight.arrival is not None:
            flight.arrival.release()
        if self._batches.microbatches > 1 or self.replicas is not None:
            self._release_gradient()
        for role in Role:
            self.weights.drop(role, action.minibatch)

    def reduce(self, action: Action) -> None:
        """R: sum the round's gradients over the replicas; hear their losses, and what they know of cuts."""
        assert self.replicas is not None
        steering = self._steering
        facts = (*self.losses.take(), steering.activation_word(), steering.gradient_word())
        what = f"the gradients of stage {self.stage.index}, minibatch {action.minibatch}"
        rows = self.replicas.reduce(facts, what)
        for _, _, mark, request in rows:
            steering.arrived_with_activation(int(mark))
            steering.arrived_with_gradient(int(request))
        self._gradients = self.replicas.gradients
        together = self._schedule.round_of(self.stage.index, action.minibatch)
        # Microbatches already count by their share of the minibatch.
        self._share = 1 / len(together)
        if self.is_last:
            self._round_losses = [(minibatch, self._loss_of(minibatch, rows)) for minibatch in together]

    def update(self, action: Action, *, grad_scale: float = 1.0) -> None:
        """U: make the next version from the round's gradients, and the predictions that follow from it."""
        # The update itself still reads the newest version; the buffers of older ones are free for the new one.
        older = [version for version in action.releases if version < self.weights.newest]
        self.weights.release(older)
        scale = grad_scale * self._share
        self.weights.update(action.minibatch, self._gradients, action.predictions, grad_scale=scale)
        self._gradients = []
        self._release_gradient()
        self.weights.release([version for version in action.releases if version not in older])
        self.next_update = action.minibatch + 1

    def predict(self, action: Action) -> None:
        """P: predictions that no update could make."""
        self.weights.predict(action.predictions)

    # -- evaluations --

    def average(self, action: Action) -> None:
        """A: the buffers that the coming evaluation uses."""
        self._averaged_buffers = self.averaged(self.buffers)

    def evaluate(self, action: Action) -> None:
        """E: a forward pass in evaluation mode on the true weights."""
        arrival, self._evaluation_input = self._evaluation_input, None
        inputs = self._batches.eval_inputs(action.microbatch) if arrival is None else arrival.present()
        outputs = self.passes.evaluate(inputs, self.weights.versions[action.version], self._averaged_buffers)
        if self.is_last:
            targets = self._batches.eval_targets(action.microbatch)
            with torch.no_grad():
                self._evaluation().add(outputs, targets)
        else:
            self._evaluation_output = tuple(t for t in apart_from(arrival, outputs) if t is not None)
        if arrival is not None:
            arrival.release()

    def collect(self, action: Action) -> None:
        """C: add up what the replicas of the last stage have evaluated; each may have had no batch at all."""
        assert self.replicas is not None
        evaluation = self._evaluation()
        rows = self.replicas.gather(evaluation.sums, f"the evaluation behind minibatch {action.minibatch}")
        evaluation.sums = rows.sum(axis=0).tolist()

    def take_evaluation(self) -> dict[str, float]:
        """Figures of the evaluation that just ended; only the last stage has them."""
        figures = self._evaluation().figures()
        self.losses.evaluation = None
        return figures

    # -- what is asked about the stage --

    def averaged(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Buffers as means over the replicas (not floating-point: replica 0's), or themselves where there is one.

        All replicas of the stage call it at the same place of their programs.
        """
        if self.replicas is None or not buffers:
            return dict(buffers)
        return self.replicas.average(buffers, f"the buffers of stage {self.stage.index}")

    def gradient_norm_squared(self) -> float:
        """Sum of squares of the round's mean gradients, over all parameters of the stage."""
        present = [gradient for gradient in self._gradients if gradient is not None]
        return (float(torch.nn.utils.get_total_norm(present)) * self._share) ** 2 if present else 0.0

    def take_losses(self, minibatch: int) -> list[tuple[int, float]]:
        """Each minibatch of the round that U(`minibatch`) ends, with its loss, in order; at the last stage."""
        if self.replicas is not None:
            return self._round_losses
        return [(minibatch, mean_loss(*self.losses.take()))]

    def _loss_of(self, minibatch: int, rows: Row) -> float:
        """The loss of a minibatch that its owners among the replicas have the parts of."""
        owners = {
            self._schedule.owner(self.stage.index, minibatch, microbatch)
            for microbatch in range(self._batches.microbatches)
        }
        return mean_loss(*(float(sum(rows[owner, part] for owner in sorted(owners))) for part in (0, 1)))

    def _evaluation(self) -> Evaluation:
        """The running evaluation, which begins with whoever asks first."""
        if self.losses.evaluation is None:
            self.losses.evaluation = Evaluation(self._objective)
        return self.losses.evaluation

    def _loss(self, action: Action, outputs: tuple[Tensor, ...]) -> Tensor:
        """Mean loss of this pass, scaled to its share of the minibatch."""
        targets = self._batches.targets(action.minibatch, action.microbatch)
        loss = self._objective.loss(outputs, targets)
        count = self._objective.count(targets)
        self.losses.parts.append((loss.detach(), count))
        if self._batches.microbatches == 1:
            return loss
        return loss * (count / max(1, self._objective.count(self._batches.all_targets(action.minibatch))))

    def _accumulate(self, found: Sequence[Tensor | None]) -> None:
        if self._batches.microbatches == 1:
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
            self._arrived_gradient.release()
            self._arrived_gradient = None
