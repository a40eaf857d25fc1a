"""Spoiled checkpoint sets whose checksums are all right: each is read in every way, or refused in one line.

`HPCPIPE_FUZZ_EXAMPLES=20` tries twenty times as many, drawn anew; `tools/fuzz_reader.py` goes on for as long as
one likes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given

from hpcpipe.cli.main import hpcpipe as command_line
from hpcpipe.errors import CheckpointError
from tests.fuzz.mutations import encoded, mutated_bytes, mutated_json, some
from tests.fuzz.sets import Sample, look_once, make_sample, put, put_record, read_everything


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def sample(folder: Path) -> Sample:
    return make_sample(folder)


@pytest.fixture
def agreeable(monkeypatch: pytest.MonkeyPatch) -> None:
    """HDF5 finds nothing wrong with any file: what stands behind it must hold by itself."""
    monkeypatch.setattr("hpcpipe.checkpoint.reader.inspect_apart", lambda *_: None)


def _shown(folder: Path) -> None:
    """The commands that people point at a colleague's set."""
    for words in (["list"], ["show"], ["show", "--json"], ["show", "--digest"], ["verify"]):
        result = CliRunner().invoke(command_line, ["checkpoint", *words, str(folder)])
        assert isinstance(result.exception, (CheckpointError, SystemExit, type(None))), result.exception
        assert "\x1b" not in result.output


def test_the_sample_itself_is_read_in_every_way(folder: Path, sample: Sample) -> None:
    put(folder, sample)
    assert read_everything(folder) == 8
    put(folder, sample, index=encoded(sample.index))
    assert read_everything(folder) == 8


@pytest.mark.usefixtures("agreeable")
def test_an_index_with_other_values_in_it(folder: Path, sample: Sample) -> None:
    @some(200)
    @given(mutated_json(sample.index))
    def check(index: Any) -> None:
        put(folder, sample, index=encoded(index))
        read_everything(folder)

    check()


@pytest.mark.usefixtures("agreeable")
def test_an_index_with_other_bytes_in_it(folder: Path, sample: Sample) -> None:
    @some(150)
    @given(mutated_bytes(encoded(sample.index), b"[" * 300, b'{"a":' * 300))
    def check(index: bytes) -> None:
        put(folder, sample, index=index)
        read_everything(folder)

    check()


@pytest.mark.usefixtures("agreeable")
def test_a_record_with_other_values_in_it(folder: Path, sample: Sample) -> None:
    put(folder, sample)
    record = json.loads((folder / "step-0000000003/commit.json").read_bytes())["record"]

    @some(200)
    @given(mutated_json(record))
    def check(spoiled: Any) -> None:
        put_record(folder, encoded(spoiled))
        read_everything(folder)

    check()


@pytest.mark.usefixtures("agreeable")
def test_a_record_with_other_bytes_in_it(folder: Path, sample: Sample) -> None:
    put(folder, sample)
    good = encoded(json.loads((folder / "step-0000000003/commit.json").read_bytes())["record"])

    @some(150)
    @given(mutated_bytes(good))
    def check(record: bytes) -> None:
        put_record(folder, record)
        read_everything(folder)

    check()


@pytest.mark.usefixtures("agreeable")
def test_sets_with_other_values_in_them_on_the_command_line(folder: Path, sample: Sample) -> None:
    @some(40)
    @given(mutated_json(sample.index), mutated_json(sample.record["meta"]))
    def check(index: Any, meta: Any) -> None:
        put(folder, sample._replace(record={**sample.record, "meta": meta}), index=encoded(index))
        _shown(folder)

    check()


@pytest.mark.usefixtures("agreeable")
def test_a_file_with_other_bytes_in_it_that_hdf5_agrees_with(folder: Path, sample: Sample) -> None:
    @some(150)
    @given(mutated_bytes(sample.file))
    def check(file: bytes) -> None:
        put(folder, sample, file=file)
        read_everything(folder)

    check()


def test_a_file_with_other_bytes_in_its_structure(folder: Path, sample: Sample) -> None:
    # Each costs a process.
    @some(25)
    @given(mutated_bytes(sample.file[: sample.report.index_offset], most=3))
    def check(beginning: bytes) -> None:
        put(folder, sample, file=beginning + sample.file[sample.report.index_offset :])
        look_once(folder)

    check()
