"""The vocabulary of schedules: one `Action` is one thing that one stage does.

A schedule is data: for each stage, a list of actions. The engine executes that list, the verifier proves
properties of it, and the terminal drawing shows it; no other module knows what 1F1B is. This module owns only
the words (PipeDream, SOSP'19, section 3, and SpecTrain, arXiv 1809.02839), never an order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Op(Enum):
    """What an action does. The value is the mark used in drawings and error messages."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"
    PREDICT = "P"
    """Predict weights without an update: where no update precedes the pass that needs them."""
    EVALUATE = "E"
    RECEIVE_ACTIVATION = "<F"
    SEND_ACTIVATION = "F>"
    RECEIVE_GRADIENT = "<B"
    SEND_GRADIENT = "B>"
    RECEIVE_EVALUATION = "<E"
    SEND_EVALUATION = "E>"


RECEIVES = {
    Op.RECEIVE_ACTIVATION: Op.SEND_ACTIVATION,
    Op.RECEIVE_GRADIENT: Op.SEND_GRADIENT,
    Op.RECEIVE_EVALUATION: Op.SEND_EVALUATION,
}
"""Each receive with the send it is matched by."""
SENDS = frozenset(RECEIVES.values())
COMPUTES = frozenset({Op.FORWARD, Op.BACKWARD, Op.EVALUATE})
"""The actions that take time on the unit clock."""


class Role(Enum):
    """Which pass of a minibatch a prediction is for."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Weights to predict from version `version`, `distance` updates ahead, for one pass of one minibatch."""

    role: Role
    minibatch: int
    version: int
    distance: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One thing that one stage does.

    `version` is the number of updates applied to the weights that F, B, E or P read, and the version that U makes.
    `distance` is how many updates ahead of `version` the weights used by F or B are predicted (0: true weights).
    `predictions` are made by U in the same pass over memory, or by P alone. `releases` are the versions that
    nothing reads after this action. For E and its messages, `minibatch` is the one whose update came before and
    `microbatch` counts the evaluation batches.
    """

    op: Op
    stage: int
    minibatch: int
    microbatch: int = 0
    replica: int = 0
    version: int = 0
    distance: int = 0
    predictions: tuple[Prediction, ...] = ()
    releases: tuple[int, ...] = ()

    @property
    def peer(self) -> int:
        """The stage at the other end of a send or a receive."""
        towards_the_loss = {Op.SEND_ACTIVATION, Op.SEND_EVALUATION, Op.RECEIVE_GRADIENT}
        return self.stage + 1 if self.op in towards_the_loss else self.stage - 1

    def __str__(self) -> str:
        micro = f".{self.microbatch}" if self.microbatch else ""
        return f"{self.op.value}({self.minibatch}{micro}) at stage {self.stage}"
