"""What each possible stage costs, and how much of it fits into memory: rows over pairs of ideals.

It owns the arrays that the partitioner reads again for every bottleneck that it tries: row a holds the stages that
begin behind ideal a, one for each ideal that contains it. The formulas are those of `costs` and `memory`.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from hpcpipe.planning.costs import StageCost, reduction_widening, transfer_s
from hpcpipe.planning.graph import Behind, Floats, Ideals
from hpcpipe.planning.memory import Held, held_at, stage_bytes
from hpcpipe.planning.problem import Problem
from hpcpipe.schedule.policies import Policy

Counts = NDArray[np.int64]
Ranks = NDArray[np.float32]
"""Numbers of ranks: exact in float32, which has an infinity and divides fast."""


class Pairs:
    """Seconds and bytes of every stage and every cut.

    Row a of `passes` (F and B of one pass), `updates` (one update) and `reduced` (bytes of an all-reduce) has an
    entry for each ideal of `behind[a]`. `cut_seconds[level][b]` are those of the cut at ideal b, per minibatch.
    """

    def __init__(self, problem: Problem, ideals: Ideals) -> None:
        profile = problem.profile
        self.behind: list[Behind] = [ideals.behind(before) for before in range(ideals.count - 1)]
        self.passes: list[Floats] = []
        self.updates: list[Floats] = []
        self.reduced: list[Floats] = []
        passes = ideals.sums(lambda layer: layer.forward_s + layer.backward_s)
        updates = ideals.sums(lambda layer: layer.update_s)
        parameters = ideals.sums(lambda layer: layer.parameter_bytes)
        for before, behind in enumerate(self.behind):
            # Per pass each neighbour takes two messages; the stages that end with the last ideal have none behind.
            seconds = passes.between(before, behind) + 2 * profile.pass_overhead_s
            seconds += 2 * profile.message_s * ((before > 0) + 1)
            seconds[-1] += profile.targets_s - 2 * profile.message_s
            if before == 0:
                seconds += profile.data_s
            self.passes.append(seconds)
            self.updates.append(updates.between(before, behind))
            self.reduced.append(parameters.between(before, behind) * reduction_widening(profile))
        self.cut_bytes = ideals.activation_bytes + ideals.gradient_bytes
        crossing = list(zip(ideals.activation_bytes, ideals.gradient_bytes, strict=True))
        self.cut_seconds = problem.passes * np.array(
            [
                [transfer_s(level, there) + transfer_s(level, back) for there, back in crossing]
                for level in problem.topology.levels
            ]
        )


class Fit(NamedTuple):
    """When stages of `least` or more ranks (2 at least) fit into memory, an entry a stage.

    With D ranks behind it a stage of m ranks fits if D <= `spread` m, or if m >= `enough`; never where not `fits`.
    """

    least: int
    fits: NDArray[np.bool_]
    spread: Ranks
    enough: Ranks


class Rings(NamedTuple):
    """Places in rings for messages of several ranks, beyond those for one: of the activations that cross at each
    ideal, at the stage behind it, and of their gradients, at the stage before it."""

    arriving: Floats
    returning: Floats


class MemoryFits:
    """Which stages fit into `limit` bytes.

    `single[a]`: the largest number of ranks behind a stage of one rank, -1 if it never fits. `shared[a]`: for
    stages of several ranks, which fit if any of these says so. `first_ranks` is the number of ranks of the first
    stage, which vertical_sync asks for. `rings` says what to add for messages at each cut, if anything.

    A stage fits the better the fewer ranks are behind it and the more it has itself: the passes in flight are
    w + 1 = (D + m - 1) // m + 1, and memory is linear in them.
    """

    def __init__(
        self,
        problem: Problem,
        ideals: Ideals,
        pairs: Pairs,
        limit: int,
        first_ranks: int | None = None,
        rings: Rings | None = None,
    ) -> None:
        self._problem = problem
        self._limit: float | Floats = limit
        self._first_ranks = 1 if first_ranks is None else first_ranks
        sums = {
            "parameter_bytes": ideals.sums(lambda layer: layer.parameter_bytes),
            "state_bytes": ideals.sums(lambda layer: layer.state_bytes),
            "buffer_bytes": ideals.sums(lambda layer: layer.buffer_bytes),
            "saved_bytes": ideals.sums(lambda layer: layer.saved_bytes),
        }
        self.single: list[Counts] = []
        self.shared: list[list[Fit]] = []
        for before, behind in enumerate(pairs.behind):
            sizes = SimpleNamespace(
                **{name: of.between(before, behind) for name, of in sums.items()},
                reduced_bytes=pairs.reduced[before],
                input_bytes=ideals.activation_bytes[before] if before else problem.profile.input_bytes,
                output_bytes=ideals.activation_bytes[behind],
                gradient_bytes=ideals.gradient_bytes[behind],
                input_gradient_bytes=ideals.gradient_bytes[before],
            )
            if rings is not None:
                coming = rings.arriving[before] * ideals.activation_bytes[before]
                self._limit = limit - coming - rings.returning[behind] * ideals.gradient_bytes[behind]
            # The formula of a stage holds for arrays as well.
            cost = cast(StageCost, sizes)
            self.single.append(self._single(cost, before == 0))
            self.shared.append([self._shared(cost, before == 0, least) for least in self._classes(before == 0)])

    def holds(self, before: int, ranks: int, behind: int) -> NDArray[np.bool_]:
        """Which of the stages that begin at `before` fit with `ranks` ranks and `behind` ranks behind them."""
        if ranks == 1:
            return behind <= self.single[before]
        found = np.zeros(len(self.single[before]), dtype=np.bool_)
        for fit in self.shared[before]:
            if fit.least <= ranks:
                near = (behind <= fit.spread * ranks) & (fit.spread > 0)
                found |= fit.fits & (near | (ranks >= fit.enough))
        return found

    def _classes(self, is_first: bool) -> list[int]:
        """Smallest numbers of ranks, 2 at least, from which a stage holds fewer versions than with fewer ranks."""
        if self._problem.synchronous or Policy(self._problem.policy) is not Policy.VERTICAL_SYNC:
            return [2]
        weights = [self._held(1, ranks, is_first).weights for ranks in range(2, self._problem.ranks + 1)]
        return [m for m, held in enumerate(weights, 2) if m == 2 or held < weights[m - 3]]

    def _held(self, warm_up: int, ranks: int, is_first: bool) -> Held:
        return held_at(
            self._problem.schedule,
            self._problem.policy,
            warm_up=warm_up,
            ranks=ranks,
            first_ranks=self._first_ranks,
            total=self._problem.ranks,
            is_first=is_first,
            microbatches=self._problem.microbatches,
            cut_in_flight=self._problem.cut_in_flight,
        )

    def _single(self, cost: StageCost, is_first: bool) -> Counts:
        fits, most = self._most(cost, 1, is_first)
        if self._problem.synchronous:
            # A rank alone has all microbatches; where they do not all fit, 1f1b may still hold few enough.
            some = most - 1 if self._problem.schedule == "1f1b" else -1
            most = np.where(most >= self._problem.microbatches, self._problem.ranks, some)
        single: Counts = np.where(fits, most, -1).astype(np.int64)
        return single

    def _shared(self, cost: StageCost, is_first: bool, least: int) -> Fit:
        fits, most = self._most(cost, least, is_first)
        spread, enough = most, np.full_like(most, np.inf)
        if self._problem.synchronous:
            spread = most - 1 if self._problem.schedule == "1f1b" else np.zeros_like(most)
            enough = np.ceil(self._problem.microbatches / np.maximum(most, 1))
        if self._problem.schedule != "gpipe":
            # There is no rank behind the last stage, so that any spread will do.
            spread[-1] = max(1, spread[-1])
        return Fit(least, fits, spread.astype(np.float32), enough.astype(np.float32))

    def _most(self, cost: StageCost, ranks: int, is_first: bool) -> tuple[NDArray[np.bool_], Floats]:
        """Whether stages fit at all, and with how many warm-up forwards (synchronous: passes in flight) at most.

        The last stage has no warm-up, every other one has some.
        """
        if self._problem.synchronous:
            held = [replace(self._held(0, ranks, is_first), in_flight=count) for count in (1, 1, 2)]
        else:
            held = [self._held(warm_up, ranks, is_first) for warm_up in (0, 1, 2)]
        last, one, two = (cast(Floats, stage_bytes(cost, each, ranks).total) for each in held)
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.where(two > one, 1 + np.floor((self._limit - one) / (two - one)), np.inf)
        most = np.minimum(np.where(one <= self._limit, most, 0), self._problem.ranks + self._problem.microbatches)
        fits = most >= 1
        fits[-1] = (last <= self._limit)[-1]
        if not self._problem.synchronous:
            most[-1] = 0
        return fits, most
