"""What a prediction multiplies: learning rates of the coming updates, per parameter group.

The learning rate is a function of the minibatch index alone, so coming rates are known exactly and a prediction
uses their sum instead of s times today's rate (prediction under a learning-rate schedule). Where replicas share an
update, it has the rate of the last of their minibatches. Which updates come is the schedule's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from hpcpipe.optim.prediction import coefficients
from hpcpipe.optim.schedules import LearningRate


class Horizon:
    """Learning rates and prediction coefficients of one stage.

    `updates_from(version, distance)` names the next `distance` updates behind a version by their last minibatches,
    as `StageProgram.updates_from` does. `scales` multiply the learning rate in each parameter group, `decays` are
    decoupled weight decays per group (0 where decay is part of the gradient), `momentum` is SGD's or Adam's beta1.
    """

    def __init__(
        self,
        rate: LearningRate,
        *,
        target: str,
        momentum: float,
        updates_from: Callable[[int, int], Sequence[int]],
        scales: Sequence[float] = (1.0,),
        decays: Sequence[float] = (0.0,),
    ) -> None:
        self.rate = rate
        self._target = target
        self._momentum = momentum
        self._updates_from = updates_from
        self._scales = tuple(scales)
        self._decays = tuple(decays)
        # A constant rate asks for the same few values for ever.
        self._along = lru_cache(maxsize=256)(self._coefficients)

    def learning_rates(self, minibatch: int) -> tuple[float, ...]:
        """Learning rate of U(`minibatch`) in each parameter group."""
        rate = self.rate(minibatch)
        return tuple(rate * scale for scale in self._scales)

    def coefficients(self, version: int, distance: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(factor, coef) per group of a prediction from `version`, `distance` updates ahead."""
        return self._along(self.rate.coming(self._updates_from(version, distance)))

    def _coefficients(self, coming: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        pairs = [
            coefficients(
                self._target,
                len(coming),
                [rate * scale for rate in coming],
                momentum=self._momentum,
                decoupled_weight_decay=decay,
            )
            for scale, decay in zip(self._scales, self._decays, strict=True)
        ]
        return tuple(factor for factor, _ in pairs), tuple(coef for _, coef in pairs)
