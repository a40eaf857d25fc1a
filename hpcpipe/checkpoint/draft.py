"""A file of a set before it is on disk: HDF5 lays it out in memory, and says where the bytes of each array belong.

Whoever puts the arrays there, this is the rest of the file: the index and the structure between the arrays. It
never opens a file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from h5py import h5a, h5d, h5f, h5fd, h5g, h5p, h5s, h5t

from hpcpipe.checkpoint.layout import (
    STORED,
    Array,
    Entry,
    Index,
    check_paths,
    stored_shape,
)
from hpcpipe.checkpoint.skeleton import Skeleton


class Kind(NamedTuple):
    """What an array is: its dtype as the model knows it, and its shape."""

    dtype: str
    shape: tuple[int, ...]


class Extent(NamedTuple):
    """A stretch of a file in bytes, with its CRC-32."""

    offset: int
    length: int
    crc: int


def kinds_of(tree: Mapping[str, Array], bf16: Collection[str]) -> dict[str, Kind]:
    """What each array of a tree is, by its path; the paths in `bf16` are uint16 that stand for bfloat16.

    Raises:
        ValueError: a dtype that a checkpoint cannot hold, or a path in `bf16` that is not in the tree.
    """
    if not set(bf16) <= tree.keys():
        raise ValueError(f"bf16 names arrays that are not in the tree: {sorted(set(bf16) - tree.keys())[:3]}")
    return {path: Kind(_dtype(path, array, path in bf16), array.shape) for path, array in tree.items()}


def _dtype(path: str, array: Array, bf16: bool) -> str:
    """The name of an array's dtype as the model knows it."""
    dtype = "bfloat16" if bf16 else array.dtype.name
    if dtype not in STORED or (bf16 and array.dtype != np.uint16):
        raise ValueError(f"array {path!r} has dtype {array.dtype}, which a checkpoint cannot hold")
    return dtype


def bytes_of(array: Array) -> npt.NDArray[np.uint8]:
    """The array's bytes as they go to disk; copies only what is not contiguous or not little-endian."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8)


class Draft:
    """The layout of one file that holds arrays of these kinds, and `meta` (JSON). Equal input gives equal layouts.

    entries: every array, its checksum still 0, in the order of `kinds`.
    length: bytes of the whole file.
    index_offset, index_length: where the index belongs.
    """

    def __init__(self, rank: int, kinds: Mapping[str, Kind], meta: Mapping[str, Any]) -> None:
        """Lay the file out; costs some 50 microseconds an array, and must run in the main thread (HDF5's lock).

        Raises:
            ValueError, TypeError: a path or meta that a checkpoint cannot hold.
        """
        check_paths(kinds)
        self.rank = rank
        self._meta = dict(meta)
        self._skeleton = Skeleton()
        file = _new_file(self._skeleton)
        try:
            create = _Creator(file)
            self.entries = {
                path: Entry(
                    dtype=kind.dtype,
                    shape=kind.shape,
                    offset=create(("tree", *path.split("/")), kind.dtype, kind.shape),
                    crc=0,
                )
                for path, kind in kinds.items()
            }
            # The checksums are still to come; they do not change the length.
            self.index_length = len(self._encode(self.entries))
            self.index_offset = create(("meta",), "uint8", (self.index_length,))
        finally:
            file.close()
        self.length = self._skeleton.length

    def extents(self, crcs: Iterable[int]) -> list[Extent]:
        """Where each array lies, in the order of `entries`, with the checksums given."""
        return [
            Extent(entry.offset, entry.nbytes, crc) for entry, crc in zip(self.entries.values(), crcs, strict=True)
        ]

    def index(self, crcs: Iterable[int]) -> bytes:
        """The index with the checksums of all arrays, in the order of `entries`."""
        entries = {
            path: Entry(dtype=entry.dtype, shape=entry.shape, offset=entry.offset, crc=crc)
            for (path, entry), crc in zip(self.entries.items(), crcs, strict=True)
        }
        index = self._encode(entries)
        assert len(index) == self.index_length
        return index

    def structure(self, extents: Iterable[Extent]) -> Iterator[tuple[int, bytes, Extent]]:
        """What lies between extents: offset, bytes, and the extent that follows, which at the end has length 0."""
        end = 0
        for extent in [*sorted(e for e in extents if e.length), Extent(self.length, 0, 0)]:
            yield end, self._skeleton.read_at(end, extent.offset - end), extent
            end = extent.offset + extent.length

    def _encode(self, entries: dict[str, Entry]) -> bytes:
        return Index(rank=self.rank, meta=self._meta, entries=entries).encode()


def _new_file(skeleton: Skeleton) -> Any:
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fileobj_driver(h5fd.fileobj_driver, skeleton)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    # The oldest bound that has compact groups; HDF5 1.10 and every later one read it.
    access.set_libver_bounds(h5f.LIBVER_V18, h5f.LIBVER_V110)
    creation = h5p.create(h5p.FILE_CREATE)
    # h5py before 3.8 would give the root group times, but equal content is to give equal bytes.
    creation.set_obj_track_times(False)
    return h5f.create(b"in memory", h5f.ACC_TRUNC, fapl=access, fcpl=creation)


class _Creator:
    """Creates contiguous datasets, allocated at once and never filled, and the groups above them."""

    def __init__(self, file: Any) -> None:
        self._groups: dict[tuple[str, ...], Any] = {(): file}
        self._group_plist = h5p.create(h5p.GROUP_CREATE)
        self._dataset_plist = h5p.create(h5p.DATASET_CREATE)
        self._dataset_plist.set_layout(h5d.CONTIGUOUS)
        self._dataset_plist.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        self._dataset_plist.set_fill_time(h5d.FILL_TIME_NEVER)
        for plist in (self._group_plist, self._dataset_plist):
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
