"""The torch twin against torch.optim, to the bit, and the parts of the protocol that torch.optim has not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hpcpipe.optim import twin
from hpcpipe.optim.flat import FlatLayout
from hpcpipe.optim.rules import AdamOptions, Output, RuleOptions, SgdOptions, UpdateRule

SHAPES: list[tuple[int, ...]] = [(7, 13), (), (1,), (3, 5, 2), (33, 65), (0, 4)]
STEPS = 55

SGD_CASES: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.01},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"momentum": 0.5, "dampening": 0.5, "maximize": True},
    {"maximize": True, "weight_decay": 0.1},
]
ADAM_CASES: list[dict[str, Any]] = [
    {},
    {"betas": (0.3, 0.9), "eps": 1e-3, "weight_decay": 0.1},
    {"betas": (0.0, 0.5)},
    {"maximize": True, "weight_decay": 0.0},
]


def layout_of_two_groups(dtype: torch.dtype = torch.float32) -> FlatLayout:
    return FlatLayout([(f"p{i}", shape, i % 2) for i, shape in enumerate(SHAPES)], dtype=dtype)


def gradients_of(layout: FlatLayout, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(slot.shape, generator=generator, dtype=torch.float64).to(dtype) for slot in layout.slots]


def random_flat(layout: FlatLayout, seed: int) -> Tensor:
    flat = layout.allocate()
    flat.copy_(torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    return flat


def state_of(rule: UpdateRule, layout: FlatLayout) -> dict[str, Tensor]:
    return {name: layout.allocate() for name in rule.state_names}


def assert_same_run(
    options: RuleOptions,
    optimizer_class: type[torch.optim.Optimizer],
    arguments: list[dict[str, Any]],
    rates: tuple[float, ...],
    dtype: torch.dtype,
    **constructor: Any,
) -> None:
    """Run torch.optim and the twin side by side and compare weights and state bit for bit."""
    layout = layout_of_two_groups(dtype)
    rule = twin.make(options, layout)
    weights, spare = random_flat(layout, 0), layout.allocate()
    state = state_of(rule, layout)
    parameters = [torch.nn.Parameter(view.clone()) for view in layout.view_list(weights)]
    optimizer = optimizer_class(
        [
            {"params": parameters[group::2], "lr": rate, **kwargs}
            for group, (rate, kwargs) in enumerate(zip(rates, arguments, strict=True))
        ],
        **constructor,
    )
    for step in range(STEPS):
        gradients = gradients_of(layout, step + 1, dtype)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        rule.step(
            gradients=gradients,
            weights=weights,
            next_weights=spare,
            state=state,
            step=step,
            learning_rates=rates,
        )
        weights, spare = spare, weights
    for slot, parameter, view in zip(layout.slots, parameters, layout.view_list(weights), strict=True):
        assert torch.equal(parameter.detach(), view), slot.name
        for name in rule.state_names:
            assert torch.equal(optimizer.state[parameter][name], layout.views(state[name])[slot.name]), name


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", SGD_CASES, ids=str)
def test_sgd_equals_torch_to_the_bit(case: dict[str, Any], dtype: torch.dtype, foreach: bool | None) -> None:
    other = {**case, "weight_decay": 0.2}
    options = [SgdOptions(**case), SgdOptions(**other)]
    assert_same_run(options, torch.optim.SGD, [case, other], (0.1, 0.03), dtype, lr=1.0, foreach=foreach)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ADAM_CASES, ids=str)
def test_adamw_equals_torch_to_the_bit(case: dict[str, Any], dtype: torch.dtype, foreach: bool | None) -> None:
    other = {**case, "weight_decay": 0.2}
    options = [AdamOptions(**case), AdamOptions(**other)]
    assert_same_run(options, torch.optim.AdamW, [case, other], (0.01, 0.003), dtype, foreach=foreach)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_equals_torch_to_the_bit(weight_decay: float) -> None:
    case = {"weight_decay": weight_decay}
    options = [AdamOptions(decoupled=False, **case)] * 2
    assert_same_run(options, torch.optim.Adam, [case, case], (0.01, 0.003), torch.float32)


def step_once(rule: UpdateRule, layout: FlatLayout, **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """One update with outputs or other arguments as given; returns the new weights and the state."""
    state = changes.pop("state", None) or state_of(rule, layout)
    arguments: dict[str, Any] = {
        "gradients": gradients_of(layout, 1),
        "weights": random_flat(layout, 0),
        "next_weights": layout.allocate(),
        "state": state,
        "step": 0,
        "learning_rates": (0.1, 0.2),
        **changes,
    }
    rule.step(**arguments)
    return arguments["next_weights"], state


@pytest.fixture(params=["sgd", "adamw"])
def options(request: pytest.FixtureRequest) -> RuleOptions:
    if request.param == "sgd":
        return [SgdOptions(momentum=0.9), SgdOptions(momentum=0.5, weight_decay=0.1)]
    return [AdamOptions(), AdamOptions(weight_decay=0.1)]


def test_the_old_version_is_only_read(options: RuleOptions) -> None:
    layout = layout_of_two_groups()
    weights = random_flat(layout, 0)
    before = weights.clone()
    step_once(twin.make(options, layout), layout, weights=weights)
    assert torch.equal(weights, before)


def test_in_place_gives_the_same_as_out_of_place(options: RuleOptions) -> None:
    layout = layout_of_two_groups()
    rule = twin.make(options, layout)
    elsewhere, _ = step_once(rule, layout)
    weights = random_flat(layout, 0)
    step_once(rule, layout, weights=weights, next_weights=weights)
    for here, there in zip(layout.view_list(weights), layout.view_list(elsewhere), strict=True):
        assert torch.equal(here, there)


def test_a_missing_gradient_leaves_weights_and_state_alone(options: RuleOptions) -> None:
    layout = layout_of_two_groups()
    rule = twin.make(options, layout)
    weights = random_flat(layout, 0)
    _, state = step_once(rule, layout, weights=weights)
    before = {name: flat.clone() for name, flat in state.items()}
    gradients = gradients_of(layout, 2)
    gradients[0] = gradients[3] = None
    predicted = layout.allocate()
    output = Output(buffer=predicted, factor=(1.0, 1.0), coef=(0.3, 0.3))
    new, state = step_once(
        rule, layout, weights=weights, gradients=gradients, state=state, step=1, outputs=[output]
    )
    for index, slot in enumerate(layout.slots):
        kept = gradients[index] is None or slot.numel == 0
        assert torch.equal(layout.view_list(new)[index], layout.view_list(weights)[index]) == kept
        for name in rule.state_names:
            assert torch.equal(layout.view_list(state[name])[index], layout.view_list(before[name])[index]) == kept
    assert not torch.equal(layout.view_list(predicted)[0], layout.view_list(weights)[0])


def test_a_gradient_scale_of_one_changes_no_bit_and_another_scales(options: RuleOptions) -> None:
    layout = layout_of_two_groups()
    rule = twin.make(options, layout)
    plain, _ = step_once(rule, layout)
    one, _ = step_once(rule, layout, grad_scale=1.0)
    half, _ = step_once(rule, layout, grad_scale=0.5)
    halved = [None if g is None else g * 0.5 for g in gradients_of(layout, 1)]
    expected, _ = step_once(rule, layout, gradients=halved)
    assert torch.equal(plain, one)
    assert torch.equal(half, expected)


def test_a_bfloat16_gradient_counts_as_its_float32_value(options: RuleOptions) -> None:
    layout = layout_of_two_groups()
    rule = twin.make(options, layout)
    short = gradients_of(layout, 1, torch.bfloat16)
    got, _ = step_once(rule, layout, gradients=short)
    expected, _ = step_once(rule, layout, gradients=[None if g is None else g.float() for g in short])
    assert torch.equal(got, expected)


def test_outputs_are_formed_from_new_weights_and_the_direction() -> None:
    layout = layout_of_two_groups()
    rule = twin.make([SgdOptions(momentum=0.9)] * 2, layout)
    predicted = layout.allocate()
    master_in_bfloat16 = layout.allocate(dtype=torch.bfloat16)
    new, state = step_once(
        rule,
        layout,
        outputs=[
            Output(buffer=predicted, factor=(1.0, 0.9), coef=(0.3, 0.0)),
            Output(buffer=master_in_bfloat16, factor=(1.0, 1.0), coef=(0.0, 0.0)),
        ],
    )
    for index, slot in enumerate(layout.slots):
        weight = layout.view_list(new)[index]
        velocity = layout.view_list(state["momentum_buffer"])[index]
        expected = weight.add(velocity, alpha=-0.3) if slot.group == 0 else weight * 0.9
        assert torch.equal(layout.view_list(predicted)[index], expected)
        assert torch.equal(layout.view_list(master_in_bfloat16)[index], weight.bfloat16())


def test_predict_writes_what_the_step_wrote(options: RuleOptions) -> None:
    layout = layout_of_two_groups()
    rule = twin.make(options, layout)
    first, second = layout.allocate(), layout.allocate()
    factor, coef = (0.9, 1.0), (0.3, 0.2)
    new, state = step_once(rule, layout, outputs=[Output(buffer=first, factor=factor, coef=coef)])
    rule.predict(weights=new, state=state, step=1, outputs=[Output(buffer=second, factor=factor, coef=coef)])
    assert torch.equal(first, second)


def test_adam_predicts_along_the_bias_corrected_step() -> None:
    layout = FlatLayout([("w", (1,), 0)], dtype=torch.float64)
    rule = twin.make([AdamOptions(eps=1e-3, weight_decay=0.0)], layout)
    weights, predicted = layout.allocate(), layout.allocate()
    state = state_of(rule, layout)
    output = Output(buffer=predicted, factor=(1.0,), coef=(0.5,))
    for step, gradient in enumerate([3.0, -1.0, 0.5]):
        rule.step(
            gradients=[torch.full((1,), gradient, dtype=torch.float64)],
            weights=weights,
            next_weights=weights,
            state=state,
            step=step,
            learning_rates=(0.1,),
            outputs=[output],
        )
    m = 0.1 * (0.81 * 3.0 - 0.9 * 1.0 + 0.5) / (1 - 0.9**3)
    v = 0.001 * (0.999**2 * 9.0 + 0.999 * 1.0 + 0.25) / (1 - 0.999**3)
    assert float(predicted[0]) == pytest.approx(float(weights[0]) - 0.5 * m / (v**0.5 + 1e-3), rel=1e-12)


def test_sgd_without_momentum_keeps_its_gradient_where_predictions_are_wanted() -> None:
    layout = layout_of_two_groups()
    rule = twin.make([SgdOptions(weight_decay=0.1)] * 2, layout, keep_velocity=True)
    weights = random_flat(layout, 0)
    _, state = step_once(rule, layout, weights=weights)
    for view, old, gradient in zip(
        layout.view_list(state["momentum_buffer"]), layout.view_list(weights), gradients_of(layout, 1), strict=True
    ):
        assert gradient is not None
        assert torch.equal(view, gradient.add(old, alpha=0.1))


def test_a_gradient_of_another_shape_is_named() -> None:
    layout = FlatLayout([("block.weight", (2, 3), 0)])
    rule = twin.make([SgdOptions()], layout)
    with pytest.raises(ValueError, match=r"'block.weight' has shape \(3, 2\), expected \(2, 3\)"):
        step_once(rule, layout, gradients=[torch.zeros(3, 2)], learning_rates=(0.1,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradients": []}, "expected 6 gradients"),
        ({"learning_rates": (0.1,)}, "expected 2 learning rates"),
        ({"next_weights": layout_of_two_groups().allocate(dtype=torch.float64)}, "next_weights is torch.float64"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    layout = layout_of_two_groups()
    with pytest.raises(ValueError, match=message):
        step_once(twin.make([SgdOptions()] * 2, layout), layout, **changes)


def test_outputs_that_cannot_be_computed_are_refused() -> None:
    layout = layout_of_two_groups()
    rule = twin.make([SgdOptions(momentum=0.9), SgdOptions()], layout)

    def refused(message: str, *outputs: Output) -> None:
        with pytest.raises(ValueError, match=message):
            step_once(rule, layout, outputs=outputs)

    def output(coef: tuple[float, ...], dtype: torch.dtype = torch.float32) -> Output:
        return Output(buffer=layout.allocate(dtype=dtype), factor=(1.0, 1.0), coef=coef)

    refused("keep_velocity=True", output((0.0, 0.1)))
    refused("2 factors and coefs", output((0.1,)))
    refused("at most 3 outputs", *[output((0.0, 0.0)) for _ in range(4)])
    refused("torch.float16", output((0.0, 0.0), torch.float16))
