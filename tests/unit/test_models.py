from __future__ import annotations

import hashlib
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from hpcpipe.config import GptModel, MlpModel, ModelConfig, PipelineConfig, VggModel
from hpcpipe.datasets.protocol import DataDescription
from hpcpipe.errors import ModelError
from hpcpipe.models.build import build_layers, split_layers
from hpcpipe.models.layers import (
    LayerSpec,
    check_names,
    fingerprint,
    inspect_layers,
    make_layers,
    shared_parameters,
)
from hpcpipe.seeding import seeded, stable_seed

ROWS_OF_64 = DataDescription(input_shape=(64,), classes=10)
IMAGES = DataDescription(input_shape=(3, 32, 32), classes=10)
TEXT = DataDescription(input_shape=(16,), classes=256, tokens=True)
MODELS = {
    "mlp": (MlpModel(name="mlp", hidden=(8, 6), dropout=0.1, batchnorm=True), ROWS_OF_64, torch.randn(5, 64)),
    "vgg11": (VggModel(name="vgg11", width=1 / 16, batchnorm=True), IMAGES, torch.randn(5, 3, 32, 32)),
    "vgg16": (
        VggModel(name="vgg16", width=1 / 16, size=64, channels=1, classes=10),
        None,
        torch.randn(5, 1, 64, 64),
    ),
    "gpt": (GptModel(name="gpt", width=16, heads=2, depth=3, dropout=0.1), TEXT, torch.randint(256, (5, 16))),
}
SHAPES = {"mlp": (5, 10), "vgg11": (5, 10), "vgg16": (5, 10), "gpt": (5, 16, 256)}


def whole(model: ModelConfig, data: DataDescription | None, seed: int = 0) -> nn.Sequential:
    return nn.Sequential(*make_layers(build_layers(model, seed, data), seed))


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_a_built_in_model_maps_a_minibatch_to_scores_and_every_parameter_gets_a_gradient(name: str) -> None:
    model, data, x = MODELS[name]
    network = whole(model, data)

    scores = network(x)
    scores.square().sum().backward()

    assert scores.shape == SHAPES[name]
    assert all(parameter.grad is not None for parameter in network.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_of_a_layer_do_not_depend_on_which_others_are_built(name: str) -> None:
    model, data, _ = MODELS[name]
    specs = build_layers(model, 3, data)
    together = make_layers(specs, 3)

    torch.manual_seed(99)
    for place in reversed(range(len(specs))):
        (alone,) = make_layers(specs[place : place + 1], 3)

        assert same(alone, together[place])


def test_equal_layers_differ_by_their_names_and_by_the_seed() -> None:
    specs = build_layers(MlpModel(name="mlp", width=4, depth=2, in_features=4, out_features=4), 0)

    first, second, output = make_layers(specs, 0)

    assert not torch.equal(first.linear.weight, second.linear.weight)
    assert not torch.equal(output.linear.weight, make_layers(specs, 1)[2].linear.weight)


def test_building_layers_leaves_every_random_generator_as_it_was() -> None:
    model, data, _ = MODELS["gpt"]
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    states = np.random.get_state()[1].tolist(), random.getstate()

    specs = build_layers(model, 0, data)
    make_layers(specs, 0)
    inspect_layers(specs, 0)

    assert torch.equal(torch.randn(3), expected)
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states


def test_a_stable_seed_is_the_same_in_every_process() -> None:
    expected = int.from_bytes(hashlib.sha256(b'[0, "block1"]').digest()[:8], "little") >> 1

    assert stable_seed(0, "block1") == expected
    assert stable_seed(0, "block1") != stable_seed(0, "block2")
    assert 0 <= stable_seed(7) < 2**63


def test_seeded_covers_numpy_and_python_too() -> None:
    def draw() -> tuple[float, float, float]:
        with seeded(1, "x"):
            return torch.rand(()).item(), float(np.random.rand()), random.random()

    assert draw() == draw()


def test_vgg16_has_the_published_layers_and_parameters() -> None:
    specs = build_layers(VggModel(name="vgg16", channels=3, size=224, classes=1000), 0)
    inspection = inspect_layers(specs, 0)

    assert [spec.name for spec in specs[:4]] == ["conv1_1", "conv1_2", "pool1", "conv2_1"]
    assert sum(spec.name.startswith(("conv", "fc")) for spec in specs) == 16
    # The figure of torchvision's vgg16, and of the paper's configuration D.
    assert sum(inspection.parameter_counts) == 138_357_544


def test_an_inspection_counts_what_is_built() -> None:
    for model, data, _ in MODELS.values():
        specs = build_layers(model, 0, data)
        built = make_layers(specs, 0)
        named = [(spec.name, layer) for spec, layer in zip(specs, built, strict=True)]

        inspection = inspect_layers(specs, 0)

        assert list(inspection.parameter_counts) == [sum(p.numel() for p in layer.parameters()) for layer in built]
        assert list(inspection.parameter_names) == [
            f"{name}.{parameter}" for name, layer in named for parameter, _ in layer.named_parameters()
        ]
        assert inspection.fingerprint == fingerprint(named)
        assert inspection.shared == ()


def test_a_fingerprint_tells_names_shapes_dtypes_and_buffers_apart() -> None:
    variants: list[tuple[str, nn.Module]] = [
        ("a", nn.Linear(2, 3)),
        ("b", nn.Linear(2, 3)),
        ("a", nn.Linear(3, 2)),
        ("a", nn.Linear(2, 3).double()),
        ("a", nn.BatchNorm1d(2)),
        ("a", nn.BatchNorm1d(2, track_running_stats=False)),
    ]

    assert len({fingerprint([variant]) for variant in variants}) == len(variants)
    assert fingerprint([("a", nn.Linear(2, 3))]) == fingerprint(variants[:1])


def test_gpt_sees_no_later_token() -> None:
    model, data, x = MODELS["gpt"]
    network = whole(model, data).eval()
    changed = x.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256

    before, after = network(x), network(changed)

    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_gpt_takes_a_sequence_shorter_than_its_context() -> None:
    model, data, x = MODELS["gpt"]

    assert whole(model, data)(x[:, :5]).shape == (5, 5, 256)


def test_an_mlp_takes_images_as_rows_of_numbers() -> None:
    data = DataDescription(input_shape=(1, 8, 8), classes=10)

    assert whole(MlpModel(name="mlp"), data)(torch.randn(2, 1, 8, 8)).shape == (2, 10)


def test_an_mlp_without_hidden_layers_is_one_linear_layer() -> None:
    assert [spec.name for spec in build_layers(MlpModel(name="mlp", hidden=()), 0, ROWS_OF_64)] == ["output"]


UNFIT = [
    (MlpModel(name="mlp", in_features=65), ROWS_OF_64, "model.in_features: is 65, but the data have 64"),
    (
        MlpModel(name="mlp", out_features=9),
        ROWS_OF_64,
        "model.out_features: is 9, but the data have targets up to 9",
    ),
    (MlpModel(name="mlp"), None, "model.in_features: missing, and the data do not tell it"),
    (MlpModel(name="mlp"), TEXT, "model.name: mlp takes numbers, but the data are tokens"),
    (GptModel(name="gpt"), ROWS_OF_64, "model.name: gpt takes tokens, but the data are numbers"),
    (
        GptModel(name="gpt", context=15),
        TEXT,
        "model.context: sequences of 16 tokens do not fit in a context of 15",
    ),
    (GptModel(name="gpt"), None, "model.context: missing"),
    (VggModel(name="vgg16"), ROWS_OF_64, r"model.name: vgg16 needs square images, but .* shape \(64,\)"),
    (
        VggModel(name="vgg16"),
        DataDescription(input_shape=(1, 28, 28), classes=10),
        "model.size: vgg16 needs a multiple of 32, but the images have 28; pad them with data.size = 32",
    ),
]


@pytest.mark.parametrize(("model", "data", "expected"), UNFIT, ids=[expected for _, _, expected in UNFIT])
def test_a_model_that_does_not_fit_the_data_is_refused(
    model: ModelConfig, data: DataDescription | None, expected: str
) -> None:
    with pytest.raises(ModelError, match=expected):
        build_layers(model, 0, data)


def test_more_outputs_than_classes_are_allowed() -> None:
    assert whole(MlpModel(name="mlp", out_features=12), ROWS_OF_64)(torch.randn(1, 64)).shape == (1, 12)


def test_shared_storage_is_found_wherever_it_lies() -> None:
    embedding, head, other, normal = nn.Embedding(5, 3), nn.Linear(3, 5), nn.Linear(3, 3), nn.BatchNorm1d(3)
    head.weight = embedding.weight
    other.register_buffer("mean", normal.running_mean)
    view = nn.Module()
    view.register_buffer("rows", embedding.weight.detach()[1:3])
    layers = [("embed", embedding), ("norm", normal), ("other", other), ("head", head), ("view", view)]

    assert shared_parameters(layers) == [
        ("norm", "other", "mean"),
        ("embed", "head", "weight"),
        ("embed", "view", "rows"),
    ]


def test_a_parameter_twice_in_one_layer_is_not_shared_between_layers() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layer[1].weight = layer[0].weight

    assert shared_parameters([("a", layer), ("b", nn.Linear(2, 2))]) == []


def test_an_inspection_finds_storage_shared_by_factories_and_no_chance_reuse_of_memory() -> None:
    common = nn.Linear(64, 64)
    specs = [LayerSpec(name=f"fresh{place}", factory=lambda: nn.Linear(64, 64)) for place in range(20)]
    specs += [LayerSpec(name=name, factory=lambda: common) for name in ("left", "right")]

    assert inspect_layers(specs, 0).shared == (("left", "right", "weight"), ("left", "right", "bias"))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b", "a"], "two layers are named 'a'"),
        (["a/b"], "'a/b' cannot be the name of a layer"),
        ([""], "'' cannot be the name of a layer"),
        (["a", "a.b"], "layers 'a' and 'a.b' could have parameters of the same full name"),
    ],
)
def test_layer_names_that_a_checkpoint_could_not_tell_apart_are_refused(names: list[str], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        check_names(names)


def test_layers_are_split_by_parameters_or_as_the_run_file_says() -> None:
    counts = [10, 10, 20, 1]

    assert split_layers(PipelineConfig(), counts, 2) == [(0, 2), (2, 4)]
    assert split_layers(PipelineConfig(balance=(1, 3)), counts, 2) == [(0, 1), (1, 4)]
    with pytest.raises(ModelError, match=r"\[1, 3\] is for 2 stages, but there are 3"):
        split_layers(PipelineConfig(balance=(1, 3)), counts, 3)


def test_an_inspection_of_a_built_in_model_loads_no_compiler_of_torch() -> None:
    # Which drawing weights without memory would do, and take every rank seconds.
    program = (
        "import sys, torch; from hpcpipe.config import GptModel, VggModel; "
        "from hpcpipe.models.build import build_layers; from hpcpipe.models.layers import inspect_layers; "
        "gpt = build_layers(GptModel(name='gpt', vocab=9, context=9), 0); "
        "vgg = build_layers(VggModel(name='vgg16', channels=3, size=32, classes=9), 0); "
        "before = len(sys.modules); inspect_layers(gpt + vgg, 0); print(len(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)

    assert int(done.stdout) < 50
