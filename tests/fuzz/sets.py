"""Checkpoint sets with spoiled contents and right checksums, and everything that hpcpipe reads of a set."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcpipe.checkpoint.describe import describe
from hpcpipe.checkpoint.digest import digest
from hpcpipe.checkpoint.export import export
from hpcpipe.checkpoint.layout import COMMIT_NAME, FileReport, rank_name, set_name
from hpcpipe.checkpoint.reader import Part
from hpcpipe.checkpoint.record import commit
from hpcpipe.checkpoint.sets import CheckpointSet, find_sets, newest_valid, open_set
from hpcpipe.checkpoint.writer import write_rank_file
from hpcpipe.engine.written import read_state, read_written
from hpcpipe.errors import CheckpointError
from hpcpipe.schedule import Place
from tests.fuzz.mutations import encoded
from tests.unit.checkpoint_samples import layer_tree

STEP = 3
META: Mapping[str, Any] = {
    "fingerprint": "f" * 64,
    "first": 0,
    "identity": {"stages": [["a"]], "replicas": [1], "seed": 5, "model": {"name": "mlp", "hidden": [12, 11]}},
    "minibatches": 30,
    "ranks": [[0]],
    "config": '[model]\nname = "mlp"\n',
}
STAGES: Mapping[str, Any] = {
    "0": {
        "layers": ["a"],
        "replica": 0,
        "replicas": 1,
        "updates": 3,
        "versions": [2, 3],
        "in_flight": {"3": [True], "4": [True]},
    }
}
LONGEST_MESSAGE = 4000


class Sample(NamedTuple):
    """A real set of one rank: the bytes of its file, the report on it, and its record without checksum."""

    file: bytes
    report: FileReport
    record: dict[str, Any]

    @property
    def index(self) -> dict[str, Any]:
        """The JSON document in the file."""
        document: dict[str, Any] = json.loads(self.file[self.report.index_offset :][: self.report.index_length])
        return document


def make_sample(folder: Path) -> Sample:
    """A set as the engine writes it, with one layer, a version and minibatches in flight."""
    tree = {
        **layer_tree("a"),
        "stages/0/versions/2/a/weight": np.ones((6, 2), np.float32),
        "stages/0/inflight/3/inputs/0": np.ones((4, 6), np.uint16),
        "stages/0/inflight/4/inputs/0": np.zeros((0, 3), bool),
    }
    directory = folder / set_name(STEP)
    meta = {"step": STEP, "stages": STAGES}
    report = write_rank_file(directory, 0, tree, meta, ["stages/0/inflight/3/inputs/0"])
    commit(directory, [report], META)
    record = json.loads((directory / COMMIT_NAME).read_bytes())["record"]
    return Sample((directory / rank_name(0)).read_bytes(), report, record)


def put(folder: Path, sample: Sample, *, file: bytes | None = None, index: bytes | None = None) -> Path:
    """A set with another file, or another index in it, and everything that sums or measures them set right."""
    report, file = sample.report, sample.file if file is None else file
    if index is not None:
        file = file[: report.index_offset] + index + file[report.index_offset + report.index_length :]
        report = report._replace(index_length=len(index))
    summed = zlib.crc32(file[report.index_offset :][: report.index_length])
    report = report._replace(length=len(file), crc=zlib.crc32(file), index_crc=summed)
    put_record(folder, encoded({**sample.record, "files": [report._asdict()]}))
    path = folder / set_name(STEP) / rank_name(0)
    path.write_bytes(file)
    return path


def put_record(folder: Path, record: bytes) -> None:
    """Put a commit record with the right checksum into the set's folder."""
    directory = folder / set_name(STEP)
    directory.mkdir(parents=True, exist_ok=True)
    digest_of_record = hashlib.sha256(record).hexdigest().encode()
    (directory / COMMIT_NAME).write_bytes(b'{"sha256":"' + digest_of_record + b'","record":' + record + b"}\n")


def read_everything(folder: Path) -> int:
    """Read the sets below `folder` in every way; how many of the ways gave something and did not refuse.

    Fails if one ends otherwise than with its result or with one line, or gives what the file does not hold.
    """
    infos = find_sets(folder)
    for info in infos:
        if info.fault is not None:
            _check_message(info.fault)
    _, skipped = newest_valid(folder)
    for line in skipped:
        _check_message(line)
    directory = folder / set_name(STEP)
    ways: list[Callable[[CheckpointSet], object]] = [
        lambda found: [_check_message(fault) for fault in found.faults()],
        lambda found: _check_part(found, found.read_rank(0)),
        lambda found: _check_part(found, found.read_paths(lambda path: True, range(found.ranks))),
        lambda found: [found.read_layer(layer) for layer in found.layers],
        lambda found: [stage.staleness(found.step) for stage in describe(found)[1]],
        digest,
        lambda found: export(found, folder / "exported"),
        lambda found: read_state(found, read_written(found), Place(0)),
    ]
    return sum(_answers(directory, way) for way in ways)


def look_once(folder: Path) -> bool:
    """Whether the set below `folder` counts. Fails if that is told in more than a line."""
    chosen, skipped = newest_valid(folder)
    for line in skipped:
        _check_message(line)
    return chosen is not None


def _answers(directory: Path, way: Callable[[CheckpointSet], object]) -> bool:
    try:
        way(open_set(directory))
    except CheckpointError as error:
        _check_message(str(error))
        return False
    return True


def _check_message(line: str) -> None:
    assert line.isprintable(), repr(line)
    assert len(line) < LONGEST_MESSAGE, len(line)


def _check_part(found: CheckpointSet, part: Part) -> None:
    """What was read is what lies in the file where the index says, and no more than the file has."""
    data = (found.path / rank_name(0)).read_bytes()
    assert sum(array.nbytes for array in part.tree.values()) <= len(data)
    for path, entry in found.index(0).entries.items():
        assert part.tree[path].tobytes() == data[entry.offset :][: entry.nbytes]
        assert zlib.crc32(part.tree[path].tobytes()) == entry.crc
