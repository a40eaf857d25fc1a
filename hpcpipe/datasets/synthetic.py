"""Random rows for benchmarks and tests, the same on every rank; there is nothing to learn in them."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hpcpipe.config.data import SyntheticData
from hpcpipe.datasets.order import Index
from hpcpipe.datasets.protocol import DataDescription
from hpcpipe.datasets.rows import Minibatches

_POOL = 2**22
"""Random numbers that are drawn; rows beyond them repeat."""


class SyntheticTable:
    """`rows` rows drawn from a pool, made when the first is asked for."""

    def __init__(self, config: SyntheticData, rows: int, stream: int) -> None:
        self._config = config
        self._rows = rows
        self._stream = stream

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._rows

    @property
    def _pooled(self) -> int:
        return max(1, min(self._rows, _POOL // int(np.prod(self._config.shape))))

    @cached_property
    def _inputs(self) -> Tensor:
        shape = (self._pooled, *self._config.shape)
        draw = np.random.Generator(np.random.Philox(key=[self._stream, 0]))
        if self._config.vocab is not None:
            return torch.from_numpy(draw.integers(self._config.vocab, size=shape, dtype=np.int64))
        return torch.from_numpy(draw.standard_normal(shape, dtype=np.float32))

    @cached_property
    def _targets(self) -> Tensor:
        config = self._config
        shape = (self._pooled,) if config.vocab is None else (self._pooled, *config.shape)
        draw = np.random.Generator(np.random.Philox(key=[self._stream, 1]))
        return torch.from_numpy(draw.integers(config.vocab or config.classes, size=shape, dtype=np.int64))

    def inputs(self, index: Index, epoch: int) -> tuple[Tensor, ...]:
        """Return float32 rows of the given shape, or int64 tokens."""
        return (self._inputs[torch.from_numpy(index % self._pooled)],)

    def targets(self, index: Index, epoch: int) -> Tensor:
        """Return int64 classes of shape (rows,), or tokens of shape (rows, length)."""
        return self._targets[torch.from_numpy(index % self._pooled)]


def build_synthetic(config: SyntheticData, seed: int) -> Minibatches:
    """Return random rows as a data set; `seed` decides their order, not what is in them."""
    description = DataDescription(
        input_shape=config.shape, classes=config.vocab or config.classes, tokens=config.vocab is not None
    )
    train = SyntheticTable(config, config.rows, 0)
    evaluation = SyntheticTable(config, config.eval_data_rows, 1)
    return Minibatches(train, evaluation, description, config=config, seed=seed)
