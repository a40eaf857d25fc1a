"""What can be said of a file for all ranks without MPI: how arrays are cut, what is refused, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from hpcpipe.checkpoint.shared_file import parts_of, write_shared_file
from hpcpipe.errors import ConfigError
from tests.oracle.runs import configured, failure_of


class TwoRanks:
    """Rank 0 of two, of which the other brings what `theirs` makes of the same."""

    rank = 0
    communicator = None

    def __init__(self, **theirs: Any) -> None:
        self._theirs = theirs

    def all_gather_json(self, value: Any, *, what: str) -> list[Any]:
        table, meta = value
        renamed = [[self._theirs.get("path", path), *rest] for path, *rest in table]
        return [value, [renamed, {**meta, **self._theirs.get("meta", {})}]]


def test_a_path_that_two_ranks_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="array 'layers/a/parameters/w' is on rank 1 and on one before it"):
        write_shared_file(TwoRanks(), tmp_path, {"layers/a/parameters/w": np.zeros(3)}, {"step": 3})

    assert list(tmp_path.iterdir()) == []


def test_ranks_that_are_at_different_steps_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    ranks = TwoRanks(path="layers/b/parameters/w", meta={"step": 4})

    with pytest.raises(ValueError, match="the ranks differ in 'step': 3 and 4"):
        write_shared_file(ranks, tmp_path, {"layers/a/parameters/w": np.zeros(3)}, {"step": 3})

    assert list(tmp_path.iterdir()) == []


@given(array_shapes(min_dims=0, max_dims=4, max_side=7), st.integers(1, 400))
def test_the_parts_of_an_array_are_short_enough_and_make_up_the_whole(shape: tuple[int, ...], most: int) -> None:
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    made = np.full_like(array, -1)

    for start, part in parts_of(array, most):
        assert part.nbytes <= max(most, array.itemsize)
        assert part.flags.c_contiguous
        assert len(start) == part.ndim == array.ndim
        made[tuple(slice(first, first + size) for first, size in zip(start, part.shape, strict=True))] = part

    np.testing.assert_array_equal(made, array)


def test_one_file_for_all_is_refused_with_its_remedy_where_h5py_has_no_mpi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcpipe.engine.shared_checkpoints.has_parallel_hdf5", lambda: False)

    said = failure_of(configured(tmp_path / "run", checkpoint={"file": "shared"}), ConfigError)

    assert len(said.splitlines()) == 1
    assert f'{tmp_path / "run.toml"}: checkpoint.file = "shared" needs an h5py that was built with MPI' in said
    for remedy in ("python3-h5py-mpi", "HDF5_MPI=ON", 'checkpoint.file = "rank"'):
        assert remedy in said
