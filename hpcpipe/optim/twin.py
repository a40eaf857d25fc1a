"""The update rules in plain torch operations: the oracle for the compiled ones, and what runs where those cannot.

Each slot goes through the very operations of torch.optim's single-tensor SGD and Adam, in their order, so that
weights equal torch's to the bit; any floating dtype and device works.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hpcpipe.optim.flat import FlatLayout
from hpcpipe.optim.options import AdamOptions, RuleOptions, SgdOptions, state_names_for
from hpcpipe.optim.protocol import Output, check_outputs, check_step

__all__ = ["TorchRule", "make"]


class _Arithmetic(Protocol):
    """One rule's arithmetic on the views of one slot; `group` indexes the options."""

    def has_direction(self, group: int) -> bool: ...

    def update(
        self, gradient: Tensor, weight: Tensor, state: Sequence[Tensor], group: int, count: int, rate: float
    ) -> None:
        """Apply update number `count` (from 1) to `weight` and `state` in place."""
        ...

    def direction(self, state: Sequence[Tensor], group: int, count: int) -> tuple[Tensor, float]:
        """Return (d, divisor) with d/divisor the direction after `count` updates."""
        ...


class TorchRule:
    """An `UpdateRule` of plain torch operations, one slot at a time."""

    def __init__(
        self, layout: FlatLayout, arithmetic: _Arithmetic, group_count: int, names: tuple[str, ...]
    ) -> None:
        self._layout = layout
        self._arithmetic = arithmetic
        self._state_names = names
        self._has_direction = tuple(arithmetic.has_direction(group) for group in range(group_count))

    @property
    def state_names(self) -> tuple[str, ...]:
        return self._state_names

    @torch.no_grad()
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
        check_step(self._layout, len(self._has_direction), gradients, weights, next_weights, learning_rates)
        check_outputs(self._has_direction, weights, outputs)
        targets = self._layout.view_list(next_weights)
        states = self._states(state)
        for slot, gradient, old, new, *slot_states in zip(
            self._layout.slots, gradients, self._layout.view_list(weights), targets, *states, strict=True
        ):
            if new.data_ptr() != old.data_ptr():
                new.copy_(old)
            if gradient is None:
                continue
            if gradient.shape != new.shape:
                raise ValueError(
                    f"gradient of {slot.name!r} has shape {tuple(gradient.shape)}, expected {tuple(new.shape)}"
                )
            scaled = gradient.to(new.dtype)
            if grad_scale != 1.0:
                scaled = scaled * grad_scale
            self._arithmetic.update(scaled, new, slot_states, slot.group, step + 1, learning_rates[slot.group])
        self._write(targets, states, step + 1, outputs)

    @torch.no_grad()
    def predict(
        self, *, weights: Tensor, state: Mapping[str, Tensor], step: int, outputs: Sequence[Output]
    ) -> None:
        check_outputs(self._has_direction, weights, outputs)
        self._write(self._layout.view_list(weights), self._states(state), step, outputs)

    def _states(self, state: Mapping[str, Tensor]) -> list[list[Tensor]]:
        return [self._layout.view_list(state[name]) for name in self._state_names]

    def _write(
        self, weights: Sequence[Tensor], states: Sequence[Sequence[Tensor]], count: int, outputs: Sequence[Output]
    ) -> None:
        for output in outputs:
            buffers = self._layout.view_list(output.buffer)
            for slot, weight, buffer, *slot_states in zip(
                self._layout.slots, weights, buffers, *states, strict=True
            ):
                factor, coef = output.factor[slot.group], output.coef[slot.group]
                result = weight if factor == 1.0 else weight * factor
                if coef != 0.0 and count > 0:
                    direction, divisor = self._arithmetic.direction(slot_states, slot.group, count)
                    result = result.add(direction, alpha=-(coef / divisor))
                buffer.copy_(result)


class _Sgd:
    def __init__(self, groups: Sequence[SgdOptions], keep_velocity: bool) -> None:
        self._groups = groups
        self._keep_velocity = keep_velocity

    def has_direction(self, group: int) -> bool:
        return self._keep_velocity or self._groups[group].momentum != 0

    def update(
        self, gradient: Tensor, weight: Tensor, state: Sequence[Tensor], group: int, count: int, rate: float
    ) -> None:
        options = self._groups[group]
        if options.maximize:
            gradient = -gradient
        if options.weight_decay != 0:
            gradient = gradient.add(weight, alpha=options.weight_decay)
        if options.momentum != 0:
            (buffer,) = state
            if count == 1:
                buffer.copy_(gradient)
            else:
                buffer.mul_(options.momentum).add_(gradient, alpha=1 - options.dampening)
            gradient = gradient.add(buffer, alpha=options.momentum) if options.nesterov else buffer
        elif self._keep_velocity:
            state[0].copy_(gradient)
        weight.add_(gradient, alpha=-rate)

    def direction(self, state: Sequence[Tensor], group: int, count: int) -> tuple[Tensor, float]:
        return state[0], 1.0


class _Adam:
    def __init__(self, groups: Sequence[AdamOptions]) -> None:
        self._groups = groups

    def has_direction(self, group: int) -> bool:
        return True

    def update(
        self, gradient: Tensor, weight: Tensor, state: Sequence[Tensor], group: int, count: int, rate: float
    ) -> None:
        options = self._groups[group]
        exp_avg, exp_avg_sq = state
        beta1, beta2 = options.betas
        if options.maximize:
            gradient = -gradient
        if options.weight_decay != 0:
            if options.decoupled:
                weight.mul_(1 - rate * options.weight_decay)
            else:
                gradient = gradient.add(weight, alpha=options.weight_decay)
        exp_avg.lerp_(gradient, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weight.addcdiv_(exp_avg, self._denominator(exp_avg_sq, group, count), value=-(rate / (1 - beta1**count)))

    def direction(self, state: Sequence[Tensor], group: int, count: int) -> tuple[Tensor, float]:
        exp_avg, exp_avg_sq = state
        return exp_avg / self._denominator(exp_avg_sq, group, count), 1 - self._groups[group].betas[0] ** count

    def _denominator(self, exp_avg_sq: Tensor, group: int, count: int) -> Tensor:
        options = self._groups[group]
        correction = (1 - options.betas[1] ** count) ** 0.5
        denominator: Tensor = exp_avg_sq.sqrt() / correction
        return denominator.add_(options.eps)


def make(options: RuleOptions, layout: FlatLayout, *, keep_velocity: bool = False) -> TorchRule:
    """Build the torch twin for one `SgdOptions` or `AdamOptions` per parameter group."""
    adam = [group for group in options if isinstance(group, AdamOptions)]
    sgd = [group for group in options if isinstance(group, SgdOptions)]
    arithmetic = _Adam(adam) if adam else _Sgd(sgd, keep_velocity)
    return TorchRule(layout, arithmetic, len(options), state_names_for(options, keep_velocity=keep_velocity))
