from __future__ import annotations

import math

import pytest

from hpcpipe.checkpoint.interval import young_daly


def test_the_interval_is_where_young_s_waste_is_least() -> None:
    write_s, between_failures_s = 12.0, 86400.0

    def waste(interval: float) -> float:
        return write_s / interval + interval / (2 * between_failures_s)

    best = young_daly(write_s, between_failures_s)
    assert best == pytest.approx(1440.0)
    assert waste(best) < min(waste(best * 0.9), waste(best * 1.1))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_times_that_are_not_positive_and_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="write_s"):
        young_daly(bad, 1.0)
    with pytest.raises(ValueError, match="mean_time_between_failures_s"):
        young_daly(1.0, bad)
