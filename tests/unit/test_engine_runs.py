"""What a run does beside training: where it begins, where it ends, what it refuses, what it clips."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpcpipe.checkpoint.export import export
from hpcpipe.checkpoint.sets import find_sets, open_set
from hpcpipe.engine.train import TrainOptions, train
from hpcpipe.errors import CheckpointError, ConfigError, ModelError, NonFiniteError, UserError
from tests.oracle.cases import MLP, NETS, OPTIMIZERS, POLICIES, ROWS, case, laid_over
from tests.oracle.lone_world import LoneWorld
from tests.oracle.plain import train_plainly
from tests.oracle.replay import replay
from tests.oracle.runs import (
    assert_close,
    assert_equal,
    assert_same,
    configured,
    failure_of,
    outcome_of,
    run_alone,
    write_run_file,
)


@pytest.mark.parametrize("policy", ["stash", "round_trip"])
def test_recomputed_activations_equal_kept_ones_where_forward_and_backward_use_the_same_weights(
    tmp_path: Path, policy: str
) -> None:
    """Under stash on four stages, under spectrain on one; the first block's inputs need no gradient."""
    net = {"name": "tests.oracle.nets:build_recomputed"}
    stages = 4 if policy == "stash" else 1
    kept, again = (
        run_alone(
            configured(
                tmp_path / str(on), **case(policy, stages, {"model": {**net, "recompute": on}, "data": ROWS})
            )
        )
        for on in (False, True)
    )
    assert_same(again, kept)


@pytest.mark.parametrize("policy", ["none", "round_trip", "damped"])
def test_recomputed_activations_come_from_the_weights_of_the_backward(tmp_path: Path, policy: str) -> None:
    """As SpecTrain's rules say: other numbers than those of the forward, but those of an explicit swap."""
    net = {"name": "tests.oracle.nets:build_recomputed"}
    again = configured(tmp_path / "again", **case(policy, 4, {"model": {**net, "recompute": True}, "data": ROWS}))
    kept = configured(tmp_path / "kept", **case(policy, 4, {"model": {**net, "recompute": False}, "data": ROWS}))
    outcome = run_alone(again)
    assert_same(outcome, replay(again, 4))
    assert outcome.losses != run_alone(kept).losses


SHARED = {"model": {"name": "tests.oracle.nets:build_shared"}, "data": ROWS}


@pytest.mark.parametrize("policy", ["stash", "none", "round_trip"])
def test_layers_of_one_stage_may_share_weights(tmp_path: Path, policy: str) -> None:
    alone = configured(tmp_path / "alone", **case(policy, 1, SHARED))
    assert_same(run_alone(alone), train_plainly(alone))
    together = configured(tmp_path / "run", **case(policy, 2, SHARED, {"pipeline": {"balance": (4, 2)}}))
    assert_same(run_alone(together), replay(together, 2))


def test_layers_of_two_stages_that_share_weights_are_wrong_input(tmp_path: Path) -> None:
    apart = configured(tmp_path / "run", **case("stash", 2, SHARED, {"pipeline": {"balance": (3, 3)}}))
    message = failure_of(apart, ModelError)
    assert ModelError.exit_code == 2
    assert "layers '0' and '3' share 'weight', but lie on stages 0 and 1" in message
    assert "pipeline.balance" in message


def test_a_layer_that_returns_something_else_than_tensors_is_named(tmp_path: Path) -> None:
    sections = {"model": {"name": "tests.oracle.nets:build_named"}, "data": ROWS}
    message = failure_of(configured(tmp_path / "run", **case("stash", 3, sections)), ModelError)
    assert "layer 'named' returned dict" in message


@pytest.mark.parametrize("policy", POLICIES)
def test_clipping_in_the_asynchronous_schedule_is_by_each_stages_own_norm(tmp_path: Path, policy: str) -> None:
    sections = case(policy, 4, NETS["mlp"], {"optimizer": {**OPTIMIZERS["sgd"], "clip_norm": 0.05}})
    config = configured(tmp_path / "run", **sections)
    found, expected = run_alone(config), replay(config, 4)
    assert_close(found.weights, expected.weights, rtol=2e-5, atol=2e-6)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    free = run_alone(configured(tmp_path / "free", **laid_over(sections, {"optimizer": OPTIMIZERS["sgd"]})))
    assert free.losses[-1] != pytest.approx(found.losses[-1], rel=1e-4)


def test_a_clip_norm_that_is_never_reached_changes_no_bit(tmp_path: Path) -> None:
    sections = case("round_trip", 4, NETS["mlp"])
    clipped = laid_over(sections, {"optimizer": {**OPTIMIZERS["sgd"], "clip_norm": 1e6}})
    assert_same(
        run_alone(configured(tmp_path / "clipped", **clipped)),
        run_alone(configured(tmp_path / "free", **sections)),
    )


POISONED = {"model": MLP, "data": {"name": "tests.oracle.data:build_numbered", "batch": 8, "poisoned": 4}}


def test_a_loss_that_is_no_number_ends_the_run_and_is_named(tmp_path: Path) -> None:
    message = failure_of(configured(tmp_path / "run", **case("stash", 4, POISONED)), NonFiniteError)
    assert "the loss of minibatch 4 is nan" in message
    assert "optimizer.on_nonfinite" in message


def test_a_loss_that_is_no_number_may_be_let_pass(tmp_path: Path) -> None:
    going_on = laid_over(POISONED, {"optimizer": {**OPTIMIZERS["sgd"], "on_nonfinite": "continue"}})
    outcome = run_alone(configured(tmp_path / "run", **case("stash", 4, going_on, steps=9)))
    assert outcome.losses[4] is None
    assert len(outcome.losses) == 9


def test_the_run_ends_after_max_steps_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    outcome = run_alone(
        configured(tmp_path / "run", **case("round_trip", 4, NETS["mlp"], {"run": {"epochs": 9}}, steps=7))
    )
    assert len(outcome.losses) == 7
    assert outcome.summary["steps"] == 7
    assert outcome.summary["checkpoint_step"] == 7


@pytest.mark.parametrize("source", ["run folder", "safetensors"])
def test_a_run_starts_from_the_weights_and_buffers_of_another(tmp_path: Path, source: str) -> None:
    net = NETS["batchnorm and dropout"]
    first = run_alone(configured(tmp_path / "first", **case("stash", 3, net)))
    path = tmp_path / "first"
    if source == "safetensors":
        path = tmp_path / "weights.safetensors"
        export(open_set(find_sets(tmp_path / "first" / "checkpoints")[0].path), path)
    still = {"run": {"init_from": str(path), "seed": 99}, "optimizer": {**OPTIMIZERS["sgd"], "lr": 0.0}}
    second = run_alone(configured(tmp_path / "second", **case("stash", 2, net, still, steps=1)))
    assert_equal(second.weights, first.weights)
    moved = {name for name, buffer in second.buffers.items() if not torch.equal(buffer, first.buffers[name])}
    assert all(buffer == 18 for name, buffer in second.buffers.items() if name.endswith("num_batches_tracked"))
    assert len(moved) == len(second.buffers)


def test_a_run_does_not_start_from_the_weights_of_another_model(tmp_path: Path) -> None:
    run_alone(configured(tmp_path / "first", **case("stash", 2, NETS["mlp"], steps=2)))
    other = {"model": {**MLP, "hidden": (9, 8, 8, 7, 8, 9, 9)}, "run": {"init_from": str(tmp_path / "first")}}
    message = failure_of(configured(tmp_path / "second", **case("stash", 2, NETS["mlp"], other)), CheckpointError)
    assert "hidden7" in message


@pytest.mark.parametrize("policy", ["stash", "vertical_sync", "none", "round_trip"])
def test_stages_of_one_process_that_pass_a_cut_far_apart_leave_a_whole_checkpoint(
    tmp_path: Path, policy: str
) -> None:
    """With a cut after every minibatch, the stage of the loss is three cuts ahead of the first."""
    config = configured(
        tmp_path / "run",
        **case(policy, 4, NETS["batchnorm and dropout"], {"checkpoint": {"every": 1, "keep_last": 99}}, steps=9),
    )
    unbroken = run_alone(config)
    middle = next(info.path for info in find_sets(tmp_path / "run" / "checkpoints") if info.step == 5)
    elsewhere = (f"run.out={tmp_path / 'resumed'}",)
    options = TrainOptions(run_file=str(write_run_file(config)), resume=str(middle), overrides=elsewhere)
    assert train(LoneWorld(), options) == 0
    resumed = outcome_of(tmp_path / "resumed")
    assert_same(resumed, replace(unbroken, losses=unbroken.losses[5:]))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"pipeline": {"stages": 99}}, "99 stages for a model of 8 layers"),
        ({"data": {**ROWS, "rows": 4, "drop_last": True}}, "make no minibatch of 8 rows"),
        ({"pipeline": {"stages": 2, "balance": (4, 5)}}, "deals out 9 layers, but the model has 8"),
    ],
)
def test_wrong_input_is_one_line(tmp_path: Path, sections: dict[str, dict[str, object]], words: str) -> None:
    try:
        config = configured(tmp_path / "run", **laid_over(case("stash", None, NETS["mlp"]), sections))
        message = failure_of(config, UserError)
    except ConfigError as error:
        message = str(error)
    assert words in message
    assert "\n" not in message
