"""Measuring a model: bytes are counted by hand here; of times only what must hold on any machine."""

from __future__ import annotations

import math
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import hpcpipe
from hpcpipe.datasets.build import build_dataset
from hpcpipe.engine.measure import measure, parted, spread
from hpcpipe.errors import ConfigError, ModelError
from hpcpipe.planning.profile import Profile, load_profile, save_profile
from tests.oracle.cases import GROUPS, NETS, OPTIMIZERS, ROWS
from tests.oracle.lone_world import LoneWorld
from tests.oracle.runs import configured
from tests.unit.measured_nets import CLASSES, CPU, INPUTS, WIDTH, layer, measured, net, profile_of

BATCH = 8
FLOAT = 4
SECONDS = st.floats(0, 10)


@pytest.fixture(scope="module")
def chain() -> Profile:
    return measured(**net("build_chain"), repeats=3)


def per_layer(profile: Profile, key: str) -> list[int]:
    return [getattr(one, key) for one in profile.layers]


def test_every_layer_of_the_model_is_measured_in_its_order(chain: Profile) -> None:
    assert [one.name for one in chain.layers] == ["one", "relu1", "two", "relu2", "three"]
    assert chain.is_chain
    assert chain.rows == BATCH
    assert all(one.forward_s > 0 and one.backward_s > 0 for one in chain.layers)


def test_the_times_that_are_not_of_a_layer_are_measured_too(chain: Profile) -> None:
    assert min(chain.pass_overhead_s, chain.data_s, chain.targets_s, chain.message_s) > 0


def test_what_crosses_a_boundary_has_the_bytes_of_its_tensors(chain: Profile) -> None:
    hidden = BATCH * WIDTH * FLOAT
    assert per_layer(chain, "output_bytes") == [hidden] * 4 + [BATCH * CLASSES * FLOAT]
    assert per_layer(chain, "gradient_bytes") == per_layer(chain, "output_bytes")
    assert chain.input_bytes == BATCH * INPUTS * FLOAT


def test_a_linear_layer_behind_a_relu_saves_what_the_relu_has_saved() -> None:
    # The loss saves log-probabilities, targets and the sum of the targets' weights.
    loss = BATCH * CLASSES * FLOAT + BATCH * 8 + FLOAT
    hidden = BATCH * WIDTH * FLOAT
    assert per_layer(measured(**net("build_chain")), "saved_bytes") == [0, hidden, 0, hidden, loss]


def test_the_input_that_a_layer_saves_counts_where_it_was_made() -> None:
    loss = BATCH * CLASSES * FLOAT + BATCH * 8 + FLOAT
    hidden = BATCH * WIDTH * FLOAT
    assert per_layer(measured(**net("build_chain", relus=False)), "saved_bytes") == [hidden, hidden, loss]


def test_a_block_that_is_computed_again_saves_less() -> None:
    kept, again = (measured(**net("build_recomputed", recompute=recompute)) for recompute in (False, True))
    assert layer(again, "block1").saved_bytes < layer(kept, "block1").saved_bytes


@pytest.mark.parametrize(
    ("optimizer", "dtype", "policy", "parameter", "state"),
    [
        ("sgd", "float32", "stash", 4, 4),
        ("adamw", "float32", "spectrain", 4, 8),
        ("adamw", "bfloat16", "spectrain", 2, 8 + 4),
        ("sgd", "float64", "none", 8, 8),
    ],
)
def test_weights_and_state_have_the_bytes_of_their_numbers(
    optimizer: str, dtype: str, policy: str, parameter: int, state: int
) -> None:
    profile = measured(
        **net("build_chain"),
        run={"dtype": dtype},
        optimizer=OPTIMIZERS[optimizer],
        pipeline={"policy": policy},
    )
    numbers = [INPUTS * WIDTH + WIDTH, 0, WIDTH * WIDTH + WIDTH, 0, WIDTH * CLASSES + CLASSES]
    assert per_layer(profile, "parameter_bytes") == [parameter * n for n in numbers]
    assert per_layer(profile, "state_bytes") == [state * n for n in numbers]


def test_plain_sgd_keeps_no_state() -> None:
    profile = measured(**net("build_chain"), optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.0})
    assert per_layer(profile, "state_bytes") == [0] * 5


def test_activations_have_the_dtype_of_the_run() -> None:
    profile = measured(**net("build_chain"), run={"dtype": "bfloat16"})
    assert layer(profile, "one").output_bytes == BATCH * WIDTH * 2
    assert profile.input_bytes == BATCH * INPUTS * 2


def test_tuples_with_integers_and_bools_count_and_only_gradients_come_back() -> None:
    profile = measured(**net("build_several"))
    width = 8
    hidden, mask, positions = BATCH * width * FLOAT, BATCH * width, BATCH * width * 8
    scale, side = BATCH * FLOAT, BATCH * width // 2 * FLOAT
    assert set(per_layer(profile, "output_bytes")[:-1]) == {hidden + mask + positions + scale + side}
    # The head never looks at `side`.
    assert per_layer(profile, "gradient_bytes")[:-1] == [hidden + side] * 3 + [hidden]


def test_buffers_and_frozen_weights_are_held_once_beside_the_trained_ones() -> None:
    frozen = measured(**net("build_frozen", trained=["hidden2", "last"]))
    numbers = {"hidden0": 16 * 8 + 8, "hidden1": 8 * 8 + 8, "hidden2": 8 * 8 + 8, "last": 8 * 5 + 5}
    assert per_layer(frozen, "buffer_bytes") == [FLOAT * numbers["hidden0"], FLOAT * numbers["hidden1"], 0, 0]
    assert per_layer(frozen, "parameter_bytes") == [0, 0, FLOAT * numbers["hidden2"], FLOAT * numbers["last"]]


def test_nothing_comes_back_to_layers_that_learn_nothing() -> None:
    profile = measured(**net("build_frozen", trained=["hidden2", "last"]))
    assert per_layer(profile, "gradient_bytes")[:3] == [0, 0, BATCH * 8 * FLOAT]


def test_running_statistics_are_buffers() -> None:
    profile = measured(**NETS["batchnorm and dropout"])
    # Mean and variance of 6 channels and a count.
    assert layer(profile, "stem").buffer_bytes == 2 * 6 * FLOAT + 8


def test_weights_tied_within_a_layer_count_once() -> None:
    profile = measured(**net("build_tied"))
    assert layer(profile, "tied0").parameter_bytes == FLOAT * (8 * 8 + 8 + 8)


def test_layers_that_share_a_weight_are_measured_and_named() -> None:
    profile = measured(**net("build_shared"))
    assert layer(profile, "0").parameter_bytes == layer(profile, "3").parameter_bytes == FLOAT * (16 * 16 + 16)
    assert profile.shared == ((0, 3),)


def test_a_pass_is_a_microbatch() -> None:
    whole = measured(**net("build_chain"), pipeline={"schedule": "gpipe"})
    profile = measured(**net("build_chain"), pipeline={"schedule": "gpipe", "microbatches": 3})
    assert profile.rows == 3
    assert [8 * size for size in per_layer(profile, "output_bytes")] == [
        3 * size for size in per_layer(whole, "output_bytes")
    ]


@pytest.mark.parametrize("name", NETS)
def test_every_kind_of_net_can_be_measured_and_kept(name: str, tmp_path: Path) -> None:
    profile = measured(**NETS[name])
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile


@pytest.mark.parametrize("policy", ["stash", "vertical_sync", "none", "spectrain"])
def test_updates_take_their_time_by_their_bytes(policy: str) -> None:
    profile = measured(
        **net("build_chain"),
        pipeline={"policy": policy},
        optimizer={"name": "adamw", "lr": 0.01, "clip_norm": 0.1, "groups": GROUPS[:1]},
        lr_schedule={"name": "cosine"},
    )
    assert layer(profile, "one").update_s > 0
    assert layer(profile, "relu1").update_s == 0
    one, two = layer(profile, "one"), layer(profile, "two")
    assert one.update_s / one.parameter_bytes == pytest.approx(two.update_s / two.parameter_bytes)
    assert profile.about["predictions"] == (policy == "spectrain")


def test_more_sweeps_than_the_run_has_minibatches_are_no_obstacle() -> None:
    profile = measured(run={"max_steps": 1}, pipeline={"policy": "spectrain"}, repeats=4)
    assert profile.about["sweeps"] == 4


def test_however_the_run_splits_the_model_all_layers_are_measured() -> None:
    profile = measured(pipeline={"replicas": [2, 1], "balance": [1, 3]})
    assert len(profile.layers) == 4
    assert len(measured(pipeline={"plan": "auto", "memory_limit": "1GiB"}).layers) == 4


def test_a_profile_says_what_it_holds_for() -> None:
    config = configured(**net("build_chain"), run={"dtype": "bfloat16"}, pipeline={"policy": "none"})
    about = profile_of(config).about
    expected = {
        "model": config.model.name,
        "batch": BATCH,
        "microbatches": 1,
        "schedule": "pipedream",
        "policy": "none",
        "optimizer": "sgd",
        "dtype": "bfloat16",
        "device": "cpu",
        "threads": 1,
        "ranks_measuring": 1,
        "message_s": "default",
        "hpcpipe": hpcpipe.__version__,
        "torch": torch.__version__,
    }
    assert {key: about[key] for key in expected} == expected
    assert about["device_name"]


def test_the_fingerprint_tells_models_of_other_shapes_apart() -> None:
    one, other = (measured(model={"name": "mlp", "hidden": [size]}).about["fingerprint"] for size in (8, 9))
    assert one != other


def test_a_world_of_one_rank_measures_as_no_world_does() -> None:
    config = configured(**net("build_chain"))
    data = build_dataset(config.data, config.run.seed)
    found = measure(config, data, LoneWorld(), device=CPU, repeats=1)
    assert per_layer(found, "saved_bytes") == per_layer(profile_of(config), "saved_bytes")


def test_progress_counts_every_sweep_to_the_last() -> None:
    config = configured()
    data = build_dataset(config.data, config.run.seed)
    heard: list[tuple[int, int]] = []
    measure(config, data, device=CPU, repeats=2, step=lambda done, total: heard.append((done, total)))
    total = heard[0][1]
    assert heard == [(done, total) for done in range(total + 1)]


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        ("build_unfit", "layer '2' failed in its forward pass on inputs (8, 6) float32: RuntimeError: "),
        ("build_one_way", "layer '1' failed in its backward pass on inputs (8, 32) float32: ValueError: no way"),
        ("build_named", "layer 'named' returned dict"),
    ],
)
def test_a_layer_that_fails_is_named_with_the_shapes_of_its_inputs(builder: str, message: str) -> None:
    with pytest.raises(ModelError) as failed:
        measured(**net(builder))
    assert str(failed.value).startswith(message)
    assert "\n" not in str(failed.value)


def test_a_loss_that_fails_is_no_layers_fault() -> None:
    with pytest.raises(ModelError, match=r"the loss failed on outputs \(8, 5\) float32 and targets \(8,\) int64"):
        measured(**net("build_chain"), loss={"name": "tests.unit.measured_nets:lopsided"})


def test_what_cannot_be_trained_is_refused_as_in_training() -> None:
    with pytest.raises(ModelError, match="keeps a tensor computed from its weights alone"):
        measured(**net("build_derived", kind="weight_norm"), pipeline={"policy": "none"})
    assert measured(**net("build_derived", kind="weight_norm"), pipeline={"policy": "stash"}).is_chain


def test_what_cannot_be_scheduled_is_refused_as_in_training() -> None:
    pipeline = {"schedule": "gpipe", "microbatches": 4}
    with pytest.raises(ConfigError, match=r"2 rows, fewer than pipeline\.microbatches = 4"):
        measured(model=net("build_chain")["model"], data={**ROWS, "rows": 202}, pipeline=pipeline)


@settings(max_examples=200, deadline=None)
@given(st.lists(SECONDS, min_size=1, max_size=6), SECONDS, SECONDS)
def test_all_layers_and_what_is_beside_them_make_the_whole(
    layers: list[float], whole: float, overhead: float
) -> None:
    own, beside = parted(layers, whole, overhead)
    assert 0 <= beside <= min(whole, overhead)
    assert min(own) >= 0
    assert math.isclose(sum(own) + beside, whole, rel_tol=1e-9, abs_tol=1e-12) or not any(layers)


def test_layers_share_the_whole_by_what_they_take_beside_the_overhead() -> None:
    own, beside = parted([1.5, 2.5, 4.5], 15.5, 0.5)
    assert own == pytest.approx([2.1428571, 4.2857142, 8.5714285])
    assert beside == 0.5


def test_the_spread_is_the_interquartile_range() -> None:
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0]) == 2.0
    assert spread([7.0]) == 0.0
