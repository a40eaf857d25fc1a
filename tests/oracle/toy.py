"""The toy pipeline of the comparison of staleness policies: a residual tanh net that learns from a teacher.

Width 16, minibatches of 32 rows of noise, targets from a deeper random net; as many layers as stages.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hpcpipe.datasets.protocol import DataDescription

WIDTH = 16
ROWS = 32


class Residual(nn.Module):
    """x + tanh(W x + b)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def build_net(layers: int) -> list[tuple[str, Callable[[], nn.Module]]]:
    return [(f"layer{i}", Residual) for i in range(layers)]


class Teacher:
    """A data set without end: rows of noise and what a fixed random net makes of them."""

    def __init__(self, seed: int, minibatches: int) -> None:
        self._seed = seed
        self._minibatches = minibatches
        draw = torch.Generator().manual_seed(1000 + seed)
        self._inner = torch.randn(WIDTH, WIDTH, generator=draw) * 1.5 / WIDTH**0.5
        self._outer = torch.randn(WIDTH, WIDTH, generator=draw) * 1.5 / WIDTH**0.5

    @property
    def minibatches_per_epoch(self) -> int:
        return self._minibatches

    @property
    def eval_batches(self) -> int:
        return 0

    def epoch(self, j: int) -> int:
        return j // self._minibatches

    def rows(self, j: int) -> int:
        return ROWS

    def inputs(self, j: int) -> tuple[Tensor, ...]:
        return (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10**6 * self._seed + j)),)

    def targets(self, j: int) -> Tensor:
        (x,) = self.inputs(j)
        return torch.tanh(torch.tanh(x @ self._inner) @ self._outer) * 2.0

    def eval_rows(self, i: int) -> int:
        raise IndexError(i)

    def eval_inputs(self, i: int) -> tuple[Tensor, ...]:
        raise IndexError(i)

    def eval_targets(self, i: int) -> Tensor:
        raise IndexError(i)

    def describe(self) -> DataDescription:
        return DataDescription(input_shape=(WIDTH,))


def build_data(seed: int, minibatches: int) -> Teacher:
    return Teacher(seed, minibatches)


def toy(layers: int, steps: int, lr: float) -> dict[str, dict[str, object]]:
    """Sections of a run on the toy with as many layers as stages."""
    return {
        "run": {"max_steps": steps},
        "model": {"name": "tests.oracle.toy:build_net", "layers": layers},
        "data": {"name": "tests.oracle.toy:build_data", "minibatches": steps},
        "loss": {"name": "torch.nn:MSELoss"},
        "optimizer": {"name": "sgd", "lr": lr, "momentum": 0.9},
    }
