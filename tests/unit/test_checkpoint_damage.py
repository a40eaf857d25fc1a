from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hpcpipe.checkpoint.layout import COMMIT_NAME, rank_name
from hpcpipe.checkpoint.reader import RankFile
from hpcpipe.checkpoint.sets import CheckpointSet, inspect, newest_valid, open_set
from hpcpipe.errors import CheckpointError
from tests.unit.checkpoint_samples import layer_tree, random_array, same_tree, write_set


@contextmanager
def _flipped(descriptor: int, position: int, mask: int) -> Iterator[None]:
    (byte,) = os.pread(descriptor, 1, position)
    os.pwrite(descriptor, bytes([byte ^ mask]), position)
    yield
    os.pwrite(descriptor, bytes([byte]), position)


def _faults(directory: Path) -> list[str]:
    """What deep verification says, as `newest_valid` asks for it."""
    info = inspect(directory)
    if info.fault is not None or info.record is None:
        return [str(info.fault)]
    return CheckpointSet(directory, info.record).faults()


def test_every_flipped_byte_of_a_small_set_is_noticed(tmp_path: Path) -> None:
    directory = write_set(tmp_path, 1, [{"a/w": np.ones(3)}, {}], {"run": "x"})
    files = sorted(directory.iterdir())
    assert [path.name for path in files] == [COMMIT_NAME, rank_name(0), rank_name(1)]
    assert sum(path.stat().st_size for path in files) < 64 << 10
    assert _faults(directory) == []

    rng = random.Random(1)
    for path in files:
        descriptor = os.open(path, os.O_RDWR)
        for position in range(path.stat().st_size):
            with _flipped(descriptor, position, rng.randrange(1, 256)):
                faults = _faults(directory)
            assert faults, f"byte {position} of {path.name}"
            assert path.name in faults[0]
        os.close(descriptor)
    assert _faults(directory) == []


def test_flips_at_500_places_of_a_large_set_are_noticed(tmp_path: Path) -> None:
    tree = {f"layers/l{i}/parameters/w": random_array((60_000,), "float32", i) for i in range(4)}
    directory = write_set(tmp_path, 1, [tree, tree])
    rng = random.Random(2)
    descriptors = [os.open(directory / rank_name(rank), os.O_RDWR) for rank in range(2)]
    for _ in range(500):
        rank = rng.randrange(2)
        position = rng.randrange(os.fstat(descriptors[rank]).st_size)
        with _flipped(descriptors[rank], position, 1 << rng.randrange(8)):
            faults = _faults(directory)
        assert len(faults) == 1, f"byte {position} of rank {rank}"
        assert rank_name(rank) in faults[0]
    for descriptor in descriptors:
        os.close(descriptor)


def test_the_damaged_datasets_are_named_and_only_they(tmp_path: Path) -> None:
    directory = write_set(tmp_path, 1, [layer_tree(["a", "b"])])
    checkpoint = open_set(directory)
    entries = checkpoint.index(0).entries
    hit = ["layers/a/parameters/bias", "layers/b/optimizer/momentum_buffer/weight"]
    with open(directory / rank_name(0), "r+b", buffering=0) as file:
        for path in hit:
            file.seek(entries[path].offset)
            byte = file.read(1)
            file.seek(entries[path].offset)
            file.write(bytes([byte[0] ^ 1]))
    faults = checkpoint.faults()
    assert len(faults) == 2
    for fault, path in zip(faults, hit, strict=True):
        assert repr(path) in fault

    with pytest.raises(CheckpointError, match="in dataset 'layers/a/parameters/bias'; copy it again"):
        open_set(directory).read_rank(0)
    with (
        pytest.raises(CheckpointError, match="dataset 'layers/a/parameters/bias' fails its CRC-32"),
        RankFile(directory / rank_name(0), checkpoint.record.files[0], trusted=True) as file,
    ):
        file.part()


def test_damage_between_the_datasets_never_reaches_hdf5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_set(tmp_path, 1, [layer_tree("a")])
    descriptor = os.open(directory / rank_name(0), os.O_RDWR)
    monkeypatch.setattr("hpcpipe.checkpoint.structure.h5py.File", lambda *_, **__: pytest.fail("HDF5 saw it"))
    with _flipped(descriptor, 60, 1):
        assert "in the HDF5 structure" in _faults(directory)[0]
        with pytest.raises(CheckpointError, match="in the HDF5 structure"):
            open_set(directory).read_rank(0)
    os.close(descriptor)


@pytest.mark.parametrize("name", [rank_name(0), COMMIT_NAME])
def test_a_file_cut_at_any_length_sends_us_to_the_set_before(tmp_path: Path, name: str) -> None:
    before = layer_tree("a", seed=1)
    write_set(tmp_path, 1, [before])
    directory = write_set(tmp_path, 2, [layer_tree("a", seed=2)])
    whole = (directory / name).read_bytes()
    lengths = {0, 1, len(whole) // 2, len(whole) - 1, *random.Random(3).sample(range(len(whole)), 60)}
    for length in sorted(lengths):
        (directory / name).write_bytes(whole[:length])
        chosen, skipped = newest_valid(tmp_path)
        assert chosen is not None
        assert chosen.step == 1
        assert len(skipped) == 1
        assert name in skipped[0]
    (directory / name).write_bytes(whole + b"\0")
    assert newest_valid(tmp_path, deep=False)[0].step == 1  # type: ignore[union-attr]
    assert same_tree(open_set(tmp_path / "step-0000000001").read_rank(0).tree, before)


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_no_hang(tmp_path: Path) -> None:
    directory = write_set(tmp_path, 1, [{"a": random_array((50_000,), "float32", 1)}])
    with RankFile(directory / rank_name(0), open_set(directory).record.files[0]) as file:
        os.truncate(directory / rank_name(0), 5000)
        with pytest.raises(CheckpointError, match="became shorter"):
            file.read("a")
