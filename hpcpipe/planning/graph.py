"""The places where a model can be cut: the ideals of its graph, with what lies before each and what crosses it.

It owns the states of the partitioner: an ideal is a set of layers that holds all that its layers read, so a stage
is the difference of two (the antichains of PipeDream's optimizer are their borders). It knows no ranks, no plans.

    layers 0 -> 1 -> 3, 0 -> 2 -> 3      ideals {} {0} {0,1} {0,2} {0,1,2} {0,1,2,3}; for a chain: its prefixes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpipe.errors import PlanError
from hpcpipe.planning.costs import returned_bytes
from hpcpipe.planning.profile import LayerCost, Profile

MOST_IDEALS = 3000
"""What the partitioner can search within minutes; it looks at pairs of them."""

Floats = NDArray[np.float64]
Behind = slice | NDArray[np.intp]


class _Ideal(NamedTuple):
    """An ideal as the one it was found from and one layer more; `ready` are the layers that could come next."""

    mask: int
    parent: int
    added: int
    ready: frozenset[int]


class Sums:
    """Sums over the layers before each ideal, kept so that no digit of a difference is lost.

    A stage is often a thousandth of the model: differences of plain sums would be wrong in the 13th digit.
    """

    def __init__(self, exact: list[Fraction]) -> None:
        self._high = np.array([float(value) for value in exact])
        self._low = np.array([float(value - Fraction(float(value))) for value in exact])

    def between(self, before: int, behind: Behind) -> Floats:
        """The sum over the layers that each of `behind` holds and `before` does not."""
        difference: Floats = (self._high[behind] - self._high[before]) + (self._low[behind] - self._low[before])
        return difference


class Ideals:
    """All ideals of a profile's graph that part no layers with a weight in common.

    Each stands behind all that it contains; 0 is empty and the last holds all layers. `activation_bytes` and
    `gradient_bytes` cross the cut at each ideal: the outputs of its layers that layers outside read, each once,
    and what comes back for them.

    Raises PlanError: there are more than `most`.
    """

    def __init__(self, profile: Profile, most: int = MOST_IDEALS) -> None:
        self._found = _enumerate(profile, most)
        self._layers = profile.layers
        together = [1 << earlier | 1 << later for earlier, later in profile.shared]
        self._kept = [
            index
            for index, ideal in enumerate(self._found)
            if all(ideal.mask & pair in (0, pair) for pair in together)
        ]
        self._masks = [self._found[index].mask for index in self._kept]
        self._places = {mask: place for place, mask in enumerate(self._masks)}
        self.count = len(self._kept)
        self.is_chain = len(self._found) == len(profile.layers) + 1
        self.activation_bytes, self.gradient_bytes = (
            crossing[self._kept] for crossing in _crossing(profile, self._found)
        )
        width = -(-len(profile.layers) // 64)
        data = b"".join(mask.to_bytes(8 * width, "little") for mask in self._masks)
        self._words = np.frombuffer(data, dtype="<u8").reshape(self.count, width)

    def sums(self, of: Callable[[LayerCost], float]) -> Sums:
        """What `of` gives for each layer, summed over the layers of each ideal."""
        values = [Fraction(of(layer)) for layer in self._layers]
        exact = [Fraction(0)]
        for ideal in self._found[1:]:
            exact.append(exact[ideal.parent] + values[ideal.added])
        return Sums([exact[index] for index in self._kept])

    def behind(self, before: int) -> Behind:
        """The ideals that contain ideal `before` and more."""
        if self.is_chain:
            return slice(before + 1, self.count)
        inside = self._words[before]
        contains = ((self._words[before + 1 :] & inside) == inside).all(axis=1)
        return np.flatnonzero(contains) + (before + 1)

    def index(self, layers: Iterable[int]) -> int:
        """The ideal of just these layers. Raises KeyError: they are none."""
        return self._places[sum(1 << layer for layer in layers)]

    @property
    def most_stages(self) -> int:
        """The number of stages of the longest pipeline."""
        longest = [0] * self.count
        for before in reversed(range(self.count - 1)):
            behind = self.behind(before)
            places = range(behind.start, behind.stop) if isinstance(behind, slice) else behind
            longest[before] = 1 + max(longest[place] for place in places)
        return longest[0]

    def layers(self, before: int, behind: int) -> tuple[int, ...]:
        """The layers of the stage between two ideals."""
        mask = self._masks[behind] & ~self._masks[before]
        return tuple(index for index in range(len(self._layers)) if mask >> index & 1)


def _enumerate(profile: Profile, most: int) -> list[_Ideal]:
    """All ideals, by their number of layers."""
    reads, readers = _neighbours(profile)
    none = _Ideal(0, 0, -1, frozenset(index for index, needed in enumerate(reads) if not needed))
    found, border = [none], range(1)
    while border:
        larger: dict[int, _Ideal] = {}
        for parent in border:
            ideal = found[parent]
            for added in sorted(ideal.ready):
                mask = ideal.mask | 1 << added
                if mask not in larger:
                    freed = (index for index in readers[added] if not reads[index] & ~mask)
                    larger[mask] = _Ideal(mask, parent, added, (ideal.ready - {added}).union(freed))
                    # Ideals of one size alone may be too many for memory.
                    if len(found) + len(larger) > most:
                        raise PlanError(
                            f"the graph of {len(reads)} layers can be cut in more than {most:,} places: merge "
                            "layers of branches that run side by side in the profile"
                        )
        border = range(len(found), len(found) + len(larger))
        found += larger.values()
    return found


def _neighbours(profile: Profile) -> tuple[list[int], list[list[int]]]:
    """The layers that each layer reads, as a bit mask, and those that read it."""
    reads = [0] * len(profile.layers)
    readers: list[list[int]] = [[] for _ in profile.layers]
    for source, reader in profile.edges:
        reads[reader] |= 1 << source
        readers[source].append(reader)
    return reads, readers


def _crossing(profile: Profile, ideals: list[_Ideal]) -> tuple[Floats, Floats]:
    """Bytes that cross the cut at each ideal, forward and back."""
    reads, readers = _neighbours(profile)
    read_by = [sum(1 << index for index in indices) for indices in readers]
    forward, backward = [0], [0]
    for ideal in ideals[1:]:
        # Against the parent's cut: the new layer's output comes, and what only it still had to read goes.
        new = [ideal.added] if read_by[ideal.added] else []
        done = [source for source in _members(reads[ideal.added]) if not read_by[source] & ~ideal.mask]
        layers = profile.layers
        forward.append(
            forward[ideal.parent]
            + sum(layers[index].output_bytes for index in new)
            - sum(layers[index].output_bytes for index in done)
        )
        backward.append(
            backward[ideal.parent]
            + sum(returned_bytes(layers[index]) for index in new)
            - sum(returned_bytes(layers[index]) for index in done)
        )
    return np.array(forward, dtype=np.float64), np.array(backward, dtype=np.float64)


def _members(mask: int) -> list[int]:
    members = []
    while mask:
        lowest = mask & -mask
        members.append(lowest.bit_length() - 1)
        mask ^= lowest
    return members
