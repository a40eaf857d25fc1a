"""Records of planning on disk: JSON files with a format, a version and fixed keys, checked value by value.

It owns what profiles, topologies and plans have in common as files: a mistake is one line with file, key, what was
expected and what was found. It knows no record by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn

from hpcpipe.durable import replace_file
from hpcpipe.errors import PlanError
from hpcpipe.hints import did_you_mean
from hpcpipe.untrusted import one_line, parse_json

LONGEST_FILE = 64 * 2**20
"""Bytes: far above the plan of ten thousand ranks, and read in a moment."""
LARGEST_COUNT = 2**53
"""Beyond any real number of bytes, and still exact as a float."""
LONGEST_TIME = 1e9
"""Seconds, thirty years: a longer one is a mistake of units."""


def read_text(path: str | os.PathLike[str], what: str) -> str:
    """Return a file's text. `what` names the file's kind in messages ("profile").

    Raises PlanError: it is missing, unreadable, too long or not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(LONGEST_FILE + 1)
    except FileNotFoundError:
        raise PlanError(f"{path}: no such {what}; name an existing file") from None
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: cannot read the {what}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > LONGEST_FILE:
        raise PlanError(f"{path}: longer than {LONGEST_FILE >> 20} MiB, which no {what} is")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: is not UTF-8 text (byte {error.start}); this is no {what}") from None


def parse(text: str, source: str | os.PathLike[str], form: str, version: int) -> dict[str, Any]:
    """Return the JSON object in `text` without its "format" (must be `form`) and "version" keys.

    Raises PlanError: no JSON object, another format or version, a key given twice, NaN or infinity.
    """
    try:
        found = parse_json(text)
    except ValueError as error:
        raise PlanError(f"{source}: is no valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise PlanError(f"{source}: must hold one JSON object with the format {form}, got {shown(found)}")
    if found.get("format") != form:
        held = shown(found["format"]) if "format" in found else "a JSON file without a format"
        raise PlanError(f'{source}: must have the format "{form}", got {held}')
    if type(found.get("version")) is not int or found["version"] != version:
        got = shown(found.get("version"))
        raise PlanError(f"{source}: version must be {version}, got {got}; this hpcpipe cannot read it")
    return {key: value for key, value in found.items() if key not in ("format", "version")}


def write(path: str | os.PathLike[str], form: str, version: int, table: Mapping[str, Any]) -> None:
    """Put a JSON object at `path` as a whole or not at all.

    Raises PlanError: the folder is missing or the disk is full; what stood there before is unharmed.
    """
    text = json.dumps({"format": form, "version": version, **table}, indent=1, allow_nan=False, ensure_ascii=False)
    path = Path(path)
    try:
        replace_file(path, (text + "\n").encode())
    except OSError as error:
        raise PlanError(f"{path}: cannot write it: {error.strerror}") from None


def entries(found: Any, kind: type, where: str) -> dict[str, Any]:
    """Return `found` as the keyword arguments of the dataclass `kind`: all keys known, none missing.

    Raises PlanError with the key; `where` is the dotted path of the record in its file.
    """
    dot = f"{where}." if where else ""
    if not isinstance(found, dict):
        raise PlanError(f"{where}{': ' * bool(where)}must be an object, got {shown(found)}")
    known = {field.name: field for field in fields(kind)}
    for key in found:
        if key not in known:
            raise PlanError(
                f"{dot}{one_line(key, 60)}: no such key{did_you_mean(key, known)}; the keys are {', '.join(known)}"
            )
    for key, field in known.items():
        if key not in found and field.default is MISSING and field.default_factory is MISSING:
            raise PlanError(f"{dot}{key}: missing")
    return found


def listed(found: Any, where: str) -> list[Any]:
    """Return a JSON list. Raises PlanError."""
    return found if isinstance(found, list) else wrong(where, "a list", found)


def table(found: Any, where: str) -> Mapping[str, Any]:
    """Return a JSON object of free keys. Raises PlanError."""
    return found if isinstance(found, Mapping) else wrong(where, "an object", found)


def number(found: Any, where: str, *, unit: str = "seconds", largest: float = LONGEST_TIME) -> float:
    """Return a finite number of at least 0. Raises PlanError."""
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found <= largest:
        wrong(where, f"a number of {unit}, 0 to {largest:g}", found)
    return float(found)


def count(found: Any, where: str, *, unit: str = "bytes", least: int = 0) -> int:
    """Return a whole number. Raises PlanError."""
    if type(found) is not int or not least <= found <= LARGEST_COUNT:
        wrong(where, f"a whole number of {unit}, {least} to 2^53", found)
    return int(found)


def text(found: Any, where: str) -> str:
    """Return a string of one printable line. Raises PlanError."""
    if not isinstance(found, str) or not found.strip() or not found.isprintable():
        wrong(where, "a string of one line, not empty", found)
    return str(found)


def wrong(where: str, expected: str, got: object) -> NoReturn:
    raise PlanError(f"{where}: must be {expected}, got {shown(got)}")


def shown(value: object) -> str:
    """Return a value as JSON, in one line of 60 characters at most."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
