"""Nets and profiles for tests of measuring: chains whose bytes can be counted by hand, and layers that fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpcpipe.config import RunConfig
from hpcpipe.datasets.build import build_dataset
from hpcpipe.engine.measure import measure
from hpcpipe.planning.profile import LayerCost, Profile
from tests.oracle.cases import ROWS
from tests.oracle.runs import configured

CPU = torch.device("cpu")
INPUTS, WIDTH, CLASSES = 16, 32, 5


def measured(*, repeats: int = 1, **sections: Mapping[str, Any]) -> Profile:
    """The profile of a run, by default of the MLP of `runs.BASE`."""
    return profile_of(configured(**sections), repeats=repeats)


def profile_of(config: RunConfig, *, repeats: int = 1) -> Profile:
    """The profile of a run on one thread of the CPU."""
    torch.set_num_threads(1)
    return measure(config, build_dataset(config.data, config.run.seed), device=CPU, repeats=repeats)


def net(builder: str, **arguments: Any) -> dict[str, Any]:
    """[model] and [data] of a net of `tests.oracle.nets` or of this module: 16 numbers a row, batches of 8."""
    home = "tests.unit.measured_nets" if builder in globals() else "tests.oracle.nets"
    return {"model": {"name": f"{home}:{builder}", **arguments}, "data": ROWS}


def layer(profile: Profile, name: str) -> LayerCost:
    """The layer of this name."""
    return next(layer for layer in profile.layers if layer.name == name)


def build_chain(relus: bool = True) -> list[tuple[str, nn.Module]]:
    """Linear layers with ReLUs as layers of their own between them, or without."""
    layers = [
        ("one", nn.Linear(INPUTS, WIDTH)),
        ("relu1", nn.ReLU()),
        ("two", nn.Linear(WIDTH, WIDTH)),
        ("relu2", nn.ReLU()),
        ("three", nn.Linear(WIDTH, CLASSES)),
    ]
    return layers if relus else [entry for entry in layers if "relu" not in entry[0]]


def build_unfit() -> nn.Sequential:
    """The third of four layers takes other numbers than the second gives."""
    return nn.Sequential(
        nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, 6), nn.Linear(7, WIDTH), nn.Linear(WIDTH, CLASSES)
    )


class Unwilling(nn.Module):
    """Has no way back."""

    def forward(self, x: Tensor) -> Tensor:
        return Stubborn.apply(x)


class Stubborn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("no\nway back")


def build_one_way() -> nn.Sequential:
    """The second layer fails in its backward pass."""
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), Unwilling(), nn.Linear(WIDTH, CLASSES))


def lopsided(scores: Tensor, targets: Tensor) -> Tensor:
    """A loss that fails."""
    return scores[:, 99].mean()
