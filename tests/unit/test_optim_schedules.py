"""Learning rates against torch.optim.lr_scheduler, which computes them step by step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from hpcpipe.errors import ConfigError
from hpcpipe.optim.schedules import LearningRate

BASE = 0.3
TOTAL = 40

CASES: dict[str, tuple[dict[str, Any], Callable[[torch.optim.Optimizer, int], Any]]] = {
    "constant": ({}, lambda optimizer, n: lr_scheduler.ConstantLR(optimizer, factor=1.0)),
    "step": ({"gamma": 0.5, "every": 7}, lambda optimizer, n: lr_scheduler.StepLR(optimizer, 7, gamma=0.5)),
    "cosine": (
        {"total": TOTAL, "minimum": 0.02},
        lambda optimizer, n: lr_scheduler.CosineAnnealingLR(optimizer, n, eta_min=0.02),
    ),
    "linear": (
        {"total": TOTAL, "end_factor": 0.1},
        lambda optimizer, n: lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=n),
    ),
}


def torch_rates(make: Callable[[torch.optim.Optimizer, int], Any], warmup: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=BASE)
    schedule = make(optimizer, TOTAL - warmup)
    if warmup:
        first = lr_scheduler.LinearLR(optimizer, start_factor=1 / warmup, total_iters=max(warmup - 1, 1))
        schedule = lr_scheduler.SequentialLR(optimizer, [first, schedule], milestones=[warmup])
    rates = []
    for _ in range(TOTAL + 1):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        with warnings.catch_warnings():
            # SequentialLR itself passes the deprecated epoch argument on.
            warnings.simplefilter("ignore")
            schedule.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("name", CASES)
def test_a_schedule_equals_its_torch_namesake(name: str, warmup: int) -> None:
    options, make = CASES[name]
    rate = LearningRate(base=BASE, schedule=name, warmup=warmup, **options)  # type: ignore[arg-type]

    assert [rate(index) for index in range(TOTAL + 1)] == pytest.approx(torch_rates(make, warmup), rel=1e-12)


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_a_decay_keeps_its_last_value(name: str) -> None:
    rate = LearningRate(base=BASE, schedule=name, **CASES[name][0])  # type: ignore[arg-type]
    assert rate(TOTAL) == pytest.approx(0.02 if name == "cosine" else 0.03)
    assert rate(TOTAL + 1000) == rate(TOTAL)


def test_warm_up_ends_at_the_base_rate_and_never_starts_at_zero() -> None:
    rate = LearningRate(base=1.0, warmup=4)
    assert [rate(index) for index in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_coming_rates_are_those_of_the_next_updates() -> None:
    rate = LearningRate(base=1.0, schedule="step", gamma=0.5, every=2)
    assert rate.coming(range(1, 5)) == (1.0, 0.5, 0.5, 0.25)
    assert rate.coming((1, 4)) == (1.0, 0.25)
    assert rate.coming(()) == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "exponential"}, "choose one of constant, step, cosine, linear"),
        ({"base": -1.0}, "base must be"),
        ({"base": float("nan")}, "base must be"),
        ({"warmup": -1}, "warmup must be"),
        ({"schedule": "step"}, "needs every"),
        ({"schedule": "cosine"}, "needs total"),
        ({"schedule": "linear", "total": 5, "warmup": 5}, "above warmup = 5"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LearningRate(**{"base": 0.1, **options})


def test_a_negative_index_is_refused() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        LearningRate(base=0.1)(-1)
