"""How far ahead a prediction reaches, as two floats: Ŵ = factor · W - coef · direction.

Pure arithmetic over coming learning rates; it never sees a tensor, and counting s is the schedule's business.
SpecTrain (arXiv 1809.02839) and PipeOptim (2312.00839) reach along the full horizon, DANA along the damped one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpcpipe.errors import ConfigError

__all__ = ["TARGETS", "coefficients"]

TARGETS = ("round_trip", "local", "damped")
"""Distance targets. `round_trip` and `local` share the full horizon and differ only in the s that is counted."""


def coefficients(
    target: str,
    s: int,
    learning_rates: Sequence[float],
    *,
    momentum: float = 0.0,
    decoupled_weight_decay: float = 0.0,
) -> tuple[float, float]:
    """Return (factor, coef) of a prediction over the next `s` updates.

    Full horizon: coef = η_t + … + η_{t+s-1}. Damped: coef = Σ_{i=1..s} η_{t+i-1} · momentum^i, what momentum alone
    will still do. factor = Π (1 - η_i · decoupled_weight_decay) over the same updates.

    Args:
        target: one of `TARGETS`.
        s: prediction distance in updates, 0 or more; 0 gives exactly (1.0, 0.0).
        learning_rates: the rates of the coming updates, first the next one; at least `s` of them.
        momentum: SGD's momentum or Adam's beta1; used by `damped` only.
        decoupled_weight_decay: AdamW's weight decay; 0 where decay is part of the gradient.

    Raises:
        ConfigError: unknown target.
        ValueError: negative `s`, or fewer learning rates than `s`.
    """
    if target not in TARGETS:
        raise ConfigError(f"prediction target {target!r} is unknown; choose one of {', '.join(TARGETS)}")
    if s < 0:
        raise ValueError(f"prediction distance must be 0 or more updates, got {s}")
    if len(learning_rates) < s:
        raise ValueError(f"a distance of {s} updates needs {s} coming learning rates, got {len(learning_rates)}")
    coming = learning_rates[:s]
    factor = math.prod(1.0 - rate * decoupled_weight_decay for rate in coming)
    if target == "damped":
        coef = math.fsum(rate * momentum**i for i, rate in enumerate(coming, start=1))
    else:
        coef = math.fsum(coming)
    return float(factor), coef
