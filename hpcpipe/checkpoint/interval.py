"""How far apart checkpoints should be, from what one costs and how often the machine fails."""

from __future__ import annotations

import math


def young_daly(write_s: float, mean_time_between_failures_s: float) -> float:
    """Seconds of training between two checkpoints that lose the least time: sqrt(2 * C * M).

    `write_s` (C) is what one checkpoint costs the training, `mean_time_between_failures_s` (M) the mean time
    between failures of the whole job, both in seconds and positive. First order, good while C is much smaller
    than M: Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; Daly,
    FGCS 22(3), 2006.

    Raises:
        ValueError: a time is not positive and finite.
    """
    for name, value in (
        ("write_s", write_s),
        ("mean_time_between_failures_s", mean_time_between_failures_s),
    ):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive and finite, got {value}")
    return math.sqrt(2 * write_s * mean_time_between_failures_s)
