"""Pipelines over real ranks: asynchronous ones equal the serial replay to the bit, synchronous ones plain SGD."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from hpcpipe.config import RunConfig
from tests.mpi.pipeline_runs import train_each
from tests.oracle.cases import MLP, NETS, OPTIMIZERS, POLICIES, ROWS, SETTINGS, Sections, case, laid_over
from tests.oracle.data import OneSided
from tests.oracle.plain import train_plainly
from tests.oracle.replay import replay
from tests.oracle.runs import Outcome, assert_close, assert_same, configured

WIDE = {"model": {"name": "tests.oracle.nets:build_wide"}, "data": {**ROWS, "batch": 32}}
SLEEPY = {"model": {"name": "tests.oracle.nets:build_sleepy"}, "data": ROWS}
ONE_SIDED = {"model": MLP, "data": {"name": "tests.oracle.data:build_numbered", "batch": 8, "one_sided": True}}


class Case(NamedTuple):
    """A run on `ranks` ranks with `more` stages than ranks."""

    ranks: int
    name: str
    sections: dict[str, dict[str, Any]]
    more: int = 0


def of(ranks: int, policy: str, what: str, *parts: Sections, more: int = 0, steps: int = 11) -> Case:
    sections = case(policy, ranks + more if more else None, NETS["mlp"], *parts, steps=steps)
    return Case(ranks, f"{policy}, {what}", sections, more)


def flushing(ranks: int, schedule: str, what: str, *parts: Sections) -> Case:
    pipeline = {"schedule": schedule, "microbatches": 3}
    return Case(ranks, f"{schedule}, {what}", laid_over({"run": {"max_steps": 6}}, *parts, {"pipeline": pipeline}))


ASYNCHRONOUS = [
    *(
        of(ranks, policy, name, {"optimizer": optimizer})
        for ranks in (2, 3)
        for policy, (name, optimizer) in zip(POLICIES, [*OPTIMIZERS.items()] * 3, strict=True)
    ),
    *(
        of(4, policy, name, {"optimizer": optimizer})
        for policy in POLICIES
        for name, optimizer in OPTIMIZERS.items()
    ),
    *(
        of(4, policy, net, NETS[net], steps=9)
        for net in ("batchnorm and dropout", "gpt", "several tensors", "in place", "aliases of messages")
        for policy in ("stash", "round_trip")
    ),
    *(of(4, policy, f"{n} minibatches", steps=n) for n in (1, 2, 3) for policy in ("stash", "round_trip")),
    of(2, "vertical_sync", "batchnorm and dropout", NETS["batchnorm and dropout"]),
    of(2, "round_trip", "two stages on each rank", more=2),
    of(2, "stash", "labels on one rank, inputs on the other", ONE_SIDED),
    of(3, "none", "several tensors", NETS["several tensors"]),
    of(3, "round_trip", "batchnorm and dropout, five stages", NETS["batchnorm and dropout"], more=2),
    of(3, "stash", "8 MiB both ways", WIDE, steps=6),
    of(3, "none", "8 MiB both ways", WIDE, steps=6),
    of(4, "round_trip", "layers that take random times", SLEEPY, steps=20),
    of(4, "damped", "evaluations in between", NETS["digits"], {"eval": {"every": 5, "at_end": True}}),
    of(
        4, "none", "short minibatches", NETS["several tensors"], SETTINGS["two epochs with short last minibatches"]
    ),
    of(4, "round_trip", "decay and groups", SETTINGS["decoupled decay and parameter groups"]),
    of(4, "local", "bfloat16", SETTINGS["bfloat16"]),
]
SYNCHRONOUS = [
    flushing(ranks, schedule, net, NETS[net], {"optimizer": OPTIMIZERS["sgd"]})
    for ranks in (2, 4)
    for schedule in ("gpipe", "1f1b")
    for net in ("mlp", "batchnorm and dropout", "gpt")
] + [
    flushing(ranks, "1f1b", "clipped", NETS["mlp"], {"optimizer": {**OPTIMIZERS["sgd"], "clip_norm": 0.05}})
    for ranks in (2, 3)
]
CASES = {f"{case.ranks} ranks, {case.name}": case for case in [*ASYNCHRONOUS, *SYNCHRONOUS]}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    directory = tmp_path_factory.mktemp("runs")
    return {name: configured(directory / str(i), **case.sections) for i, (name, case) in enumerate(CASES.items())}


@pytest.fixture(scope="module")
def outcomes(configs: dict[str, RunConfig], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return train_each(configs, {name: one.ranks for name, one in CASES.items()}, tmp_path_factory)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case in ASYNCHRONOUS])
def test_asynchronous_training_equals_the_serial_replay(
    name: str, configs: dict[str, RunConfig], outcomes: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    # The replay, being one process, asks for both inputs and labels.
    monkeypatch.setattr(OneSided, "_note", lambda data, what: None)
    assert_same(outcomes[name], replay(configs[name], case.ranks + case.more))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case in SYNCHRONOUS])
def test_synchronous_training_equals_one_rank_to_float32_rounding(
    name: str, configs: dict[str, RunConfig], outcomes: dict[str, Outcome]
) -> None:
    found, expected = outcomes[name], train_plainly(configs[name])
    assert_close(found.weights, expected.weights, rtol=2e-5, atol=2e-6)
    assert_close(found.buffers, expected.buffers, rtol=2e-5, atol=2e-6)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)


def test_only_activations_and_their_gradients_travel(outcomes: dict[str, Outcome]) -> None:
    """Labels do not: 11 minibatches of 8 rows of floats, as many as the layer before the cut has outputs."""
    ranks = outcomes["2 ranks, stash, labels on one rank, inputs on the other"].summary["ranks"]
    boundary = len(ranks[0]["stages"][0]["layers"])
    expected = 11 * 8 * 4 * MLP["hidden"][boundary - 1]
    assert [rank["bytes_sent"] for rank in ranks] == [expected, expected]


def test_the_summary_tells_staleness_and_versions_of_every_stage(outcomes: dict[str, Outcome]) -> None:
    ranks = outcomes["4 ranks, stash, sgd"].summary["ranks"]
    stages = [stage for rank in ranks for stage in rank["stages"]]
    assert [stage["staleness"] for stage in stages] == [3, 2, 1, 0]
    assert [stage["peak_versions"] for stage in stages] == [4, 3, 2, 2]
