"""Files that nobody vouches for: opened only if they are plain files, parsed only if they are plain JSON.

It owns the bounds that hold for every such file, whatever it is: no waiting for a pipe, no device, no more bytes
than asked for, no bottomless nesting, nothing that another program would read otherwise. What the content means is
the caller's business.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any, NoReturn

MOST_CONTAINERS = 2**20
"""Objects and lists in one document: each takes twenty times the memory of its two characters."""
DEEPEST = 64
"""Levels of objects and lists: far from where Python, or whoever gets the document next, runs out of stack."""


def open_plain(path: str | os.PathLike[str]) -> int:
    """A descriptor for reading a regular file (or what a link leads to, if that is one).

    Raises:
        OSError: there is none, or it is a folder, pipe, socket or device, none of which is waited for.
    """
    # Looked at before it is opened, because opening a device can do things; and after, because it may be another.
    _check_plain(os.stat(path), path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_plain(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_plain(path: str | os.PathLike[str], longest: int) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: as `open_plain`, or it has more than `longest` bytes.
    """
    with open(open_plain(path), "rb") as file:
        data = file.read(longest + 1)
    if len(data) > longest:
        raise OSError(errno.EFBIG, f"it has more than {longest} bytes", os.fspath(path))
    return data


def _check_plain(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def parse_json(data: bytes | str) -> Any:
    """The value of a JSON document, as any careful program would read it.

    Raises:
        ValueError: not UTF-8, no JSON, a key given twice, NaN or Infinity, more than `DEEPEST` levels or
            `MOST_CONTAINERS` objects and lists; one line.
    """
    text = data if isinstance(data, str) else data.decode("utf-8")
    if text.count("{") + text.count("[") > MOST_CONTAINERS:
        raise ValueError(f"more than {MOST_CONTAINERS} objects and lists")
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError(f"nested too deeply, beyond {DEEPEST} levels") from None
    except ValueError as error:
        raise ValueError(one_line(error)) from None
    _check_depth(found)
    return found


def one_line(what: object, longest: int = 300) -> str:
    """An error, or anything else, as one line of text that is safe and not too long to print."""
    text = " ".join(str(what)[: 4 * longest].split()) or type(what).__name__
    return printable(text if len(text) <= longest else text[: longest - 1] + "…")


def printable(text: str) -> str:
    """`text` with escapes for what a terminal would not show but do, and for halves of characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _check_depth(found: Any) -> None:
    level = [found] if isinstance(found, (dict, list)) else []
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"nested too deeply, beyond {DEEPEST} levels")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {json.dumps(twice[:60])} stands twice in one object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON; every number must be finite")
