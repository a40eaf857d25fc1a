"""scikit-learn's digits: 1,797 real images of 8 by 8 handwritten digits.

The file that comes with scikit-learn is read where it lies: importing scikit-learn takes every rank over a second.
"""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcpipe.config.data import DigitsData
from hpcpipe.datasets.order import Index, held_out
from hpcpipe.datasets.protocol import DataDescription
from hpcpipe.datasets.rows import Minibatches
from hpcpipe.errors import DataError

_SPLIT_SEED = 20260101
"""Decides which images are held out, in every run."""
_MEAN, _STD = 4.88, 6.02
"""Of all pixels, which are 0 to 16."""


class DigitsTable:
    """Some of the images. Inputs are float32 with about zero mean and unit variance, targets int64."""

    def __init__(self, pixels: NDArray[np.float32], labels: NDArray[np.int64], *, flat: bool) -> None:
        scaled = torch.from_numpy((pixels - np.float32(_MEAN)) / np.float32(_STD))
        self._images = scaled if flat else scaled.view(-1, 1, 8, 8)
        self._labels = torch.from_numpy(labels)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._labels)

    def inputs(self, index: Index, epoch: int) -> tuple[Tensor, ...]:
        """Return images of shape (rows, 64) or (rows, 1, 8, 8)."""
        return (self._images[torch.from_numpy(index)],)

    def targets(self, index: Index, epoch: int) -> Tensor:
        """Return digits of shape (rows,)."""
        return self._labels[torch.from_numpy(index)]


def build_digits(config: DigitsData, seed: int) -> Minibatches:
    """Return the digits as a data set. Raises DataError when scikit-learn is not installed."""
    pixels, labels = read_digits()
    train, held = held_out(len(labels), config.eval_fraction, _SPLIT_SEED)
    return Minibatches(
        DigitsTable(pixels[train], labels[train], flat=config.flat),
        DigitsTable(pixels[held], labels[held], flat=config.flat),
        DataDescription(input_shape=(64,) if config.flat else (1, 8, 8), classes=10),
        config=config,
        seed=seed,
    )


def read_digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return (pixels of shape (1797, 64), labels). Raises DataError when scikit-learn's file is not there."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise DataError('data.name: "digits" comes with scikit-learn; install it with: pip install scikit-learn')
    path = Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            values = np.loadtxt(file, delimiter=",", dtype=np.float32)
    except (OSError, EOFError, ValueError) as error:
        text = f"cannot read {path}: {error}; reinstall scikit-learn"
        raise DataError(f'data.name: "digits": {text}') from error
    return np.ascontiguousarray(values[:, :64]), values[:, 64].astype(np.int64)
