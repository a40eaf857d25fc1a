"""Proves properties of the action lists that the ranks of a run execute, and of every cut through them.

Messages and deadlock are proved by dry runs, versions and predictions by keeping each stage's books, distances by
counting updates on the full unit clock of all stages (SpecTrain, arXiv 1809.02839, section 3.3; the generator
looks them up in a folded one). It reads what generators made and never makes an action itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hpcpipe.errors import ConfigError
from hpcpipe.schedule.account import StageProof, account, alone
from hpcpipe.schedule.actions import COMPUTES, Action, Op
from hpcpipe.schedule.cut import StageCut, cut_at
from hpcpipe.schedule.dryrun import Channel, ScheduleError, Traffic, by_stage, dry_run
from hpcpipe.schedule.policies import Target
from hpcpipe.schedule.program import Schedule
from hpcpipe.schedule.ranks import rank_actions
from hpcpipe.schedule.rings import depths_of, ring_depths

__all__ = ["Proof", "ScheduleError", "StageProof", "prove", "ring_depths", "verify"]

_CUT_BUDGET = 300_000
"""Actions regenerated to check cuts: a few seconds."""
_EVALUATING = frozenset({Op.EVALUATE, Op.SEND_EVALUATION, Op.RECEIVE_EVALUATION})


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was proved of a schedule, with all figures.

    `messages` and `ring_depths` are per channel (source stage, destination stage, kind). `cuts` are the
    minibatches k whose cut "after U(k) on every stage" was checked.
    """

    schedule: Schedule
    ranks: tuple[tuple[int, ...], ...]
    stages: tuple[StageProof, ...]
    messages: dict[Channel, int]
    ring_depths: dict[Channel, int]
    cuts: tuple[int, ...] = ()

    @property
    def actions(self) -> int:
        """Number of actions of all ranks together."""
        return sum(stage.actions for stage in self.stages)

    @property
    def minibatches(self) -> int:
        """Number of minibatches that go through the pipeline."""
        return self.schedule.minibatches - self.schedule.first


def verify(schedule: Schedule, ranks: Sequence[Sequence[int]] | None = None) -> Proof:
    """Generate the lists of all ranks, prove them, and check the cuts.

    `ranks` are the stages of each rank, one stage each by default. All cuts of a short run are checked, and evenly
    spread ones of a run for which that would take long. Raises ScheduleError for the first fault, ConfigError for
    ranks that do not share out the stages.
    """
    groups = _groups(schedule, ranks)
    lists = [list(rank_actions(schedule, stages)) for stages in groups]
    proof = prove(schedule, lists)
    cuts = _Cuts(schedule, groups, by_stage(lists, schedule.stages), proof.ring_depths)
    checked = _spread(schedule, proof.actions)
    for minibatch in checked:
        cuts.check(minibatch)
    return replace(proof, ranks=groups, cuts=checked)


def prove(schedule: Schedule, lists: Sequence[Sequence[Action]]) -> Proof:
    """Prove that complete lists, one a rank, are right for `schedule`. Raises ScheduleError for a fault."""
    stages = by_stage(lists, schedule.stages)
    traffic = dry_run(lists)
    depths = depths_of(traffic)
    dry_run(lists, depths=depths)
    # An evaluation takes time but must not change what is learnt, so distances are counted as if there were none.
    clock = dry_run([[action for action in actions if action.op not in _EVALUATING] for actions in stages])
    proofs = tuple(
        account(schedule, stage, actions, _aim(schedule, clock, stage)) for stage, actions in enumerate(stages)
    )
    return Proof(
        schedule=schedule,
        ranks=tuple(tuple(sorted({action.stage for action in actions})) for actions in lists),
        stages=proofs,
        messages=traffic.messages,
        ring_depths=depths,
    )


def _aim(schedule: Schedule, clock: Traffic, stage: int) -> Callable[[int], int]:
    """The version that both passes of a minibatch aim at, counted on the clock of a dry run of all stages."""
    ends = clock.update_ends.get(stage, [])

    def counted(minibatch: int) -> int:
        returned = clock.start.get((Op.BACKWARD, 0, minibatch, 0))
        if returned is None:
            raise ScheduleError(f"stage 0 never does B({minibatch})", stage=0)
        return schedule.first + bisect_left(ends, returned)

    return counted if schedule.target is Target.ROUND_TRIP else int


def _groups(schedule: Schedule, ranks: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    if ranks is None:
        return tuple((stage,) for stage in range(schedule.stages))
    groups = tuple(tuple(stages) for stages in ranks)
    owned = sorted(stage for stages in groups for stage in stages)
    if owned != list(range(schedule.stages)) or not all(groups):
        raise ConfigError(f"ranks must own each of the stages 0 to {schedule.stages - 1} once, got {list(groups)}")
    return groups


def _spread(schedule: Schedule, actions: int) -> tuple[int, ...]:
    """The cuts to check: as many as the budget allows, from the first to the last."""
    cuts = range(schedule.first, schedule.minibatches)
    # A cut has half of the run behind it on average.
    affordable = max(2, 2 * _CUT_BUDGET // max(1, actions))
    if len(cuts) <= affordable:
        return tuple(cuts)
    return tuple(cuts[round(i * (len(cuts) - 1) / (affordable - 1))] for i in range(affordable))


class _Cuts:
    """Checks what a run resumed at a cut would do against what the unbroken run does behind it."""

    def __init__(
        self,
        schedule: Schedule,
        groups: Sequence[Sequence[int]],
        stages: list[list[Action]],
        depths: dict[Channel, int],
    ) -> None:
        self._schedule = schedule
        self._groups = groups
        self._stages = stages
        self._depths = depths
        self._at = [
            {(action.op, action.minibatch): index for index, action in enumerate(actions)} for actions in stages
        ]

    def check(self, minibatch: int) -> None:
        """Raise ScheduleError if the cut after U(`minibatch`) is no exact place to resume from."""
        cuts = [cut_at(self._schedule, stage, minibatch) for stage in range(self._schedule.stages)]
        for cut in cuts:
            self._check_state(cut)
        sent = [
            self._stages[cut.stage][self._at[cut.stage][Op.SEND_ACTIVATION, j]] for cut in cuts for j in cut.resend
        ]
        lists = []
        for stages in self._groups:
            again = [action for action in sent if action.stage in stages]
            lists.append([*again, *rank_actions(self._schedule, stages, after=minibatch)])
        dry_run(lists, depths=self._depths)
        for cut, actions in zip(cuts, by_stage(lists, self._schedule.stages), strict=True):
            self._check_tail(cut, actions[len(cut.resend) :])

    def _check_state(self, cut: StageCut) -> None:
        """In flight is what went forward before the cut and backward behind it; likewise versions and messages."""
        stage, k = cut.stage, cut.minibatch
        behind = self._at[stage][Op.UPDATE, k]
        in_flight = []
        for j in range(k + 1, self._schedule.minibatches):
            if self._at[stage][Op.FORWARD, j] > behind:
                break
            in_flight.append(j)
        read = {a.version for a in self._stages[stage][behind + 1 :] if a.op in COMPUTES or a.op is Op.PREDICT}
        versions = (*sorted(version for version in read if version <= k), k + 1)
        resend: list[int] = []
        if stage + 1 < self._schedule.stages:
            following = self._at[stage + 1]
            consumed = following[Op.UPDATE, k]
            resend = [j for j in in_flight if following[Op.RECEIVE_ACTIVATION, j] > consumed]
        for name, found, right in (
            ("in flight", cut.in_flight, tuple(in_flight)),
            ("versions", cut.versions, versions),
            ("resend", cut.resend, tuple(resend)),
        ):
            if found != right:
                raise ScheduleError(
                    f"cut after U({k}) at stage {stage}: {name} {found}, must be {right}", stage=stage
                )

    def _check_tail(self, cut: StageCut, resumed: Sequence[Action]) -> None:
        """The resumed program is the unbroken one, but that it predicts itself what U(k) had predicted."""
        stage, k = cut.stage, cut.minibatch
        index = self._at[stage][Op.UPDATE, k]
        unbroken = self._stages[stage]
        missing = set(unbroken[index].predictions)
        for action in resumed:
            repeated = next((p for p in missing if action == alone(stage, p)), None)
            if repeated is not None:
                missing.remove(repeated)
                continue
            index += 1
            if index == len(unbroken) or action != unbroken[index]:
                goes = f"goes on with {unbroken[index]}" if index < len(unbroken) else "is done"
                raise ScheduleError(f"resumed after U({k}), but the unbroken run {goes} here", action=action)
        if index + 1 != len(unbroken) or missing:
            what = unbroken[index + 1] if index + 1 < len(unbroken) else missing.pop()
            raise ScheduleError(f"resumed after U({k}), stage {stage} lacks {what}", stage=stage)
