"""Runs a model layer by layer and as a whole, and takes time and bytes of its passes.

Each layer is run as a stage of its own, and all layers as one stage, through the very passes that train them, so
what the engine does around a layer is in its time. Owns the order of the runs; what the times mean is `measure`'s
business (PipeDream, SOSP'19, section 3.1, measures layers by hooks on the whole model).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hpcpipe.engine.clocks import Clock
from hpcpipe.engine.objective import Objective
from hpcpipe.engine.passes import ForwardPass, Head
from hpcpipe.engine.runner import StageRunner
from hpcpipe.errors import HpcpipeError, ModelError
from hpcpipe.schedule import Prediction, Role


class Sample(NamedTuple):
    """One pass worth of data on the device: the first microbatch of a minibatch."""

    minibatch: int
    inputs: tuple[Tensor, ...]
    targets: Tensor


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer in one pass; `LayerCost` in hpcpipe.planning.profile says what each means."""

    output: int
    gradient: int
    parameter: int
    buffer: int
    state: int
    saved: int


class Nothing(nn.Module):
    """Next to no work, for what is in a pass beside work."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, number: Tensor) -> Tensor:
        return number * self.one


class Sweeps:
    """A model's layers, each as a stage of its own, and the whole model as one stage, ready to run.

    `layers` and `whole` are runners without channels, and so is `nothing`, a stage that only has `Nothing`: its
    passes take what every stage pays beside its layers. `substitute`: the passes of this run use other weights
    forward than backward. `predictions`: how many the update makes. `accumulates`: gradients of several
    microbatches are added up. `clips`: the update needs the norm of the gradients.
    """

    def __init__(
        self,
        *,
        layers: Sequence[StageRunner],
        whole: StageRunner,
        nothing: StageRunner,
        objective: Objective,
        clock: Clock,
        substitute: bool,
        predictions: int,
        accumulates: bool,
        clips: bool,
    ) -> None:
        self._layers = layers
        self._whole = whole
        self._nothing = nothing
        self._objective = objective
        self._clock = clock
        self._substitute = substitute
        self._predictions = predictions
        self._clips = clips
        self._totals = {id(runner): _totals(runner) for runner in (*layers, whole)} if accumulates else {}

    def layers(self, sample: Sample) -> tuple[list[float], list[float]]:
        """Forward and backward seconds of each layer: forward through all, then backward through all.

        Raises ModelError for a layer that fails, with the shapes of its inputs.
        """
        clock = self._clock
        marks: list[tuple[Any, Any]] = []
        done: list[ForwardPass] = []
        given, wants = sample.inputs, [False] * len(sample.inputs)
        for runner in self._layers:
            began = clock.mark()
            leaves = _leaves(given, wants)
            done.append(self._forward(runner, sample, leaves, self._head(runner, sample)))
            marks.append((began, clock.mark()))
            given, wants = done[-1].outputs, [output.requires_grad for output in done[-1].outputs]
        gradients: tuple[Tensor | None, ...] | None = None
        for runner in reversed(self._layers):
            forward = done.pop()
            began = clock.mark()
            gradients, of_weights = self._backward(runner, forward, gradients)
            self._accumulate(runner, of_weights)
            marks.append((began, clock.mark()))
        clock.settle()
        seconds = [clock.seconds(*pair) for pair in marks]
        count = len(self._layers)
        return seconds[:count], seconds[count:][::-1]

    def whole(self, sample: Sample) -> tuple[float, float, float]:
        """Seconds of forward, backward and update of the whole model. Raises ModelError as `layers` does."""
        clock, runner = self._clock, self._whole
        marks = [clock.mark()]
        forward = self._forward(runner, sample, sample.inputs, self._head(runner, sample))
        marks.append(clock.mark())
        _, of_weights = self._backward(runner, forward, None)
        self._accumulate(runner, of_weights)
        marks.append(clock.mark())
        del forward
        self._update(of_weights)
        marks.append(clock.mark())
        clock.settle()
        return (
            clock.seconds(marks[0], marks[1]),
            clock.seconds(marks[1], marks[2]),
            clock.seconds(marks[2], marks[3]),
        )

    def nothing(self, sample: Sample) -> tuple[float, float]:
        """Seconds of forward and backward of a stage that computes nothing to speak of."""
        clock, runner = self._clock, self._nothing
        number = torch.zeros(1, device=runner.device, dtype=runner.weights.dtype)
        marks = [clock.mark()]
        forward = self._forward(runner, sample, _leaves([number], [True]), None)
        marks.append(clock.mark())
        self._backward(runner, forward, (number,))
        marks.append(clock.mark())
        clock.settle()
        return clock.seconds(marks[0], marks[1]), clock.seconds(marks[1], marks[2])

    def weigh(self, sample: Sample) -> list[LayerBytes]:
        """Bytes of each layer. Sweep at least once before: a stage's first pass copies its inputs.

        What autograd saves counts once, at the layer that made it: there it stays until its backward pass, be it
        saved by that layer or by the next, whose input it is. Weights, buffers and the model's inputs do not
        count.
        """
        maker: dict[int, int] = {}
        saved: list[dict[int, int]] = [{} for _ in self._layers]
        done: list[ForwardPass] = []
        given, wants = sample.inputs, [False] * len(sample.inputs)
        model_inputs = _places(sample.inputs)
        outputs: list[tuple[Tensor, ...]] = []
        for index, runner in enumerate(self._layers):
            module = runner.stage
            held = _places([*module.parameters(), *module.buffers()]) | model_inputs | {_buffer(runner).pointer}
            notice = _Notice(index, held, maker, saved)
            leaves = _leaves(given, wants)
            last = runner is self._layers[-1]
            head = _keeping(self._head(runner, sample), outputs) if last else None
            with saved_tensors_hooks(notice, lambda tensor: tensor):
                done.append(self._forward(runner, sample, leaves, head, substitute=False))
            if not last:
                outputs.append(done[-1].outputs)
            for output in outputs[-1]:
                maker.setdefault(_place(output), index)
            given, wants = done[-1].outputs, [output.requires_grad for output in done[-1].outputs]
        gradients: tuple[Tensor | None, ...] | None = None
        gradient_bytes = [_nbytes(output for output in outputs[-1] if output.requires_grad)]
        for runner in reversed(self._layers):
            gradients, _ = self._backward(runner, done.pop(), gradients)
            gradient_bytes.append(_nbytes(gradient for gradient in gradients if gradient is not None))
        return [
            LayerBytes(
                output=_nbytes(outputs[index]),
                gradient=gradient_bytes[len(self._layers) - 1 - index],
                saved=sum(saved[index].values()),
                **_held_bytes(runner),
            )
            for index, runner in enumerate(self._layers)
        ]

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all weights that are trained, in the dtype of the passes."""
        return _held_bytes(self._whole)["parameter"]

    def _forward(
        self,
        runner: StageRunner,
        sample: Sample,
        inputs: tuple[Tensor, ...],
        head: Head | None,
        *,
        substitute: bool | None = None,
    ) -> ForwardPass:
        with _naming(runner, inputs, "forward"):
            return runner.passes.forward(
                sample.minibatch,
                0,
                inputs,
                _buffer(runner),
                substitute=self._substitute if substitute is None else substitute,
                head=head,
            )

    def _backward(
        self, runner: StageRunner, forward: ForwardPass, gradients: tuple[Tensor | None, ...] | None
    ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        with _naming(runner, forward.inputs, "backward"):
            return runner.passes.backward(forward, _buffer(runner), gradients)

    def _head(self, runner: StageRunner, sample: Sample) -> Head | None:
        if runner is not self._whole and runner is not self._layers[-1]:
            return None

        def loss(outputs: tuple[Tensor, ...]) -> Tensor:
            try:
                return self._objective.loss(outputs, sample.targets)
            except HpcpipeError:
                raise
            except Exception as error:
                shapes = f"outputs {_shapes(outputs)} and targets {_shapes([sample.targets])}"
                raise ModelError(f"the loss failed on {shapes}: {_one_line(error)}") from error

        return loss

    def _accumulate(self, runner: StageRunner, found: Sequence[Tensor | None]) -> None:
        if self._totals:
            for gradient, total in zip(found, self._totals[id(runner)], strict=True):
                if gradient is not None:
                    total.add_(gradient)

    def _update(self, gradients: Sequence[Tensor | None]) -> None:
        weights = self._whole.weights
        minibatch = weights.newest
        if self._clips:
            present = [gradient for gradient in gradients if gradient is not None]
            float(torch.nn.utils.get_total_norm(present)) if present else 0.0
        predictions = [
            Prediction(role=Role.FORWARD, minibatch=minibatch + 1 + n, version=minibatch + 1, distance=1 + n)
            for n in range(self._predictions)
        ]
        weights.update(minibatch, gradients, predictions)
        for prediction in predictions:
            weights.drop(prediction.role, prediction.minibatch)
        weights.release([minibatch])


class _Notice:
    """A pack hook that notes the size of each storage that autograd saves."""

    def __init__(self, index: int, held: set[int], maker: dict[int, int], saved: list[dict[int, int]]) -> None:
        self._index = index
        self._held = held
        self._maker = maker
        self._saved = saved

    def __call__(self, tensor: Tensor) -> Tensor:
        place = _place(tensor)
        if place and place not in self._held:
            made_by = self._maker.get(place, self._index)
            self._saved[made_by][place] = tensor.untyped_storage().nbytes()
        return tensor


@contextmanager
def _naming(runner: StageRunner, inputs: Sequence[Tensor], what: str) -> Iterator[None]:
    """Name the layer and the shapes that it was given when it fails."""
    try:
        yield
    except HpcpipeError:
        raise
    except Exception as error:
        names = runner.stage.names
        whole = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        raise ModelError(
            f"layer {whole!r} failed in its {what} pass on inputs {_shapes(inputs)}: {_one_line(error)}"
        ) from error


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)


def _leaves(tensors: Sequence[Tensor], wants: Sequence[bool]) -> tuple[Tensor, ...]:
    """What a stage makes of a message: leaves of a new graph, of which only some want a gradient."""
    return tuple(tensor.detach().requires_grad_(want) for tensor, want in zip(tensors, wants, strict=True))


def _keeping(head: Head | None, outputs: list[tuple[Tensor, ...]]) -> Head:
    """`head`, which appends what it is given to `outputs`."""
    assert head is not None

    def noting(given: tuple[Tensor, ...]) -> Tensor:
        outputs.append(given)
        return head(given)

    return noting


def _buffer(runner: StageRunner) -> Any:
    return runner.weights.versions[runner.weights.newest]


def _totals(runner: StageRunner) -> list[Tensor]:
    layout = runner.weights.layout
    return layout.view_list(layout.allocate(runner.device))


def _held_bytes(runner: StageRunner) -> dict[str, int]:
    """Bytes that stay: weights that are trained, everything else in the module, and what the optimizer keeps."""
    weights, module = runner.weights, runner.stage
    numbers = sum(slot.numel for slot in weights.layout.slots)
    buffer = _buffer(runner).flat
    masters = [] if weights.master is buffer else [weights.master]
    frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    return {
        "parameter": numbers * buffer.element_size(),
        "buffer": _nbytes([*frozen, *module.buffers()]),
        "state": sum(numbers * flat.element_size() for flat in (*weights.state.values(), *masters)),
    }


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _places(tensors: Iterable[Tensor]) -> set[int]:
    return {_place(tensor) for tensor in tensors} - {0}
