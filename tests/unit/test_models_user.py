from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcpipe.config import UserModel
from hpcpipe.datasets.protocol import DataDescription
from hpcpipe.errors import ModelError
from hpcpipe.models.build import build_layers
from hpcpipe.models.layers import inspect_layers, make_layers

SOURCE = """
from collections import OrderedDict
import torch
from torch import nn

def sequential(width=4, depth=2):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

def named():
    return nn.Sequential(OrderedDict(first=nn.Linear(3, 4), last=nn.Linear(4, 2)))

def lazy(width):
    return [("in", lambda: nn.Linear(3, width)), ("out", nn.Linear(width, 2))]

def modules():
    return [nn.Flatten(), nn.Linear(3, 2)]

def twice():
    act = nn.ReLU()
    return nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act)

def tied():
    embed, head = nn.Embedding(5, 3), nn.Linear(3, 5)
    head.weight = embed.weight
    return [("embed", embed), ("head", head)]

def from_data(data, seed):
    return [("only", nn.Linear(data.input_shape[0], seed))]

def anything(**options):
    return [("only", nn.Linear(**options))]

class Skips(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)

def skips():
    return Skips(nn.Linear(3, 3))

def model():
    return nn.Linear(3, 3)

def nothing():
    return []

def pairs():
    return [("a", nn.Linear(3, 3), 1)]

def numbers():
    return [("a", 3)]

def strings():
    return ["a"]

def bad_factory():
    return [("a", lambda: 3)]

def fails():
    raise RuntimeError("out of ideas")

not_a_function = 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package in the working directory, which a console script does not have on its path."""
    (tmp_path / "userpkg").mkdir()
    (tmp_path / "userpkg" / "__init__.py").touch()
    (tmp_path / "userpkg" / "net.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "userpkg" / "needs.py").write_text("import not_installed_anywhere\n", encoding="utf-8")
    (tmp_path / "userpkg" / "broken.py").write_text("def build(:\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield "userpkg.net"
    for name in [name for name in sys.modules if name.split(".")[0] == "userpkg"]:
        del sys.modules[name]


def user(builder: str, **arguments: Any) -> UserModel:
    return UserModel.model_validate({"name": builder, **arguments})


def names(builder: str, **arguments: Any) -> list[str]:
    return [spec.name for spec in build_layers(user(builder, **arguments), 0)]


def test_a_builder_may_return_a_sequential_named_layers_factories_or_modules(package: str) -> None:
    assert names(f"{package}:sequential", depth=3) == ["0", "1", "2"]
    assert names(f"{package}:named") == ["first", "last"]
    assert names(f"{package}:lazy", width=5) == ["in", "out"]
    assert names(f"{package}:modules") == ["0", "1"]


def test_full_names_are_those_of_the_sequential_itself(package: str) -> None:
    inspection = inspect_layers(build_layers(user(f"{package}:named"), 0), 0)

    assert inspection.parameter_names == ("first.weight", "first.bias", "last.weight", "last.bias")
    assert inspection.parameter_counts == (16, 10)


def test_every_rank_gets_the_same_weights_and_another_seed_gets_others(package: str) -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        layers = make_layers(build_layers(user(f"{package}:lazy", width=5), seed), seed)
        return [parameter for layer in layers for parameter in layer.parameters()]

    first = weights(0)
    torch.manual_seed(17)

    assert all(torch.equal(a, b) for a, b in zip(first, weights(0), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, weights(1), strict=True))


def test_a_module_that_stands_in_two_places_is_two_layers(package: str) -> None:
    specs = build_layers(user(f"{package}:twice"), 0)

    assert [type(layer) for layer in make_layers(specs, 0)] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU]


def test_tied_weights_are_reported(package: str) -> None:
    assert inspect_layers(build_layers(user(f"{package}:tied"), 0), 0).shared == (("embed", "head", "weight"),)


def test_a_builder_that_asks_for_the_data_and_the_seed_gets_them(package: str) -> None:
    specs = build_layers(user(f"{package}:from_data"), 7, DataDescription(input_shape=(9,)))

    assert make_layers(specs, 7)[0].weight.shape == (7, 9)


def test_a_builder_with_open_arguments_gets_what_the_run_file_says(package: str) -> None:
    specs = build_layers(user(f"{package}:anything", in_features=2, out_features=3), 0)

    assert make_layers(specs, 0)[0].weight.shape == (3, 2)


MISTAKES = [
    ("userpkg.nett:build", {}, "model.name: userpkg.nett:build: no module 'userpkg.nett' in"),
    ("nowhere.net:build", {}, "no module 'nowhere' in"),
    ("userpkg.needs:build", {}, "importing userpkg.needs fails: No module named 'not_installed_anywhere'"),
    ("userpkg.broken:build", {}, "importing userpkg.broken fails: SyntaxError: invalid syntax"),
    ("userpkg.net:sequentail", {}, "userpkg.net has no 'sequentail'; did you mean \"sequential\"?"),
    ("userpkg.net:not_a_function", {}, "is a int; name a function that builds one"),
    ("userpkg.net:sequential", {"widht": 3}, 'model.widht: no such argument; did you mean "width"?'),
    ("userpkg.net:named", {"width": 3}, "model.width: no such argument; userpkg.net:named takes no arguments"),
    ("userpkg.net:lazy", {}, "model.width: userpkg.net:lazy needs it; add width = ... to [model]"),
    ("userpkg.net:model", {}, "returned a Linear; it must return an nn.Sequential, a list of (name, module"),
    ("userpkg.net:skips", {}, "Skips has a forward of its own, which a split would skip"),
    ("userpkg.net:nothing", {}, "returned no layers"),
    ("userpkg.net:pairs", {}, "item 0 of what userpkg.net:pairs returned is a tuple of 3"),
    ("userpkg.net:numbers", {}, "layer 'a' of userpkg.net:numbers is a int"),
    ("userpkg.net:strings", {}, "layer '0' of userpkg.net:strings is a str"),
]


@pytest.mark.parametrize(("builder", "arguments", "expected"), MISTAKES, ids=[text for *_, text in MISTAKES])
def test_a_builder_that_cannot_be_used_is_one_line(
    package: str, builder: str, arguments: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ModelError) as caught:
        build_layers(user(builder, **arguments), 0)

    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_factory_that_builds_no_module_is_one_line(package: str) -> None:
    specs = build_layers(user(f"{package}:bad_factory"), 0)

    with pytest.raises(ModelError, match="the factory of layer 'a' returned a int"):
        make_layers(specs, 0)


def test_what_the_users_own_code_raises_keeps_its_traceback(package: str) -> None:
    with pytest.raises(RuntimeError, match="out of ideas"):
        build_layers(user(f"{package}:fails"), 0)
