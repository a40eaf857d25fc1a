"""The loss and the figures of an evaluation, built in or a user's own, so that parts of a batch add up exactly.

A loss is a mean; how many targets it is the mean of is told beside it, so that microbatches and batches of
different sizes can be weighted. Nothing here averages over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hpcpipe.config.model import GptModel, ModelConfig, UserModel
from hpcpipe.config.sections import LOSSES, LossConfig
from hpcpipe.datasets.protocol import DataDescription
from hpcpipe.errors import ModelError
from hpcpipe.user_code import import_object

Output = Tensor | tuple[Tensor, ...]
"""What the last layer returns."""


class Loss(Protocol):
    """A scalar to minimise."""

    def __call__(self, output: Output, targets: Tensor) -> Tensor:
        """Return the mean loss, a scalar that gradients flow from."""
        ...

    def count(self, targets: Tensor) -> int:
        """Return how many targets that mean is over: its weight beside other parts of the batch."""
        ...


class Metric(Protocol):
    """A figure of an evaluation that can be gathered batch by batch."""

    @property
    def name(self) -> str:
        """Key of the figure in metrics.jsonl."""
        ...

    def measure(self, output: Output, targets: Tensor) -> tuple[float, float]:
        """Return (total, weight) of one batch; both add up over batches."""
        ...

    def result(self, total: float, weight: float) -> float:
        """Return the figure of all batches from the added totals and weights; NaN without any weight."""
        ...


def make_loss(config: LossConfig) -> Loss:
    """Return the loss that [loss] names. Raises ModelError when a user's function cannot be imported."""
    if config.name in LOSSES:
        return CrossEntropy(ignore_index=config.ignore_index)
    return UserLoss(function=_function(config.name, "loss.name"))


def make_metrics(config: LossConfig, model: ModelConfig, data: DataDescription | None = None) -> list[Metric]:
    """Return the figures that [loss] names, or those that suit the model.

    Raises ModelError when a user's function cannot be imported.
    """
    names = config.metrics if config.metrics is not None else default_metrics(config, model, data)
    return [_metric(name, config.ignore_index) for name in names]


def default_metrics(config: LossConfig, model: ModelConfig, data: DataDescription | None) -> tuple[str, ...]:
    """Return perplexity for tokens, accuracy for classes, and nothing where the targets' meaning is unknown."""
    if config.name not in LOSSES:
        return ()
    if isinstance(model, GptModel) or (data is not None and data.tokens):
        return ("perplexity",)
    if isinstance(model, UserModel) and (data is None or data.classes is None):
        return ()
    return ("accuracy",)


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """Mean cross entropy of scores (rows, ..., classes) and class numbers (rows, ...)."""

    ignore_index: int | None = None

    def __call__(self, output: Output, targets: Tensor) -> Tensor:
        """Return the mean over the targets that count, 0 when none does; bf16 scores are summed in float32."""
        scores = _scores(output)
        if scores.dtype in (torch.bfloat16, torch.float16):
            scores = scores.float()
        classes = scores.shape[-1]
        flat, wanted = scores.reshape(-1, classes), targets.reshape(-1)
        if self.ignore_index is None:
            # torch's own default skips -100 in silence; without the key every target counts, and -100 is an error.
            return functional.cross_entropy(flat, wanted, ignore_index=_NO_TARGET)
        if self.count(targets) == 0:
            return flat.sum() * 0.0
        return functional.cross_entropy(flat, wanted, ignore_index=self.ignore_index)

    def count(self, targets: Tensor) -> int:
        """Return the number of targets that are not ignored."""
        return targets.numel() if self.ignore_index is None else int((targets != self.ignore_index).sum())


_NO_TARGET = -(2**63)


@dataclass(frozen=True, kw_only=True)
class UserLoss:
    """A user's function of (output, targets) that returns the mean over the rows."""

    function: Callable[[Any, Tensor], Any]

    def __call__(self, output: Output, targets: Tensor) -> Tensor:
        """Return the function's scalar. Raises ModelError when it is none."""
        value = self.function(output, targets)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ModelError(f"loss.name: the loss must be a tensor with one value, the mean, but it is {shape}")
        return value.reshape(())

    def count(self, targets: Tensor) -> int:
        """Return the number of rows."""
        return targets.shape[0]


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Share of targets that have the highest score."""

    ignore_index: int | None = None
    name: str = "accuracy"

    def measure(self, output: Output, targets: Tensor) -> tuple[float, float]:
        """Return (targets hit, targets that count)."""
        hit = _scores(output).argmax(dim=-1) == targets
        counts = torch.ones_like(hit) if self.ignore_index is None else targets != self.ignore_index
        return float((hit & counts).sum()), float(counts.sum())

    def result(self, total: float, weight: float) -> float:
        """Return hits per target."""
        return total / weight if weight else math.nan


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Exponential of the mean cross entropy."""

    ignore_index: int | None = None
    name: str = "perplexity"

    def measure(self, output: Output, targets: Tensor) -> tuple[float, float]:
        """Return (summed cross entropy, targets that count)."""
        entropy = CrossEntropy(ignore_index=self.ignore_index)
        count = entropy.count(targets)
        return float(entropy(output, targets)) * count, float(count)

    def result(self, total: float, weight: float) -> float:
        """Return exp(total / weight), infinity where a float cannot hold it."""
        if not weight:
            return math.nan
        try:
            return math.exp(total / weight)
        except OverflowError:
            return math.inf


@dataclass(frozen=True, kw_only=True)
class UserMetric:
    """A user's function of (output, targets): the mean over the rows, or (total, weight)."""

    function: Callable[[Any, Tensor], Any]
    name: str

    def measure(self, output: Output, targets: Tensor) -> tuple[float, float]:
        """Return (total, weight) of one batch."""
        value = self.function(output, targets)
        if isinstance(value, tuple):
            total, weight = value
            return float(total), float(weight)
        rows = targets.shape[0]
        return float(value) * rows, float(rows)

    def result(self, total: float, weight: float) -> float:
        """Return the weighted mean."""
        return total / weight if weight else math.nan


def _metric(name: str, ignore_index: int | None) -> Metric:
    if name == "accuracy":
        return Accuracy(ignore_index=ignore_index)
    if name == "perplexity":
        return Perplexity(ignore_index=ignore_index)
    return UserMetric(function=_function(name, "loss.metrics"), name=name.rpartition(":")[2])


def _function(name: str, key: str) -> Callable[[Any, Tensor], Any]:
    found = import_object(name, key=key, error=ModelError)
    if isinstance(found, type):
        # A module class such as torch.nn:MSELoss is used with its defaults.
        found = found()
    if not callable(found):
        raise ModelError(f"{key}: {name} is a {type(found).__name__}; name a function of (output, targets)")
    function: Callable[[Any, Tensor], Any] = found
    return function


def _scores(output: Output) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if len(output) == 1:
        return output[0]
    text = f"the last layer returns {len(output)} tensors, and cross_entropy needs one"
    raise ModelError(f"loss.name: {text}; name a loss of your own")
