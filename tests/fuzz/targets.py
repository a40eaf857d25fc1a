"""What can be fuzzed, each as a way to make an input from random numbers and a way to read it.

Reading fails, by AssertionError or whatever the reader raises, if it ends otherwise than with a result or with one
line.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from hpcpipe.checkpoint.fence import inspect_apart
from hpcpipe.checkpoint.layout import FileReport, Index
from hpcpipe.checkpoint.structure import NoVerdictError, check_structure
from hpcpipe.errors import UserError
from tests.fuzz.documents import Document, make_documents
from tests.fuzz.mutations import edited, encoded, spoiled
from tests.fuzz.sets import Sample, make_sample, put, put_record, read_everything
from tests.unit.checkpoint_samples import another_hdf5

LONGEST_MESSAGE = 10_000


class Target(NamedTuple):
    """make: an input; read: read it, as often as one likes; fenced: the same, where what `read` does may crash."""

    name: str
    make: Callable[[random.Random], bytes]
    read: Callable[[bytes], object]
    fenced: Callable[[bytes], object] | None = None


def make_targets(folder: Path) -> dict[str, Target]:
    """All targets by name; "structure" gives its input to the HDF5 library in this very process."""
    sample = make_sample(folder / "set")
    found = [*_of_sets(folder / "set", sample), _structure(folder)]
    (folder / "documents").mkdir()
    found += [_of_document(folder / "documents", it) for it in make_documents(folder / "documents").values()]
    return {target.name: target for target in found}


@contextmanager
def agreeable_hdf5() -> Iterator[None]:
    """HDF5 is asked about no file meanwhile, and finds nothing wrong with any."""
    with patch("hpcpipe.checkpoint.reader.inspect_apart", lambda *_: None):
        yield


def _of_sets(folder: Path, sample: Sample) -> list[Target]:
    put(folder, sample)
    record = json.loads((folder / "step-0000000003" / "commit.json").read_bytes())["record"]

    def index(data: bytes) -> None:
        put(folder, sample, index=data)
        read_everything(folder)

    def commit_record(data: bytes) -> None:
        put(folder, sample)
        put_record(folder, data)
        read_everything(folder)

    def file(data: bytes) -> None:
        put(folder, sample, file=data)
        read_everything(folder)

    return [
        Target("index", _of_json(sample.index), index),
        Target("record", _of_json(record), commit_record),
        Target("file", lambda rng: edited(sample.file, rng), file),
    ]


def _structure(folder: Path) -> Target:
    samples = [make_sample(folder / "usual")]
    for oldest in (False, True):
        with another_hdf5(oldest=oldest):
            samples.append(make_sample(folder / f"other{oldest}"))
    path = folder / "rank-00000.h5"

    def make(rng: random.Random) -> bytes:
        seeds = [sample.file for sample in samples]
        rng.shuffle(seeds)
        return edited(seeds[0], rng, tuple(seeds[1:]))

    def given(data: bytes) -> tuple[FileReport, Index]:
        path.write_bytes(data)
        # Of the sample whose file it may still be.
        sample = next((sample for sample in samples if data[:16] == sample.file[:16]), samples[0])
        index = Index.decode(encoded(sample.index), sample.report.length)
        return sample.report._replace(length=len(data)), index

    def read(data: bytes) -> None:
        report, index = given(data)
        in_one_line(lambda: check_structure(path, report, index))

    def fenced(data: bytes) -> None:
        report, index = given(data)
        in_one_line(lambda: inspect_apart(path, report, len(index.entries)), but_not=NoVerdictError)

    return Target("structure", make, read, fenced)


def _of_document(folder: Path, document: Document) -> Target:
    def read(data: bytes) -> None:
        path = folder / document.name
        path.write_bytes(data)
        in_one_line(lambda: document.read(path))

    if document.name.endswith(".json"):
        return Target(document.name, _of_json(json.loads(document.content)), read)
    return Target(document.name, lambda rng: edited(document.content, rng), read)


def _of_json(document: Any) -> Callable[[random.Random], bytes]:
    """Half of the inputs have other values in them, half of them other bytes."""
    good = encoded(document)

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return encoded(spoiled(document, rng, rng.randint(1, 4)))
        return edited(good, rng)

    return make


def in_one_line(read: Callable[[], object], but_not: type[Exception] | None = None) -> None:
    """Read; fails if that ends otherwise than with a result or with one line of a UserError."""
    try:
        read()
    except UserError as error:
        if but_not is not None and isinstance(error, but_not):
            raise
        message = str(error)
    else:
        return
    if "\n" in message or len(message) > LONGEST_MESSAGE:
        raise AssertionError(repr(message[:LONGEST_MESSAGE]))
