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


def forward_version(policy: Policy, *, stage: int, stages: int, minibatch: int, first: int) -> int:
    """Version that F(minibatch) reads; `first` is the minibatch that filled the pipeline last."""
    delay = stages - 1 if policy is Policy.VERTICAL_SYNC else warm_up(stage, stages)
    return max(first, minibatch - delay)


def backward_version(policy: Policy, *, stage: int, stages: int, minibatch: int, first: int) -> int:
    """Version that B(minibatch) reads: the forward's own where it is kept, the newest otherwise."""
    if policy in (Policy.STASH, Policy.VERTICAL_SYNC):
        return forward_version(policy, stage=stage, stages=stages, minibatch=minibatch, first=first)
    return minibatch


def keeps_forward_weights(policy: Policy) -> bool:
    """Whether B(j) reads the very weights that F(j) read."""
    return policy in (Policy.STASH, Policy.VERTICAL_SYNC)
