"""What a stage reads of the data set, in the parts that its passes take and on the device where they run.

Owns the split of a minibatch's rows into microbatches. It never asks which replica a part belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor


class StageData(Protocol):
    """What a stage reads of the data set: inputs at the first stage, targets at the last."""

    def inputs(self, minibatch: int) -> tuple[Tensor, ...]:
        """Model inputs of a minibatch, rows first."""

    def targets(self, minibatch: int) -> Tensor:
        """Targets of a minibatch, rows first."""

    def rows(self, minibatch: int) -> int:
        """Rows of a minibatch; the last one of an epoch may have fewer."""

    def eval_rows(self, batch: int) -> int:
        """Rows of an evaluation batch."""

    def eval_inputs(self, batch: int) -> tuple[Tensor, ...]:
        """Model inputs of an evaluation batch."""

    def eval_targets(self, batch: int) -> Tensor:
        """Targets of an evaluation batch."""


class Batches:
    """Minibatches in `microbatches` parts whose sizes differ by one row at most, the larger first.

    `dtype` is that of floating-point inputs.
    """

    def __init__(self, data: StageData, *, microbatches: int, device: torch.device, dtype: torch.dtype) -> None:
        self.microbatches = microbatches
        self._data = data
        self._device = device
        self._dtype = dtype
        # The microbatches of a minibatch come one after another and are parts of the same tensors.
        self._inputs = lru_cache(maxsize=1)(lambda minibatch: self._to_device(data.inputs(minibatch)))
        self._targets = lru_cache(maxsize=1)(lambda minibatch: data.targets(minibatch).to(device))

    def rows(self, minibatch: int, microbatch: int) -> int:
        """Rows of one pass."""
        whole, extra = divmod(self._data.rows(minibatch), self.microbatches)
        return whole + (microbatch < extra)

    def inputs(self, minibatch: int, microbatch: int) -> tuple[Tensor, ...]:
        """Model inputs of one pass."""
        return tuple(self._part(tensor, microbatch) for tensor in self._inputs(minibatch))

    def targets(self, minibatch: int, microbatch: int) -> Tensor:
        """Targets of one pass."""
        return self._part(self._targets(minibatch), microbatch)

    def all_targets(self, minibatch: int) -> Tensor:
        """Targets of all microbatches."""
        return self._targets(minibatch)

    def eval_rows(self, batch: int) -> int:
        """Rows of an evaluation batch."""
        return self._data.eval_rows(batch)

    def eval_inputs(self, batch: int) -> tuple[Tensor, ...]:
        """Model inputs of an evaluation batch."""
        return self._to_device(self._data.eval_inputs(batch))

    def eval_targets(self, batch: int) -> Tensor:
        """Targets of an evaluation batch."""
        return self._data.eval_targets(batch).to(self._device)

    def _to_device(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(
            tensor.to(self._device, self._dtype if tensor.is_floating_point() else None) for tensor in tensors
        )

    def _part(self, tensor: Tensor, microbatch: int) -> Tensor:
        if self.microbatches == 1:
            return tensor
        return torch.tensor_split(tensor, self.microbatches)[microbatch]
