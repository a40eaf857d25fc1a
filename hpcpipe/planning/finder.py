"""The plan of the lowest bottleneck, by asking for plans below one bottleneck after the other.

It owns the search over bottlenecks, with a number of stages and a memory that are given; which plans there are
below one is for `reach` to say (PipeDream, SOSP'19, section 3.1). It weighs no flush and no bytes.
"""

from __future__ import annotations

import math

from hpcpipe.planning.graph import Ideals
from hpcpipe.planning.pairs import MemoryFits, Pairs, Rings
from hpcpipe.planning.problem import Problem, Split, split_of
from hpcpipe.planning.reach import Reach
from hpcpipe.schedule.policies import Policy

TINY = 1e-13
"""Relative difference of two bottlenecks that counts as none: rounding of sums."""
UNLIMITED = 1e250
"""Seconds: a bottleneck that every plan keeps, and far from overflow."""
CONVINCING = 2
"""Tries in vain for a better plan after which the best so far is likely the best of all."""
_LEAST = 1e-250
_FIRST_RANKS = 32
"""Sizes of the first stage that are tried where each is a search: all up to half as many, and others between."""
_KEPT_PAIRS = 10_000_000
"""Pairs of ideals for which what fits into memory is kept."""


class Finder:
    """Finds plans of at most `most_stages` stages and within `limit` bytes a rank; None for any.

    `rings`: bytes to add for messages at each cut. Messages are else counted as if each rank had one neighbour
    before and one behind.
    """

    def __init__(
        self,
        problem: Problem,
        ideals: Ideals,
        pairs: Pairs,
        *,
        limit: int | None,
        most_stages: int | None,
        rings: Rings | None = None,
    ) -> None:
        self._problem = problem
        self._ideals = ideals
        self._pairs = pairs
        self._limit = limit
        self._most_stages = most_stages
        self._rings = rings
        self._searches: dict[int | None, Reach] = {}
        self._hopeless: dict[int | None, float] = dict.fromkeys(self._first_ranks(), 0.0)

    def find(self, bottleneck: float, slow_bytes: float = math.inf) -> Split | None:
        """A plan of at most `bottleneck` seconds whose cuts on slow links are of at most `slow_bytes`, or None."""
        for first_ranks, hopeless in self._hopeless.items():
            if bottleneck <= hopeless:
                continue
            plan = self._search(first_ranks).plan(bottleneck, slow_bytes)
            if plan is not None:
                layers = [self._ideals.layers(block.before, block.behind) for block in plan]
                return split_of(self._problem, layers, [block.ranks for block in plan])
            if slow_bytes == math.inf:
                self._hopeless[first_ranks] = bottleneck
        return None

    def lowest(self, lower: float, close: float = TINY) -> Split | None:
        """The plan of the lowest bottleneck, which is at least `lower`; None if there is no plan at all.

        Its bottleneck is the lowest up to the fraction `close` of it.

        Every answer is a plan with a cost of its own, which soon is the lowest: then nothing just below is found.
        """
        lower = max(lower * (1 - TINY), _LEAST)
        for factor in (1.0, 1.01, 1.1, 2.0, 10.0, 1000.0, math.inf):
            bottleneck = min(lower * factor, UNLIMITED)
            found = self.find(bottleneck)
            if found is not None:
                break
            lower = bottleneck
        if found is None:
            return None
        survived = 0
        while lower < (below := found.bottleneck_s * (1 - close)):
            middle = math.sqrt(lower) * math.sqrt(below) if below > 4 * lower else (lower + below) / 2
            bottleneck = below if survived == CONVINCING or middle <= lower else middle
            better = self.find(bottleneck)
            if better is None:
                lower = bottleneck
                survived += 1
            else:
                found, survived = better, 0
        return found

    def _first_ranks(self) -> list[int] | list[None]:
        """The numbers of ranks of the first stage to search one by one; None: all at once.

        The versions that vertical_sync keeps everywhere follow from that number. Of many only some are tried.
        """
        problem = self._problem
        if self._limit is None or problem.synchronous or Policy(problem.policy) is not Policy.VERTICAL_SYNC:
            return [None]
        if problem.straight:
            return [1]
        ranks, tried = problem.ranks, _FIRST_RANKS // 2
        spread = (-(-ranks * part // tried) for part in range(1, tried + 1))
        return sorted({*range(1, min(ranks, tried) + 1), *spread})

    def _search(self, first_ranks: int | None) -> Reach:
        if first_ranks not in self._searches:
            if len(self._searches) * self._ideals.count**2 > _KEPT_PAIRS:
                self._searches.clear()
            memory = None
            if self._limit is not None:
                memory = MemoryFits(
                    self._problem, self._ideals, self._pairs, self._limit, first_ranks, self._rings
                )
            self._searches[first_ranks] = Reach(
                self._problem,
                self._ideals,
                self._pairs,
                memory=memory,
                most_stages=self._most_stages,
                first_ranks=first_ranks,
            )
        return self._searches[first_ranks]
