"""What the last stage minimises and reports: the loss of each pass, and the figures of an evaluation.

Owns the weighting of microbatches and evaluation batches by the number of targets each is the mean of. Sums are
kept apart from their quotients, so that those of several replicas add up; who adds them is not its business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    """The figures of one evaluation, gathered batch by batch.

    `sums` are what adds up over batches and over replicas: the loss times its count, the count, then total and
    weight of each metric.
    """

    def __init__(self, objective: Objective) -> None:
        self.sums = [0.0] * (2 + 2 * len(objective.metrics))
        self._objective = objective

    def add(self, outputs: tuple[Tensor, ...], targets: Tensor) -> None:
        """Let one batch count."""
        count = self._objective.count(targets)
        found: list[float] = [float(self._objective.loss(outputs, targets)) * count, count]
        for metric in self._objective.metrics:
            found += metric.measure(_output(outputs), targets)
        self.sums = [total + part for total, part in zip(self.sums, found, strict=True)]

    def figures(self) -> dict[str, float]:
        """`loss` and each metric by name; NaN where nothing counted."""
        total, count, *of_metrics = self.sums
        results = {"loss": total / count if count else float("nan")}
        for metric, whole, weight in zip(self._objective.metrics, of_metrics[::2], of_metrics[1::2], strict=True):
            results[metric.name] = metric.result(whole, weight)
        return results


@dataclass(kw_only=True)
class Losses:
    """Losses at the last stage: of the passes since the last update, and of the running evaluation."""

    parts: list[tuple[Tensor, int]] = field(default_factory=list)
    """Mean loss of each pass, and how many targets it is the mean of."""
    evaluation: Evaluation | None = None

    def take(self) -> tuple[float, float]:
        """Sum of the losses of all targets since the last update, and how many there were."""
        total = sum(count for _, count in self.parts)
        weighted = sum((float(loss) * count for loss, count in self.parts), 0.0)
        self.parts.clear()
        return weighted, float(total)


def mean_loss(weighted: float, count: float) -> float:
    """The loss of a minibatch from its sums; 0 where no target counts."""
    return weighted / count if count else 0.0


def _output(outputs: tuple[Tensor, ...]) -> Output:
    return outputs[0] if len(outputs) == 1 else outputs
