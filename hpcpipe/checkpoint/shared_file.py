"""Writes one file for all ranks of a set together, through parallel HDF5; every rank calls it at the same place.

Rank 0 lays the file out and writes its structure and index, which hold no array. Then all ranks open it with the
`mpio` driver and each writes its own arrays, so that HDF5 changes nothing but their bytes: no metadata that a full
disk could leave half-written, and no collective call that a rank with an error would keep the others waiting in.
After each step that may fail on some ranks only, all hear of it and give up together.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
import numpy.typing as npt
from h5py import h5d, h5s

from hpcpipe.checkpoint.crc import combine
from hpcpipe.checkpoint.draft import Draft, Extent, Kind, bytes_of, kinds_of
from hpcpipe.checkpoint.layout import STORED, Array, FileReport, rank_name, stored_shape
from hpcpipe.durable import make_directory, sync_directory, write_all
from hpcpipe.errors import CheckpointError, HpcpipeError

MOST_AT_ONCE = 64 << 20
"""Bytes of one write: h5py keeps the interpreter's lock meanwhile, and MPI counts bytes in 32 bits."""

Meta = Mapping[str, Any]


class Ranks(Protocol):
    """All ranks of the job, as one of them sees them; a `transport.World` is one.

    communicator: mpi4py's, of exactly these ranks; HDF5 duplicates it.
    """

    rank: int

    @property
    def communicator(self) -> Any: ...

    def all_gather_json(self, value: Any, *, what: str) -> list[Any]: ...


def has_parallel_hdf5() -> bool:
    """Whether this h5py was built with MPI."""
    return bool(h5py.get_config().mpi)


def write_shared_file(
    ranks: Ranks, directory: Path, tree: Mapping[str, Array], meta: Meta, bf16: Collection[str] = ()
) -> FileReport:
    """Write `rank-00000.h5` of the set in `directory`: the arrays of all ranks, and their metas merged.

    `tree`, `meta` and `bf16` are those of this rank, as `write_rank_file` takes them; no path is on two ranks.
    Entries of the same name in two metas are merged where they are objects, and must be equal otherwise. The
    report is the same on every rank. Waits for all ranks.

    Raises:
        ValueError, TypeError: a path, dtype or meta that a checkpoint cannot hold, or a path of two ranks.
        CheckpointError: some rank could not write, the same text on every rank; no part of the file is left.
        HpcpipeError: the file is open on some ranks only, which cannot be mended.
    """
    return _SharedWrite(ranks, directory).run(tree, meta, bf16)


class _SharedWrite:
    def __init__(self, ranks: Ranks, directory: Path) -> None:
        self._ranks = ranks
        self._final = directory / rank_name(0)
        self._temporary = self._final.with_name(self._final.name + ".tmp")

    def run(self, tree: Mapping[str, Array], meta: Meta, bf16: Collection[str]) -> FileReport:
        kinds = kinds_of(tree, bf16)
        data = {path: bytes_of(array) for path, array in tree.items()}
        crcs = {path: zlib.crc32(data[path].data) for path in data}
        table = [[path, *kind, crcs[path]] for path, kind in kinds.items()]
        everybody = self._ranks.all_gather_json([table, meta], what="the arrays of all ranks")
        draft, crcs = _merged(everybody) if self._ranks.rank == 0 else (None, {})
        try:
            with self._agreed("laying out"):
                if draft is not None:
                    index = self._lay_out(draft, crcs)
            with self._agreed("looking for"):
                # What keeps one rank from it is to be found before MPI, which may not tell the others.
                os.close(os.open(self._temporary, os.O_RDWR))
            self._write(kinds, data)
            with self._agreed("finishing"):
                report = None if draft is None else self._finish(draft, crcs, index)
        except HpcpipeError:
            if self._ranks.rank == 0:
                # What a failing disk says about this is less useful than what it said before.
                with suppress(OSError):
                    self._temporary.unlink(missing_ok=True)
            raise
        reports = self._ranks.all_gather_json(report, what="the shared file's length and checksum")
        return FileReport(*reports[0])

    def _write(self, kinds: Mapping[str, Kind], data: Mapping[str, npt.NDArray[np.uint8]]) -> None:
        """Bring this rank's arrays into the file, as all others do, and have them on disk."""
        file = self._open()
        failure: CheckpointError | None = None
        try:
            with self._agreed("writing"):
                try:
                    _write_arrays(file, kinds, data)
                except Exception as error:
                    # MPI does not say what the system said.
                    raise OSError(f"{error} ({_free(self._temporary)})") from error
        except CheckpointError as error:
            failure = error
        # Closing is collective, and a rank that waits inside it neither hears nor says anything: all come at once.
        with self._agreed("closing"):
            file.close()
            if failure is None:
                _sync(self._temporary)
        if failure is not None:
            raise failure

    @contextmanager
    def _agreed(self, doing: str) -> Iterator[None]:
        """Run a block that may fail on some ranks only; it fails on all of them if on any."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            # h5py turns faults of the library into nearly every exception that Python has.
            error = caught
        if failed := self._who_failed(error, doing):
            raise CheckpointError(f"{doing} {self._final}: {_told(failed)}") from error

    def _open(self) -> h5py.File:
        """The file on all ranks; raises CheckpointError when it opened on none."""
        file = error = None
        try:
            file = h5py.File(self._temporary, "r+", driver="mpio", comm=self._ranks.communicator)
        except Exception as caught:
            error = caught
        failed = self._who_failed(error, "opening")
        if file is None and len(failed) == self._size:
            raise CheckpointError(f"opening {self._final}: {_told(failed)}") from error
        if failed or file is None:
            # Closing it is collective as well: those that have it open cannot let go of it alone.
            raise HpcpipeError(f"{self._final} could be opened on some ranks only: {_told(failed)}") from error
        return file

    def _who_failed(self, error: Exception | None, doing: str) -> dict[int, str]:
        texts = self._ranks.all_gather_json(_in_words(error), what=f"all ranks {doing} {self._final}")
        self._size = len(texts)
        return {rank: text for rank, text in enumerate(texts) if text is not None}

    def _lay_out(self, draft: Draft, crcs: Mapping[str, int]) -> Extent:
        """Put everything but the arrays on disk; where the index is."""
        index = draft.index(crcs.values())
        placed = Extent(draft.index_offset, len(index), zlib.crc32(index))
        make_directory(self._final.parent)
        descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            # HDF5 refuses a file that ends before the last dataset does.
            os.ftruncate(descriptor, draft.length)
            write_all(descriptor, index, placed.offset)
            for offset, between, _ in draft.structure([*draft.extents(crcs.values()), placed]):
                write_all(descriptor, between, offset)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return placed

    def _finish(self, draft: Draft, crcs: Mapping[str, int], index: Extent) -> FileReport:
        """The report of the file that all ranks have written and synced, under its final name."""
        pieces = []
        descriptor = os.open(self._temporary, os.O_RDONLY)
        try:
            if (length := os.fstat(descriptor).st_size) != draft.length:
                raise OSError(f"it has {length} bytes instead of {draft.length}")
            for offset, between, extent in draft.structure([*draft.extents(crcs.values()), index]):
                # HDF5 may write its structure anew when it closes a file.
                stored = os.pread(descriptor, len(between), offset)
                pieces += [(zlib.crc32(stored), len(between)), (extent.crc, extent.length)]
        finally:
            os.close(descriptor)
        os.replace(self._temporary, self._final)
        sync_directory(self._final.parent)
        return FileReport(draft.rank, draft.length, combine(pieces), *index)


def _merged(everybody: list[Any]) -> tuple[Draft, dict[str, int]]:
    """The file of all ranks' tables and metas, and the checksums of its arrays."""
    kinds: dict[str, Kind] = {}
    crcs: dict[str, int] = {}
    meta: dict[str, Any] = {}
    for rank, (table, theirs) in enumerate(everybody):
        for path, dtype, shape, crc in table:
            if path in kinds:
                raise ValueError(f"array {path!r} is on rank {rank} and on one before it")
            kinds[path] = Kind(dtype, tuple(shape))
            crcs[path] = crc
        _merge(meta, theirs)
    return Draft(0, kinds, meta), crcs


def _merge(into: dict[str, Any], more: Meta) -> None:
    for name, value in more.items():
        if isinstance(value, dict):
            _merge(into.setdefault(name, {}), value)
        elif into.setdefault(name, value) != value:
            raise ValueError(f"the ranks differ in {name!r}: {into[name]!r} and {value!r}")


def _write_arrays(file: h5py.File, kinds: Mapping[str, Kind], data: Mapping[str, npt.NDArray[np.uint8]]) -> None:
    for path, (dtype, shape) in kinds.items():
        if data[path].size:
            stored = data[path].view(STORED[dtype]).reshape(stored_shape(dtype, shape))
            dataset = h5d.open(file.id, f"tree/{path}".encode())
            for start, part in parts_of(stored, MOST_AT_ONCE):
                space = h5s.ALL
                if part.shape != stored.shape:
                    space = dataset.get_space()
                    space.select_hyperslab(start, part.shape)
                memory = h5s.ALL if space is h5s.ALL else h5s.create_simple(part.shape)
                dataset.write(memory, space, part)


def parts_of(array: Array, most: int) -> Iterator[tuple[tuple[int, ...], Array]]:
    """A contiguous array in contiguous parts of at most `most` bytes (or one item), each with where it begins."""
    if array.nbytes <= most or array.ndim == 0:
        yield (0,) * array.ndim, array
        return
    row = array.nbytes // len(array)
    rows = max(1, most // row)
    for first in range(0, len(array), rows):
        if row <= most:
            yield (first, *(0,) * (array.ndim - 1)), array[first : first + rows]
        else:
            for start, part in parts_of(array[first], most):
                yield (first, *start), part[np.newaxis]


def _sync(path: Path) -> None:
    """Have this host's part of the file on disk."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _in_words(error: Exception | None) -> str | None:
    if error is None:
        return None
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__


def _free(path: Path) -> str:
    status = os.statvfs(path)
    return f"{status.f_bavail * status.f_frsize / 1e6:.1f} MB are free there"


def _told(failed: Mapping[int, str]) -> str:
    """The first one's words; the others' are seldom other ones."""
    first = min(failed)
    others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
    return f"rank {first}{others}: {failed[first]}"
