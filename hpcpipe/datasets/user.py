"""A user's own data: map-style torch data sets, or an object that is a `Dataset` already.

Rows are fetched under a seed, so that random augmentation is a function of (seed, epoch, minibatch) too, and a
restart sees the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hpcpipe.config.data import UserData
from hpcpipe.datasets.order import Index
from hpcpipe.datasets.protocol import DataDescription, Dataset
from hpcpipe.datasets.rows import Minibatches
from hpcpipe.errors import DataError
from hpcpipe.seeding import seeded
from hpcpipe.user_code import call_builder

_ACCEPTED = "a map-style data set of (inputs..., target) rows, a pair of them (training, evaluation), or a Dataset"
_MAP_STYLE = ("__len__", "__getitem__")
_PROTOCOL = tuple(name for name in vars(Dataset) if not name.startswith("_"))


class MapStyle(Protocol):
    """What torch calls a map-style data set."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return one row as (input, ..., target)."""
        ...


class UserTable:
    """A stretch of a map-style data set."""

    def __init__(self, data: MapStyle, first: int, last: int, seed: int) -> None:
        self._data = data
        self._first = first
        self._last = last
        self._seed = seed

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._last - self._first

    def inputs(self, index: Index, epoch: int) -> tuple[Tensor, ...]:
        """Return everything but the last value of these rows, each stacked."""
        columns = list(zip(*self.fetch(index, epoch), strict=True))[:-1]
        return tuple(_stack(column, f"input {place}") for place, column in enumerate(columns))

    def targets(self, index: Index, epoch: int) -> Tensor:
        """Return the last value of these rows, stacked."""
        return _stack([row[-1] for row in self.fetch(index, epoch)], "targets")

    def fetch(self, index: Index, epoch: int) -> list[tuple[Any, ...]]:
        """Return these rows, each as (input, ..., target). Raises DataError for a row that is none."""
        # Inputs and targets are fetched apart, on different ranks: both must draw the same random numbers.
        with seeded(self._seed, "rows", epoch, int(index[0])):
            return [self._row(place) for place in index.tolist()]

    def _row(self, place: int) -> tuple[Any, ...]:
        row = self._data[self._first + place]
        if not isinstance(row, (tuple, list)) or len(row) < 2:
            shape = f"{len(row)} values" if isinstance(row, (tuple, list)) else f"a {type(row).__name__}"
            raise DataError(f"data.name: row {place} is {shape}; each must be (input, ..., target)")
        return tuple(row)


def build_user(config: UserData, seed: int) -> Dataset:
    """Return what a user's builder makes as a data set.

    Raises DataError: the builder cannot be imported, does not take an argument, or returns nothing of use.
    """
    offered = {
        "seed": seed,
        "batch": config.batch,
        "eval_batch": config.eval_rows,
        "drop_last": config.drop_last,
        "shuffle": config.shuffle,
    }
    with seeded(seed, "data", config.name):
        built = call_builder(config.name, config.arguments, section="data", error=DataError, offered=offered)
    if isinstance(built, Dataset):
        if built.minibatches_per_epoch < 1:
            raise DataError(f"data.name: {config.name} returned a data set without a minibatch; give more rows")
        return built
    missing = [name for name in _PROTOCOL if not hasattr(built, name)]
    if "inputs" not in missing and "targets" not in missing:
        raise DataError(f"data.name: {config.name} returned a {type(built).__name__} without {', '.join(missing)}")
    train, evaluation = _tables(built, config, seed)
    description = _described(built[0] if isinstance(built, tuple) else built, train)
    return Minibatches(train, evaluation, description, config=config, seed=seed)


def _tables(built: Any, config: UserData, seed: int) -> tuple[UserTable, UserTable]:
    parts = built if isinstance(built, tuple) else (built,)
    if len(parts) not in (1, 2) or not all(hasattr(part, method) for part in parts for method in _MAP_STYLE):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise DataError(f"data.name: {config.name} returned {kinds}; it must return {_ACCEPTED}")
    if len(parts) == 2:
        return UserTable(parts[0], 0, len(parts[0]), seed), UserTable(parts[1], 0, len(parts[1]), seed)
    total = len(built)
    held = round(total * config.eval_fraction)
    return UserTable(built, 0, total - held, seed), UserTable(built, total - held, total, seed)


def _described(data: Any, train: UserTable) -> DataDescription:
    """Read shapes off the first row; `classes` (a number or list) and `tokens` are the data set's own, if any."""
    if not len(train):
        return DataDescription(input_shape=())
    first = _tensor(train.fetch(np.zeros(1, dtype=np.int64), 0)[0][0])
    classes = getattr(data, "classes", None)
    if isinstance(classes, Sequence):
        classes = len(classes)
    return DataDescription(
        input_shape=tuple(first.shape),
        classes=classes if isinstance(classes, int) else None,
        tokens=bool(getattr(data, "tokens", False)),
    )


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (bool, int, np.integer)):
        return torch.tensor(int(value), dtype=torch.int64)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float32)
    return torch.as_tensor(value)


def _stack(values: Sequence[Any], what: str) -> Tensor:
    tensors = [_tensor(value) for value in values]
    shapes = sorted({tuple(tensor.shape) for tensor in tensors})
    if len(shapes) > 1:
        raise DataError(f"data.name: {what} of one minibatch differ in shape, {shapes}; pad them in the data set")
    return torch.stack(tensors)
