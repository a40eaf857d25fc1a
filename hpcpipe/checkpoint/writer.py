"""Writes one rank's file: HDF5 lays it out in memory, then the arrays go to disk in one pass that also sums them.

It never decides when to write or what; a file that it leaves under its final name is whole and on disk.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5p, h5s, h5t

from hpcpipe.checkpoint.crc import combine
from hpcpipe.checkpoint.layout import (
    STORED,
    Array,
    Entry,
    FileReport,
    Index,
    check_paths,
    rank_name,
    stored_shape,
)
from hpcpipe.checkpoint.skeleton import Skeleton
from hpcpipe.durable import make_directory, named, sync_directory, write_all

CHUNK = 4 << 20
"""Bytes summed and written at a time, without the interpreter's lock: small enough to stay in the processor's
cache between the two, large enough that the trainer's thread is asked for that lock only now and then."""


def write_rank_file(
    directory: Path, rank: int, tree: Mapping[str, Array], meta: Mapping[str, Any], bf16: Collection[str] = ()
) -> FileReport:
    """Write `rank-<rank>.h5` of the set in `directory` and return what the commit record needs.

    `tree` maps "/"-joined paths of at most 8 parts to host arrays of any shape (float16/32/64, complex64/128,
    bool, integers); the paths in `bf16` are uint16 that stand for bfloat16. `meta` is JSON. Equal input gives
    equal bytes.

    Raises:
        ValueError, TypeError: a path, dtype or meta that a checkpoint cannot hold; nothing was written.
        OSError: the disk is full or gone; names the file. No part of it is left and an older file is unharmed.
    """
    return RankFileWriter(directory, rank, tree, meta, bf16).write()


class _Extent(NamedTuple):
    offset: int
    length: int
    crc: int


class RankFileWriter:
    """`write_rank_file` in two acts: the constructor lays the file out, `write` puts it on disk in any thread.

    They are apart because a thread inside the HDF5 library when the interpreter ends would block it for good:
    only the constructor calls HDF5 (some 50 microseconds an array), and it must run in the main thread.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        tree: Mapping[str, Array],
        meta: Mapping[str, Any],
        bf16: Collection[str] = (),
    ) -> None:
        """Take what `write_rank_file` takes; the arrays must not change until `write` returns.

        Raises:
            ValueError, TypeError: a path, dtype or meta that a checkpoint cannot hold.
        """
        check_paths(tree)
        if not set(bf16) <= tree.keys():
            raise ValueError(f"bf16 names arrays that are not in the tree: {sorted(set(bf16) - tree.keys())[:3]}")
        dtypes = {path: _dtype(path, array, path in bf16) for path, array in tree.items()}
        self._directory = directory
        self._skeleton = Skeleton()
        self._data = [_bytes(array) for array in tree.values()]
        # The oldest bound that has compact groups; HDF5 1.10 and every later one read it.
        with h5py.File(self._skeleton, "w", libver=("v108", "v110")) as file:
            create = _Creator(file)
            offsets = [
                create(("tree", *path.split("/")), dtypes[path], array.shape) for path, array in tree.items()
            ]
            entries = {
                path: Entry(dtype=dtypes[path], shape=array.shape, offset=offset, crc=0)
                for (path, array), offset in zip(tree.items(), offsets, strict=True)
            }
            self._index = Index(rank=rank, meta=dict(meta), entries=entries)
            # The checksums are still to come; they do not change the length.
            self._index_length = len(self._index.encode())
            self._index_offset = create(("meta",), "uint8", (self._index_length,))

    def write(self) -> FileReport:
        """Write, sync and rename the file; holds the interpreter's lock only in between chunks.

        Raises:
            OSError: the disk is full or gone; names the file. No part of it is left, an older file is unharmed.
        """
        final = self._directory / rank_name(self._index.rank)
        temporary = final.with_name(final.name + ".tmp")
        try:
            make_directory(self._directory)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                report = self._write(descriptor)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, final)
            sync_directory(self._directory)
        except OSError as error:
            # What a failing disk says about this is less useful than what it said before.
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise named(error, final) from error
        return report

    def _write(self, descriptor: int) -> FileReport:
        extents = []
        entries = {}
        for (path, entry), data in zip(self._index.entries.items(), self._data, strict=True):
            extents.append(_write_data(descriptor, data, entry.offset))
            entries[path] = Entry(dtype=entry.dtype, shape=entry.shape, offset=entry.offset, crc=extents[-1].crc)
        index = Index(rank=self._index.rank, meta=self._index.meta, entries=entries).encode()
        assert len(index) == self._index_length
        extents.append(_write_data(descriptor, memoryview(index), self._index_offset))
        crc = self._write_structure(descriptor, extents)
        return FileReport(self._index.rank, self._skeleton.length, crc, *extents[-1])

    def _write_structure(self, descriptor: int, extents: list[_Extent]) -> int:
        """Fill what lies between the arrays from the skeleton; the CRC-32 of the whole file."""
        pieces = []
        end = 0
        for extent in [*sorted(e for e in extents if e.length), _Extent(self._skeleton.length, 0, 0)]:
            between = self._skeleton.read_at(end, extent.offset - end)
            write_all(descriptor, between, end)
            pieces += [(zlib.crc32(between), len(between)), (extent.crc, extent.length)]
            end = extent.offset + extent.length
        return combine(pieces)


def _dtype(path: str, array: Array, bf16: bool) -> str:
    """The name of an array's dtype as the model knows it."""
    dtype = "bfloat16" if bf16 else array.dtype.name
    if dtype not in STORED or (bf16 and array.dtype != np.uint16):
        raise ValueError(f"array {path!r} has dtype {array.dtype}, which a checkpoint cannot hold")
    return dtype


def _bytes(array: Array) -> memoryview:
    """The array's bytes as they go to disk; copies only what is not contiguous or not little-endian."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8).data


def _write_data(descriptor: int, data: memoryview, offset: int) -> _Extent:
    crc = 0
    for start in range(0, data.nbytes, CHUNK):
        chunk = data[start : start + CHUNK]
        crc = zlib.crc32(chunk, crc)
        write_all(descriptor, chunk, offset + start)
    return _Extent(offset, data.nbytes, crc)


class _Creator:
    """Creates contiguous datasets, allocated at once and never filled, and the groups above them."""

    def __init__(self, file: h5py.File) -> None:
        self._groups: dict[tuple[str, ...], Any] = {(): file.id}
        self._group_plist = h5p.create(h5p.GROUP_CREATE)
        self._dataset_plist = h5p.create(h5p.DATASET_CREATE)
        self._dataset_plist.set_layout(h5d.CONTIGUOUS)
        self._dataset_plist.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        self._dataset_plist.set_fill_time(h5d.FILL_TIME_NEVER)
        for plist in (self._group_plist, self._dataset_plist):
            # Equal content is to give equal bytes.
            plist.set_obj_track_times(False)
        self._types = {name: h5t.py_create(np.dtype(stored)) for name, stored in STORED.items()}

    def __call__(self, parts: tuple[str, ...], dtype: str, shape: tuple[int, ...]) -> int:
        """Where in the file the data of a new dataset belongs, for an array of `dtype` and `shape`."""
        stored = stored_shape(dtype, shape)
        space = h5s.create_simple(stored) if stored else h5s.create(h5s.SCALAR)
        parent = self._group(parts[:-1])
        dataset = h5d.create(parent, parts[-1].encode(), self._types[dtype], space, self._dataset_plist)
        if np.dtype(STORED[dtype]).name != dtype:
            name = np.array(dtype.encode())
            attribute = h5a.create(dataset, b"dtype", h5t.py_create(name.dtype), h5s.create(h5s.SCALAR))
            attribute.write(name)
        return int(dataset.get_offset() or 0)

    def _group(self, parts: tuple[str, ...]) -> Any:
        group = self._groups.get(parts)
        if group is None:
            parent = self._group(parts[:-1])
            group = self._groups[parts] = h5g.create(parent, parts[-1].encode(), None, self._group_plist)
        return group
