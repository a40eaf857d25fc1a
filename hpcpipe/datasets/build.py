"""From the section data to a data set: the one place that knows which module reads which."""

from __future__ import annotations

from hpcpipe.config.data import DataConfig, DigitsData, IdxData, SyntheticData, TextData
from hpcpipe.datasets.digits import build_digits
from hpcpipe.datasets.idx import build_idx
from hpcpipe.datasets.protocol import Dataset
from hpcpipe.datasets.synthetic import build_synthetic
from hpcpipe.datasets.text import build_text
from hpcpipe.datasets.user import build_user


def build_dataset(config: DataConfig, seed: int) -> Dataset:
    """Return the data set of a run; `seed` (run.seed) decides the order of the training rows.

    Raises DataError: files are missing or damaged, there are too few rows for one minibatch, or a user's builder
    cannot be used.
    """
    if isinstance(config, DigitsData):
        return build_digits(config, seed)
    if isinstance(config, IdxData):
        return build_idx(config, seed)
    if isinstance(config, TextData):
        return build_text(config, seed)
    if isinstance(config, SyntheticData):
        return build_synthetic(config, seed)
    return build_user(config, seed)
