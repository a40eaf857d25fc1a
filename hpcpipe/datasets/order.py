"""Which rows make up minibatch j: a pure function of (seed, epoch, minibatch), kept by no state.

It knows numbers of rows only, not what is in them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hpcpipe.errors import DataError

Index = NDArray[np.int64]
"""Row numbers."""


class Order:
    """Deals `rows` rows out in minibatches of `batch`, epoch after epoch.

    The last minibatch of an epoch is short, or left out with `drop_last`. Raises DataError when an epoch would
    have no minibatch.
    """

    def __init__(self, *, rows: int, batch: int, seed: int, shuffle: bool = True, drop_last: bool = False) -> None:
        self.rows_per_epoch = rows
        self.batch = batch
        self.minibatches_per_epoch = rows // batch if drop_last else -(-rows // batch)
        if self.minibatches_per_epoch == 0:
            remedy = "lower data.batch or set data.drop_last = false" if rows else "give more data"
            raise DataError(f"data.batch: {rows} training rows make no minibatch of {batch} rows; {remedy}")
        self._seed = seed
        self._shuffle = shuffle
        # Two epochs, since stages of one process may stand on both sides of an epoch's end.
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def epoch(self, j: int) -> int:
        """Return the epoch of minibatch `j`."""
        return j // self.minibatches_per_epoch

    def rows(self, j: int) -> int:
        """Return the number of rows of minibatch `j`."""
        first = (j % self.minibatches_per_epoch) * self.batch
        return min(self.batch, self.rows_per_epoch - first)

    def indices(self, j: int) -> Index:
        """Return the row numbers of minibatch `j`."""
        epoch, place = divmod(j, self.minibatches_per_epoch)
        first = place * self.batch
        if not self._shuffle:
            return np.arange(first, first + self.rows(j), dtype=np.int64)
        return self._permutation(epoch)[first : first + self.batch]

    def _permute(self, epoch: int) -> Index:
        # NumPy promises the raw stream of a bit generator for ever, but not what `permutation` makes of it.
        key = np.array([self._seed, epoch], dtype=np.uint64)
        drawn = np.random.Philox(key=key).random_raw(self.rows_per_epoch)
        return np.argsort(drawn, kind="stable").astype(np.int64, copy=False)


def held_out(rows: int, fraction: float, seed: int) -> tuple[Index, Index]:
    """Return (training rows, evaluation rows), sorted, drawn by `seed` alone; neither is empty."""
    drawn = np.random.Philox(key=np.array([seed, rows], dtype=np.uint64)).random_raw(rows)
    order = np.argsort(drawn, kind="stable").astype(np.int64, copy=False)
    kept = min(max(1, round(rows * fraction)), rows - 1)
    return np.sort(order[kept:]), np.sort(order[:kept])
