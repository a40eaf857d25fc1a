"""Where stages of given sizes lie in the topology, as arrays over the number of ranks behind a place.

It owns the arithmetic of groups. Stages take the ranks 0..N-1 in order, so a stage of m ranks with D behind it has
the ranks N-D-m .. N-D-1: which levels it and its cut lie on follows from D and m alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcpipe.planning.topology import Topology

Indices = NDArray[np.intp]


class Positions:
    """The levels that matter for `ranks` ranks, and for each level l, of group size S and inner group size s:

    `groups[l]`: how many groups there are. Counted from the last rank, group g has D from `starts[l][g]` on; the
    first of them may be cut short, by `padding[l]` ranks.
    `leap[l][D]`: D + the fewest ranks (2 at least) of a stage with D ranks behind it that leaves its inner group.
    `group[l][q]`: the group, counted from the last rank, of the first rank of a stage, q = D + its ranks.
    `nearest[l][q]`, `farthest[l][q]`: the least and the most D that a stage of level l can have if it begins q
    ranks before the end (nearest > farthest: none).
    """

    def __init__(self, topology: Topology, ranks: int) -> None:
        self.ranks = ranks
        self.levels = topology.level_of([0, ranks - 1]) + 1
        self.sizes = [level.size for level in topology.levels[: self.levels - 1]] + [ranks]
        inner = [1, *self.sizes[:-1]]
        self.padding = [-ranks % size for size in self.sizes]
        self.groups = [(ranks + pad) // size for pad, size in zip(self.padding, self.sizes, strict=True)]
        self.starts = [
            np.arange(groups) * size - pad
            for groups, size, pad in zip(self.groups, self.sizes, self.padding, strict=True)
        ]
        behind = np.arange(ranks + 1)
        last = ranks - 1 - behind
        first = ranks - behind
        self.leap = [np.minimum(behind + last - last // s * s + 2, 4 * ranks).astype(np.float32) for s in inner]
        self.group: list[Indices] = []
        self.nearest: list[Indices] = []
        self.farthest: list[Indices] = []
        for size, s, pad in zip(self.sizes, inner, self.padding, strict=True):
            self.group.append(np.clip((ranks + pad - 1 - first) // size, 0, None))
            self.nearest.append(ranks - 1 - np.minimum((first // size + 1) * size - 1, ranks - 1))
            self.farthest.append(ranks - 1 - (first // s + 1) * s)
        # Between the ranks N-q-1 and N-q.
        self.border = np.array([self._level(ranks - q - 1, ranks - q) if 0 < q < ranks else 0 for q in behind])
        level = np.arange(self.levels)
        self.cut = np.maximum(np.maximum(level[:, None], level[None, :])[:, :, None], self.border)
        """[l0, l1, q]: the level of the cut between stages of levels l0 and l1, the second with q ranks and those
        behind it."""

    def level(self, first: int, ranks: int) -> int:
        """The level of a stage of `ranks` ranks from rank `first` on."""
        return self._level(first, first + ranks - 1)

    def _level(self, first: int, last: int) -> int:
        return next(i for i, size in enumerate(self.sizes) if first // size == last // size)
