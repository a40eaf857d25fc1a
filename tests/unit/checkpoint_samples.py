"""Trees and sets that the checkpoint tests share."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from h5py import h5f

from hpcpipe.checkpoint.layout import COMMIT_NAME, STORED, FileReport, new_set_directory, rank_name
from hpcpipe.checkpoint.record import commit, read_record
from hpcpipe.checkpoint.writer import write_rank_file

Array = npt.NDArray[Any]
DTYPES = [name for name in STORED if name != "bfloat16"]


def random_array(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    """Random bits, so NaNs with payloads, infinities and denormals among the floats; bools are 0 or 1."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return np.asarray(rng.integers(0, 2, shape), dtype=bool)
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(rng.bytes(count), dtype=dtype).reshape(shape)


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def same_tree(a: Mapping[str, Array], b: Mapping[str, Array]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[path], b[path]) for path in a)


def layer_tree(layers: Sequence[str], size: int = 6, seed: int = 0) -> dict[str, Array]:
    """What a rank stores of some layers; a layer's values depend on its name and `seed`, not on the rank."""
    tree: dict[str, Array] = {}
    for layer in layers:
        base = seed + sum(layer.encode())
        tree[f"layers/{layer}/parameters/weight"] = random_array((size, 2), "float32", base)
        tree[f"layers/{layer}/parameters/bias"] = random_array((size,), "float32", base + 1)
        tree[f"layers/{layer}/buffers/running_mean"] = random_array((size,), "float32", base + 2)
        tree[f"layers/{layer}/buffers/num_batches_tracked"] = np.asarray(base, dtype=np.int64)
        tree[f"layers/{layer}/optimizer/momentum_buffer/weight"] = random_array((size, 2), "float32", base + 3)
    return tree


def write_set(
    root: Path,
    step: int,
    trees: Sequence[Mapping[str, Array]],
    meta: Mapping[str, Any] | None = None,
    bf16: Sequence[str] = (),
) -> Path:
    """A committed set with one tree a rank."""
    directory = new_set_directory(root, step)
    reports = [
        write_rank_file(directory, rank, tree, {"rank": rank}, [path for path in bf16 if path in tree])
        for rank, tree in enumerate(trees)
    ]
    commit(directory, reports, meta or {})
    return directory


def fake_set(root: Path, step: int, *, committed: bool = True) -> Path:
    """A folder whose record and lengths are right, a few bytes for a rank file: for what reads no more."""
    directory = new_set_directory(root, step)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / rank_name(0)).write_bytes(b"some bytes")
    if committed:
        commit(directory, [FileReport(0, 10, 0, 0, 0, 0)], {})
    return directory


def uncommit(directory: Path) -> None:
    (directory / COMMIT_NAME).unlink()


def recommit(directory: Path, meta: Mapping[str, Any] | None = None, **changes: int) -> None:
    """Give a set of one rank a record in which all is right for its file as it is now, but for `changes`."""
    (report,) = read_record(directory).files
    data = (directory / rank_name(0)).read_bytes()
    uncommit(directory)
    commit(directory, [report._replace(**{"length": len(data), "crc": zlib.crc32(data), **changes})], meta or {})


@contextmanager
def another_hdf5(*, oldest: bool = False) -> Iterator[None]:
    """Files that are written meanwhile hold the same, but are laid out as another version of HDF5 might do it.

    The `oldest` layout has no checksums of its own.
    """
    least = h5f.LIBVER_EARLIEST if oldest else h5f.LIBVER_LATEST
    with patch.multiple(h5f, LIBVER_V18=least, LIBVER_V110=h5f.LIBVER_LATEST):
        yield
