"""The learning rate as a pure function of the minibatch whose update it is for.

It holds no counter, so that prediction can ask for coming rates and a restart needs nothing but the index. An
optional linear warm-up comes first; the decay then runs over the minibatches that are left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from hpcpipe.errors import ConfigError

__all__ = ["LearningRate", "ScheduleName"]

ScheduleName = Literal["constant", "step", "cosine", "linear"]


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Learning rate of update `index` (0-based): `LearningRate(base=0.1, schedule="cosine", total=1000)(17)`.

    An update is numbered by its minibatch, or by the last one where several share it.

    With i = index - warmup and n = total - warmup:
    constant: base; step: base · gamma^⌊i/every⌋; cosine: minimum + (base - minimum) · (1 + cos(π·i/n))/2;
    linear: base · (1 + (end_factor - 1) · i/n). From `total` on, cosine and linear keep their last value.
    During warm-up: base · (index + 1)/warmup. Each is the closed form of its torch.optim.lr_scheduler namesake.

    Raises:
        ConfigError: a value out of its range, or one that the schedule needs and that is missing.
    """

    base: float
    """Learning rate after warm-up, before decay; 0 or more."""
    schedule: ScheduleName = "constant"
    warmup: int = 0
    """Updates of linear warm-up; the last one of them is at `base`."""
    total: int | None = None
    """cosine and linear: index of the first update at the final rate, warm-up included."""
    minimum: float = 0.0
    """cosine: the final rate."""
    end_factor: float = 0.0
    """linear: final rate over `base`."""
    gamma: float = 0.1
    """step: factor of each step."""
    every: int | None = None
    """step: updates between two steps."""

    def __post_init__(self) -> None:
        if self.schedule not in get_args(ScheduleName):
            names = ", ".join(get_args(ScheduleName))
            raise ConfigError(f"learning-rate schedule {self.schedule!r} is unknown; choose one of {names}")
        for name in ("base", "minimum", "end_factor", "gamma"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"learning-rate schedule: {name} must be a finite number of 0 or more, got {value}"
                )
        if self.warmup < 0:
            raise ConfigError(f"learning-rate schedule: warmup must be 0 or more updates, got {self.warmup}")
        if self.schedule == "step" and (self.every is None or self.every < 1):
            raise ConfigError(
                f"learning-rate schedule 'step' needs every = 1 or more updates between steps, got {self.every}"
            )
        if self.schedule in ("cosine", "linear") and (self.total is None or self.total <= self.warmup):
            raise ConfigError(
                f"learning-rate schedule {self.schedule!r} needs total, the number of updates it runs over, "
                f"above warmup = {self.warmup}; got {self.total}"
            )

    def __call__(self, index: int) -> float:
        """Return the rate of the update with this 0-based index."""
        if index < 0:
            raise ValueError(f"an update index is 0 or more, got {index}")
        if index < self.warmup:
            return self.base * ((index + 1) / self.warmup)
        i = index - self.warmup
        if self.schedule == "step":
            assert self.every is not None
            return float(self.base * self.gamma ** (i // self.every))
        if self.schedule in ("cosine", "linear"):
            assert self.total is not None
            part = min(1.0, i / (self.total - self.warmup))
            if self.schedule == "cosine":
                return self.minimum + (self.base - self.minimum) * (1.0 + math.cos(math.pi * part)) / 2.0
            return self.base * (1.0 + (self.end_factor - 1.0) * part)
        return self.base

    def coming(self, updates: Iterable[int]) -> tuple[float, ...]:
        """Return the rates of these updates, as prediction needs those of the next ones."""
        return tuple(self(index) for index in updates)
