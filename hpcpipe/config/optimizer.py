"""The sections optimizer and lr_schedule: one class for each rule, so that a key of another rule is refused.

The meaning of the options is torch.optim's. The arithmetic is elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field, Tag, model_validator

from hpcpipe.config.base import (
    Count,
    Fraction,
    Mistakes,
    NotNegative,
    Positive,
    Section,
    Whole,
    chosen_by_name,
    shown,
)
from hpcpipe.errors import ConfigError

Momentum = Annotated[float, Field(ge=0.0, lt=1.0)]


class ParameterGroup(Section):
    """Parameters with hyper-parameters of their own."""

    match: Annotated[str, Field(min_length=1)]
    """Shell pattern over the full parameter name, such as "*.bias" or "block1.*"; the first that fits wins."""
    lr_scale: NotNegative = 1.0
    """Multiplies the learning rate."""
    weight_decay: NotNegative | None = None
    """Replaces the optimizer's weight_decay; the same when left out."""


def group_of(parameter: str, groups: Sequence[ParameterGroup]) -> int:
    """Return the group of a full parameter name: 0 for the optimizer's own values, i + 1 for `groups[i]`."""
    return next((i + 1 for i, group in enumerate(groups) if fnmatchcase(parameter, group.match)), 0)


def check_groups(parameters: Sequence[str], groups: Sequence[ParameterGroup]) -> None:
    """Raise ConfigError for a group that takes none of these full parameter names: its pattern is mistyped, or an
    earlier group takes all that fit.
    """
    taken = {group_of(parameter, groups) for parameter in parameters}
    for place, group in enumerate(groups):
        if place + 1 in taken:
            continue
        fitting = [parameter for parameter in parameters if fnmatchcase(parameter, group.match)]
        why = "an earlier group takes every parameter that fits" if fitting else "no parameter of the model fits"
        names = f"the first parameters are {', '.join(parameters[:3])}"
        raise ConfigError(
            f"optimizer.groups[{place}].match: {why} {shown(group.match)}; "
            f"change the pattern or the order ({names})"
        )


class _Optimizer(Section):
    lr: NotNegative
    """Learning rate before the schedule."""
    weight_decay: NotNegative = 0.0
    """L2 term added to the gradient for sgd, decoupled decay for adamw."""
    maximize: bool = False
    """Climb instead of descending."""
    backend: Literal["auto", "native", "torch"] = "auto"
    """The compiled update or plain torch; auto takes the compiled one where it is built."""
    clip_norm: Positive | None = None
    """Largest norm of a gradient: global in synchronous schedules, per stage in the asynchronous one."""
    on_nonfinite: Literal["stop", "continue"] = "stop"
    """What to do when the loss, or at a checkpoint a weight, is NaN or infinite: end the run, or let it pass."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with hyper-parameters of their own."""


class SgdConfig(_Optimizer):
    """[optimizer] for torch.optim.SGD's rule."""

    name: Literal["sgd"] = "sgd"
    """Which update rule."""
    momentum: Momentum = 0.9
    """Decay of the momentum buffer."""
    dampening: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of the gradient that does not enter the momentum buffer."""
    nesterov: bool = False
    """Nesterov momentum."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> SgdConfig:
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise Mistakes(
                ("nesterov", "needs momentum above 0 and dampening = 0; change those or remove nesterov")
            )
        return self


class AdamwConfig(_Optimizer):
    """[optimizer] for torch.optim.AdamW's rule."""

    name: Literal["adamw"] = "adamw"
    """Which update rule."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay of the first and the second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""


class _Rate(Section):
    warmup: Whole = 0
    """Updates over which the learning rate rises linearly to its value."""


class ConstantRate(_Rate):
    """[lr_schedule] that keeps the learning rate."""

    name: Literal["constant"] = "constant"
    """Which schedule."""


class StepRate(_Rate):
    """[lr_schedule] that multiplies the learning rate by gamma at regular intervals."""

    name: Literal["step"] = "step"
    """Which schedule."""
    step_every: Count
    """Updates between two steps."""
    gamma: Positive = 0.1
    """Factor at each step."""


class _Towards(_Rate):
    total: Count | None = None
    """Update at which the end value is reached; all updates of the run when left out."""

    @model_validator(mode="after")
    def _warmup_ends_in_time(self) -> _Towards:
        if self.total is not None and self.warmup >= self.total:
            raise Mistakes(("warmup", f"must be below total ({self.total}), got {self.warmup}"))
        return self


class CosineRate(_Towards):
    """[lr_schedule] that falls along half a cosine."""

    name: Literal["cosine"] = "cosine"
    """Which schedule."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end."""


class LinearRate(_Towards):
    """[lr_schedule] that falls along a line."""

    name: Literal["linear"] = "linear"
    """Which schedule."""
    end_factor: NotNegative = 0.0
    """Learning rate at the end as a share of the optimizer's."""


OptimizerConfig = Annotated[
    Annotated[SgdConfig, Tag("sgd")] | Annotated[AdamwConfig, Tag("adamw")],
    chosen_by_name("sgd"),
]
RateConfig = Annotated[
    Annotated[ConstantRate, Tag("constant")]
    | Annotated[StepRate, Tag("step")]
    | Annotated[CosineRate, Tag("cosine")]
    | Annotated[LinearRate, Tag("linear")],
    chosen_by_name("constant"),
]
