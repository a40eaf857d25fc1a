"""Which plans keep every stage and every cut below a given bottleneck: the inner loop of the partitioner.

It owns the dynamic program over suffixes of the model (that of PipeDream, SOSP'19, section 3.1, turned round:
with the ranks behind a stage known, so are its warm-up and its place in the topology, hence its memory and its
links). It answers yes or no for one bottleneck and says which plan; it never looks for the best one.

State: ideal a, level l of the stage that begins there, and q, the ranks of all stages from there on. A stage from
a to b of m ranks turns q - m at b into q at a. For m >= 2 only the smallest q of each group at b matters:

    a stage fits if m >= some bound that only rises with q - m, so whatever place in the group is reached from
    some q of the group is reached from the smallest one;

except where latencies, or the one all-reduce of a synchronous minibatch, make more ranks worse than fewer: there
the possible m are an interval, and whether some q lies in it is a difference of two counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpipe.planning.costs import ALLREDUCE_VOLUME
from hpcpipe.planning.graph import Behind, Floats, Ideals
from hpcpipe.planning.pairs import Fit, MemoryFits, Pairs, Ranks
from hpcpipe.planning.positions import Indices, Positions
from hpcpipe.planning.problem import Problem

Bools = NDArray[np.bool_]
Words = NDArray[np.uint64]
_MOST_COUNTS = 4_000_000
"""Entries of the largest array of counts: a few tens of MB."""


class Block(NamedTuple):
    """A stage of a plan: from one ideal to another, on `ranks` ranks."""

    before: int
    behind: int
    ranks: int


class _Allowed(NamedTuple):
    """Bytes that an all-reduce of m = 2, 3, ... ranks of one level may have.

    `upwards[i]`: with these, m = i + 2 and all larger numbers will do; `downwards[i]`: and all smaller ones.
    `dips`: whether a larger m may be worse.
    """

    each: Floats
    upwards: Floats
    downwards: Floats
    dips: bool


class Reach:
    """Searches the plans of one problem.

    `memory`: what fits, None for no limit. `most_stages`: None for any number; costs that much more time.
    `first_ranks`: the only number of ranks allowed for the first stage, None for any.
    """

    def __init__(
        self,
        problem: Problem,
        ideals: Ideals,
        pairs: Pairs,
        *,
        memory: MemoryFits | None = None,
        most_stages: int | None = None,
        first_ranks: int | None = None,
    ) -> None:
        self._problem = problem
        self._pairs = pairs
        self._memory = memory
        self._first_ranks = first_ranks
        self._counts_stages = most_stages is not None
        self._positions = Positions(problem.topology, problem.ranks)
        self._last = ideals.count - 1
        layers = most_stages or 1
        ranks, levels = problem.ranks, self._positions.levels
        self._width = -(-(ranks + 1) // 64) * 64
        # For each ideal b, number of stages behind it and level l of the stage before it: which q are reached and
        # can be cut off from a stage of level l, as bits and as the smallest of each group; and the q that a stage
        # from there reaches at least if it leaves the inner group.
        self._bits = np.zeros((ideals.count, layers, levels, self._width // 64), dtype=np.uint64)
        self._smallest = [
            np.full((ideals.count, layers, groups), np.inf, dtype=np.float32) for groups in self._positions.groups
        ]
        self._leaps = [np.full_like(smallest, np.inf) for smallest in self._smallest]
        self._alive = np.zeros((ideals.count, levels), dtype=np.bool_)
        self._behind = np.arange(ranks + 1)
        self._up_to = _pack(self._behind[:, None] >= np.arange(self._width))
        self._end()

    def plan(self, bottleneck: float, slow_bytes: float = np.inf) -> list[Block] | None:
        """A plan that costs at most `bottleneck` (above 0) seconds a minibatch, or None if there is none.

        Of the plans that keep cuts between groups of the innermost level below `slow_bytes` bytes. With a limit on
        stages it has as few as can be.
        """
        self._bottleneck = bottleneck
        self._allowed = [self._allreduces(level) for level in range(self._positions.levels)]
        self._cuttable = self._pairs.cut_seconds[: self._positions.levels] <= bottleneck
        self._cuttable[1:] &= self._pairs.cut_bytes <= slow_bytes
        # Quotients by zero seconds or zero versions are infinite and mean just that.
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            for before in range(self._last - 1, 0, -1):
                self._store(before, self._reached(before))
            return self._trace()

    def _end(self) -> None:
        """Behind the last ideal there is no rank and no cut."""
        reached = np.zeros((self._bits.shape[1], self._positions.levels, self._width), dtype=np.bool_)
        reached[:, :, 0] = True
        self._keep(self._last, reached)

    def _store(self, ideal: int, reached: Bools) -> None:
        """Keep what is `reached` [number of stages, level, q] at an ideal for the stages that may stand before."""
        if self._counts_stages:
            # Entry i of a row now means at most i stages behind, and with none nothing is reached.
            reached = np.roll(reached, 1, axis=0)
            reached[0] = False
        cuttable = self._cuttable[:, ideal]
        if cuttable.all():
            reached = np.broadcast_to(reached.any(axis=1, keepdims=True), reached.shape)
        elif cuttable.any():
            ranks = self._positions.ranks + 1
            can = cuttable[self._positions.cut]
            before = np.zeros_like(reached)
            before[:, :, :ranks] = (reached[:, None, :, :ranks] & can).any(axis=2)
            reached = before
        else:
            reached = np.zeros_like(reached)
        self._keep(ideal, reached)

    def _keep(self, ideal: int, reached: Bools) -> None:
        self._bits[ideal] = _pack(reached)
        self._alive[ideal] = reached.any(axis=(0, 2))
        positions = self._positions
        for level, size in enumerate(positions.sizes):
            pad, groups = positions.padding[level], positions.groups[level]
            padded = np.zeros((len(reached), groups * size), dtype=np.bool_)
            padded[:, pad:] = reached[:, level, : positions.ranks]
            grouped = padded.reshape(len(reached), groups, size)
            smallest = grouped.argmax(axis=2) + positions.starts[level]
            found = grouped.any(axis=2)
            self._smallest[level][ideal] = np.where(found, smallest, np.inf)
            if level > 0:
                self._leaps[level][ideal] = np.where(found, positions.leap[level][smallest], np.inf)

    def _reached(self, before: int) -> Bools:
        """The q that some first stage from ideal `before` on reaches: [number of stages, its level, q]."""
        reached = np.zeros((self._bits.shape[1], self._positions.levels, self._width), dtype=np.bool_)
        compute = self._fewest_for_compute(before)
        self._add_single(before, compute, reached)
        if not self._problem.straight:
            for level, size in enumerate(self._positions.sizes):
                if size > 1:
                    self._add_shared(before, compute, level, reached)
        return reached

    def _fewest_for_compute(self, before: int) -> Floats:
        """The ranks that each stage from `before` on needs for its compute; infinity where none suffice."""
        passes, updates = self._pairs.passes[before], self._pairs.updates[before]
        if not self._problem.synchronous:
            return np.ceil((passes + updates) / self._bottleneck)
        each = np.where(passes > 0, np.floor((self._bottleneck - updates) / passes), np.inf)
        each = np.where(updates <= self._bottleneck, each, 0)
        return np.where(each >= 1, np.ceil(self._problem.microbatches / each), np.inf)

    def _allreduces(self, level: int) -> _Allowed:
        link = self._problem.topology.levels[level]
        ranks = np.arange(2.0, max(self._positions.sizes[level], 2) + 1)
        volume = ALLREDUCE_VOLUME[self._problem.allreduce] * (ranks - 1) / ranks
        # An asynchronous stage has an all-reduce every m minibatches, a synchronous one every minibatch.
        seconds = self._bottleneck * (1.0 if self._problem.synchronous else ranks)
        each = (seconds - 2 * (ranks - 1) * link.latency_s) * link.reduce_bandwidth / volume
        upwards = np.minimum.accumulate(each[::-1])[::-1]
        return _Allowed(each, upwards, np.minimum.accumulate(each), bool((upwards < each).any()))

    def _add_single(self, before: int, compute: Floats, reached: Bools) -> None:
        """Stages of one rank: each q behind moves up by one."""
        behind = self._pairs.behind[before]
        good = (compute <= 1) & self._alive[behind, 0]
        if self._memory is not None:
            most = self._memory.single[before]
            good &= most >= 0
        if not good.any():
            return
        bits = self._bits[behind, :, 0][good]
        if self._memory is not None:
            bits = bits & self._up_to[np.minimum(most[good], self._positions.ranks)][:, None]
        found = _unpack(np.bitwise_or.reduce(bits, axis=0))
        reached[:, 0, 1:] |= found[:, :-1]

    def _add_shared(self, before: int, compute: Floats, level: int, reached: Bools) -> None:
        """Stages of two or more ranks that lie in a group of `level` and in none of the level below."""
        allowed, size = self._allowed[level], self._positions.sizes[level]
        nbytes = self._pairs.reduced[before]
        fewest = np.maximum(compute, np.searchsorted(allowed.upwards, nbytes) + 2)
        alive = self._alive[self._pairs.behind[before], level]
        for fit in self._fits(before):
            low = fewest if fit is None else np.where(fit.fits, np.maximum(fewest, fit.least), np.inf)
            good = np.flatnonzero((low <= size) & alive)
            if good.size:
                self._add_upwards(before, level, good, low, fit, reached)
        if allowed.dips:
            # `downwards` falls: the ranks from 2 up to this number will do, though not all above.
            most = len(allowed.downwards) - np.searchsorted(allowed.downwards[::-1], nbytes) + 1
            least = np.maximum(compute, 2)
            between = (least <= most) & (most < size) & alive
            for fit in self._fits(before):
                low = least if fit is None else np.where(fit.fits, np.maximum(least, fit.least), np.inf)
                good = np.flatnonzero(between & (low <= most))
                if good.size:
                    self._add_between(before, level, good, low, most, fit, reached)

    def _fits(self, before: int) -> list[Fit] | list[None]:
        return [None] if self._memory is None else self._memory.shared[before]

    def _add_upwards(
        self, before: int, level: int, good: Indices, low: Floats, fit: Fit | None, reached: Bools
    ) -> None:
        """Stages that any number of ranks from `low` on will do for: only the smallest q of each group matters."""
        positions = self._positions
        chosen = _choose(good)
        # Those between that will not do are infinitely far.
        least = np.where(low[chosen] <= positions.sizes[level], low[chosen], np.inf).astype(np.float32)
        rows = _within(self._pairs.behind[before], chosen)
        smallest = self._smallest[level][rows]
        ranks: Ranks = least[:, None, None]
        if fit is not None:
            ranks = np.maximum(ranks, _needed(fit, chosen, smallest))
        places = smallest + ranks
        if level > 0:
            np.maximum(places, self._leaps[level][rows], out=places)
        fewest = places.min(axis=0)
        group = positions.group[level]
        reached[:, level, : positions.ranks + 1] |= self._behind >= fewest[:, group]

    def _add_between(
        self,
        before: int,
        level: int,
        good: Indices,
        low: Floats,
        most: Indices,
        fit: Fit | None,
        reached: Bools,
    ) -> None:
        """Stages that need from `low` to `most` ranks: counts the q behind that are not too near nor too far."""
        positions, ranks = self._positions, self._positions.ranks + 1
        rows = np.arange(self._last + 1)[self._pairs.behind[before]][good]
        step = max(1, _MOST_COUNTS // (self._bits.shape[1] * self._width))
        for start in range(0, good.size, step):
            part = good[start : start + step]
            nearest = np.maximum(self._behind - most[part, None], positions.nearest[level])
            farthest = np.minimum(self._behind - low[part, None].astype(np.intp), positions.farthest[level])
            if fit is not None:
                farthest = np.minimum(farthest, _most_behind(fit, part, self._behind))
            behind = _unpack(self._bits[rows[start : start + step]][:, :, level])[:, :, :ranks]
            counts = np.zeros((*behind.shape[:2], ranks + 1), dtype=np.int32)
            np.cumsum(behind, axis=2, out=counts[:, :, 1:])
            up_to = np.take_along_axis(counts, np.clip(farthest + 1, 0, ranks)[:, None], axis=2)
            short_of = np.take_along_axis(counts, np.clip(nearest, 0, ranks)[:, None], axis=2)
            reached[:, level, :ranks] |= (up_to > short_of).any(axis=0)

    # -- the plan behind an answer --

    def _trace(self) -> list[Block] | None:
        """A plan from the first ideal on, with as few stages as are told apart."""
        compute, ranks = self._fewest_for_compute(0), self._problem.ranks
        if self._first_ranks is None:
            reached = self._reached(0)[:, :, ranks].any(axis=1)
            tries, choices = np.flatnonzero(reached)[:1].tolist(), range(1, ranks + 1)
        else:
            tries, choices = list(range(self._bits.shape[1])), range(self._first_ranks, self._first_ranks + 1)
        for stages in tries:
            for count in choices:
                end = self._end_of(0, ranks, count, stages, compute)
                if end is not None:
                    return self._follow(Block(0, end, count), stages)
        return None

    def _follow(self, first: Block, stages: int) -> list[Block]:
        plan = [first]
        place = self._problem.ranks
        while plan[-1].behind != self._last:
            before, count = plan[-1].behind, plan[-1].ranks
            level = self._positions.level(self._problem.ranks - place, count)
            place -= count
            stages -= self._counts_stages
            plan.append(self._next(before, place, level, stages))
        return plan

    def _next(self, before: int, place: int, level: int, stages: int) -> Block:
        """The stage behind one of `level`; there is one, for the search has come through here."""
        compute = self._fewest_for_compute(before)
        for count in range(1, place + 1):
            own = self._positions.level(self._problem.ranks - place, count)
            if self._cuttable[self._positions.cut[level, own, place], before]:
                end = self._end_of(before, place, count, stages, compute)
                if end is not None:
                    return Block(before, end, count)
        raise AssertionError(f"no stage behind ideal {before}, {place} ranks before the end")

    def _end_of(self, before: int, place: int, count: int, stages: int, compute: Floats) -> int | None:
        """Where a stage of `count` ranks may end that begins at `before`, `place` ranks before the last."""
        if count > 1 and self._problem.straight:
            return None
        behind, rows = place - count, self._pairs.behind[before]
        level = self._positions.level(self._problem.ranks - place, count)
        words = self._bits[rows, stages, level, behind // 64]
        good = (compute <= count) & (words >> np.uint64(behind % 64) & np.uint64(1)).astype(np.bool_)
        if count > 1:
            good &= self._pairs.reduced[before] <= self._allowed[level].each[count - 2]
        if self._memory is not None:
            good &= self._memory.holds(before, count, behind)
        found = np.flatnonzero(good)
        return int(np.arange(self._last + 1)[rows][found[-1]]) if found.size else None


def _pack(bits: Bools) -> Words:
    packed: Words = np.packbits(bits, axis=-1, bitorder="little").view(np.uint64)
    return packed


def _unpack(words: Words) -> Bools:
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little").view(np.bool_)


def _choose(good: Indices) -> Behind:
    """The indices in `good`, or the slice around them if that is hardly more: a view instead of a copy."""
    first, last = int(good[0]), int(good[-1])
    return slice(first, last + 1) if last - first < 2 * good.size else good


def _within(behind: Behind, chosen: Behind) -> Behind:
    """The ideals at places `chosen` of a row."""
    ideals: Indices
    if not isinstance(behind, slice):
        ideals = behind[chosen]
        return ideals
    if not isinstance(chosen, slice):
        ideals = chosen + behind.start
        return ideals
    return slice(behind.start + chosen.start, behind.start + chosen.stop)


def _needed(fit: Fit, chosen: Behind, smallest: Ranks) -> Ranks:
    """The ranks that stages need to fit with so many ranks behind them."""
    needed = np.ceil(smallest / fit.spread[chosen][:, None, None])
    # Where no spread helps, the quotient is infinite or none at all.
    enough: Ranks = np.fmin(needed, fit.enough[chosen][:, None, None])
    return enough


def _most_behind(fit: Fit, chosen: Indices, place: Indices) -> Indices:
    """The most ranks behind with which stages fit that begin `place` ranks before the end."""
    spread = fit.spread[chosen, None].astype(np.float64)
    near = np.where(spread > 0, np.floor(place * spread / (spread + 1)), -1)
    most: Indices = np.maximum(near, place - fit.enough[chosen, None]).astype(np.intp)
    return most
