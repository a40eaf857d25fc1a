"""metrics.jsonl: one JSON object a line, written by the one rank that owns the last stage.

A resumed run first cuts the file back to the checkpoint it starts from, so that every step stands in it once.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class MetricsFile:
    """The metrics of one run, appended line by line.

    Lines of training have `step` (updates applied), `epoch`, `loss`, `lr`, `samples_per_s`, `wall_s`; lines of
    evaluation have `step`, `epoch`, `evaluation` (an object of figures) and `wall_s`.
    """

    def __init__(self, path: Path, *, keep_until: int) -> None:
        """Open `path` without its lines beyond step `keep_until` and evaluations at it, which are done again."""
        kept = []
        if keep_until and path.exists():
            for line in path.read_text().splitlines():
                entry = _parse(line)
                if entry is None or entry["step"] > keep_until:
                    continue
                if entry["step"] < keep_until or "evaluation" not in entry:
                    kept.append(line + "\n")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(kept))
        temporary.replace(path)
        self._file = path.open("a", buffering=1)

    def write(self, entry: dict[str, Any]) -> None:
        """Append one line. Numbers that JSON does not know (NaN, infinity) become null."""
        self._file.write(json.dumps(_finite(entry)) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _parse(line: str) -> dict[str, Any] | None:
    """A line's object; None for one that a killed run left unfinished."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value
