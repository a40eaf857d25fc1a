"""What a checkpoint is called on disk and what a rank file may hold: names, paths, dtypes, the index.

It owns the rules that writer and reader share, and never opens a file.

    rank-00002.h5
      /tree/<path>   one contiguous little-endian dataset per array; no links, chunks or filters
      /meta          the rank's JSON document (bytes): the engine's meta, and of all arrays the dtype, shape,
                     offset in the file and CRC-32

Three kinds of numbers have no type of their own in HDF5 and are kept as another: bfloat16 as uint16, bool as
uint8, complex as pairs of floats (one more dimension of length 2). Attribute `dtype` names what they stand for.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hpcpipe.untrusted import one_line, parse_json

Array = npt.NDArray[Any]

COMMIT_NAME = "commit.json"
MAX_DEPTH = 8
MAX_PART_BYTES = 1024
MAX_DIMENSIONS = 32
MAX_OBJECTS = 2**18
"""Arrays and the folders above them in one file: laying them out anew takes a reader some seconds."""
MAX_INDEX_BYTES = 32 << 20
_RANK_FORMAT = "hpcpipe rank file"
_VERSION = 1
_SET_NAME = re.compile(r"step-(\d{10,18})(?:\.([1-9]\d{0,8}))?")
_CRC = re.compile(r"[0-9a-f]{8}")
_RANK_NAME = re.compile(r"rank-(\d{5,9})\.h5")

STORED: Mapping[str, str] = {
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "bool": "|u1",
    "bfloat16": "<u2",
    "complex64": "<f4",
    "complex128": "<f8",
}
"""NumPy type on disk of each dtype that a checkpoint may hold."""


class FileReport(NamedTuple):
    """What a rank tells of the file it has put on disk: six integers below 2**63, so that MPI can carry them.

    `length` and `crc` (CRC-32) are those of the whole file; `index_*` say where its JSON document lies, which
    lets a reader name the damaged dataset without giving a damaged file to the HDF5 library.
    """

    rank: int
    length: int
    crc: int
    index_offset: int
    index_length: int
    index_crc: int


def stored_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The dataspace on disk of such an array: a complex number takes two floats."""
    return (*shape, 2) if dtype.startswith("complex") else shape


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One array of a rank file: dtype as the model knows it, shape, offset in the file (bytes) and CRC-32."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    crc: int

    @property
    def nbytes(self) -> int:
        """Bytes on disk, in Python integers, so that a hostile shape cannot overflow."""
        return math.prod(stored_shape(self.dtype, self.shape)) * np.dtype(STORED[self.dtype]).itemsize

    def as_array(self, data: npt.NDArray[np.uint8]) -> Array:
        """The array that these bytes are; bfloat16 as uint16. A view: nothing is copied."""
        dtype = "uint16" if self.dtype == "bfloat16" else self.dtype
        return data.view(np.dtype(dtype)).reshape(self.shape)


@dataclass(frozen=True, kw_only=True)
class Index:
    """The JSON document of a rank file: whose it is, the engine's meta, and every array by its path."""

    rank: int
    meta: dict[str, Any]
    entries: dict[str, Entry]

    def encode(self) -> bytes:
        """Bytes for the `meta` dataset. Their number does not depend on the checksums.

        Raises:
            TypeError, ValueError: `meta` holds something that JSON does not (NaN and infinity included), or all is
                too long.
        """
        arrays = {path: [e.dtype, e.shape, e.offset, f"{e.crc:08x}"] for path, e in self.entries.items()}
        document = {
            "format": _RANK_FORMAT,
            "version": _VERSION,
            "rank": self.rank,
            "meta": self.meta,
            "arrays": arrays,
        }
        data = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
        if len(data) > MAX_INDEX_BYTES:
            raise ValueError(f"the index of {len(data)} bytes is longer than the {MAX_INDEX_BYTES} allowed")
        return data

    @classmethod
    def decode(cls, data: bytes, length: int) -> Index:
        """Read the document of a file of `length` bytes, believing nothing.

        Raises:
            ValueError: it is not such a document, or an array of it does not fit into the file; says which.
        """
        try:
            document = parse_json(data)
        except ValueError as error:
            raise ValueError(f"its index is not JSON ({one_line(error)})") from error
        if not isinstance(document, dict) or document.get("format") != _RANK_FORMAT:
            raise ValueError("it is not a rank file of hpcpipe")
        if document.get("version") != _VERSION:
            found = one_line(repr(document.get("version")), 40)
            raise ValueError(f"its format version is {found}, this hpcpipe reads {_VERSION}")
        rank, meta, arrays = (document.get(key) for key in ("rank", "meta", "arrays"))
        if not (isinstance(rank, int) and _is_count(rank) and isinstance(meta, dict) and isinstance(arrays, dict)):
            raise ValueError("its index lacks rank, meta or arrays")
        entries = {path: _entry(path, value) for path, value in arrays.items()}
        check_paths(entries)
        _check_extents(entries, length)
        return cls(rank=rank, meta=meta, entries=entries)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _entry(path: str, value: object) -> Entry:
    check_path(path)
    shown = one_line(repr(path), 200)
    if not isinstance(value, list) or len(value) != 4:
        raise ValueError(f"dataset {shown} is not described by dtype, shape, offset and crc")
    dtype, shape, offset, crc = value
    if not isinstance(dtype, str) or dtype not in STORED:
        raise ValueError(f"dataset {shown} has dtype {one_line(repr(dtype), 40)}, which a checkpoint cannot hold")
    if not isinstance(shape, list) or not all(map(_is_count, shape)) or not _is_possible(dtype, tuple(shape)):
        raise ValueError(f"dataset {shown} has an impossible shape")
    if not (_is_count(offset) and isinstance(crc, str) and _CRC.fullmatch(crc)):
        raise ValueError(f"dataset {shown} has an impossible offset or checksum")
    return Entry(dtype=dtype, shape=tuple(shape), offset=offset, crc=int(crc, 16))


def _is_possible(dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether NumPy and HDF5 can count the elements; of arrays without any, too, whose other extents multiply."""
    stored = stored_shape(dtype, shape)
    if len(stored) > MAX_DIMENSIONS:
        return False
    return 0 not in stored or math.prod(extent for extent in stored if extent) < 1 << 48


def _check_extents(entries: Mapping[str, Entry], length: int) -> None:
    """Arrays must lie inside the file and apart: together they then need no more memory than the file is long."""
    end = 0
    for path, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.nbytes > length:
            raise ValueError(f"dataset {path!r} declares {entry.nbytes} bytes in a file of {length}")
        if entry.nbytes and (entry.offset < end or entry.offset + entry.nbytes > length):
            raise ValueError(f"dataset {path!r} lies outside the file or over another dataset")
        end = max(end, entry.offset + entry.nbytes) if entry.nbytes else end


def check_path(path: str) -> None:
    """Refuse a path that HDF5 would read in another way than we do.

    Raises:
        ValueError: a part is empty, ".", ".." or too long, holds a NUL, or there are more than 8 parts.
    """
    parts = path.split("/")
    if len(parts) > MAX_DEPTH:
        raise ValueError(f"path {path[:80]!r} has {len(parts)} parts, at most {MAX_DEPTH} are allowed")
    for part in parts:
        if part in ("", ".", "..") or "\0" in part:
            raise ValueError(f"path {path[:80]!r} has a part that is empty, '.', '..' or holds a NUL")
        if len(part.encode("utf-8", "surrogatepass")) > MAX_PART_BYTES or not part.isprintable():
            raise ValueError(f"path {path[:80]!r} has a part that is too long or not printable")


def check_paths(paths: Iterable[str]) -> None:
    """`check_path` for each, no path may be an array and a folder of others at once, and there are not too many.

    Raises:
        ValueError: says which path, or how many.
    """
    names = set(paths)
    folders = set()
    for path in names:
        check_path(path)
        parts = path.split("/")
        for depth in range(1, len(parts)):
            if (folder := "/".join(parts[:depth])) in names:
                raise ValueError(f"path {folder[:80]!r} is an array and also holds {path[:80]!r}")
            folders.add(folder)
    if len(names) + len(folders) > MAX_OBJECTS:
        raise ValueError(f"{len(names)} arrays in {len(folders)} folders are more than the {MAX_OBJECTS} allowed")


def set_name(step: int, attempt: int = 0) -> str:
    """Folder of the set at `step` (updates applied); later attempts at a committed step get a suffix."""
    return f"step-{step:010d}" + (f".{attempt}" if attempt else "")


def parse_set_name(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a folder name, None for any other name."""
    match = _SET_NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def rank_name(rank: int) -> str:
    """File of one rank within its set."""
    return f"rank-{rank:05d}.h5"


def is_ours(name: str) -> bool:
    """Whether a file in a set's folder was put there by this package, finished or not."""
    stem = name.removesuffix(".tmp")
    return stem == COMMIT_NAME or _RANK_NAME.fullmatch(stem) is not None


def new_set_directory(root: Path, step: int) -> Path:
    """The folder for a new set at `step` below `root` (`<run>/checkpoints`); nothing is created.

    A committed set is never written over, because a crash half-way would lose it: a run that comes by the same
    step again (it was resumed from an older set) gets `step-0000000050.1`, which counts as newer once
    committed. Parts of an uncommitted attempt are no set; they are overwritten in place. Every rank may ask for
    itself: the answer only changes when this very set is committed, for which all ranks must have written.
    """
    attempt = 0
    while (root / set_name(step, attempt) / COMMIT_NAME).exists():
        attempt += 1
    return root / set_name(step, attempt)
