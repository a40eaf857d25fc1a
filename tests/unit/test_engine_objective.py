"""Losses, targets that do not count, metrics and evaluations, as plain torch computes them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpipe.config import RunConfig
from hpcpipe.config.model import MlpModel
from hpcpipe.config.sections import LossConfig
from hpcpipe.engine.objective import Evaluation, Losses, Objective, mean_loss
from hpcpipe.models.loss import make_loss, make_metrics
from tests.oracle.cases import MLP, case, laid_over
from tests.oracle.data import IGNORED, Numbered, margin_loss
from tests.oracle.parts import parts_of
from tests.oracle.plain import train_plainly
from tests.oracle.replay import replay
from tests.oracle.runs import Outcome, assert_close, assert_same, configured, run_alone

NUMBERED = {"name": "tests.oracle.data:build_numbered", "batch": 8}
PARTLY_IGNORED = {
    "data": {**NUMBERED, "share_ignored": 0.4},
    "loss": {"name": "cross_entropy", "ignore_index": IGNORED, "metrics": ("accuracy", "perplexity")},
}


def whole_net(config: RunConfig, weights: dict[str, Tensor] | None = None) -> tuple[nn.Sequential, Numbered]:
    """The net of a run as one plain module, and its data."""
    parts = parts_of(config, 1)
    if weights is not None:
        for name, parameter in parts.slices[0].parameters().items():
            parameter.data.copy_(weights[name])
    assert isinstance(parts.data, Numbered)
    return nn.Sequential(*parts.slices[0].layers), parts.data


def losses_by_hand(config: RunConfig, steps: int, loss: Any) -> list[float]:
    """Losses of a loop over whole minibatches that knows nothing of microbatches."""
    net, data = whole_net(config)
    optimizer = torch.optim.SGD(net.parameters(), lr=config.optimizer.lr, momentum=0.9)
    found = []
    for j in range(steps):
        optimizer.zero_grad()
        value = loss(net(*data.inputs(j)), data.targets(j))
        value.backward()
        optimizer.step()
        found.append(float(value.detach()))
    return found


def ignoring(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores, targets, ignore_index=IGNORED)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_targets_that_do_not_count_weigh_nothing_in_any_microbatch(
    tmp_path: Path, schedule: str, microbatches: int
) -> None:
    pipeline = {"schedule": schedule, "stages": 3, "microbatches": microbatches}
    config = configured(
        tmp_path / "run",
        **laid_over({"run": {"max_steps": 10}, "model": MLP, "pipeline": pipeline}, PARTLY_IGNORED),
    )
    assert run_alone(config).losses == pytest.approx(losses_by_hand(config, 10, ignoring), rel=1e-5)


@pytest.mark.parametrize("policy", ["stash", "round_trip"])
def test_targets_that_do_not_count_are_left_out_under_asynchronous_schedules(tmp_path: Path, policy: str) -> None:
    config = configured(tmp_path / "run", **case(policy, 3, {"model": MLP}, PARTLY_IGNORED))
    assert_same(run_alone(config), replay(config, 3))


def test_a_minibatch_without_a_target_that_counts_changes_nothing_but_what_momentum_does(tmp_path: Path) -> None:
    nothing = laid_over(PARTLY_IGNORED, {"data": {**NUMBERED, "share_ignored": 1.1}})
    config = configured(tmp_path / "run", **case("stash", 3, {"model": MLP}, nothing))
    outcome = run_alone(config)
    start = {name: p.detach() for name, p in parts_of(config, 1).slices[0].parameters().items()}
    assert outcome.losses == [0.0] * 17
    assert_close(outcome.weights, start, rtol=0.0, atol=0.0)


def test_a_loss_of_the_users_own_is_minimised(tmp_path: Path) -> None:
    sections = {"model": MLP, "data": NUMBERED, "loss": {"name": "tests.oracle.data:margin_loss"}}
    config = configured(tmp_path / "run", **case("stash", 1, sections))
    outcome = run_alone(config)
    assert outcome.losses == losses_by_hand(config, 17, margin_loss)
    assert_same(outcome, train_plainly(config))


def figures_by_hand(config: RunConfig, outcome: Outcome) -> tuple[Tensor, Tensor]:
    """Scores and targets of all rows that are evaluated, under the final weights."""
    net, data = whole_net(config, outcome.weights)
    net.eval()
    with torch.no_grad():
        scores = [net(*data.eval_inputs(i)) for i in range(data.eval_batches)]
    return torch.cat(scores), torch.cat([data.eval_targets(i) for i in range(data.eval_batches)])


@pytest.mark.parametrize("policy", ["stash", "round_trip"])
def test_evaluations_report_what_the_whole_net_gives_on_all_rows(tmp_path: Path, policy: str) -> None:
    sections = laid_over({"model": {**MLP, "dropout": 0.3}}, PARTLY_IGNORED, {"eval": {"at_end": True}})
    config = configured(tmp_path / "run", **case(policy, 4, sections))
    outcome = run_alone(config)
    scores, targets = figures_by_hand(config, outcome)
    counted = targets != IGNORED
    loss = ignoring(scores, targets)
    figures = outcome.evaluations[17]
    assert figures["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert figures["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)
    assert figures["accuracy"] == float((scores.argmax(-1) == targets)[counted].float().mean())


def test_metrics_of_the_users_own_are_gathered_over_batches_of_unequal_size(tmp_path: Path) -> None:
    metrics = ("tests.oracle.data:second_choice", "tests.oracle.data:largest_score")
    sections = {"model": MLP, "data": NUMBERED, "loss": {"metrics": metrics}, "eval": {"at_end": True}}
    config = configured(tmp_path / "run", **case("stash", 3, sections))
    outcome = run_alone(config)
    scores, targets = figures_by_hand(config, outcome)
    hits = (scores.topk(2, dim=-1).indices == targets[:, None]).any(dim=-1)
    assert outcome.evaluations[17]["second_choice"] == pytest.approx(float(hits.float().mean()))
    assert outcome.evaluations[17]["largest_score"] == pytest.approx(float(scores.max(-1).values.mean()), rel=1e-5)


def test_the_sums_of_an_evaluation_add_up_to_those_of_all_batches() -> None:
    objective = Objective(
        make_loss(LossConfig()), make_metrics(LossConfig(metrics=("accuracy", "perplexity")), MlpModel(name="mlp"))
    )
    batches = [
        (torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows)), torch.arange(rows) % 5)
        for rows in (4, 7, 3)
    ]
    whole, parts = Evaluation(objective), [Evaluation(objective) for _ in range(3)]
    for i, (scores, targets) in enumerate(batches):
        whole.add((scores,), targets)
        parts[i % 2].add((scores,), targets)

    joined = Evaluation(objective)
    joined.sums = [sum(alike) for alike in zip(*(part.sums for part in parts), strict=True)]

    assert joined.figures() == pytest.approx(whole.figures(), rel=1e-12)
    assert math.isnan(parts[2].figures()["loss"])


def test_losses_are_weighted_by_their_targets_and_taken_once() -> None:
    losses = Losses()
    losses.parts += [(torch.tensor(2.0), 3), (torch.tensor(4.0), 1)]

    assert mean_loss(*losses.take()) == 2.5
    assert losses.take() == (0.0, 0.0)
    assert mean_loss(0.0, 0.0) == 0.0


def test_an_evaluation_sees_the_weights_of_its_own_step_while_others_are_in_flight(tmp_path: Path) -> None:
    sections = {"model": MLP, "data": NUMBERED, "eval": {"every": 4, "at_end": True}}
    policy = "stash"
    long = run_alone(configured(tmp_path / "long", **case(policy, 4, sections, steps=12)))
    for steps in (4, 8):
        short = run_alone(configured(tmp_path / f"short{steps}", **case(policy, 4, sections, steps=steps)))
        assert long.evaluations[steps] == short.evaluations[steps]
