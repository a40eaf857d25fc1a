"""The commit record: the small file, written last, that makes rank files a checkpoint set.

It owns `commit.json` and the moment of commit, and never opens a rank file. One line of JSON: a SHA-256, then the
record that it sums, byte for byte; so no byte of it can change unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcpipe.checkpoint.layout import COMMIT_NAME, FileReport, is_ours, parse_set_name, rank_name
from hpcpipe.durable import replace_file, sync_directory
from hpcpipe.errors import CheckpointError
from hpcpipe.untrusted import one_line, parse_json, read_plain

_FORMAT = "hpcpipe checkpoint set"
_VERSION = 1
_ENVELOPE = re.compile(rb'\{"sha256":"([0-9a-f]{64})","record":(\{.*\})\}\n', re.DOTALL)
_MAX_BYTES = 16 << 20
_REMEDY = "the set does not count; use another one (`hpcpipe checkpoint list`)"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What was committed: step (updates applied), Unix time, the files in order of rank, the engine's meta."""

    step: int
    created: float
    files: tuple[FileReport, ...]
    meta: dict[str, Any]


def commit(directory: Path, reports: Iterable[FileReport], meta: Mapping[str, Any]) -> None:
    """Make the rank files in `directory` (a `step-…` folder) a set: the last act of a checkpoint, by one rank.

    `reports` are the results of `write_rank_file` of all ranks 0..n-1; `meta` is JSON. Leftovers of an earlier,
    uncommitted attempt in the same folder are removed once the record stands.

    Raises:
        ValueError: the reports are not those of ranks 0..n-1, or the folder's name is not that of a set.
        CheckpointError: a file is missing or has another length than reported; nothing was committed.
        OSError: the record could not be written; names the file.
    """
    name = parse_set_name(directory.name)
    if name is None:
        raise ValueError(f"{directory} is not named as a checkpoint set")
    files = sorted(FileReport(*report) for report in reports)
    if not files or [report.rank for report in files] != list(range(len(files))):
        raise ValueError(f"a set needs one report of each rank, got ranks {[report.rank for report in files]}")
    for report in files:
        if fault := length_fault(directory, report):
            raise CheckpointError(f"{fault}; the set is not committed")
    record = {
        "format": _FORMAT,
        "version": _VERSION,
        "step": name[0],
        "created": time.time(),
        "files": [report._asdict() for report in files],
        "meta": dict(meta),
    }
    body = json.dumps(record, allow_nan=False).encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    replace_file(directory / COMMIT_NAME, b'{"sha256":"' + digest + b'","record":' + body + b"}\n")
    sync_directory(directory.parent)
    _remove_leftovers(directory, len(files))


def _remove_leftovers(directory: Path, ranks: int) -> None:
    keep = {COMMIT_NAME, *(rank_name(rank) for rank in range(ranks))}
    # The set stands with or without them, and retention tries again.
    with suppress(OSError):
        for path in directory.iterdir():
            if is_ours(path.name) and path.name not in keep:
                path.unlink()


def length_fault(directory: Path, report: FileReport) -> str | None:
    """What one `stat` tells of a rank file: missing, or of the wrong length."""
    path = directory / rank_name(report.rank)
    try:
        length = path.stat().st_size
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None if length == report.length else f"{path}: has {length} bytes instead of {report.length}"


def read_record(directory: Path) -> Record:
    """The commit record of a set.

    Raises:
        CheckpointError: there is none, or a byte of it is not what was written; one line with the file's name.
    """
    path = directory / COMMIT_NAME
    try:
        data = read_plain(path, _MAX_BYTES)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{directory}: has no commit record, its write was not finished; {_REMEDY}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); {_REMEDY}") from error
    envelope = _ENVELOPE.fullmatch(data)
    if envelope is None or hashlib.sha256(envelope[2]).hexdigest().encode() != envelope[1]:
        raise CheckpointError(f"{path}: the commit record is damaged or cut off; {_REMEDY}")
    try:
        return _parse(envelope[2])
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path}: is no commit record that this hpcpipe reads ({one_line(error)}); {_REMEDY}"
        ) from error


def _parse(body: bytes) -> Record:
    record = parse_json(body)
    form, version = record["format"], record["version"]
    if (form, version) != (_FORMAT, _VERSION):
        raise ValueError(f"format {one_line(repr(form), 40)}, version {one_line(repr(version), 40)}")
    files = tuple(FileReport(**entry) for entry in record["files"])
    for number, report in enumerate(files):
        if report.rank != number or not all(type(value) is int and 0 <= value < 1 << 63 for value in report):
            raise ValueError(f"entry {number} of its files is not a report of rank {number}")
    step, created, meta = record["step"], record["created"], record["meta"]
    if type(step) is not int or not 0 <= step < 10**18:
        raise ValueError(f"step {one_line(repr(step), 40)} is none")
    if not files or not isinstance(created, float) or not math.isfinite(created) or not isinstance(meta, dict):
        raise ValueError("created, files or meta is missing")
    return Record(step=step, created=created, files=files, meta=meta)
