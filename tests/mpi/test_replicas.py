"""Replicated stages over real ranks: asynchronous ones equal the serial replay, synchronous ones plain SGD.

Two replicas add two gradients, in whatever order to the same bits; three add in an order of MPI's choice, so there
the comparison allows for float32 rounding.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest

from hpcpipe.config import RunConfig
from tests.mpi.pipeline_runs import train_each
from tests.oracle.cases import NETS, OPTIMIZERS, POLICIES, SETTINGS, Sections, case, laid_over
from tests.oracle.plain import train_plainly
from tests.oracle.replay import replay
from tests.oracle.runs import Outcome, assert_close, assert_same, configured

ROUNDING = {"rtol": 2e-5, "atol": 2e-6}


class Case(NamedTuple):
    replicas: tuple[int, ...]
    sections: dict[str, dict[str, Any]]

    @property
    def ranks(self) -> int:
        return sum(self.replicas)

    @property
    def exact(self) -> bool:
        return max(self.replicas) <= 2


def of(replicas: tuple[int, ...], policy: str, *parts: Sections, steps: int = 13) -> Case:
    sections = case(policy, None, NETS["mlp"], *parts, {"pipeline": {"replicas": replicas}}, steps=steps)
    sections["pipeline"] = {**sections["pipeline"], "replicas": replicas}
    return Case(replicas, sections)


def flushing(replicas: tuple[int, ...], schedule: str, microbatches: int, *parts: Sections) -> Case:
    pipeline = {"schedule": schedule, "microbatches": microbatches, "replicas": replicas}
    return Case(replicas, laid_over({"run": {"max_steps": 6}}, NETS["mlp"], *parts, {"pipeline": {**pipeline}}))


ADAMW = {"optimizer": OPTIMIZERS["adamw"]}
EVALUATED = {"eval": {"every": 4, "at_end": True}}
ASYNCHRONOUS = {
    **{f"2-1, {policy}": of((2, 1), policy) for policy in POLICIES},
    **{f"1-2, {policy}": of((1, 2), policy, ADAMW) for policy in POLICIES},
    **{f"2-1-1, {policy}": of((2, 1, 1), policy) for policy in POLICIES},
    **{f"1-2-1, {policy}": of((1, 2, 1), policy, ADAMW) for policy in ("stash", "round_trip")},
    **{f"2-2, {policy}": of((2, 2), policy) for policy in ("stash", "vertical_sync", "round_trip")},
    **{f"2, {policy}": of((2,), policy) for policy in ("stash", "round_trip")},
    **{f"3-1, {policy}": of((3, 1), policy) for policy in ("stash", "none", "round_trip")},
    **{f"1-3, {policy}": of((1, 3), policy) for policy in ("vertical_sync", "damped")},
    **{f"1-3-2, {policy}": of((1, 3, 2), policy, steps=20) for policy in ("stash", "vertical_sync", "round_trip")},
    "3-2, stash, adamw": of((3, 2), "stash", ADAMW),
    "2-1, in place": of((2, 1), "round_trip", NETS["in place"]),
    "1-2, several tensors": of((1, 2), "stash", NETS["several tensors"]),
    "2-1, parameters without gradient": of((2, 1), "stash", NETS["parameters without gradient"]),
    "1-2, parameters without gradient": of((1, 2), "round_trip", NETS["parameters without gradient"]),
    "2-2, tied within a layer": of((2, 2), "stash", NETS["tied within a layer"]),
    "2-1-1, gpt": of((2, 1, 1), "round_trip", NETS["gpt"], steps=9),
    "2-1-1, batchnorm and dropout": of((2, 1, 1), "stash", NETS["batchnorm and dropout"], EVALUATED),
    "1-2, batchnorm and dropout": of((1, 2), "round_trip", NETS["batchnorm and dropout"], EVALUATED),
    "2-1, a falling learning rate": of((2, 1), "round_trip", SETTINGS["a falling learning rate"]),
    "1-2, decay and groups": of((1, 2), "round_trip", SETTINGS["decoupled decay and parameter groups"]),
    "2-1, bfloat16": of((2, 1), "stash", SETTINGS["bfloat16"]),
    "2-1, float64": of((2, 1), "round_trip", SETTINGS["float64"]),
    "2-1, short minibatches": of((2, 1), "round_trip", SETTINGS["two epochs with short last minibatches"]),
    "2-1-1, drained for checkpoints": of((2, 1, 1), "round_trip", {"checkpoint": {"every": 5, "cut": "drain"}}),
    "1-2-1, checkpoints in between": of(
        (1, 2, 1), "stash", NETS["batchnorm and dropout"], {"checkpoint": {"every": 3}}
    ),
    **{f"1-2-1, {n} minibatches": of((1, 2, 1), "round_trip", steps=n) for n in (1, 2, 3, 4)},
    **{f"2-1, {n} minibatches": of((2, 1), "stash", steps=n) for n in (1, 2, 3)},
}
SGD = {"optimizer": OPTIMIZERS["sgd"]}
SYNCHRONOUS = {
    f"{schedule}, {'-'.join(map(str, replicas))}, {microbatches} microbatches, {net}": flushing(
        replicas, schedule, microbatches, NETS[net], SGD
    )
    for schedule in ("gpipe", "1f1b")
    for replicas, microbatches, net in (
        ((2, 1), 4, "mlp"),
        ((1, 2), 3, "gpt"),
        ((2, 2), 3, "several tensors"),
        ((3,), 2, "mlp"),
        ((1, 3), 4, "parameters without gradient"),
    )
}
CLIPPED = {
    f"clipped, {schedule}": flushing((2, 1), schedule, 2, {"optimizer": {**OPTIMIZERS["sgd"], "clip_norm": 0.05}})
    for schedule in ("gpipe", "1f1b")
}
CASES = {**ASYNCHRONOUS, **SYNCHRONOUS, **CLIPPED}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    directory = tmp_path_factory.mktemp("runs")
    return {name: configured(directory / str(i), **case.sections) for i, (name, case) in enumerate(CASES.items())}


@pytest.fixture(scope="module")
def outcomes(configs: dict[str, RunConfig], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return train_each(configs, {name: one.ranks for name, one in CASES.items()}, tmp_path_factory)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_replicated_stages_equal_the_serial_replay(
    name: str, configs: dict[str, RunConfig], outcomes: dict[str, Outcome]
) -> None:
    case = CASES[name]
    found, expected = outcomes[name], replay(configs[name], case.replicas)
    if case.exact:
        assert_same(found, expected)
    else:
        assert_close(found.weights, expected.weights, **ROUNDING)
        assert_close(found.buffers, expected.buffers, **ROUNDING)
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *CLIPPED])
def test_flushing_schedules_with_replicas_equal_plain_sgd_to_float32_rounding(
    name: str, configs: dict[str, RunConfig], outcomes: dict[str, Outcome]
) -> None:
    found, expected = outcomes[name], train_plainly(configs[name])
    assert_close(found.weights, expected.weights, **ROUNDING)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.parametrize("name", ["2-1-1, batchnorm and dropout", "1-2, batchnorm and dropout"])
def test_evaluations_fall_where_every_stage_has_finished_a_round(name: str, outcomes: dict[str, Outcome]) -> None:
    assert sorted(outcomes[name].evaluations) == [4, 8, 12, 13]


def test_a_replicated_run_tells_the_replicas_of_every_stage(outcomes: dict[str, Outcome]) -> None:
    ranks = outcomes["2-1-1, stash"].summary["ranks"]
    places = [(stage["stage"], stage["replica"]) for rank in ranks for stage in rank["stages"]]
    assert places == [(0, 0), (0, 1), (1, 0), (2, 0)]
    staleness = [stage["staleness"] for rank in ranks for stage in rank["stages"]]
    assert staleness == [1, 1, 1, 0]


def test_data_parallel_replicas_have_no_staleness(outcomes: dict[str, Outcome]) -> None:
    ranks = outcomes["2, stash"].summary["ranks"]
    assert [stage["staleness"] for rank in ranks for stage in rank["stages"]] == [0, 0]
    assert all(math.isfinite(loss) for loss in outcomes["2, stash"].losses)
