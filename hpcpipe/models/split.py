"""Deals a list of layers out to stages: contiguous, in order, no stage empty.

Pure: it sees numbers only. By weights it minimises the largest sum, exactly, and among the best splits takes the
most even one; by counts it checks what the user asked for.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from hpcpipe.errors import ModelError


def split(weights: Sequence[float], stages: int) -> list[tuple[int, int]]:
    """Return (first, last + 1) of each stage's layers so that the heaviest stage is as light as possible.

    Ties are broken by the smallest sum of squared stage weights, then of squared layer counts. Exact for integers.

    Raises ModelError when there are more stages than layers.
    """
    _check_stages(len(weights), stages)
    if any(weight < 0 or not math.isfinite(weight) for weight in weights):
        raise ValueError(f"weights must be finite and not negative, got {list(weights)}")
    sums = [0, *accumulate(weights)]
    limit = _smallest_maximum(sums, stages)
    return _most_even(sums, stages, limit)


def split_counts(counts: Sequence[int], layers: int) -> list[tuple[int, int]]:
    """Return (first, last + 1) of each stage's layers for the layer counts that the run file names.

    Raises ModelError when a count is below one or the counts do not add up to `layers`.
    """
    _check_stages(layers, len(counts))
    if min(counts) < 1 or sum(counts) != layers:
        even = [last - first for first, last in split([1] * layers, len(counts))]
        raise ModelError(
            f"pipeline.balance: {list(counts)} deals out {sum(counts)} layers, but the model has {layers} "
            f"and each stage needs one; an even split is {even}"
        )
    ends = list(accumulate(counts))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _check_stages(layers: int, stages: int) -> None:
    if stages < 1:
        raise ModelError(f"pipeline.stages: there must be at least 1 stage, got {stages}")
    if stages > layers:
        raise ModelError(
            f"pipeline.stages: {stages} stages for a model of {layers} layers, and each stage needs one; "
            f"use at most {layers} ranks or a deeper model"
        )


def _smallest_maximum(sums: Sequence[float], stages: int) -> float:
    """Return the least possible weight of the heaviest stage. `sums[i]` is the weight of the first i layers."""
    layers = len(sums) - 1
    best = list(sums)
    for stage in range(2, stages + 1):
        row = best
        best = [math.inf] * (layers + 1)
        for end in range(stage, layers + 1):
            # `row` grows with the cut and the last stage's weight falls, so the best cut is where they cross.
            cuts = range(stage - 1, end)
            at = bisect_left(cuts, True, key=partial(_crossed, sums, row, end))
            near = [cuts[index] for index in (at - 1, at) if 0 <= index < len(cuts)]
            best[end] = min(max(row[cut], sums[end] - sums[cut]) for cut in near)
    return best[layers]


def _crossed(sums: Sequence[float], row: Sequence[float], end: int, cut: int) -> bool:
    return row[cut] >= sums[end] - sums[cut]


def _most_even(sums: Sequence[float], stages: int, limit: float) -> list[tuple[int, int]]:
    """Return the split with no stage above `limit` and the smallest (sum of weight², sum of count²)."""
    layers = len(sums) - 1
    costs: list[tuple[float, int] | None] = [(0, 0)] + [None] * layers
    cuts_of: list[list[int]] = []
    for stage in range(1, stages + 1):
        row, costs, cuts = costs, [None] * (layers + 1), [0] * (layers + 1)
        for end in range(stage, layers - (stages - stage) + 1):
            best: tuple[float, int] | None = None
            for cut in range(end - 1, stage - 2, -1):
                weight = sums[end] - sums[cut]
                if weight > limit:
                    break
                before = row[cut]
                if before is None:
                    continue
                cost = (before[0] + weight * weight, before[1] + (end - cut) ** 2)
                if best is None or cost < best:
                    best, cuts[end] = cost, cut
            costs[end] = best
        cuts_of.append(cuts)
    bounds = []
    end = layers
    for cuts in reversed(cuts_of):
        bounds.append((cuts[end], end))
        end = cuts[end]
    return bounds[::-1]
