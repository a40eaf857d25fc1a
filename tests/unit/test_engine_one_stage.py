"""One stage on one rank is the plain training loop of torch, to the bit, whatever the schedule and the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.oracle.cases import IMAGES, NETS, OPTIMIZERS, POLICIES, ROWS, laid_over
from tests.oracle.plain import train_plainly
from tests.oracle.runs import assert_same, configured, run_alone

SMALL = {"model": {"name": "mlp", "hidden": (9,), "activation": "tanh"}, "data": ROWS, "pipeline": {"stages": 1}}

OPTIONS: dict[str, dict[str, Any]] = {
    "sgd without momentum": {"name": "sgd", "lr": 0.05, "momentum": 0.0},
    "sgd with momentum": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    "sgd with dampening": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "dampening": 0.4},
    "sgd with nesterov": {"name": "sgd", "lr": 0.02, "momentum": 0.9, "nesterov": True},
    "sgd with weight decay": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "sgd uphill": {"name": "sgd", "lr": 0.0005, "momentum": 0.5, "maximize": True},
    "adamw": {"name": "adamw", "lr": 0.003},
    "adamw with all options": {
        "name": "adamw",
        "lr": 0.003,
        "betas": (0.8, 0.95),
        "eps": 1e-6,
        "weight_decay": 0.1,
    },
}


@pytest.mark.parametrize("optimizer", OPTIONS)
def test_hundreds_of_steps_equal_plain_torch(tmp_path: Path, optimizer: str) -> None:
    run = {"max_steps": 310, "epochs": 20}
    config = configured(tmp_path / "run", **laid_over(SMALL, {"run": run, "optimizer": OPTIONS[optimizer]}))
    outcome = run_alone(config)
    assert len(outcome.losses) == 310
    assert_same(outcome, train_plainly(config))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("net", ["batchnorm and dropout", "gpt", "several tensors"])
def test_every_kind_of_net_equals_plain_torch(tmp_path: Path, net: str, optimizer: str) -> None:
    config = configured(
        tmp_path / "run",
        **laid_over(
            {"run": {"max_steps": 25}}, NETS[net], {"optimizer": OPTIMIZERS[optimizer], "pipeline": {"stages": 1}}
        ),
    )
    assert_same(run_alone(config), train_plainly(config))


@pytest.mark.parametrize("policy", POLICIES)
def test_with_one_stage_every_policy_is_sequential_sgd(tmp_path: Path, policy: str) -> None:
    pipeline = {**POLICIES[policy], "stages": 1}
    config = configured(
        tmp_path / "run",
        **laid_over(SMALL, {"run": {"epochs": 4}, "data": {**ROWS, "rows": 92}, "pipeline": pipeline}),
    )
    assert_same(run_alone(config), train_plainly(config))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_with_one_stage_and_one_microbatch_the_synchronous_schedules_are_sequential_sgd(
    tmp_path: Path, schedule: str
) -> None:
    config = configured(
        tmp_path / "run",
        **laid_over(
            {"run": {"max_steps": 30}},
            NETS["batchnorm and dropout"],
            {"pipeline": {"schedule": schedule, "stages": 1}},
        ),
    )
    assert_same(run_alone(config), train_plainly(config))


@pytest.mark.parametrize("dtype", ["float64"])
def test_a_float64_run_equals_plain_torch_in_float64(tmp_path: Path, dtype: str) -> None:
    config = configured(
        tmp_path / "run",
        **laid_over({"run": {"max_steps": 60, "dtype": dtype}}, NETS["mlp"], {"pipeline": {"stages": 1}}),
    )
    assert_same(run_alone(config), train_plainly(config))


def test_the_learning_rate_schedule_equals_plain_torch(tmp_path: Path) -> None:
    config = configured(
        tmp_path / "run",
        **laid_over(
            {"run": {"max_steps": 60}, "lr_schedule": {"name": "linear", "end_factor": 0.05}, "data": IMAGES},
            {"model": {"name": "mlp", "hidden": (8,)}, "pipeline": {"stages": 1}},
        ),
    )
    assert_same(run_alone(config), train_plainly(config))
