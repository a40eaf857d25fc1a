"""Writes one rank's file: HDF5 lays it out in memory, then the arrays go to disk in one pass that also sums them.

It never decides when to write or what; a file that it leaves under its final name is whole and on disk.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcpipe.checkpoint.crc import combine
from hpcpipe.checkpoint.draft import Draft, Extent, bytes_of, kinds_of
from hpcpipe.checkpoint.layout import Array, FileReport, rank_name
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


class RankFileWriter:
    """`write_rank_file` in two acts: the constructor lays the file out, `write` puts it on disk in any thread.

    They are apart because a thread inside the HDF5 library when the interpreter ends would block it for good:
    only the constructor calls HDF5, and it must run in the main thread.
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
        self._directory = directory
        self._draft = Draft(rank, kinds_of(tree, bf16), meta)
        self._data = [bytes_of(array).data for array in tree.values()]

    def write(self) -> FileReport:
        """Write, sync and rename the file; holds the interpreter's lock only in between chunks.

        Raises:
            OSError: the disk is full or gone; names the file. No part of it is left, an older file is unharmed.
        """
        final = self._directory / rank_name(self._draft.rank)
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
        draft = self._draft
        crcs = [
            _write_data(descriptor, data, entry.offset).crc
            for entry, data in zip(draft.entries.values(), self._data, strict=True)
        ]
        index = _write_data(descriptor, memoryview(draft.index(crcs)), draft.index_offset)
        pieces = []
        for offset, between, extent in draft.structure([*draft.extents(crcs), index]):
            write_all(descriptor, between, offset)
            pieces += [(zlib.crc32(between), len(between)), (extent.crc, extent.length)]
        return FileReport(draft.rank, draft.length, combine(pieces), *index)


def _write_data(descriptor: int, data: memoryview, offset: int) -> Extent:
    crc = 0
    for start in range(0, data.nbytes, CHUNK):
        chunk = data[start : start + CHUNK]
        crc = zlib.crc32(chunk, crc)
        write_all(descriptor, chunk, offset + start)
    return Extent(offset, data.nbytes, crc)
