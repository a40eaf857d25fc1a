"""The partitioner: which layers on which ranks, so that the slowest stage or cut is as fast as can be.

It owns the choice among plans: the lowest bottleneck for asynchronous schedules (PipeDream, SOSP'19, section
3.1), the lowest bottleneck times flush for synchronous ones; among equals the fewest bytes over the largest cut on
a slow link, then few stages; all within the memory of each rank.

    partition(Problem(profile=load_profile("profile.json"), topology=flat(8, 1e10), ranks=8)).replicas
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace
from typing import NamedTuple, NoReturn

import numpy as np

from hpcpipe.errors import PlanError
from hpcpipe.planning.costs import flush_factor, stage_costs
from hpcpipe.planning.finder import CONVINCING, TINY, UNLIMITED, Finder
from hpcpipe.planning.graph import Ideals
from hpcpipe.planning.pairs import Pairs, Rings
from hpcpipe.planning.problem import Problem, Split, SplitStage, bytes_of, held_by, time_of
from hpcpipe.planning.units import show_size

__all__ = ["Problem", "Search", "Split", "SplitStage", "partition"]

_CLOSE = 1e-3
"""Relative difference of two sizes that a message about memory need not tell apart."""
_QUICK = 20_000_000
"""Stages times ideals times ranks that are searched in a second or two."""
_MOST_STAGES = 64
"""Stages of a synchronous schedule beyond which only the plan of the lowest bottleneck is looked at."""
_MOST_ATTEMPTS = 12
_ROUGH = 0.02
"""Relative difference of two bottlenecks while it is not yet known whether messages leave room for either."""


def partition(problem: Problem) -> Split:
    """The best plan of a problem, for chains and branching graphs, over any levels and within memory.

    Exact, but for what messages need at a rank that hears of several others: it is known of whole plans only.
    Where the best plan lacks memory for that, the search goes on with more held back at its cuts.

    Raises PlanError: no plan fits into memory (names the tightest stage of the plan that lacks the least, and the
    missing bytes), or the graph can be cut in too many places.
    """
    search = Search(problem)
    best = search.best()
    if not search.hold_back(best, 0):
        return best
    return search.best_held_back() or _without_crowds(problem) or _refuse(problem, best)


class _Range(NamedTuple):
    """Bottlenecks above `low` and up to `high`, with which plans have at least `fewest` stages."""

    low: float
    high: float
    fewest: int
    tries: int


class Search:
    """Plans a problem, with what can be worked out once for all bottlenecks."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._ideals = Ideals(problem.profile)
        if problem.straight and problem.profile.shared and problem.ranks > (most := self._ideals.most_stages):
            raise PlanError(
                f"layers with weights in common allow at most {most} stages, but a straight pipeline over "
                f"{problem.ranks} ranks has as many: use fewer ranks, or let stages be replicated"
            )
        self._pairs = Pairs(problem, self._ideals)
        self._rings = Rings(np.zeros(self._ideals.count), np.zeros(self._ideals.count))
        # No plan is faster than all ranks busy all the time.
        passes, updates = self._pairs.passes[0][-1], self._pairs.updates[0][-1]
        work = problem.passes * passes + (0 if problem.synchronous else updates)
        self._least = float(work) / problem.ranks

    def best(self) -> Split:
        """The best plan, with memory for what is held back and for messages between one rank and one other.

        Raises PlanError: none fits into memory.
        """
        return self._best_synchronous() if self._problem.synchronous else self._best_of_bottleneck()

    def best_held_back(self) -> Split | None:
        """The best plan with memory for all its messages, as far as a few attempts find it; None for none."""
        for attempt in range(1, _MOST_ATTEMPTS):
            found = self._with(self._problem.max_stages).lowest(self._least, close=_ROUGH)
            if found is None:
                return None
            self._least = max(self._least, found.bottleneck_s * (1 - _ROUGH))
            if not self.hold_back(found, attempt):
                found = self.best()
                if not self.hold_back(found, attempt):
                    return found
        return None

    def hold_back(self, split: Split, attempt: int) -> bool:
        """Whether a plan lacks memory for messages of several ranks; then hold back as much at its cuts.

        And at those around them, the farther the more often this has been tried: the next plan likely has cuts as
        crowded there.
        """
        limit, crowded = self._problem.memory_bytes, False
        around = max(2**attempt - 1, self._ideals.count // 64 * 2**attempt)
        before: set[int] = set()
        for stage, (part, needed) in enumerate(zip(split.stages, bytes_of(self._problem, split), strict=True)):
            first = self._ideals.index(before)
            before.update(part.layers)
            if limit is not None and needed.total > limit:
                crowded = True
                held, last = held_by(self._problem, split.replicas, stage), self._ideals.index(before)
                for places, at, more in (
                    (self._rings.arriving, first, held.arriving - 1),
                    (self._rings.returning, last, held.returning - 2),
                ):
                    near = slice(max(0, at - around), at + around + 1)
                    places[near] = np.maximum(places[near], more)
        return crowded

    def _best_of_bottleneck(self) -> Split:
        """The plan of the lowest bottleneck, and of those the one that is kindest to slow links."""
        most, finder = self._problem.max_stages, self._with(None)
        found = finder.lowest(self._least)
        if found is not None and most is not None:
            # Telling numbers of stages apart costs time, so it waits until they are known to matter.
            finder = self._with(most)
            if len(found.stages) > most:
                found = finder.lowest(found.bottleneck_s)
        if found is None:
            raise _too_large(self._problem, self._least_lacking())
        # With more held back no plan gets faster.
        self._least = max(self._least, found.bottleneck_s)
        return self._fewer_stages(self._fewer_bytes(finder, found))

    def _best_synchronous(self) -> Split:
        """The plan of the lowest bottleneck times flush: fewer stages may do with a slower one.

        Branch and bound over the bottleneck: within a range of it no plan is better than its lower end with as
        few stages as its upper end allows.
        """
        best = self._best_of_bottleneck()
        ranges = [] if self._problem.straight else [_Range(best.bottleneck_s, math.inf, 1, 0)]
        while ranges:
            ranges.sort(key=lambda each: -each.low * self._flush(each.fewest))
            low, high, fewest, tries = ranges.pop()
            high = min(high, best.seconds / self._flush(fewest) * (1 - TINY))
            if low * (1 + TINY) >= high:
                continue
            middle = high if tries % (CONVINCING + 1) == CONVINCING else math.sqrt(low) * math.sqrt(high)
            found = self._with(self._worth(low, best)).find(middle)
            if found is None:
                ranges.append(_Range(middle, high, fewest, tries + 1))
                continue
            best = min(best, found, key=lambda split: split.seconds)
            stages = len(found.stages)
            ranges.append(_Range(low, found.bottleneck_s * (1 - TINY), stages, 0))
            if fewest < stages:
                ranges.append(_Range(middle, high, fewest, 0))
        return self._fewer_bytes(self._with(len(best.stages)), best)

    def _worth(self, bottleneck: float, best: Split) -> int:
        """The most stages with which a plan of `bottleneck` seconds or more could beat `best`."""
        microbatches = self._problem.microbatches
        most = math.ceil(microbatches * best.seconds / bottleneck * (1 + TINY) - microbatches)
        return max(1, min(most, self._problem.max_stages or most, _MOST_STAGES))

    def _flush(self, stages: int) -> float:
        return flush_factor(self._problem.schedule, self._problem.microbatches, stages)

    def _with(self, most_stages: int | None, limit: int | None = None) -> Finder:
        if most_stages is not None:
            most_stages = min(most_stages, self._problem.ranks, len(self._problem.profile.layers))
        return Finder(
            self._problem,
            self._ideals,
            self._pairs,
            limit=self._problem.memory_bytes if limit is None else limit,
            most_stages=most_stages,
            rings=self._rings,
        )

    def _fewer_bytes(self, finder: Finder, found: Split) -> Split:
        """A plan as fast, whose largest cut between groups of the innermost level is as small as can be."""
        fast = found.bottleneck_s * (1 + TINY)
        sizes = [-1.0, *(float(size) for size in np.unique(self._pairs.cut_bytes))]
        low, high = 0, bisect_left(sizes, self._slow_bytes(found))
        while low < high:
            middle = (low + high) // 2
            better = finder.find(fast, sizes[middle])
            if better is None:
                low = middle + 1
            else:
                found, high = better, min(middle, bisect_left(sizes, self._slow_bytes(better)))
        return found

    def _slow_bytes(self, split: Split) -> float:
        """Bytes of one pass over the largest cut that leaves a group of the innermost level; -1 if none does."""
        costs = stage_costs(self._problem.profile, [stage.layers for stage in split.stages])
        cuts = time_of(self._problem, costs, [stage.ranks for stage in split.stages]).cuts
        slow = [
            cost.output_bytes + cost.gradient_bytes for cost, cut in zip(costs, cuts, strict=False) if cut.level
        ]
        return float(max(slow, default=-1))

    def _fewer_stages(self, found: Split) -> Split:
        """A plan as fast and as kind to slow links with the fewest stages, where that is quickly found."""
        fast, least = found.bottleneck_s * (1 + TINY), self._slow_bytes(found)
        size = self._ideals.count * self._problem.ranks
        while not self._problem.straight and 0 < (most := len(found.stages) - 1) * size <= _QUICK:
            fewer = self._with(most).find(fast, least)
            if fewer is None:
                break
            found = fewer
        return found

    def _least_lacking(self) -> Split:
        """Of the plans that do not fit into memory the one whose fullest rank needs the least."""
        problem = self._problem
        assert problem.memory_bytes is not None
        everything = sum(
            layer.parameter_bytes + layer.state_bytes + layer.saved_bytes + layer.output_bytes + layer.buffer_bytes
            for layer in problem.profile.layers
        )
        low, high, found = problem.memory_bytes, 2 * problem.memory_bytes + everything, None
        while found is None or high - low > max(1, high * _CLOSE):
            middle = high
            if found is not None:
                # At least one byte up: the root of small numbers may be the lower one.
                middle = (low + high) // 2 if high < 2 * low else max(low + 1, math.isqrt(low * high))
            better = self._with(problem.max_stages, middle).find(UNLIMITED)
            if better is not None:
                found, high = better, middle
            else:
                low, high = middle, high if found is not None else 4 * high
        return found


def _without_crowds(problem: Problem) -> Split | None:
    """The best plan with one stage or with one rank a stage, where no rank hears of several; None if none fits."""
    found = []
    for changes in ({"max_stages": 1}, {"straight": True}):
        try:
            found.append(Search(replace(problem, **changes)).best())
        except PlanError:
            continue
    return min(found, key=lambda split: split.seconds, default=None)


def _refuse(problem: Problem, split: Split) -> NoReturn:
    raise _too_large(problem, split)


def _too_large(problem: Problem, split: Split) -> PlanError:
    """What to tell when no plan fits into memory, of the plan that comes next to it."""
    limit = problem.memory_bytes
    assert limit is not None
    totals = [each.total for each in bytes_of(problem, split)]
    needed = max(totals)
    stage = split.stages[totals.index(needed)]
    names = [problem.profile.layers[index].name for index in stage.layers]
    span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    ranks = f"{len(stage.ranks)} rank{'s' * (len(stage.ranks) > 1)}"
    return PlanError(
        f"no plan fits into {show_size(limit)} a rank: the tightest stage of the best try, {span} on {ranks}, "
        f"needs {show_size(needed)}, {show_size(needed - limit)} too much; use more ranks, a smaller minibatch or "
        "more microbatches"
    )
