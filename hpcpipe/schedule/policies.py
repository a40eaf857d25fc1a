"""Staleness policies: which weight version the forward and the backward pass of a minibatch read.

Pure integer arithmetic on minibatch numbers, as in section 3.3 of PipeDream (SOSP'19; weight stashing, vertical
sync) and in SpecTrain (arXiv 1809.02839). Versions count updates, so version j is what sequential SGD would use
for minibatch j.
"""

from __future__ import annotations

from enum import Enum


class Policy(Enum):
    """What an asynchronous stage does about weights that change between F(j) and B(j)."""

    STASH = "stash"
    """F(j) and B(j) both use version j - w: the gradient of an old point, delay w."""
    VERTICAL_SYNC = "vertical_sync"
    """Both use version j - (N-1) on every stage: one consistent old model."""
    NONE = "none"
    """F(j) uses version j - w, B(j) the newest: not a gradient of anything; the baseline."""
    SPECTRAIN = "spectrain"
    """Both use weights predicted from the newest version they find."""


class Target(Enum):
    """The version that SpecTrain's predictions aim at."""

    ROUND_TRIP = "round_trip"
    """The stage's version when B(j) starts at stage 0 (the paper)."""
    LOCAL = "local"
    """Version j itself, what sequential SGD would use (PipeOptim's horizon)."""
    DAMPED = "damped"
    """As local, but only as far as momentum alone would still carry the weights."""


def warm_up(stage: int, stages: int) -> int:
    """w_k = N-1-k: forwards that stage k runs before its first backward."""
    return stages - 1 - stage


def forward_delay(policy: Policy, *, stage: int, stages: int) -> int:
    """In the steady state F(j) reads version j - delay; in the fill, the one that the fill began with."""
    return stages - 1 if policy is Policy.VERTICAL_SYNC else warm_up(stage, stages)


def backward_delay(policy: Policy, *, stage: int, stages: int) -> int:
    """The same for B(j): the forward's own delay where its weights are kept, 0 (the newest) otherwise."""
    return forward_delay(policy, stage=stage, stages=stages) if keeps_forward_weights(policy) else 0


def keeps_forward_weights(policy: Policy) -> bool:
    """Whether B(j) reads the very weights that F(j) read."""
    return policy in (Policy.STASH, Policy.VERTICAL_SYNC)
