"""Whose data a file holds that stands in the place of a rank's file and is not that file.

Files get mixed up when they are copied by hand. What the index in such a file says is for the message alone: it is
found by its first words, not by HDF5, and nothing else of the file is believed.
"""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path
from typing import NamedTuple

from hpcpipe.checkpoint.layout import FileReport
from hpcpipe.checkpoint.origin import run_of
from hpcpipe.checkpoint.record import Record
from hpcpipe.untrusted import open_plain

_BEGINNING = re.compile(
    rb'\{"format":"hpcpipe rank file","version":\d{1,9},"rank":(?P<rank>\d{1,9}),"meta":\{'
    rb'(?:"step":(?P<step>\d{1,18}),)?(?:"run":"(?P<run>[0-9a-f]{16})",)?'
)
_LONGEST_BEGINNING = 256
_CHUNK = 4 << 20
_AT_MOST = 256 << 20
"""Bytes from the end in which to look: the index is what a writer lays out last."""


class _Owner(NamedTuple):
    rank: int
    step: int | None
    run: str | None

    def __str__(self) -> str:
        step = "" if self.step is None else f" of step {self.step}"
        return f"rank {self.rank}'s data{step}" + ("" if self.run is None else f" of run {self.run}")


def stranger(path: Path, report: FileReport, record: Record) -> str | None:
    """One line that says whose data is at `path` instead of what `report` tells; None if that cannot be said.

    `record` is that of the set to which the report belongs.
    """
    try:
        descriptor = open_plain(path)
    except OSError:
        return None
    try:
        if _holds_own_index(descriptor, report):
            return None
        owner = _find(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    if owner is None or not _differs(owner, _Owner(report.rank, record.step, run_of(record.meta))):
        return None
    return (
        f"{path}: holds {owner}, not rank {report.rank}'s of step {record.step}; put the right file there, or use "
        "another set (`hpcpipe checkpoint list`)"
    )


def _differs(found: _Owner, expected: _Owner) -> bool:
    return any(None not in pair and pair[0] != pair[1] for pair in zip(found, expected, strict=True))


def _holds_own_index(descriptor: int, report: FileReport) -> bool:
    crc, offset, left = 0, report.index_offset, report.index_length
    while left and (data := os.pread(descriptor, min(left, _CHUNK), offset)):
        crc, offset, left = zlib.crc32(data, crc), offset + len(data), left - len(data)
    return not left and crc == report.index_crc


def _find(descriptor: int) -> _Owner | None:
    end = os.fstat(descriptor).st_size
    for start in range(end - _CHUNK, max(end - _AT_MOST, 0) - _CHUNK, -_CHUNK):
        first = max(start, 0)
        data = os.pread(descriptor, start + _CHUNK - first + _LONGEST_BEGINNING, first)
        if found := _BEGINNING.search(data):
            step, run = found["step"], found["run"]
            return _Owner(
                rank=int(found["rank"]),
                step=None if step is None else int(step),
                run=None if run is None else run.decode(),
            )
    return None
