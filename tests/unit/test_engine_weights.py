"""Buffers of weights: how many a stage needs, who holds them, and what is computed in lower precision."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcpipe.engine.horizon import Horizon
from hpcpipe.engine.runner import StageRunner
from hpcpipe.engine.weights import WeightStore
from hpcpipe.optim.rules import AdamOptions, SgdOptions, make_rule
from hpcpipe.optim.schedules import LearningRate
from hpcpipe.schedule import Prediction, Role, Schedule, StageProgram
from tests.oracle.cases import MLP, NETS, SETTINGS, case, laid_over
from tests.oracle.runs import configured, run_alone
from tests.unit.engine_cases import CPU, seeded, stage_of, store_of


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[float]]:
    """By stage, after every update: bytes of weights and optimizer state, in multiples of one version."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    update = StageRunner.update

    def wrapped(runner: StageRunner, *given: Any, **more: Any) -> None:
        update(runner, *given, **more)
        found[runner.stage.index].append(runner.weights.allocated_bytes / runner.weights.master.nbytes)

    monkeypatch.setattr(StageRunner, "update", wrapped)
    return found


@pytest.mark.parametrize(
    ("policy", "buffers"),
    [
        ("stash", [4, 3, 2, 2]),
        ("vertical_sync", [4, 4, 4, 4]),
        ("none", [2, 2, 2, 2]),
        ("local", [3, 3, 3, 2]),
        ("round_trip", [3, 3, 4, 3]),
    ],
)
def test_stages_hold_the_weights_that_their_policy_needs_and_no_more(
    tmp_path: Path, policy: str, buffers: list[int], allocated: dict[int, list[float]]
) -> None:
    """Versions alive at once, the one being made among them, and predictions; the momentum buffer is left out."""
    run_alone(configured(tmp_path / "run", **case(policy, 4, NETS["mlp"], steps=20)))
    assert [allocated[stage][-1] - 1 for stage in range(4)] == buffers


@pytest.mark.parametrize("policy", ["stash", "vertical_sync", "none", "round_trip"])
def test_nothing_is_allocated_once_the_pipeline_is_full(
    tmp_path: Path, policy: str, allocated: dict[int, list[float]]
) -> None:
    cuts = {"checkpoint": {"every": 7}, "eval": {"every": 3}}
    run_alone(configured(tmp_path / "run", **case(policy, 4, NETS["mlp"], cuts, steps=24)))
    assert all(len(set(sizes[9:])) == 1 for sizes in allocated.values())


def gradients_of(store: Any, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(slot.shape, generator=generator) for slot in store.layout.slots]


def test_ten_thousand_predictions_leave_the_weights_as_they_are() -> None:
    store = store_of(stage_of(seeded(lambda: nn.Linear(6, 5))))
    store.update(0, gradients_of(store, 0), ())
    store.release([0])
    true = store.versions[1].flat.clone()
    first: Tensor | None = None
    for j in range(10_000):
        store.predict([Prediction(role=Role.FORWARD, minibatch=j, version=1, distance=3)])
        predicted = store.weights_of(Role.FORWARD, j, 1).flat
        first = predicted.clone() if first is None else first
        assert torch.equal(predicted, first)
        store.drop(Role.FORWARD, j)
    assert torch.equal(store.versions[1].flat, true)
    assert first is not None
    assert not torch.equal(first, true)


def test_two_predictions_without_an_update_between_are_the_same() -> None:
    store = store_of(stage_of(seeded(lambda: nn.Linear(6, 5))))
    store.update(0, gradients_of(store, 0), ())
    wanted = [Prediction(role=Role.FORWARD, minibatch=j, version=1, distance=2) for j in (5, 6)]
    for prediction in wanted:
        store.predict([prediction])
    one, other = (store.weights_of(Role.FORWARD, j, 1) for j in (5, 6))
    assert one is not other
    assert torch.equal(one.flat, other.flat)


def test_a_prediction_made_with_the_update_equals_one_made_alone() -> None:
    prediction = Prediction(role=Role.FORWARD, minibatch=4, version=1, distance=2)
    together, apart = (store_of(stage_of(seeded(lambda: nn.Linear(6, 5)))) for _ in range(2))
    together.update(0, gradients_of(together, 0), [prediction])
    apart.update(0, gradients_of(apart, 0), ())
    apart.predict([prediction])
    assert torch.equal(together.weights_of(Role.FORWARD, 4, 1).flat, apart.weights_of(Role.FORWARD, 4, 1).flat)


def test_without_a_velocity_a_prediction_is_the_weights_themselves() -> None:
    store = store_of(stage_of(seeded(lambda: nn.Linear(6, 5))))
    store.predict([Prediction(role=Role.FORWARD, minibatch=3, version=0, distance=3)])
    assert torch.equal(store.weights_of(Role.FORWARD, 3, 0).flat, store.versions[0].flat)


def store_of_rounds(
    options: SgdOptions | AdamOptions, replicas: int = 2, target: str = "local", minibatches: int = 100
) -> tuple[WeightStore, LearningRate]:
    """The weights of a linear layer, with one update for all replicas and a rate that falls by the minibatch."""
    stage = stage_of(seeded(lambda: nn.Linear(6, 5)))
    like = store_of(stage)
    rate = LearningRate(base=0.1, schedule="linear", end_factor=0.1, total=minibatches)
    schedule = Schedule(name="pipedream", stages=1, minibatches=minibatches, replicas=(replicas,))
    rule, _ = make_rule([options], like.layout, backend="torch", keep_velocity=True)
    horizon = Horizon(
        rate,
        target=target,
        momentum=options.damping,
        decays=[options.decoupled_weight_decay],
        updates_from=StageProgram(schedule, 0).updates_from,
    )
    store = WeightStore(like.layout, rule=rule, horizon=horizon, device=CPU, dtype=torch.float32)
    store.start_from(0, like.layout.views(like.versions[0].flat), updates=0)
    return store, rate


def test_an_update_of_several_minibatches_has_the_learning_rate_of_the_last() -> None:
    store, rate = store_of_rounds(SgdOptions(momentum=0.0))
    before = store.versions[0].flat.clone()
    gradients = gradients_of(store, 0)

    store.update(1, gradients, (), grad_scale=0.5)

    assert store.newest == 2
    views = zip(store.layout.view_list(store.versions[2].flat), store.layout.view_list(before), strict=True)
    for (after, weight), gradient in zip(views, gradients, strict=True):
        assert torch.equal(after, weight.add(gradient * 0.5, alpha=-rate(1)))


@pytest.mark.parametrize("after", [0, 3])
def test_adam_counts_updates_whatever_number_of_minibatches_they_are_of(after: int) -> None:
    """Also behind a restart at the minibatch `after`, which brings the number of updates with it."""
    store, rate = store_of_rounds(AdamOptions(weight_decay=0.1), replicas=3)
    parameters = [nn.Parameter(view.clone()) for view in store.layout.view_list(store.versions[0].flat)]
    optimizer = torch.optim.AdamW(parameters, lr=1.0, weight_decay=0.1)
    for j in (2, 5, 8):
        if store.newest == after > 0:
            store.start_from(after, store.layout.views(store.versions[after].flat.clone()), updates=1)
        gradients = gradients_of(store, j)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.param_groups[0]["lr"] = rate(j)
        optimizer.step()
        store.update(j, gradients, ())
        store.release([store.newest - 3])

    assert store.updates == 3
    for parameter, view in zip(parameters, store.layout.view_list(store.versions[9].flat), strict=True):
        assert torch.equal(parameter.detach(), view)


@pytest.mark.parametrize("target", ["local", "damped"])
def test_predictions_reach_along_the_rates_of_the_coming_rounds(target: str) -> None:
    store, rate = store_of_rounds(SgdOptions(momentum=0.9), target=target, minibatches=9)
    store.update(1, gradients_of(store, 0), ())
    store.release([0])

    # The last round has one minibatch, so the updates behind version 2 are those of minibatches 3, 5, 7 and 8.
    store.predict([Prediction(role=Role.FORWARD, minibatch=8, version=2, distance=4)])

    coming = [rate(j) * (0.9**i if target == "damped" else 1.0) for i, j in enumerate((3, 5, 7, 8), start=1)]
    velocity = store.state["momentum_buffer"]
    predicted = store.weights_of(Role.FORWARD, 8, 2).flat
    assert torch.equal(predicted, store.versions[2].flat.add(velocity, alpha=-math.fsum(coming)))


def test_gradients_are_watched_on_every_buffer_old_or_new() -> None:
    store = store_of(stage_of(seeded(lambda: nn.Linear(6, 5))))
    kept = store.restore_forward_weights(7)
    seen: list[int] = []

    def hook(slot: int, gradient: Tensor | None) -> None:
        seen.append(slot)

    store.watch_gradients(hook)
    for buffer in (store.versions[0], kept, store.add_version(5)):
        torch.autograd.grad(sum(leaf.sum() for leaf in buffer.leaves.values()), list(buffer.leaves.values()))
        assert sorted(seen) == [0, 1]
        seen.clear()


def test_kept_weights_outlive_their_version() -> None:
    store = store_of(stage_of(seeded(lambda: nn.Linear(6, 5))))
    kept = store.versions[0]
    store.keep_forward_weights(2, 0)
    for j in range(3):
        store.update(j, gradients_of(store, j), ())
        store.release([j])
    assert store.weights_of(Role.FORWARD, 2, 0) is kept
    assert kept not in store.versions.values()
    store.drop(Role.FORWARD, 2)
    store.update(3, gradients_of(store, 3), ())
    assert store.versions[4] is kept


def test_bfloat16_passes_leave_the_optimizer_its_float32_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[torch.dtype, torch.dtype, torch.dtype]] = set()
    update = StageRunner.update

    def wrapped(runner: StageRunner, *given: Any, **more: Any) -> None:
        update(runner, *given, **more)
        weights = runner.weights
        seen.add(
            (weights.master.dtype, weights.versions[weights.newest].flat.dtype, weights.state["exp_avg"].dtype)
        )
        assert torch.equal(weights.master.to(torch.bfloat16), weights.versions[weights.newest].flat)

    monkeypatch.setattr(StageRunner, "update", wrapped)
    outcome = run_alone(configured(tmp_path / "run", **case("round_trip", 4, NETS["mlp"], SETTINGS["bfloat16"])))
    assert seen == {(torch.float32, torch.bfloat16, torch.float32)}
    for tensor in outcome.weights.values():
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, tensor.to(torch.bfloat16).float())


def test_a_bfloat16_run_learns(tmp_path: Path) -> None:
    digits = {"run": {"epochs": 3, "max_steps": 250, "dtype": "bfloat16"}, "model": {**MLP, "hidden": (32, 32)}}
    sections = laid_over(case("round_trip", 3), digits, {"optimizer": {"name": "adamw", "lr": 0.003}})
    losses = run_alone(configured(tmp_path / "run", **sections)).losses
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
