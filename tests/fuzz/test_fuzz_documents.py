"""Run files, profiles, topologies, plans, weights and data with something wrong in them: one line, or none."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from hpcpipe.config import parse_run
from tests.fuzz.documents import RUN, Document, make_documents
from tests.fuzz.mutations import encoded, mutated_bytes, mutated_json, some
from tests.fuzz.targets import in_one_line

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KINDS = (
    "run.toml",
    "profile.json",
    "topology.json",
    "plan.json",
    "graph.txt",
    "weights.safetensors",
    "images-idx",
    "images.gz",
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def documents(folder: Path) -> dict[str, Document]:
    return make_documents(folder)


def _read(folder: Path, document: Document, content: bytes) -> None:
    path = folder / document.name
    path.write_bytes(content)
    in_one_line(lambda: document.read(path))


def test_the_documents_themselves_are_read(folder: Path, documents: dict[str, Document]) -> None:
    assert set(documents) == set(KINDS)
    for document in documents.values():
        path = folder / document.name
        path.write_bytes(document.content)
        document.read(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_with_other_bytes_in_it(folder: Path, documents: dict[str, Document], kind: str) -> None:
    document = documents[kind]

    @some(100)
    @given(mutated_bytes(document.content, b"[" * 3000, b"[a." * 2000, b"9" * 5000))
    def check(content: bytes) -> None:
        _read(folder, document, content)

    check()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith(".json")])
def test_a_document_with_other_values_in_it(folder: Path, documents: dict[str, Document], kind: str) -> None:
    document = documents[kind]

    @some(150)
    @given(mutated_json(json.loads(document.content)))
    def check(spoiled: Any) -> None:
        _read(folder, document, encoded(spoiled))

    check()


def test_a_run_file_of_other_values() -> None:
    @some(200)
    @given(mutated_json(tomllib.loads(RUN)))
    def check(spoiled: Any) -> None:
        # Halves of characters no TOML has.
        if isinstance(spoiled, dict) and b"\\ud800" not in encoded(spoiled):
            in_one_line(lambda: parse_run(spoiled))

    check()
