"""Loads the extension module, or says in one line why it cannot be used; it never raises for a bad build.

Needs the standard library alone: setup.py runs this file as well, to agree with it on names and on the digest.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["BUILD_RECORD", "MODULE", "load", "read_build_record", "sources_digest"]

MODULE = "hpcpipe.native._core"
BUILD_RECORD = "_build.json"
"""Beside the module: what it was built for, or why it was not built."""

_REMEDY = "install hpcpipe again"


def load(directory: Path, version: str) -> tuple[ModuleType | None, str | None]:
    """Return (module, None), or (None, reason) where there is none that fits this Python and these sources.

    Args:
        directory: where the module lies, with its build record and, in a source tree, its sources.
        version: of hpcpipe, which the module must have been built for.
    """
    record = read_build_record(directory)
    path = next(
        (
            directory / f"_core{s}"
            for s in importlib.machinery.EXTENSION_SUFFIXES
            if (directory / f"_core{s}").exists()
        ),
        None,
    )
    if path is None:
        return None, _why_missing(directory, record)
    try:
        spec = importlib.util.spec_from_file_location(MODULE, path)
        if spec is None or spec.loader is None:
            return None, f"{path.name} is not an extension module"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:  # an import runs foreign code; whatever it raises is the reason
        return None, f"{path.name} cannot be loaded: {_one_line(error)} ({_built_for(record)}); {_REMEDY}"
    stale = _why_stale(directory, module, version)
    if stale is not None:
        return None, stale
    sys.modules[MODULE] = module
    return module, None


def read_build_record(directory: Path) -> dict[str, Any]:
    """Return what the build wrote about itself; empty where there is no readable record."""
    try:
        record = json.loads((directory / BUILD_RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def sources_digest(directory: Path) -> str | None:
    """Return a SHA-256 over the C++ and CUDA sources in a directory; None where there are none."""
    digest = hashlib.sha256()
    paths = sorted(p for p in directory.glob("*") if p.suffix in (".h", ".inc", ".cpp", ".cu"))
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest() if paths else None


def _why_missing(directory: Path, record: dict[str, Any]) -> str:
    others = sorted(p.name for p in directory.glob("_core*.so"))
    if others:
        return f"{others[0]} is {_built_for(record)}; {_REMEDY}"
    if record.get("reason"):
        return f"it was not built: {record['reason']}"
    return f"it was not built; {_REMEDY}"


def _why_stale(directory: Path, module: ModuleType, version: str) -> str | None:
    built = getattr(module, "VERSION", "unknown")
    if built != version:
        return f"the extension was built for hpcpipe {built}, this is {version}; {_REMEDY}"
    present = sources_digest(directory)
    if present is not None and present != getattr(module, "SOURCES", None):
        return f"the extension was built from other sources than those in {directory}; {_REMEDY}"
    return None


def _built_for(record: dict[str, Any]) -> str:
    return f"built for Python {record.get('python', 'unknown')}, this is {platform.python_version()}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
