"""Options of the update rules, per parameter group, with the meaning that torch.optim gives them.

It checks ranges and answers what a prediction needs to know; it holds no arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpcpipe.errors import ConfigError

__all__ = ["AdamOptions", "RuleOptions", "SgdOptions", "state_names_for"]


@dataclass(frozen=True, kw_only=True)
class SgdOptions:
    """SGD for one parameter group, each option with torch.optim.SGD's meaning.

    Raises:
        ConfigError: a value out of range, or Nesterov without momentum or with dampening.
    """

    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        _require("sgd", "momentum", self.momentum, self.momentum >= 0)
        _require("sgd", "dampening", self.dampening, True)
        _require("sgd", "weight_decay", self.weight_decay, self.weight_decay >= 0)
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ConfigError(
                "sgd: nesterov needs momentum above 0 and dampening 0, "
                f"got momentum = {self.momentum} and dampening = {self.dampening}"
            )

    @property
    def decoupled_weight_decay(self) -> float:
        """Decay that a prediction applies as a factor; SGD's decay is part of the gradient, so 0."""
        return 0.0

    @property
    def damping(self) -> float:
        """Factor by which the direction shrinks from one update to the next when gradients are zero."""
        return self.momentum


@dataclass(frozen=True, kw_only=True)
class AdamOptions:
    """Adam for one parameter group; `decoupled` makes it AdamW (torch.optim.AdamW), else torch.optim.Adam.

    Raises:
        ConfigError: a value out of range.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decoupled: bool = True
    maximize: bool = False

    def __post_init__(self) -> None:
        for name, beta in zip(("betas[0]", "betas[1]"), self.betas, strict=True):
            _require("adam", name, beta, 0 <= beta < 1)
        _require("adam", "eps", self.eps, self.eps >= 0)
        _require("adam", "weight_decay", self.weight_decay, self.weight_decay >= 0)

    @property
    def decoupled_weight_decay(self) -> float:
        """Decay that a prediction applies as a factor."""
        return self.weight_decay if self.decoupled else 0.0

    @property
    def damping(self) -> float:
        """Factor by which the direction shrinks from one update to the next when gradients are zero."""
        return self.betas[0]


RuleOptions = Sequence[SgdOptions] | Sequence[AdamOptions]
"""One entry per parameter group, all of the same kind."""


def state_names_for(options: RuleOptions, *, keep_velocity: bool) -> tuple[str, ...]:
    """Return the names of the state tensors that a rule with these options keeps."""
    if isinstance(options[0], AdamOptions):
        return ("exp_avg", "exp_avg_sq")
    if keep_velocity or any(isinstance(group, SgdOptions) and group.momentum != 0 for group in options):
        return ("momentum_buffer",)
    return ()


def _require(rule: str, name: str, value: float, in_range: bool) -> None:
    if not (math.isfinite(value) and in_range):
        raise ConfigError(f"{rule}: {name} = {value} is out of range")
