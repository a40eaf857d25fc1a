"""Proves properties of the action lists that the ranks of a run execute, and of every cut through them.

Messages and deadlock are proved by dry runs, versions and predictions by keeping each replica's books, distances
by counting updates on the full unit clock of all stages (SpecTrain, arXiv 1809.02839, section 3.3; the generator
looks them up in a folded one). It reads what generators made and never makes an action itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hpcpipe.schedule.account import StageProof, account, alone
from hpcpipe.schedule.actions import COMPUTES, EVALUATION, Action, Op, Place
from hpcpipe.schedule.cut import StageCut, cut_at
from hpcpipe.schedule.demands import Demands
from hpcpipe.schedule.dryrun import Channel, ScheduleError, Traffic, by_place, dry_run
from hpcpipe.schedule.policies import Target
from hpcpipe.schedule.ranks import checked_groups, rank_actions
from hpcpipe.schedule.rings import depths_of, ring_depths
from hpcpipe.schedule.schedule import Schedule

__all__ = ["Proof", "ScheduleError", "StageProof", "prove", "ring_depths", "verify"]

_CUT_BUDGET = 300_000
"""Actions regenerated to check cuts: a few seconds."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was proved of a schedule, with all figures.

    `ranks` are the places of each rank, `stages` the figures of each place in the schedule's order. `messages` and
    `ring_depths` are per channel. `boundaries` are the minibatches k for which there is a cut "after U(k) on every
    stage", `cuts` those whose cut was checked.
    """

    schedule: Schedule
    ranks: tuple[tuple[Place, ...], ...]
    stages: tuple[StageProof, ...]
    messages: dict[Channel, int]
    ring_depths: dict[Channel, int]
    boundaries: tuple[int, ...]
    cuts: tuple[int, ...] = ()

    @property
    def actions(self) -> int:
        """Number of actions of all ranks together."""
        return sum(stage.actions for stage in self.stages)

    @property
    def minibatches(self) -> int:
        """Number of minibatches that go through the pipeline."""
        return self.schedule.minibatches - self.schedule.first


def verify(schedule: Schedule, groups: Sequence[Sequence[Place]] | None = None) -> Proof:
    """Generate the lists of all ranks, prove them, and check the cuts.

    `groups` are the places of each rank, one each by default. All cuts of a short run are checked, and evenly
    spread ones of a run for which that would take long. Raises ScheduleError for the first fault, ConfigError for
    groups that do not share out the places.
    """
    checked = checked_groups(schedule, groups)
    lists = [list(rank_actions(schedule, places)) for places in checked]
    proof = prove(schedule, lists)
    cuts = _Cuts(schedule, checked, by_place(lists, schedule.places), proof.ring_depths)
    sampled = _spread(proof.boundaries, proof.actions)
    for minibatch in sampled:
        cuts.check(minibatch)
    return replace(proof, ranks=checked, cuts=sampled)


def prove(schedule: Schedule, lists: Sequence[Sequence[Action]]) -> Proof:
    """Prove that complete lists, one a rank, are right for `schedule`. Raises ScheduleError for a fault."""
    by = by_place(lists, schedule.places)
    traffic = dry_run(lists)
    depths = depths_of(traffic)
    dry_run(lists, depths=depths)
    # An evaluation takes time but must not change what is learnt, so distances are counted as if there were none.
    clock = dry_run([[action for action in actions if action.op not in EVALUATION] for actions in by.values()])
    return Proof(
        schedule=schedule,
        ranks=tuple(tuple(sorted({action.place for action in actions})) for actions in lists),
        stages=tuple(
            account(schedule, place, actions, _aim(schedule, clock, place)) for place, actions in by.items()
        ),
        messages=traffic.messages,
        ring_depths=depths,
        boundaries=tuple(Demands(schedule, Place(0)).boundaries),
    )


def _aim(schedule: Schedule, clock: Traffic, place: Place) -> Callable[[int], int] | None:
    """Updates in the version that both passes of a minibatch aim at, counted on the clock of a dry run of all."""
    ends = clock.update_ends.get(place, [])

    def counted(minibatch: int) -> int:
        returned = clock.start.get((Op.BACKWARD, 0, minibatch, 0))
        if returned is None:
            raise ScheduleError(f"stage 0 never does B({minibatch})", stage=0)
        return bisect_left(ends, returned)

    return counted if schedule.target is Target.ROUND_TRIP else None


def _spread(cuts: Sequence[int], actions: int) -> tuple[int, ...]:
    """The cuts to check: as many as the budget allows, from the first to the last."""
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
        groups: Sequence[Sequence[Place]],
        unbroken: dict[Place, list[Action]],
        depths: dict[Channel, int],
    ) -> None:
        self._schedule = schedule
        self._groups = groups
        self._unbroken = unbroken
        self._depths = depths
        self._at = {
            place: {(action.op, action.minibatch): index for index, action in enumerate(actions)}
            for place, actions in unbroken.items()
        }
        self._forwards = {
            place: [index for index, action in enumerate(actions) if action.op is Op.FORWARD]
            for place, actions in unbroken.items()
        }

    def check(self, minibatch: int) -> None:
        """Raise ScheduleError if the cut after U(`minibatch`) is no exact place to resume from."""
        cuts = {
            place: cut_at(self._schedule, place.stage, minibatch, place.replica) for place in self._schedule.places
        }
        for place, cut in cuts.items():
            self._check_state(place, cut)
        again = {
            place: [self._unbroken[place][self._at[place][Op.SEND_ACTIVATION, j]] for j in cut.resend]
            for place, cut in cuts.items()
        }
        lists = []
        for places in self._groups:
            sent = [action for place in sorted(places) for action in again[place]]
            lists.append([*sent, *rank_actions(self._schedule, places, after=minibatch)])
        dry_run(lists, depths=self._depths)
        for place, actions in by_place(lists, self._schedule.places).items():
            self._check_tail(place, minibatch, actions[len(again[place]) :])

    def _check_state(self, place: Place, cut: StageCut) -> None:
        """In flight is what went forward before the cut and backward behind it; likewise versions and messages."""
        k = cut.minibatch
        unbroken, at = self._unbroken[place], self._at[place]
        behind = at[Op.UPDATE, k]
        forwards = self._forwards[place]
        in_flight: list[int] = []
        for index in reversed(forwards[: bisect_left(forwards, behind)]):
            j = unbroken[index].minibatch
            if j <= k:
                break
            in_flight.insert(0, j)
        read = {a.version for a in unbroken[behind + 1 :] if a.op in COMPUTES or a.op is Op.PREDICT}
        versions = (*sorted(version for version in read if version <= k), k + 1)
        resend = [j for j in in_flight if not self._consumed(unbroken[at[Op.FORWARD, j]], k)]
        for name, found, right in (
            ("place", (cut.stage, cut.replica), tuple(place)),
            ("in flight", cut.in_flight, tuple(in_flight)),
            ("versions", cut.versions, versions),
            ("resend", cut.resend, tuple(resend)),
        ):
            if found != right:
                raise ScheduleError(
                    f"cut after U({k}) at {place}: {name} {found}, must be {right}", stage=cut.stage
                )

    def _consumed(self, forward: Action, cut: int) -> bool:
        """Whether the next stage received what `forward` made before its own cut."""
        label = Op.RECEIVE_ACTIVATION, forward.minibatch
        for place in self._schedule.places:
            if place.stage == forward.stage + 1 and label in self._at[place]:
                return self._at[place][label] < self._at[place][Op.UPDATE, cut]
        return True

    def _check_tail(self, place: Place, minibatch: int, resumed: Sequence[Action]) -> None:
        """The resumed program is the unbroken one, but that it predicts itself what the update had predicted."""
        unbroken = self._unbroken[place]
        index = self._at[place][Op.UPDATE, minibatch]
        missing = set(unbroken[index].predictions)
        for action in resumed:
            repeated = next((p for p in missing if action == alone(place, p)), None)
            if repeated is not None:
                missing.remove(repeated)
                continue
            index += 1
            if index == len(unbroken) or action != unbroken[index]:
                goes = f"goes on with {unbroken[index]}" if index < len(unbroken) else "is done"
                raise ScheduleError(
                    f"resumed after U({minibatch}), but the unbroken run {goes} here", action=action
                )
        if index + 1 != len(unbroken) or missing:
            what = unbroken[index + 1] if index + 1 < len(unbroken) else missing.pop()
            raise ScheduleError(f"resumed after U({minibatch}), {place} lacks {what}", stage=place.stage)
