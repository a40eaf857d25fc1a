"""The comparison with the replay notices every mistake that public implementations of prediction have made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle.cases import NETS, case
from tests.oracle.replay import Recurrence, replay
from tests.oracle.runs import assert_same, configured, run_alone

STAGES = 8


class WrongSign(Recurrence):
    """Predicts backwards."""

    sign = -1.0


class OneTooFar(Recurrence):
    """s + 1 in both passes (PipeOptim's code in the forward)."""

    def aim(self, stage: int, j: int) -> int:
        return super().aim(stage, j) + 1


class ReversedRank(Recurrence):
    """Counts the stages from the loss."""

    def aim(self, stage: int, j: int) -> int:
        return super().aim(self.stages - 1 - stage, j)


class BackwardAsForward(Recurrence):
    """Uses the forward's distance in the backward."""

    def backward_distance(self, stage: int, j: int) -> int:
        return self.forward_distance(stage, j)


class OnlyForward(Recurrence):
    """Leaves the backward on the weights it finds."""

    def backward_distance(self, stage: int, j: int) -> int:
        return 0


class SteadyEverywhere(Recurrence):
    """Takes the distances of the steady state in the drain as well, where there are fewer updates to come."""

    def forward_distance(self, stage: int, j: int) -> int:
        return stage // 2 + self.stages - 1 - stage


class VersionBefore(Recurrence):
    """Runs the forward on the version before."""

    def forward_version(self, stage: int, j: int) -> int:
        return max(self.first, super().forward_version(stage, j) - 1)


class NewestInBackward(Recurrence):
    """Forgets the stash."""

    def backward_version(self, stage: int, j: int) -> int:
        return j


MUTATIONS = [
    (policy, mutation)
    for policies, mutations in (
        (("round_trip", "local", "damped"), (WrongSign, OneTooFar, BackwardAsForward)),
        (("round_trip",), (ReversedRank, OnlyForward, SteadyEverywhere)),
        (("stash", "vertical_sync", "none"), (VersionBefore,)),
        (("stash", "vertical_sync"), (NewestInBackward,)),
    )
    for policy in policies
    for mutation in mutations
]


@pytest.fixture(scope="module")
def runs() -> dict[str, object]:
    return {}


@pytest.mark.parametrize(("policy", "mutation"), MUTATIONS)
def test_a_mutated_recurrence_gives_other_weights(
    policy: str, mutation: type[Recurrence], runs: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory: Path = tmp_path_factory.getbasetemp() / f"mutations-{policy}"
    config = configured(directory, **case(policy, STAGES, NETS["mlp"]))
    if policy not in runs:
        runs[policy] = run_alone(config)
        assert_same(runs[policy], replay(config, STAGES))
    with pytest.raises(AssertionError):
        assert_same(runs[policy], replay(config, STAGES, mutation))
