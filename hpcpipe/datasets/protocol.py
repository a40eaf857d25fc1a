"""What the engine asks of a data set, and what a data set tells about itself so that a model can fit it.

It holds no data and opens no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DataDescription:
    """Sizes that a model can be derived from."""

    input_shape: tuple[int, ...]
    """Shape of the first input of one row, without the row dimension."""
    classes: int | None = None
    """Number of classes, or of tokens, that a target can be; None where the data cannot tell."""
    tokens: bool = False
    """Whether inputs are sequences of token numbers with one target each; `classes` is then the vocabulary."""


@runtime_checkable
class Dataset(Protocol):
    """Minibatches of a whole run by number, and evaluation batches by number.

    `j` counts minibatches over all epochs. Every method is a pure function of its argument: the same `j` gives the
    same bits on every rank and in every process, in any order of asking. Tensors are on the CPU.
    """

    @property
    def minibatches_per_epoch(self) -> int:
        """Number of minibatches in one pass over the training rows."""
        ...

    @property
    def eval_batches(self) -> int:
        """Number of batches that hold all rows for evaluation; 0 when there are none."""
        ...

    def epoch(self, j: int) -> int:
        """Return the epoch, from 0, of minibatch `j`."""
        ...

    def rows(self, j: int) -> int:
        """Return the number of rows of minibatch `j`; the last one of an epoch may have fewer."""
        ...

    def inputs(self, j: int) -> tuple[Tensor, ...]:
        """Return the inputs of minibatch `j`, each of shape (rows, ...); reads no targets if it can."""
        ...

    def targets(self, j: int) -> Tensor:
        """Return the targets of minibatch `j`, of shape (rows, ...); reads no inputs if it can."""
        ...

    def eval_rows(self, i: int) -> int:
        """Return the number of rows of evaluation batch `i`."""
        ...

    def eval_inputs(self, i: int) -> tuple[Tensor, ...]:
        """Return the inputs of evaluation batch `i`."""
        ...

    def eval_targets(self, i: int) -> Tensor:
        """Return the targets of evaluation batch `i`."""
        ...

    def describe(self) -> DataDescription:
        """Return the sizes that a model can be derived from."""
        ...
