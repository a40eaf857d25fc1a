"""Writes the values of a run file as TOML: tables of scalars, lists and inline tables.

It writes only what the run file can hold; reading is the standard library's business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import date, datetime, time
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dump(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return TOML text of `{table: {key: value}}`; a value of None is left out, since TOML has no null.

    Raises TypeError for a value that TOML cannot hold.
    """
    blocks = []
    for name, table in tables.items():
        lines = [f"[{_key(name)}]"]
        lines += [f"{_key(key)} = {_value(value)}" for key, value in table.items() if value is not None]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, except that TOML also wants DEL escaped and knows no surrogate pairs.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, Mapping):
        pairs = (f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"TOML has no form for {value!r}")
