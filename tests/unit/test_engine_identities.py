"""What must hold of any staleness policy, whoever computes it: identities between runs, and counts of versions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcpipe.engine.runner import StageRunner
from hpcpipe.engine.snapshot import named_state
from hpcpipe.schedule import Action, Role
from tests.oracle.cases import NETS, OPTIMIZERS, POLICIES, ROWS, case, laid_over
from tests.oracle.parts import parts_of
from tests.oracle.plain import train_plainly
from tests.oracle.runs import Outcome, assert_equal, assert_same, configured, run_alone
from tests.oracle.toy import toy

Sections = dict[str, dict[str, Any]]


def outcome(directory: Path, sections: Sections) -> Outcome:
    return run_alone(configured(directory, **sections))


def partly_frozen(*trained: str, depth: int) -> Sections:
    net = {"name": "tests.oracle.nets:build_frozen", "trained": trained, "depth": depth}
    return {"model": net, "data": ROWS}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_at_learning_rate_zero_nothing_changes(tmp_path: Path, policy: str, optimizer: str) -> None:
    still = {"optimizer": {**OPTIMIZERS[optimizer], "lr": 0.0}}
    config = configured(tmp_path / "run", **case(policy, 4, NETS["mlp"], still))
    found = run_alone(config)
    start = {name: p.detach() for part in parts_of(config, 1).slices for name, p in part.parameters().items()}
    assert_equal(found.weights, start)
    assert found.losses == train_plainly(config).losses


def test_on_two_stages_the_papers_target_is_the_local_one(tmp_path: Path) -> None:
    paper = outcome(tmp_path / "paper", case("round_trip", 2, NETS["mlp"]))
    local = outcome(tmp_path / "local", case("local", 2, NETS["mlp"]))
    assert_same(paper, local)


@pytest.mark.parametrize("policy", ["stash", "none", "round_trip", "local", "damped"])
def test_behind_a_frozen_stage_the_last_of_two_is_sequential(tmp_path: Path, policy: str) -> None:
    config = configured(tmp_path / "run", **case(policy, 2, partly_frozen("last", depth=1)))
    assert_same(run_alone(config), train_plainly(config))


@pytest.mark.parametrize("policy", ["stash", "none", "local", "damped"])
@pytest.mark.parametrize("stages", [3, 5])
def test_behind_frozen_stages_the_last_is_sequential(tmp_path: Path, stages: int, policy: str) -> None:
    config = configured(tmp_path / "run", **case(policy, stages, partly_frozen("last", depth=stages - 1)))
    assert_same(run_alone(config), train_plainly(config))


@pytest.mark.parametrize("stages", [3, 4, 5, 6])
def test_behind_frozen_stages_the_papers_target_looks_ahead_by_half_the_stages(
    tmp_path: Path, stages: int
) -> None:
    config = configured(tmp_path / "run", **case("round_trip", stages, partly_frozen("last", depth=stages - 1)))
    found = run_alone(config)
    assert_equal(found.weights, looking_ahead(config, (stages - 1) // 2))
    assert not torch.equal(found.weights["last.0.weight"], train_plainly(config).weights["last.0.weight"])


def looking_ahead(config: Any, distance: int) -> dict[str, Tensor]:
    """One device: each gradient is taken at W - distance · lr · v, or nearer where the run ends before that."""
    parts = parts_of(config, 1)
    net, options = parts.slices[0], config.optimizer
    trained = {name: p for name, p in net.parameters().items() if p.requires_grad}
    true = {name: p.detach().clone() for name, p in trained.items()}
    velocity: dict[str, Tensor] = {}
    for j in range(parts.minibatches):
        reach = min(distance, parts.minibatches - j) * options.lr
        for name, p in trained.items():
            p.data.copy_(torch.sub(true[name], velocity[name], alpha=reach) if j else true[name])
            p.grad = None
        (output,) = net(j, 0, *parts.inputs(j))
        parts.loss(output, parts.data.targets(j)).backward()
        for name, p in trained.items():
            assert p.grad is not None
            velocity[name] = velocity[name].mul(options.momentum).add(p.grad) if j else p.grad.clone()
            true[name] = torch.sub(true[name], velocity[name], alpha=options.lr)
    return {name: true.get(name, p.detach()) for name, p in net.parameters().items()}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int, int], int]:
    """Updates that a stage had applied when it ran a pass: (F or B, stage, minibatch) -> count."""
    counts: dict[tuple[str, int, int], int] = {}

    def counting(
        kind: str, original: Callable[[StageRunner, Action], None]
    ) -> Callable[[StageRunner, Action], None]:
        def wrapped(runner: StageRunner, action: Action) -> None:
            counts[kind, runner.stage.index, action.minibatch] = runner.weights.newest
            original(runner, action)

        return wrapped

    monkeypatch.setattr(StageRunner, "forward", counting("F", StageRunner.forward))
    monkeypatch.setattr(StageRunner, "backward", counting("B", StageRunner.backward))
    return counts


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_updates_between_the_passes_of_a_minibatch_are_those_of_the_paper(
    tmp_path: Path, stages: int, counted: dict[tuple[str, int, int], int]
) -> None:
    minibatches = 25
    sections = laid_over(case("round_trip", stages, NETS["mlp"], steps=minibatches), {"run": {"trace": True}})
    outcome(tmp_path / "run", sections)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    distance = {
        (e["name"][0], e["tid"], int(e["name"][1:])): e["args"]["distance"]
        for e in events
        if e["name"][0] in "FB" and e["name"][1].isdigit()
    }
    for k in range(stages):
        behind = stages - 1 - k
        for j in range(minibatches):
            assert counted["B", k, j] == j
            assert counted["B", k, j] - counted["F", k, j] == min(j, behind)
            aims = {counted[kind, k, j] + distance[kind, k, j] for kind in "FB"}
            assert len(aims) == 1
            if 2 * stages <= j < minibatches - 2 * stages:
                assert aims == {j + k // 2}
                assert distance["F", k, j] == k // 2 + behind
                assert distance["B", k, j] == k // 2


def test_distances_on_four_stages_are_the_table_of_the_paper(tmp_path: Path) -> None:
    found = outcome(
        tmp_path / "run", laid_over(case("round_trip", 4, NETS["mlp"], steps=25), {"run": {"trace": True}})
    )
    assert len(found.losses) == 25
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    at = {(e["name"], e["tid"]): e["args"]["distance"] for e in events}
    assert [at["F12", k] for k in range(4)] == [3, 2, 2, 1]
    assert [at["B12", k] for k in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("target", ["round_trip", "local", "damped"])
def test_predictions_never_touch_the_true_weights(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every pass the newest version, and what a checkpoint would store, is what the last update made."""
    made: dict[int, Tensor] = {}
    checked = 0
    update, forward, backward = StageRunner.update, StageRunner.forward, StageRunner.backward

    def after_update(runner: StageRunner, action: Action, **more: Any) -> None:
        update(runner, action, **more)
        made[runner.stage.index] = runner.weights.versions[runner.weights.newest].flat.clone()

    def check(runner: StageRunner) -> None:
        nonlocal checked
        if runner.stage.index not in made:
            return
        true = made[runner.stage.index]
        assert torch.equal(runner.weights.versions[runner.weights.newest].flat, true)
        assert torch.equal(runner.weights.master, true)
        stored = {
            path: tensor
            for path, tensor in named_state(runner)
            if path.startswith("layers/") and "/parameters/" in path
        }
        for name, view in runner.weights.layout.views(true).items():
            layer, own = runner.stage.split_name(name)
            assert torch.equal(stored[f"layers/{layer}/parameters/{own}"], view)
            checked += 1

    def after_forward(runner: StageRunner, action: Action) -> None:
        forward(runner, action)
        check(runner)

    def after_backward(runner: StageRunner, action: Action) -> None:
        backward(runner, action)
        check(runner)

    monkeypatch.setattr(StageRunner, "update", after_update)
    monkeypatch.setattr(StageRunner, "forward", after_forward)
    monkeypatch.setattr(StageRunner, "backward", after_backward)
    outcome(tmp_path / "run", case(target, 4, NETS["mlp"]))
    assert checked > 100


def test_prediction_comes_nearer_to_the_weights_of_sequential_training_than_stale_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root mean square distance of what F(j) runs on to version j: predicted (local) over stale, by stage."""
    stages, steps = 4, 150
    stale: dict[tuple[int, int], Tensor] = {}
    predicted: dict[tuple[int, int], Tensor] = {}
    apart: dict[int, list[tuple[float, float]]] = {}
    forward, backward = StageRunner.run_forward, StageRunner.backward

    def before_forward(runner: StageRunner, action: Action, *more: Any) -> None:
        key = runner.stage.index, action.minibatch
        stale[key] = runner.weights.versions[action.version].flat.clone()
        predicted[key] = runner.weights.weights_of(Role.FORWARD, action.minibatch, action.version).flat.clone()
        forward(runner, action, *more)

    def before_backward(runner: StageRunner, action: Action) -> None:
        key = runner.stage.index, action.minibatch
        true = runner.weights.versions[action.minibatch].flat
        errors = tuple(float((weights.pop(key) - true).square().mean()) for weights in (predicted, stale))
        if action.minibatch >= steps // 3:
            apart.setdefault(runner.stage.index, []).append(errors)
        backward(runner, action)

    monkeypatch.setattr(StageRunner, "run_forward", before_forward)
    monkeypatch.setattr(StageRunner, "backward", before_backward)
    ratios = []
    for lr in (0.01, 0.03):
        apart.clear()
        outcome(tmp_path / f"at{lr}", laid_over(case("local", stages), toy(stages, steps, lr)))
        assert all(error == (0.0, 0.0) for error in apart[stages - 1])
        ratios.append(
            [(mean(p for p, _ in apart[k]) / mean(s for _, s in apart[k])) ** 0.5 for k in range(stages - 1)]
        )
    assert all(ratio < 0.8 for ratio in ratios[0])
    assert all(slow < fast < 1.0 for slow, fast in zip(*ratios, strict=True))


def test_losses_on_the_toy_are_in_the_order_that_is_known(tmp_path: Path) -> None:
    def final(name: str, seed: int) -> float:
        policy = "stash" if name == "sequential" else name
        config = configured(
            tmp_path / f"{name}{seed}", **laid_over(case(policy, 8), toy(8, 500, 0.03), {"run": {"seed": seed}})
        )
        losses = train_plainly(config).losses if name == "sequential" else run_alone(config).losses
        return mean(losses[-100:])

    sequential, spectrain, stash = (
        mean(final(name, seed) for seed in (0, 1)) for name in ("sequential", "round_trip", "stash")
    )
    assert 1.05 * sequential < spectrain
    assert 1.05 * spectrain < stash
    assert spectrain - sequential < 0.5 * (stash - sequential)
