"""What a schedule asks of one replica of one stage, stated anew from its numbers for the verifier.

It lists rounds, owners, versions and evaluations plainly, where the generator computes them, and takes nothing
from the generator. Definitions: PipeDream (SOSP'19, sections 3.2 and 3.3).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import cached_property

from hpcpipe.schedule.actions import Place
from hpcpipe.schedule.policies import Policy
from hpcpipe.schedule.schedule import Schedule

Label = tuple[int, int]
"""(minibatch, microbatch)"""


class Demands:
    """What `schedule` asks of `place`."""

    def __init__(self, schedule: Schedule, place: Place) -> None:
        self._schedule = schedule
        self._place = place
        self._replicas = schedule.replicas or (1,) * schedule.stages
        self.replicas = self._replicas[place.stage]
        self.last_stage = place.stage == schedule.stages - 1
        self.rounds = _rounds(schedule, self._replicas[place.stage])
        self._entry_rounds = _rounds(schedule, self._replicas[0])

    # -- passes --------------------------------------------------------------------------------------------

    def owner(self, stage: int, label: Label) -> int:
        """The replica of `stage` that F and B of `label` belong to."""
        if self._schedule.synchronous:
            return label[1] % self._replicas[stage]
        return (label[0] - self.refill(label[0])) % self._replicas[stage]

    def evaluation_owner(self, stage: int, label: Label) -> int:
        """The replica of `stage` that E of `label`, a (minibatch, evaluation batch), belongs to."""
        return label[1] % self._replicas[stage]

    def asks_for(self, label: Label) -> bool:
        """Whether F and B of `label` are this replica's to do."""
        span = self._schedule.first <= label[0] < self._schedule.minibatches
        exists = span and 0 <= label[1] < self._schedule.microbatches
        return exists and self.owner(self._place.stage, label) == self._place.replica

    @cached_property
    def passes(self) -> frozenset[Label]:
        """All (minibatch, microbatch) of this replica."""
        span = range(self._schedule.first, self._schedule.minibatches)
        every = ((j, i) for j in span for i in range(self._schedule.microbatches))
        return frozenset(label for label in every if self.asks_for(label))

    def refill(self, minibatch: int) -> int:
        """The minibatch with which the pipeline was last filled before `minibatch` went forward."""
        if self._schedule.synchronous:
            return minibatch
        every = self._schedule.drain_every
        return max(self._schedule.first, minibatch // every * every if every else 0)

    # -- rounds and versions -------------------------------------------------------------------------------

    @cached_property
    def _round_of(self) -> list[int]:
        return [index for index, members in enumerate(self.rounds) for _ in members]

    def round_of(self, minibatch: int) -> int:
        """Which round of this stage, counted from the start of the run, `minibatch` belongs to."""
        return self._round_of[minibatch - self._schedule.first]

    @cached_property
    def boundaries(self) -> list[int]:
        """The last minibatches of rounds that end together on all stages."""
        ends = [{members[-1] for members in _rounds(self._schedule, count)} for count in set(self._replicas)]
        return sorted(set.intersection(*ends))

    def forward_version(self, minibatch: int) -> int:
        """The version that F(minibatch) has to read."""
        schedule, stage = self._schedule, self._place.stage
        if schedule.synchronous:
            return minibatch
        refill = self.refill(minibatch)
        if schedule.policy is not Policy.VERTICAL_SYNC:
            return self._behind(self.rounds, stage, self.round_of(minibatch), refill)
        entered = _holding(self._entry_rounds, minibatch)
        bound = self._behind(self._entry_rounds, 0, entered, refill)
        # The newest version here that holds nothing from the bound on ends where the bound's own round begins.
        return self.rounds[_holding(self.rounds, bound)][0]

    def keeps_forward_weights(self) -> bool:
        """Whether B has to read the version that its F read; the newest otherwise."""
        return self._schedule.synchronous or self._schedule.policy in (Policy.STASH, Policy.VERTICAL_SYNC)

    def finds_newest(self) -> bool:
        """Whether each F reads the newest version that there is."""
        return self._schedule.synchronous or self._schedule.policy is not Policy.VERTICAL_SYNC

    def _behind(self, rounds: list[range], stage: int, index: int, refill: int) -> int:
        """The version that a round finds which is a warm-up ahead, but none from before the refill."""
        ahead = (sum(self._replicas[stage:]) - 1) // self._replicas[stage]
        return max(refill, rounds[max(0, index - ahead)][0])

    # -- evaluations ---------------------------------------------------------------------------------------

    @cached_property
    def evaluations(self) -> frozenset[int]:
        """The minibatches behind whose update the stages evaluate: the first boundary at or past each multiple."""
        schedule, every = self._schedule, self._schedule.evaluate_every
        if not schedule.evaluation_batches or schedule.first == schedule.minibatches:
            return frozenset()
        found = {schedule.minibatches - 1} if schedule.evaluate_at_end else set()
        multiples = range((schedule.first // every + 1) * every, schedule.minibatches + 1, every) if every else ()
        for done in multiples:
            found.add(self.boundaries[bisect_left(self.boundaries, done - 1)])
        return frozenset(found)

    @cached_property
    def evaluation_passes(self) -> frozenset[Label]:
        """All (minibatch, evaluation batch) of this replica."""
        batches = range(self._place.replica, self._schedule.evaluation_batches, self.replicas)
        return frozenset((k, batch) for k in self.evaluations for batch in batches)

    @cached_property
    def common(self) -> frozenset[Label]:
        """The evaluations before which the replicas of this stage average their buffers."""
        return frozenset((k, 0) for k in self.evaluations) if self.replicas > 1 else frozenset()


def _holding(rounds: list[range], minibatch: int) -> int:
    """Which of `rounds` holds `minibatch`."""
    return bisect_right(rounds, minibatch, key=lambda members: members[0]) - 1


def _rounds(schedule: Schedule, replicas: int) -> list[range]:
    """The minibatches of each update of a stage with so many replicas; drains cut rounds short."""
    length = 1 if schedule.synchronous else replicas
    rounds, begin = [], schedule.first
    while begin < schedule.minibatches:
        end = min(begin + length, schedule.minibatches)
        if schedule.drain_every:
            end = min(end, (begin // schedule.drain_every + 1) * schedule.drain_every)
        rounds.append(range(begin, end))
        begin = end
    return rounds
