"""Staleness policies by name, and how many forwards a stage runs ahead of its backwards.

It owns the words of PipeDream (SOSP'19, section 3.3; weight stashing, vertical sync) and of SpecTrain
(arXiv 1809.02839); which version a pass reads by them is worked out in `reads`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class Policy(Enum):
    """What an asynchronous stage does about weights that change between F(j) and B(j).

    Rounds are counted in the comments below, where a round of a stage is one update's minibatches: one minibatch
    for a stage that is not replicated, so that there version j is what sequential SGD would use for minibatch j.
    """

    STASH = "stash"
    """F and B of round m both use the version made by m - w rounds: the gradient of an old point, delay w."""
    VERTICAL_SYNC = "vertical_sync"
    """Both use the version that minibatch j found at stage 0, on every stage: one consistent old model."""
    NONE = "none"
    """F uses the version made by m - w rounds, B the newest: not a gradient of anything; the baseline."""
    SPECTRAIN = "spectrain"
    """Both use weights predicted from the newest version they find."""


class Target(Enum):
    """The version that SpecTrain's predictions aim at."""

    ROUND_TRIP = "round_trip"
    """The stage's version when B(j) starts at stage 0 (the paper)."""
    LOCAL = "local"
    """The version of the minibatch's own round, what sequential SGD would use (PipeOptim's horizon)."""
    DAMPED = "damped"
    """As local, but only as far as momentum alone would still carry the weights."""


def warm_up(stage: int, replicas: Sequence[int]) -> int:
    """w of each replica of `stage`: forwards that it runs before the one that its first backward follows.

    `replicas` are the numbers of replicas of all stages; N-1-k for stage k of N that are not replicated. PipeDream
    (SOSP'19, section 3.2): NOAM, the minibatches admitted per replica of stage 0, is 1 more than its w.
    """
    return (sum(replicas[stage:]) - 1) // replicas[stage]


def keeps_forward_weights(policy: Policy) -> bool:
    """Whether B(j) reads the very weights that F(j) read."""
    return policy in (Policy.STASH, Policy.VERTICAL_SYNC)
