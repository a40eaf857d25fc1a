"""Data sets and losses of a user's own for tests, named in run files as `tests.oracle.data:…`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hpcpipe.datasets.protocol import DataDescription

IGNORED = -7


class Numbered:
    """Rows of noise by minibatch number; the last minibatch of an epoch has fewer."""

    def __init__(
        self, rows: int, batch: int, width: int, classes: int, share_ignored: float, poisoned: int
    ) -> None:
        self._rows, self._batch = rows, batch
        self._width, self._classes = width, classes
        self._share_ignored = share_ignored
        self._poisoned = poisoned

    @property
    def minibatches_per_epoch(self) -> int:
        return -(-self._rows // self._batch)

    @property
    def eval_batches(self) -> int:
        return 2

    def epoch(self, j: int) -> int:
        return j // self.minibatches_per_epoch

    def rows(self, j: int) -> int:
        return min(self._batch, self._rows - (j % self.minibatches_per_epoch) * self._batch)

    def inputs(self, j: int) -> tuple[Tensor, ...]:
        x = torch.randn(self.rows(j), self._width, generator=torch.Generator().manual_seed(2 * j))
        if j == self._poisoned:
            x[0, 0] = float("nan")
        return (x,)

    def targets(self, j: int) -> Tensor:
        draw = torch.Generator().manual_seed(2 * j + 1)
        targets = torch.randint(self._classes, (self.rows(j),), generator=draw)
        targets[torch.rand(self.rows(j), generator=draw) < self._share_ignored] = IGNORED
        return targets

    def eval_rows(self, i: int) -> int:
        return 6 - 2 * i

    def eval_inputs(self, i: int) -> tuple[Tensor, ...]:
        return (self.inputs(1000 + i * self.minibatches_per_epoch)[0][: self.eval_rows(i)],)

    def eval_targets(self, i: int) -> Tensor:
        return self.targets(1000 + i * self.minibatches_per_epoch)[: self.eval_rows(i)]

    def describe(self) -> DataDescription:
        return DataDescription(input_shape=(self._width,), classes=self._classes)


class OneSided(Numbered):
    """Refuses to give labels to a process that has asked for inputs, and the other way round."""

    asked = ""

    def inputs(self, j: int) -> tuple[Tensor, ...]:
        self._note("inputs")
        return super().inputs(j)

    def targets(self, j: int) -> Tensor:
        self._note("targets")
        return super().targets(j)

    def _note(self, what: str) -> None:
        if self.asked not in ("", what):
            raise AssertionError(f"one process asks for {self.asked} and for {what}")
        self.asked = what


class Scaled(Numbered):
    """Two inputs: rows, and a number for each."""

    def inputs(self, j: int) -> tuple[Tensor, ...]:
        (x,) = super().inputs(j)
        return x, x.abs().mean(dim=1, keepdim=True)

    def eval_inputs(self, i: int) -> tuple[Tensor, ...]:
        return tuple(t[: self.eval_rows(i)] for t in self.inputs(1000 + i * self.minibatches_per_epoch))


def build_numbered(
    rows: int = 200,
    batch: int = 8,
    width: int = 16,
    classes: int = 5,
    share_ignored: float = 0.0,
    poisoned: int = -1,
    one_sided: bool = False,
) -> Numbered:
    kind = OneSided if one_sided else Numbered
    return kind(rows, batch, width, classes, share_ignored, poisoned)


def build_scaled(rows: int = 100, batch: int = 8, width: int = 16, classes: int = 5) -> Scaled:
    return Scaled(rows, batch, width, classes, 0.0, -1)


def regularised(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """A loss of two outputs."""
    scores, penalty = outputs
    return functional.cross_entropy(scores, targets) + 0.1 * penalty.mean()


def margin_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """A loss that hpcpipe does not know."""
    return functional.multi_margin_loss(scores, targets)


def second_choice(scores: Tensor, targets: Tensor) -> tuple[float, float]:
    """How often the target is among the two highest scores, as (hits, rows)."""
    hits = (scores.topk(2, dim=-1).indices == targets[:, None]).any(dim=-1)
    return float(hits.sum()), float(len(targets))


def largest_score(scores: Tensor, targets: Tensor) -> float:
    """A figure that is a mean over the rows."""
    return float(scores.max(dim=-1).values.mean())
