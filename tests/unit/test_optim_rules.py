"""Options, the choice between the compiled rule and the twin, and what the user is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcpipe.errors import ConfigError
from hpcpipe.optim import native, rules
from hpcpipe.optim.flat import FlatLayout
from hpcpipe.optim.native import NativeRule
from hpcpipe.optim.rules import AdamOptions, SgdOptions, make_rule
from hpcpipe.optim.twin import TorchRule

LAYOUT = FlatLayout([("w", (3,), 0), ("b", (3,), 1)])
TWO = [SgdOptions(momentum=0.9), SgdOptions()]


def test_the_torch_backend_is_the_twin_without_a_note() -> None:
    rule, note = make_rule(TWO, LAYOUT, backend="torch")
    assert isinstance(rule, TorchRule)
    assert note is None


@pytest.mark.skipif(native.available() is not None, reason=f"no extension: {native.available()}")
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_the_extension_is_used_where_it_can_be(backend: rules.Backend) -> None:
    rule, note = make_rule(TWO, LAYOUT, backend=backend)
    assert isinstance(rule, NativeRule)
    assert note is None


def test_auto_falls_back_with_one_line_and_native_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda device_type="cpu": f"no {device_type} here")

    rule, note = make_rule(TWO, LAYOUT, device=torch.device("cuda:1"))

    assert isinstance(rule, TorchRule)
    assert note == "compiled update off, torch twin used: no cuda here"
    with pytest.raises(ConfigError, match="'native' cannot be used: no cpu here"):
        make_rule(TWO, LAYOUT, backend="native")


def test_float64_weights_take_the_twin() -> None:
    layout = FlatLayout([("w", (3,), 0)], dtype=torch.float64)
    rule, note = make_rule([SgdOptions()], layout)
    assert isinstance(rule, TorchRule)
    assert note is not None
    if native.available() is None:
        assert note.endswith("it keeps weights in float32, these are float64")


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_state_is_what_the_options_need(backend: rules.Backend) -> None:
    def names(*options: Any, **arguments: Any) -> tuple[str, ...]:
        return make_rule(list(options), LAYOUT, backend=backend, **arguments)[0].state_names

    assert names(SgdOptions(), SgdOptions(momentum=0.9)) == ("momentum_buffer",)
    assert names(SgdOptions(), SgdOptions()) == ()
    assert names(SgdOptions(), SgdOptions(), keep_velocity=True) == ("momentum_buffer",)
    assert names(AdamOptions(), AdamOptions()) == ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (SgdOptions, {"momentum": -0.1}, "sgd: momentum"),
        (SgdOptions, {"weight_decay": float("nan")}, "sgd: weight_decay"),
        (SgdOptions, {"nesterov": True}, "needs momentum above 0"),
        (SgdOptions, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "dampening 0"),
        (AdamOptions, {"betas": (0.9, 1.0)}, r"adam: betas\[1\] = 1.0"),
        (AdamOptions, {"eps": -1.0}, "adam: eps"),
        (AdamOptions, {"weight_decay": -1.0}, "adam: weight_decay"),
    ],
)
def test_an_option_out_of_range_is_named(kind: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**options)


def test_options_that_do_not_fit_the_layout_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one parameter group"):
        make_rule([], LAYOUT)
    with pytest.raises(ConfigError, match="name 2 groups, but options are given for 1"):
        make_rule([SgdOptions()], LAYOUT)
    with pytest.raises(ConfigError, match="same kind"):
        make_rule([SgdOptions(), AdamOptions()], LAYOUT)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="choose one of auto, native, torch"):
        make_rule(TWO, LAYOUT, backend="fortran")  # type: ignore[arg-type]


def test_options_tell_what_a_prediction_needs() -> None:
    assert SgdOptions(momentum=0.8, weight_decay=0.1).damping == 0.8
    assert SgdOptions(weight_decay=0.1).decoupled_weight_decay == 0.0
    assert AdamOptions(betas=(0.7, 0.9), weight_decay=0.1).damping == 0.7
    assert AdamOptions(weight_decay=0.1).decoupled_weight_decay == 0.1
    assert AdamOptions(weight_decay=0.1, decoupled=False).decoupled_weight_decay == 0.0
