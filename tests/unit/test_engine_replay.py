"""All stages of an asynchronous pipeline in one process, against the serial replay, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcpipe.optim import native
from tests.oracle.cases import NETS, OPTIMIZERS, POLICIES, ROWS, SETTINGS, case
from tests.oracle.replay import replay
from tests.oracle.runs import assert_close, assert_same, configured, run_alone

STAGES = 4


def check(directory: Path, stages: int, sections: dict[str, dict[str, Any]]) -> None:
    config = configured(directory / "run", **sections)
    assert_same(run_alone(config), replay(config, stages))


@pytest.mark.parametrize(
    ("stages", "optimizer"), [*((n, "sgd") for n in (2, 3, 4, 8)), (3, "adamw"), (8, "adamw")]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_training_equals_the_serial_replay(tmp_path: Path, policy: str, stages: int, optimizer: str) -> None:
    check(tmp_path, stages, case(policy, stages, NETS["mlp"], {"optimizer": OPTIMIZERS[optimizer]}))


@pytest.mark.parametrize("policy", ["stash", "vertical_sync", "none", "round_trip"])
@pytest.mark.parametrize("net", [name for name in NETS if name != "mlp"])
def test_every_kind_of_net_equals_the_serial_replay(tmp_path: Path, net: str, policy: str) -> None:
    check(tmp_path, STAGES, case(policy, STAGES, NETS[net], steps=12))


@pytest.mark.parametrize("policy", ["stash", "round_trip", "damped"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_equals_the_serial_replay(tmp_path: Path, setting: str, policy: str) -> None:
    check(tmp_path, STAGES, case(policy, STAGES, NETS["mlp"], SETTINGS[setting]))


@pytest.mark.parametrize("policy", ["stash", "vertical_sync", "none", "round_trip"])
@pytest.mark.parametrize("minibatches", [1, 2, 3])
def test_fewer_minibatches_than_stages_fill_and_drain(tmp_path: Path, minibatches: int, policy: str) -> None:
    check(tmp_path, STAGES, case(policy, STAGES, NETS["mlp"], steps=minibatches))


@pytest.mark.parametrize("policy", ["stash", "round_trip"])
def test_several_tensors_cross_a_boundary_in_a_short_last_minibatch(tmp_path: Path, policy: str) -> None:
    short = SETTINGS["two epochs with short last minibatches"]
    check(tmp_path, STAGES, case(policy, STAGES, NETS["several tensors"], short))


@pytest.mark.parametrize("policy", ["stash", "none", "round_trip"])
@pytest.mark.parametrize("net", ["mlp", "batchnorm and dropout", "two inputs and two outputs"])
def test_evaluations_in_between_change_no_bit_of_training(tmp_path: Path, net: str, policy: str) -> None:
    evaluating = {"eval": {"every": 3, "at_end": True}}
    config = configured(tmp_path / "run", **case(policy, STAGES, NETS[net], evaluating, steps=11))
    outcome = run_alone(config)
    assert sorted(outcome.evaluations) == [3, 6, 9, 11]
    assert_same(outcome, replay(config, STAGES))


@pytest.mark.parametrize("policy", ["stash", "none", "round_trip"])
def test_checkpoints_in_between_change_no_bit_of_training(tmp_path: Path, policy: str) -> None:
    check(
        tmp_path,
        STAGES,
        case(policy, STAGES, NETS["batchnorm and dropout"], {"checkpoint": {"every": 2}}, steps=9),
    )


@pytest.mark.skipif(native.available("cpu") is not None, reason=f"compiled update: {native.available('cpu')}")
@pytest.mark.parametrize(("optimizer", "dtype"), [("sgd", "float32"), ("adamw", "float32"), ("adamw", "bfloat16")])
@pytest.mark.parametrize("policy", ["stash", "none", "round_trip", "damped"])
def test_the_compiled_update_follows_the_serial_replay(
    tmp_path: Path, policy: str, optimizer: str, dtype: str
) -> None:
    compiled = {"optimizer": {**OPTIMIZERS[optimizer], "backend": "native"}, "run": {"dtype": dtype}}
    config = configured(tmp_path / "run", **case(policy, STAGES, NETS["mlp"], compiled, steps=12))
    found, expected = run_alone(config), replay(config, STAGES)
    assert_close(found.weights, expected.weights, rtol=1e-5, atol=1e-6)
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)


@pytest.mark.parametrize(("every", "optimizer"), [(3, "sgd"), (6, "adamw")])
@pytest.mark.parametrize("policy", POLICIES)
def test_draining_for_checkpoints_refills_from_the_weights_and_velocity_there(
    tmp_path: Path, policy: str, every: int, optimizer: str
) -> None:
    drained = {"checkpoint": {"every": every, "cut": "drain"}, "optimizer": OPTIMIZERS[optimizer]}
    check(tmp_path, STAGES, case(policy, STAGES, NETS["mlp"], drained, {"eval": {"every": 4}}))


@pytest.mark.parametrize("policy", ["stash", "none", "round_trip"])
def test_stages_without_parameters_train(tmp_path: Path, policy: str) -> None:
    check(tmp_path, 6, case(policy, 6, NETS["batchnorm and dropout"], steps=12))
    check(tmp_path / "aliases", 7, case(policy, 7, NETS["aliases of messages"], steps=12))


def test_minibatches_of_one_row_train(tmp_path: Path) -> None:
    check(tmp_path, STAGES, case("round_trip", STAGES, NETS["mlp"], {"data": {**ROWS, "batch": 1}}))
