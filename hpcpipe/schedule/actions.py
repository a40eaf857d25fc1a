"""The vocabulary of schedules: one `Action` is one thing that one replica of one stage does.

A schedule is data: for each replica of each stage, a list of actions. The engine executes that list, the verifier
proves properties of it, the simulator times it, and the terminal drawing shows it; no other module knows what
1F1B is. This module owns only the words (PipeDream, SOSP'19, section 3, and SpecTrain, arXiv 1809.02839), never
an order.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Place(NamedTuple):
    """One replica of one stage: what one rank executes, unless a rank owns several stages."""

    stage: int
    replica: int = 0

    def __str__(self) -> str:
        return f"stage {self.stage} replica {self.replica}" if self.replica else f"stage {self.stage}"


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
    REDUCE = "R"
    """All-reduce the gradients of a round among the replicas of a stage, directly before the round's update."""
    AVERAGE = "A"
    """Average the buffers of a replicated stage over its replicas, before its evaluation passes."""
    COLLECT = "C"
    """Collect the evaluation's figures from the replicas of the last stage, behind their evaluation passes."""

    # Members are compared by identity, and they are looked up in sets and dictionaries for every action.
    __hash__ = object.__hash__


RECEIVES = {
    Op.RECEIVE_ACTIVATION: Op.SEND_ACTIVATION,
    Op.RECEIVE_GRADIENT: Op.SEND_GRADIENT,
    Op.RECEIVE_EVALUATION: Op.SEND_EVALUATION,
}
"""Each receive with the send it is matched by."""
SENDS = frozenset(RECEIVES.values())
COMPUTES = frozenset({Op.FORWARD, Op.BACKWARD, Op.EVALUATE})
"""The actions that take time on the unit clock."""
BARRIERS = frozenset({Op.REDUCE, Op.AVERAGE, Op.COLLECT})
"""The actions that all replicas of a stage do together; they occur only where a stage has several."""
EVALUATION = frozenset({Op.RECEIVE_EVALUATION, Op.EVALUATE, Op.SEND_EVALUATION, Op.AVERAGE, Op.COLLECT})
"""The actions of which evaluations consist."""
_TOWARDS_THE_LOSS = frozenset({Op.SEND_ACTIVATION, Op.SEND_EVALUATION, Op.RECEIVE_GRADIENT})


class Role(Enum):
    """Which pass of a minibatch a prediction is for."""

    FORWARD = "forward"
    BACKWARD = "backward"

    __hash__ = object.__hash__


class Prediction(NamedTuple):
    """Weights to predict from version `version`, `distance` updates ahead, for one pass of one minibatch."""

    role: Role
    minibatch: int
    version: int
    distance: int


class Action(NamedTuple):
    """One thing that one replica of one stage does.

    Version v of a stage is the weights that hold the updates of all minibatches below v. `version` is the one that
    F, B, E or P read, and the one that U makes. `distance` is how many updates ahead of `version` the weights used
    by F or B are predicted (0: true weights). `predictions` are made by U in the same pass over memory, or by P
    alone. `releases` are the versions that nothing at this replica reads after this action. `minibatch` of U and R
    is the last one of the round that they end; of the actions of an evaluation it is the one whose update came
    before, and their `microbatch` counts the evaluation batches. `peer_replica` is the replica at the other end of
    a send or a receive.
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
    peer_replica: int = 0

    @property
    def place(self) -> Place:
        """Where it is done."""
        return Place(self.stage, self.replica)

    @property
    def peer(self) -> int:
        """The stage at the other end of a send or a receive."""
        return self.stage + 1 if self.op in _TOWARDS_THE_LOSS else self.stage - 1

    @property
    def peer_place(self) -> Place:
        """The other end of a send or a receive."""
        return Place(self.peer, self.peer_replica)

    @property
    def words(self) -> str:
        """As people say it: "F of minibatch 71", "receive activation of minibatch 71"."""
        what = self.op.value if self.op.value.isalpha() else self.op.name.lower().replace("_", " ")
        return f"{what} of minibatch {self.minibatch}"

    def __str__(self) -> str:
        micro = f".{self.microbatch}" if self.microbatch else ""
        return f"{self.op.value}({self.minibatch}{micro}) at {self.place}"
