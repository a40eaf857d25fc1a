"""Minibatches of a table of rows: the data set that all built-in ones are.

A table is told which rows are wanted and gathers inputs and targets apart, so that the last stage reads labels
only and the first stage no labels.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from hpcpipe.config.data import DataConfig
from hpcpipe.datasets.order import Index, Order
from hpcpipe.datasets.protocol import DataDescription

EVALUATION = -1
"""Stands for the epoch of rows that are evaluated."""


class Table(Protocol):
    """Rows that can be gathered by number."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def inputs(self, index: Index, epoch: int) -> tuple[Tensor, ...]:
        """Return the inputs of these rows, in this order; `epoch` matters to random augmentation only."""
        ...

    def targets(self, index: Index, epoch: int) -> Tensor:
        """Return the targets of these rows, in this order."""
        ...


class Minibatches:
    """A `Dataset` over one table to train on and one to evaluate on, which may be empty."""

    def __init__(
        self, train: Table, evaluation: Table, description: DataDescription, *, config: DataConfig, seed: int
    ) -> None:
        self._train = train
        self._evaluation = evaluation
        self._description = description
        self._eval_batch = config.eval_rows
        self._order = Order(
            rows=len(train),
            batch=config.batch,
            seed=seed,
            shuffle=config.shuffle,
            drop_last=config.drop_last,
        )

    @property
    def minibatches_per_epoch(self) -> int:
        """Number of minibatches in one pass over the training rows."""
        return self._order.minibatches_per_epoch

    @property
    def eval_batches(self) -> int:
        """Number of batches that hold all rows for evaluation."""
        return -(-len(self._evaluation) // self._eval_batch)

    def epoch(self, j: int) -> int:
        """Return the epoch of minibatch `j`."""
        return self._order.epoch(j)

    def rows(self, j: int) -> int:
        """Return the number of rows of minibatch `j`."""
        return self._order.rows(j)

    def inputs(self, j: int) -> tuple[Tensor, ...]:
        """Return the inputs of minibatch `j`."""
        return self._train.inputs(self._order.indices(j), self.epoch(j))

    def targets(self, j: int) -> Tensor:
        """Return the targets of minibatch `j`."""
        return self._train.targets(self._order.indices(j), self.epoch(j))

    def eval_rows(self, i: int) -> int:
        """Return the number of rows of evaluation batch `i`."""
        return len(self._eval_indices(i))

    def eval_inputs(self, i: int) -> tuple[Tensor, ...]:
        """Return the inputs of evaluation batch `i`."""
        return self._evaluation.inputs(self._eval_indices(i), EVALUATION)

    def eval_targets(self, i: int) -> Tensor:
        """Return the targets of evaluation batch `i`."""
        return self._evaluation.targets(self._eval_indices(i), EVALUATION)

    def describe(self) -> DataDescription:
        """Return the sizes that a model can be derived from."""
        return self._description

    def _eval_indices(self, i: int) -> Index:
        if not 0 <= i < self.eval_batches:
            raise IndexError(f"there are {self.eval_batches} evaluation batches, asked for number {i}")
        first = i * self._eval_batch
        return np.arange(first, min(first + self._eval_batch, len(self._evaluation)), dtype=np.int64)
