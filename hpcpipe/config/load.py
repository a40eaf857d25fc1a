"""Reads a run file, lays overrides over it and validates the result.

The only place where the configuration meets the file system. Every mistake becomes part of one ConfigError
line: file, dotted key, what is wrong, remedy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcpipe.config.explain import explain
from hpcpipe.config.run import RunConfig
from hpcpipe.config.sections import SPLIT_BY_HAND, SPLIT_BY_PLAN
from hpcpipe.errors import ConfigError
from hpcpipe.untrusted import printable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_LONGEST_FILE = 16 << 20


def load_run(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Return the run file at `path` with the overrides (`section.key=value`) laid over it, checked.

    Relative paths inside the file are left as they are: they mean the working directory.

    Raises ConfigError: the file is missing, is no TOML, or any value is wrong; all mistakes in one line.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            data = file.read(_LONGEST_FILE + 1)
        if len(data) > _LONGEST_FILE:
            raise ConfigError(f"{path}: longer than {_LONGEST_FILE >> 20} MiB, which no run file is")
        tables = _load_toml(data.decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such run file; name an existing one, such as a copy from jobs/") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the run file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid TOML: {_one_line(error)}; strings need quotes") from None
    return parse_run(tables, source=str(path), overrides=overrides, out=f"runs/{path.stem}")


def parse_run(
    tables: Mapping[str, Any], *, source: str = "run", overrides: Sequence[str] = (), out: str = "runs/run"
) -> RunConfig:
    """Return the configuration of `{section: {key: value}}`; `source` names the file in messages.

    `out` is the value of run.out where it is not given. Raises ConfigError as `load_run` does.
    """
    merged: dict[str, Any] = {str(name): _own(table) for name, table in tables.items()}
    for section in ("model", "data"):
        if isinstance(merged.get(section), str):
            merged[section] = {"name": merged[section]}
    overridden = [_override(merged, text) for text in overrides]
    _let_go_of_other_splits(merged, overridden)
    for section in ("run", "model", "data", "optimizer"):
        merged.setdefault(section, {})
    if isinstance(merged["run"], dict):
        merged["run"].setdefault("out", out)
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        mistakes: dict[str, list[str]] = {}
        for key, text in explain(error, merged):
            by_option = any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in overridden)
            mistakes.setdefault("--set" if by_option else source, []).append(f"{key}: {text}")
    raise ConfigError("; ".join(f"{where}: {printable('; '.join(found))}" for where, found in mistakes.items()))


def _override(tables: dict[str, Any], text: str) -> str:
    """Lay `a.b=value` over the tables and return the dotted key."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"--set {printable(text)}: is not UTF-8 text")
    key, equals, written = text.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"--set {text}: must have the form section.key=value, such as optimizer.lr=0.1")
    table = tables
    for depth, part in enumerate(parts[:-1]):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            whole = ".".join(parts[: depth + 1])
            raise ConfigError(f"--set {text}: {whole} is no table; override it as a whole, {whole}=...")
    table[parts[-1]] = _freeze(_parse(written.strip()))
    return ".".join(parts)


def _let_go_of_other_splits(tables: dict[str, Any], overridden: Sequence[str]) -> None:
    """Where the command line says how to split the layers, the file's other way of splitting is not meant."""
    pipeline = tables.get("pipeline")
    if not isinstance(pipeline, dict):
        return
    for ways, others in ((SPLIT_BY_PLAN, SPLIT_BY_HAND), (SPLIT_BY_HAND, SPLIT_BY_PLAN)):
        if any(f"pipeline.{key}" in overridden for key in ways):
            for key in others:
                if f"pipeline.{key}" not in overridden:
                    pipeline.pop(key, None)


def _parse(written: str) -> Any:
    """Read a TOML value; what is none is a string, so that a shell user need not quote twice."""
    try:
        parsed = _load_toml(f"value = {written}\n")
    except ValueError:
        parsed = {}
    if list(parsed) == ["value"]:
        return parsed["value"]
    try:
        return float(written)
    except ValueError:
        return written


def _load_toml(text: str) -> dict[str, Any]:
    """Raises ValueError, for numbers of too many digits as well."""
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return tables


def _own(table: Any) -> Any:
    """Return a section as a dict that may be changed, its lists frozen."""
    return {str(key): _freeze(value) for key, value in table.items()} if isinstance(table, Mapping) else table


def _freeze(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item) for item in value)
    if isinstance(value, Mapping):
        return {str(key): _freeze(item) for key, item in value.items()}
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
