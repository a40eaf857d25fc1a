"""Prediction coefficients, and the closed forms of the update rules that predict with them.

T2, T3, … are names from the list of tests that any SpecTrain implementation should pass; the numbers are those of
the list. All run in float64 through the twin's own step and predict, T2 and T3 in float32 and through the compiled
rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hpcpipe.errors import ConfigError
from hpcpipe.optim import native, twin
from hpcpipe.optim.flat import FlatLayout
from hpcpipe.optim.prediction import TARGETS, coefficients
from hpcpipe.optim.rules import AdamOptions, Output, RuleOptions, SgdOptions, UpdateRule

GAMMA = 0.9
ETA = 0.05


def c(s: int, gamma: float = GAMMA) -> float:
    """γ + γ² + … + γ^s."""
    return sum(gamma**i for i in range(1, s + 1))


class Run:
    """One parameter of `n` elements, updated in place by a rule that is built for it."""

    def __init__(
        self,
        options: SgdOptions | AdamOptions,
        n: int = 1,
        *,
        start: float = 0.0,
        velocity: float = 0.0,
        updates: int = 0,
        keep_velocity: bool = False,
    ) -> None:
        self.layout = FlatLayout([("w", (n,), 0)], dtype=torch.float64)
        self.rule: UpdateRule = twin.make([options], self.layout, keep_velocity=keep_velocity)
        self.flat = self.layout.allocate()
        self.flat[:n] = start
        self.state = {name: self.layout.allocate() for name in self.rule.state_names}
        if velocity:
            self.state["momentum_buffer"][:n] = velocity
        self.updates = updates

    @property
    def w(self) -> Tensor:
        return self.layout.views(self.flat)["w"]

    def step(self, gradient: Tensor | float, rate: float = ETA) -> None:
        gradient = torch.as_tensor(gradient, dtype=torch.float64).expand(self.w.shape)
        self.rule.step(
            gradients=[gradient],
            weights=self.flat,
            next_weights=self.flat,
            state=self.state,
            step=self.updates,
            learning_rates=(rate,),
        )
        self.updates += 1

    def predict(self, coef: float, factor: float = 1.0) -> Tensor:
        buffer = self.layout.allocate()
        output = Output(buffer=buffer, factor=(factor,), coef=(coef,))
        self.rule.predict(weights=self.flat, state=self.state, step=self.updates, outputs=[output])
        return self.layout.views(buffer)["w"]


def ema(momentum: float = GAMMA, **options: float) -> SgdOptions:
    """SGD with v = γ v + (1-γ) g."""
    return SgdOptions(momentum=momentum, dampening=momentum, **options)


# --- The coefficients ---------------------------------------------------------------------------------------


@given(rates=st.lists(st.floats(0, 1), max_size=10), s=st.integers(0, 10), gamma=st.floats(0, 0.99))
def test_coefficients_are_the_sums_over_the_coming_rates(rates: list[float], s: int, gamma: float) -> None:
    rates = [*rates, *[0.0] * (10 - len(rates))]
    full = sum(rates[:s])
    damped = sum(rate * gamma ** (i + 1) for i, rate in enumerate(rates[:s]))
    for target in ("round_trip", "local"):
        assert coefficients(target, s, rates, momentum=gamma) == (1.0, pytest.approx(full, abs=1e-12))
    assert coefficients("damped", s, rates, momentum=gamma) == (1.0, pytest.approx(damped, abs=1e-12))


@pytest.mark.parametrize("target", TARGETS)
def test_distance_zero_is_the_identity(target: str) -> None:
    assert coefficients(target, 0, [], momentum=0.9, decoupled_weight_decay=0.1) == (1.0, 0.0)


def test_decoupled_decay_becomes_a_factor() -> None:
    factor, _ = coefficients("local", 2, [0.1, 0.2, 0.4], decoupled_weight_decay=0.5)
    assert factor == pytest.approx(0.95 * 0.9, rel=1e-15)


def test_coefficients_refuse_what_they_cannot_know() -> None:
    with pytest.raises(ConfigError, match="choose one of round_trip, local, damped"):
        coefficients("paper", 1, [0.1])
    with pytest.raises(ValueError, match="0 or more"):
        coefficients("local", -1, [])
    with pytest.raises(ValueError, match="needs 3 coming learning rates, got 2"):
        coefficients("local", 3, [0.1, 0.1])


# --- Identities, to the bit ---------------------------------------------------------------------------------

IDENTITY_RULES: list[RuleOptions] = [
    [SgdOptions(momentum=GAMMA, weight_decay=0.01)],
    [SgdOptions(momentum=GAMMA, nesterov=True)],
    [AdamOptions()],
]


def float32_rules(options: RuleOptions, layout: FlatLayout) -> list[UpdateRule]:
    rules: list[UpdateRule] = [twin.make(options, layout)]
    if native.available() is None:
        rules.append(native.make(options, layout))
    return rules


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("options", IDENTITY_RULES, ids=str)
def test_t2_at_learning_rate_zero_nothing_moves(options: RuleOptions, target: str) -> None:
    layout = FlatLayout([("w", (37,), 0)])
    factor, coef = coefficients(
        target, 5, [0.0] * 5, momentum=options[0].damping, decoupled_weight_decay=options[0].decoupled_weight_decay
    )
    for rule in float32_rules(options, layout):
        weights = layout.allocate()
        layout.views(weights)["w"].normal_()
        start = weights.clone()
        predicted = layout.allocate()
        state = {name: layout.allocate() for name in rule.state_names}
        for step in range(20):
            rule.step(
                gradients=[torch.randn(37)],
                weights=weights,
                next_weights=weights,
                state=state,
                step=step,
                learning_rates=(0.0,),
                outputs=[Output(buffer=predicted, factor=(factor,), coef=(coef,))],
            )
            assert torch.equal(weights, start)
            assert torch.equal(predicted, start)


@pytest.mark.parametrize("options", IDENTITY_RULES, ids=str)
def test_t3_before_the_first_update_a_prediction_is_the_weights(options: RuleOptions) -> None:
    layout = FlatLayout([("w", (37,), 0)])
    for rule in float32_rules(options, layout):
        weights = layout.allocate()
        layout.views(weights)["w"].normal_()
        predicted = layout.allocate()
        # Whatever the buffers hold before the first update is no direction.
        state = {name: layout.allocate() + 1 for name in rule.state_names}
        rule.predict(
            weights=weights,
            state=state,
            step=0,
            outputs=[Output(buffer=predicted, factor=(1.0,), coef=(0.3,))],
        )
        assert torch.equal(layout.views(predicted)["w"], layout.views(weights)["w"])


# --- Closed forms -------------------------------------------------------------------------------------------


def worst_miss_from_rest(s: int, coef: float) -> float:
    """Largest distance from T9's closed form of the error at distance `s`, when predicting with `coef`."""
    gradient = torch.tensor([1.0, -0.3, 2.5], dtype=torch.float64)
    # updates=1: a velocity of zero is meant, not torch's first step that copies the gradient.
    run = Run(ema(), 3, updates=1)
    predictions, weights = [], []
    for _ in range(100 + s + 1):
        predictions.append(run.predict(coef))
        weights.append(run.w.clone())
        run.step(gradient)
    expected = [ETA * gradient * GAMMA**t * (s - c(s)) for t in range(101)]
    return max(float((predictions[t] - weights[t + s] - expected[t]).abs().max()) for t in range(1, 101))


@pytest.mark.parametrize("s", range(13))
def test_t9_a_constant_gradient_from_rest_misses_by_its_closed_form(s: int) -> None:
    _, coef = coefficients("local", s, [ETA] * s)
    assert worst_miss_from_rest(s, coef) < 1e-13


@pytest.mark.parametrize("s", [1, 5])
def test_t21_a_wrong_sign_or_horizon_is_noticed_by_t9(s: int) -> None:
    _, coef = coefficients("local", s, [ETA] * s)
    for mutated in (-coef, coef + ETA, coef - ETA):
        assert worst_miss_from_rest(s, mutated) > 1e-3


@pytest.mark.parametrize("s", [1, 4, 12])
def test_t9_a_constant_gradient_at_full_speed_is_predicted_exactly(s: int) -> None:
    run = Run(ema(), velocity=0.7, updates=1)
    _, coef = coefficients("local", s, [ETA] * s)
    predicted = run.predict(coef)
    for _ in range(s):
        run.step(0.7)
    assert float((predicted - run.w).abs()) < 1e-13


@pytest.mark.parametrize("s", [1, 3, 7, 12])
def test_t10_without_further_gradients_the_damped_horizon_is_exact(s: int) -> None:
    run = Run(ema(), start=1.0, velocity=0.7, updates=1)
    _, damped = coefficients("damped", s, [ETA] * s, momentum=GAMMA)
    _, full = coefficients("local", s, [ETA] * s)
    predicted, too_far = run.predict(damped), run.predict(full)
    for _ in range(s):
        run.step(0.0)
    assert float((predicted - run.w).abs() / run.w.abs()) < 1e-15
    assert float(too_far - run.w) == pytest.approx(ETA * 0.7 * (c(s) - s), rel=1e-12)


def simulate_delay(
    curvatures: Sequence[float], *, gamma: float, delay: int, horizon: float, steps: int
) -> np.ndarray:
    """w_0, w_1, … of L = λ w²/2 with the gradient taken at the prediction of D updates ago; one column per λ.

    At learning rate 1 and without dampening, λ is the α of the recurrence.
    """
    n = len(curvatures)
    curvature = torch.tensor(curvatures, dtype=torch.float64)
    run = Run(SgdOptions(momentum=gamma), n, start=1.0, keep_velocity=True)
    predictions, trace = [run.predict(horizon)], [run.w.tolist()]
    for t in range(steps):
        run.step(curvature * predictions[max(t - delay, 0)], rate=1.0)
        predictions.append(run.predict(horizon))
        trace.append(run.w.tolist())
    return np.array(trace)


def delay_recurrence(alpha: float, *, gamma: float, delay: int, horizon: float, steps: int) -> list[float]:
    w = [1.0] * (delay + 2)
    for _ in range(steps):
        seen, before = w[-1 - delay], w[-2 - delay]
        w.append(w[-1] + gamma * (w[-1] - w[-2]) - alpha * ((1 + horizon) * seen - horizon * before))
    return w[delay + 1 :]


def spectral_radius(alpha: float, *, gamma: float, delay: int, horizon: float) -> float:
    polynomial = np.zeros(delay + 3)
    polynomial[:3] = 1, -(1 + gamma), gamma
    polynomial[-2:] += alpha * (1 + horizon), -alpha * horizon
    return float(np.abs(np.roots(polynomial)).max())


@pytest.mark.parametrize("delay", [1, 3, 7])
@pytest.mark.parametrize("policy", ["none", "gamma", "damped", "local"])
def test_t11_a_delayed_quadratic_follows_its_recurrence(policy: str, delay: int) -> None:
    rates = [1.0] * delay
    horizon = {
        "none": 0.0,
        "gamma": GAMMA,
        "damped": coefficients("damped", delay, rates, momentum=GAMMA)[1],
        "local": coefficients("local", delay, rates)[1],
    }[policy]
    alpha = 0.01
    trace = simulate_delay([alpha], gamma=GAMMA, delay=delay, horizon=horizon, steps=1200)[:, 0]

    expected = delay_recurrence(alpha, gamma=GAMMA, delay=delay, horizon=horizon, steps=200)
    assert float(np.abs(trace[:201] - expected).max()) < 1e-13
    early, late = np.abs(trace[200:400]).max(), np.abs(trace[1000:1200]).max()
    rate = (late / early) ** (1 / 800)
    assert rate == pytest.approx(spectral_radius(alpha, gamma=GAMMA, delay=delay, horizon=horizon), abs=1e-3)


@pytest.mark.parametrize(
    ("gamma", "delay", "horizon", "edge"),
    [
        *[(0.0, delay, 0.0, 2 * math.sin(math.pi / (4 * delay + 2))) for delay in (0, 1, 2, 3, 7)],
        (0.9, 1, 0.0, 0.1),
        (0.9, 1, 1.0, 0.2702),
        (0.9, 1, 0.9, 0.2531),
        (0.0, 1, 1.0, 0.6180),
    ],
)
def test_t12_stability_ends_where_the_theory_says(gamma: float, delay: int, horizon: float, edge: float) -> None:
    trace = simulate_delay([0.995 * edge, 1.005 * edge], gamma=gamma, delay=delay, horizon=horizon, steps=3000)
    early, late = np.abs(trace[500:1000]).max(axis=0), np.abs(trace[2500:]).max(axis=0)
    assert late[0] < 0.9 * early[0]
    assert late[1] > 1.1 * early[1]


@pytest.mark.parametrize("s", [1, 3, 8])
def test_t15_a_falling_rate_is_predicted_exactly_only_when_its_coming_values_are_used(s: int) -> None:
    gradient = 0.7
    rates = [0.1 - 0.004 * t for t in range(20)]
    run = Run(ema(), start=1.0, velocity=gradient, updates=1)
    for t in range(5):
        run.step(gradient, rate=rates[t])
    _, coef = coefficients("local", s, rates[5:])
    aware, naive = run.predict(coef), run.predict(s * rates[5])
    for t in range(5, 5 + s):
        run.step(gradient, rate=rates[t])
    assert float((aware - run.w).abs()) < 1e-13
    error = gradient * sum(rates[5 + i] - rates[5] for i in range(s))
    assert float(naive - run.w) == pytest.approx(error, abs=1e-13)


def adam_misses(gradient: float, s: int, updates: int, wrong: bool) -> list[float]:
    """|prediction - truth| after 1..updates updates; `wrong` corrects the bias by 1 - beta, not by 1 - beta^t."""
    beta1, beta2 = 0.9, 0.999
    run = Run(AdamOptions(betas=(beta1, beta2), weight_decay=0.0))
    _, coef = coefficients("local", s, [ETA] * s)
    predictions, weights = [], []
    for _ in range(updates + s):
        run.step(gradient)
        predicted = run.predict(coef)
        if wrong:
            m, v = (run.layout.views(run.state[name])["w"] for name in ("exp_avg", "exp_avg_sq"))
            predicted = run.w - coef * (m / (1 - beta1)) / ((v / (1 - beta2)).sqrt() + 1e-8)
        predictions.append(predicted.clone())
        weights.append(run.w.clone())
    return [float((predictions[t] - weights[t + s]).abs()) for t in range(updates)]


@pytest.mark.parametrize("s", [1, 3, 7])
@pytest.mark.parametrize("gradient", [0.3, -4.0])
def test_t16_adam_predicts_a_constant_gradient_exactly(gradient: float, s: int) -> None:
    assert max(adam_misses(gradient, s, 40, wrong=False)) < 1e-12


def test_t16_a_bias_corrected_by_a_constant_is_noticed() -> None:
    misses = adam_misses(0.3, 1, 3000, wrong=True)
    assert max(misses) > 1e-3
    # The mutated step is `ratio` times the true one of η: 2.077 at t = 12, 0.316 in the limit.
    assert misses[11] == pytest.approx(ETA * (2.077 - 1), rel=1e-3)
    limit = math.sqrt(1e-3) / 0.1
    expected = 1 - limit / math.sqrt(1 - 0.999**3000)
    assert misses[2999] == pytest.approx(ETA * expected, rel=1e-6)


def test_t16_adamw_without_gradient_decays_as_predicted() -> None:
    rates = [0.1, 0.08, 0.05, 0.01]
    weight_decay = 0.3
    run = Run(AdamOptions(weight_decay=weight_decay), start=2.0)
    run.step(0.0, rate=0.1)
    factor, coef = coefficients("round_trip", 4, rates, momentum=0.9, decoupled_weight_decay=weight_decay)
    predicted = run.predict(coef, factor)
    expected = float(run.w[0]) * math.prod(1 - rate * weight_decay for rate in rates)
    assert float(predicted[0]) == pytest.approx(expected, rel=1e-15)
    for rate in rates:
        run.step(0.0, rate=rate)
    assert float(run.w[0]) == pytest.approx(expected, rel=1e-14)


def noise_ratios(gamma: float, distances: Sequence[int], elements: int = 40_000) -> dict[int, tuple[float, float]]:
    """RMSE(full)/RMSE(stale) and RMSE(damped)/RMSE(stale) per distance, for gradients of pure noise."""
    generator = torch.Generator().manual_seed(18)
    run = Run(ema(gamma), elements)
    # The velocity forgets its start by γ^150.
    for _ in range(150 if gamma > 0.5 else 40):
        run.step(torch.randn(elements, generator=generator, dtype=torch.float64))
    stale = run.w.clone()
    predictions = {
        s: [
            run.predict(coefficients(target, s, [ETA] * s, momentum=gamma)[1]).clone()
            for target in ("local", "damped")
        ]
        for s in distances
    }
    ratios: dict[int, tuple[float, float]] = {}
    for s in range(1, max(distances) + 1):
        run.step(torch.randn(elements, generator=generator, dtype=torch.float64))
        if s in distances:
            base = float((stale - run.w).norm())
            full, damped = (float((predicted - run.w).norm()) / base for predicted in predictions[s])
            ratios[s] = full, damped
    return ratios


def test_t18_on_noise_prediction_helps_or_hurts_by_known_ratios() -> None:
    ratios = noise_ratios(0.9, [1, 3, 7, 20])
    assert ratios[1][0] == pytest.approx(0.447, abs=0.01)
    assert ratios[3][0] == pytest.approx(0.561, abs=0.01)
    assert ratios[7][0] == pytest.approx(0.756, abs=0.02)
    assert ratios[20][0] > 1
    assert ratios[7][1] == pytest.approx(0.660, abs=0.02)
    assert ratios[20][1] == pytest.approx(0.848, abs=0.02)
    low_momentum = noise_ratios(0.5, [3])
    assert low_momentum[3][0] == pytest.approx(1.299, abs=0.02)
    for full, damped in [*ratios.values(), *low_momentum.values()]:
        assert damped <= min(1.0, full)
