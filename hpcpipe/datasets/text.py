"""Bytes of a file or of a folder's files as sequences to predict the next byte of.

The default corpus is the Python standard library's own source, which is on every machine. Sizes are known from
the file system; the text is read when the first row is asked for, which the middle stages never do.
"""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcpipe.config.data import TextData
from hpcpipe.datasets.order import Index
from hpcpipe.datasets.protocol import DataDescription
from hpcpipe.datasets.rows import Minibatches
from hpcpipe.errors import DataError

VOCAB = 256
_NOT_SOURCE = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")
"""Folders of the standard library that differ between installations."""


class Corpus:
    """The concatenated bytes of some files, read once and only if needed."""

    def __init__(self, files: Sequence[Path], limit: int | None) -> None:
        self._files = files
        self._sizes = [file.stat().st_size for file in files]
        self._limit = limit

    def __len__(self) -> int:
        """Return the number of bytes."""
        total = sum(self._sizes)
        return total if self._limit is None else min(total, self._limit)

    @cached_property
    def bytes(self) -> NDArray[np.uint8]:
        """The text. Raises DataError when a file has changed its size since it was found."""
        text = np.empty(len(self), dtype=np.uint8)
        at = 0
        for file, size in zip(self._files, self._sizes, strict=True):
            if at == len(text):
                break
            try:
                content = file.read_bytes()
            except OSError as error:
                raise DataError(f"data.path: {file}: cannot be read: {error.strerror}") from error
            if len(content) != size:
                text_of = f"had {size} bytes at the start of the run and now has {len(content)}"
                raise DataError(f"data.path: {file}: {text_of}; train on files that nobody changes")
            part = np.frombuffer(content, dtype=np.uint8)[: len(text) - at]
            text[at : at + len(part)] = part
            at += len(part)
        return text


class TextTable:
    """Sequences of `length` bytes that follow each other from `first` on; targets are one byte further."""

    def __init__(self, corpus: Corpus, first: int, last: int, length: int) -> None:
        self._corpus = corpus
        self._first = first
        self._length = length
        self._rows = max(0, (last - first - 1) // length)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self._rows

    def inputs(self, index: Index, epoch: int) -> tuple[Tensor, ...]:
        """Return int64 tokens of shape (rows, length)."""
        return (self._gather(index, 0),)

    def targets(self, index: Index, epoch: int) -> Tensor:
        """Return the int64 tokens that follow, of shape (rows, length)."""
        return self._gather(index, 1)

    def _gather(self, index: Index, shift: int) -> Tensor:
        starts = self._first + shift + index * self._length
        places = starts[:, None] + np.arange(self._length, dtype=np.int64)
        return torch.from_numpy(self._corpus.bytes[places].astype(np.int64))


def build_text(config: TextData, seed: int) -> Minibatches:
    """Return a text as a data set. Raises DataError: nothing to read, or a text shorter than one sequence."""
    if config.path is None:
        source = Path(sysconfig.get_paths()["stdlib"])
        files = _folder_files(source, "*.py", skipped=_NOT_SOURCE)
    else:
        source = Path(config.path)
        files = _files(source, config.pattern)
    corpus = Corpus(files, config.limit)
    total = len(corpus)
    held = round(total * config.eval_fraction)
    train = TextTable(corpus, 0, total - held, config.sequence)
    if not len(train):
        raise DataError(
            f"data.path: {source}: {total} bytes, {total - held} of them to train on, are too short for one "
            f"sequence of {config.sequence} bytes and the byte after it; give more text or lower data.sequence"
        )
    evaluation = TextTable(corpus, total - held, total, config.sequence)
    description = DataDescription(input_shape=(config.sequence,), classes=VOCAB, tokens=True)
    return Minibatches(train, evaluation, description, config=config, seed=seed)


def _files(source: Path, pattern: str) -> list[Path]:
    try:
        mode = source.stat().st_mode
    except OSError as error:
        hint = "name a text file or a folder, or remove the key for the standard library's source"
        raise DataError(f"data.path: {source}: {error.strerror}; {hint}") from error
    if stat.S_ISDIR(mode):
        return _folder_files(source, pattern)
    return [source]


def _folder_files(folder: Path, pattern: str, skipped: Sequence[str] = ()) -> list[Path]:
    """Return the folder's files whose name fits, in the order of their paths, which is the same on every rank."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        fitting = [Path(parent, name) for name in names if fnmatchcase(name, pattern) and not name.startswith(".")]
        found += [path for path in fitting if path.is_file()]
    if not found:
        raise DataError(f"data.path: {folder}: no file matches {pattern!r}; check data.path and data.pattern")
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())
