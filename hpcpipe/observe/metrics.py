"""metrics.jsonl: one JSON object a line, written by the one rank that owns the last stage.

A resumed run first cuts the file back to the checkpoint it starts from, so that every step stands in it once. A
line that a full disk does not take is lost as a whole, and training goes on.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcpipe.durable import replace_file, write_all
from hpcpipe.errors import FolderError
from hpcpipe.observe.progress import say as to_stderr


class MetricsFile:
    """The metrics of one run, appended line by line; `lost` is how many lines could not be written.

    Lines of training have `step` (updates applied), `epoch`, `loss`, `lr`, `samples_per_s`, `wall_s`; lines of
    evaluation have `step`, `epoch`, `evaluation` (an object of figures) and `wall_s`.
    """

    def __init__(self, path: Path, *, keep_until: int, say: Callable[[str], None] = to_stderr) -> None:
        """Open `path` without its lines beyond step `keep_until` and evaluations at it, which are done again.

        Raises:
            FolderError: it cannot be written.
        """
        self.lost = 0
        self._path = path
        self._say = say
        self._failing = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            self._length = self._cut_back(keep_until)
        except OSError as error:
            raise FolderError(
                f"{path}: cannot be written ({error.strerror}): mend that and start again"
            ) from error

    def write(self, entry: dict[str, Any]) -> None:
        """Append one line. Numbers that JSON does not know (NaN, infinity) become null.

        A line that cannot be written is counted, and said of the first of several.
        """
        line = (json.dumps(_finite(entry)) + "\n").encode()
        try:
            write_all(self._descriptor, line, self._length)
        except OSError as error:
            self._lose(error)
            return
        self._length += len(line)
        if self._failing:
            self._failing = False
            self._say(f"{self._path} is written again; {self._missing()}")

    def close(self) -> None:
        """Close the file; what it lacks is said."""
        try:
            # Where the disk is elsewhere, it may say only here that it is full.
            os.fsync(self._descriptor)
        except OSError as error:
            self._say(f"{self._path}: its last lines may be missing ({error.strerror})")
        os.close(self._descriptor)
        if self.lost:
            self._say(f"{self._path}: {self._missing()}")

    def _cut_back(self, keep_until: int) -> int:
        """Leave only lines that count; the length of the file in bytes."""
        old = self._path.read_bytes() if keep_until else b""
        kept = b"".join(line for line in old.splitlines(keepends=True) if _counts(line, keep_until))
        if not old.startswith(kept):
            replace_file(self._path, kept)
            os.close(self._descriptor)
            self._descriptor = os.open(self._path, os.O_RDWR)
        os.ftruncate(self._descriptor, len(kept))
        return len(kept)

    def _lose(self, error: OSError) -> None:
        self.lost += 1
        with suppress(OSError):
            # Half a line would spoil the next one.
            os.ftruncate(self._descriptor, self._length)
        if not self._failing:
            self._failing = True
            self._say(
                f"{self._path} CANNOT BE WRITTEN ({error.strerror}): training goes on, and lines are lost until "
                "that is mended"
            )

    def _missing(self) -> str:
        return f"{self.lost} line{' is' if self.lost == 1 else 's are'} missing that could not be written"


def _counts(line: bytes, keep_until: int) -> bool:
    """Whether a line belongs before the checkpoint of step `keep_until`; one that a kill left torn does not."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if not line.endswith(b"\n") or not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
        return False
    return entry["step"] < keep_until or (entry["step"] == keep_until and "evaluation" not in entry)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value
