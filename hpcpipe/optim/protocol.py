"""The protocol of an update rule, and the checks of arguments that its implementations share.

A rule reads weight version t and writes version t+1 elsewhere or in place, and predictions in the same pass. It
never owns a buffer, never counts steps, and never decides a distance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hpcpipe.optim.flat import FlatLayout

__all__ = ["MAX_OUTPUTS", "Output", "UpdateRule", "check_outputs", "check_step"]

MAX_OUTPUTS = 3


@dataclass(frozen=True, kw_only=True)
class Output:
    """A buffer written in the same pass as the update: buffer = factor · W - coef · direction.

    W is the newest version, the direction what the last update applied per unit of learning rate: SGD's momentum
    buffer, Adam's bias-corrected m̂/(√v̂ + eps). factor = 1 and coef = 0 copy W bit for bit, or round it to bf16.
    """

    buffer: Tensor
    """Flat, in the dtype of the weights or bfloat16."""
    factor: tuple[float, ...]
    """One per parameter group."""
    coef: tuple[float, ...]
    """One per parameter group."""


class UpdateRule(Protocol):
    """An update rule over flat buffers of one `FlatLayout`."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the flat state tensors, e.g. ("momentum_buffer",) or ("exp_avg", "exp_avg_sq")."""
        ...

    def step(
        self,
        *,
        gradients: Sequence[Tensor | None],
        weights: Tensor,
        next_weights: Tensor,
        state: Mapping[str, Tensor],
        step: int,
        learning_rates: tuple[float, ...],
        grad_scale: float = 1.0,
        outputs: Sequence[Output] = (),
    ) -> None:
        """Apply one update.

        Args:
            gradients: one per slot, of any strides; None leaves that slot's weights and state as they are. Another
                floating dtype is converted to that of the weights first.
            weights: version t, flat; only read.
            next_weights: version t+1, flat; `weights` itself for an update in place, else memory apart from it.
            state: the flat tensors of `state_names`, in the dtype of the weights, updated in place.
            step: updates applied before this one. At 0, SGD's momentum buffer becomes the gradient.
            learning_rates: one per parameter group.
            grad_scale: factor of every gradient, for clipping; 1.0 changes no bit.
            outputs: at most three, computed from the new weights and the new state.

        Raises:
            ValueError: lengths, shapes or dtypes that do not fit the layout, or a direction that the rule does not
                keep (SGD without momentum, built without `keep_velocity`).
        """
        ...

    def predict(
        self, *, weights: Tensor, state: Mapping[str, Tensor], step: int, outputs: Sequence[Output]
    ) -> None:
        """Write the outputs alone; `step` counts the updates applied so far, and at 0 the direction is 0."""
        ...


def check_step(
    layout: FlatLayout,
    group_count: int,
    gradients: Sequence[Tensor | None],
    weights: Tensor,
    next_weights: Tensor,
    learning_rates: tuple[float, ...],
) -> None:
    """Raise ValueError where the arguments of a step do not fit the layout (gradient shapes excepted)."""
    if len(gradients) != len(layout.slots):
        raise ValueError(f"expected {len(layout.slots)} gradients (None allowed), got {len(gradients)}")
    if len(learning_rates) != group_count:
        raise ValueError(f"expected {group_count} learning rates, one per group, got {len(learning_rates)}")
    if next_weights.dtype != weights.dtype:
        raise ValueError(f"next_weights is {next_weights.dtype}, weights is {weights.dtype}")


def check_outputs(group_has_direction: Sequence[bool], weights: Tensor, outputs: Sequence[Output]) -> None:
    """Raise ValueError where outputs cannot be computed."""
    if len(outputs) > MAX_OUTPUTS:
        raise ValueError(f"at most {MAX_OUTPUTS} outputs per pass, got {len(outputs)}")
    groups = len(group_has_direction)
    for output in outputs:
        if output.buffer.dtype not in (weights.dtype, torch.bfloat16):
            raise ValueError(f"an output is {weights.dtype} or torch.bfloat16, got {output.buffer.dtype}")
        if len(output.factor) != groups or len(output.coef) != groups:
            raise ValueError(f"an output needs {groups} factors and coefs, one per group")
        for has_direction, coef in zip(group_has_direction, output.coef, strict=True):
            if coef != 0 and not has_direction:
                raise ValueError(
                    "SGD without momentum has no direction to predict along: build it with keep_velocity=True"
                )
