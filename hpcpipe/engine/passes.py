"""The passes of one stage: forward, backward and evaluation on given weights.

Owns what PyTorch needs to run them right: other weights in the backward than in the forward, inputs that a layer
changes in place, tensors that the substitution cannot see. Knows nothing of messages, data or versions' lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call

from hpcpipe.engine.derived import DerivedTensors, ForwardReads
from hpcpipe.engine.stage import Stage
from hpcpipe.engine.substitution import Substitution
from hpcpipe.engine.weights import WeightBuffer
from hpcpipe.errors import ModelError

Head = Callable[[tuple[Tensor, ...]], Tensor]
"""Turns the last stage's outputs into the loss."""


@dataclass(kw_only=True)
class ForwardPass:
    """What stays of F(j) until B(j): the graph from `inputs` and the weights' leaves to `outputs`."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    weights: WeightBuffer
    substitution: Substitution | None


class Passes:
    """Runs the passes of one stage.

    `keep_derived` lets saved tensors that were computed from weights alone keep the forward's values in a
    backward pass on other weights; without it such a layer is refused.
    """

    def __init__(self, stage: Stage, *, keep_derived: bool) -> None:
        self.notices: list[str] = []
        self._stage = stage
        self._keep_derived = keep_derived
        # functional_call looks for ties on every call unless told that there are none.
        names = sum(1 for _ in stage.named_parameters(remove_duplicate=False))
        self._tied = names > sum(1 for _ in stage.named_parameters())
        self._changes_inputs: bool | None = None
        self._looked_for_derived = False
        self._looked_for_reads = False

    def forward(
        self,
        minibatch: int,
        microbatch: int,
        inputs: tuple[Tensor, ...],
        weights: WeightBuffer,
        *,
        substitute: bool,
        head: Head | None,
    ) -> ForwardPass:
        """Run the stage on `inputs` (leaves). `substitute`: the backward will run on other weights.

        Raises ModelError for a layer that cannot be trained that way.
        """
        versions = [tensor._version for tensor in inputs]
        weights_version = weights.flat._version
        given = self._given_to_first_layer(inputs)
        watch = self._watch_for_derived(weights, given) if substitute else None
        substitution = Substitution(weights, watch) if substitute else None
        with substitution.hooks() if substitution else nullcontext(), watch or nullcontext():
            outputs = self._call(weights, self._stage.run, minibatch, microbatch, *given)
            if head is not None:
                outputs = (head(outputs),)
        self._check_inputs(inputs, versions, given)
        if weights.flat._version != weights_version:
            raise ModelError(
                f"{self._some_layer} changes its weights in its forward pass (as an embedding with max_norm "
                "does), which the update would not see: leave weights to the optimizer"
            )
        if watch is not None:
            self._report_derived(watch)
        return ForwardPass(inputs=inputs, outputs=outputs, weights=weights, substitution=substitution)

    def backward(
        self, done: ForwardPass, weights: WeightBuffer, gradients: Sequence[Tensor | None] | None
    ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        """Gradients of `done`'s inputs and of each weight, None where there is none.

        `gradients` belong to `done.outputs`; None means that the output is the loss.
        """
        if done.substitution is not None:
            done.substitution.backward = weights
        wanted = [tensor for tensor in done.inputs if tensor.requires_grad]
        leaves = list(done.weights.leaves.values())
        given = [None] * len(done.outputs) if gradients is None else gradients
        roots = [
            (output, gradient)
            for output, gradient in zip(done.outputs, given, strict=True)
            if output.requires_grad and (gradients is None or gradient is not None)
        ]
        found: tuple[Tensor | None, ...] = (None,) * (len(wanted) + len(leaves))
        if roots and found:
            outputs, output_gradients = zip(*roots, strict=True)
            # Recomputation inside the backward pass (torch.utils.checkpoint) reads the module's parameters,
            # so they must be the backward's weights meanwhile.
            gradients_of = partial(torch.autograd.grad, allow_unused=True)
            watch = self._watch_for_reads(done, weights)
            with watch or nullcontext():
                found = self._call(weights, gradients_of, outputs, [*wanted, *leaves], output_gradients)
            if watch is not None and watch.op is not None:
                raise ModelError(
                    f"{self._some_layer} reads the forward's weights in its backward pass ({watch.op}): let its "
                    'autograd.Function use ctx.save_for_backward, or set pipeline.policy = "stash"'
                )
        of_inputs = iter(found[: len(wanted)])
        return (
            tuple(next(of_inputs) if tensor.requires_grad else None for tensor in done.inputs),
            found[len(wanted) :],
        )

    def evaluate(
        self, inputs: tuple[Tensor, ...], weights: WeightBuffer, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """Run the stage in evaluation mode, without a graph; with `buffers` in the place of its own."""
        training = {module: module.training for module in self._stage.modules()}
        self._stage.eval()
        with torch.no_grad():
            outputs = self._call(
                weights, self._stage.run, 0, 0, *self._given_to_first_layer(inputs), buffers=buffers
            )
        for module, mode in training.items():
            # A module that its builder has set to evaluation (a frozen BatchNorm) stays there.
            module.training = mode
        return outputs

    def _call(
        self,
        weights: WeightBuffer,
        function: Callable[..., object],
        *args: object,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        tensors, tied = weights.leaves, self._tied
        if buffers:
            # Modules may share a buffer, too, and only its first name is given.
            tensors, tied = {**tensors, **buffers}, True
        result = functional_call(self._stage, tensors, (function, *args), tie_weights=tied)
        return tuple(result)

    def _given_to_first_layer(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copies, for a stage that changes its inputs in place; the first pass finds out whether it does."""
        if self._changes_inputs is False:
            return inputs
        return tuple(tensor.clone() for tensor in inputs)

    def _check_inputs(self, inputs: tuple[Tensor, ...], versions: list[int], given: tuple[Tensor, ...]) -> None:
        if self._changes_inputs is None:
            # A fresh clone is at version 0.
            self._changes_inputs = any(tensor._version for tensor in given)
        elif not self._changes_inputs and versions != [tensor._version for tensor in inputs]:
            raise ModelError(
                f"layer {self._stage.names[0]!r} changed its input in place, though it did not on the first "
                "minibatch: make the change out of place"
            )

    def _watch_for_derived(self, weights: WeightBuffer, inputs: tuple[Tensor, ...]) -> DerivedTensors | None:
        if self._looked_for_derived:
            return None
        self._looked_for_derived = True
        return DerivedTensors(weights=weights.pointer, inputs=inputs, layer=lambda: self._stage.running)

    def _watch_for_reads(self, done: ForwardPass, weights: WeightBuffer) -> ForwardReads | None:
        if self._looked_for_reads or done.substitution is None or done.weights is weights:
            return None
        self._looked_for_reads = True
        return ForwardReads(done.weights.pointer)

    @property
    def _some_layer(self) -> str:
        names = self._stage.names
        return f"layer {names[0]!r}" if len(names) == 1 else f"a layer from {names[0]!r} to {names[-1]!r}"

    def _report_derived(self, watch: DerivedTensors) -> None:
        for found in watch.found:
            what = f"layer {found.layer!r} keeps a tensor computed from its weights alone ({found.op})"
            if not self._keep_derived:
                raise ModelError(
                    f"{what}, so its backward pass cannot use other weights than its forward pass: set "
                    'pipeline.policy = "stash", or pipeline.derived = "keep_forward" to let this tensor '
                    "keep the forward's values"
                )
            self.notices.append(f"{what}: its backward pass uses the forward's values there")
