"""What the last stage minimises and reports: the loss of each pass, and the figures of an evaluation.

Owns the weighting of microbatches and evaluation batches by the number of targets each is the mean of.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hpcpipe.models.loss import Loss, Metric, Output


class Objective:
    """A loss to minimise and metrics to report."""

    def __init__(self, loss: Loss, metrics: Sequence[Metric]) -> None:
        self.metrics = tuple(metrics)
        self._loss = loss

    def loss(self, outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """Mean loss of one pass, a 0-d tensor."""
        return self._loss(_output(outputs), targets)

    def count(self, targets: Tensor) -> int:
        """How many targets the mean is over."""
        return self._loss.count(targets)


class Evaluation:
    """The figures of one evaluation, gathered batch by batch."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._loss = [0.0, 0.0]
        self._sums = {metric.name: [0.0, 0.0] for metric in objective.metrics}

    def add(self, outputs: tuple[Tensor, ...], targets: Tensor) -> None:
        """Let one batch count."""
        count = self._objective.count(targets)
        self._loss[0] += float(self._objective.loss(outputs, targets)) * count
        self._loss[1] += count
        for metric in self._objective.metrics:
            total, weight = metric.measure(_output(outputs), targets)
            self._sums[metric.name][0] += total
            self._sums[metric.name][1] += weight

    def figures(self) -> dict[str, float]:
        """`loss` and each metric by name; NaN where nothing counted."""
        total, count = self._loss
        results = {"loss": total / count if count else float("nan")}
        for metric in self._objective.metrics:
            results[metric.name] = metric.result(*self._sums[metric.name])
        return results


def _output(outputs: tuple[Tensor, ...]) -> Output:
    return outputs[0] if len(outputs) == 1 else outputs
