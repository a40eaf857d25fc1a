"""Faults of a disk for the processes of a run, injected between Python and the C library by `faults.c`."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCE = Path(__file__).with_suffix(".c")
KILL = "kill"


def fault(call: str, path: str, do: int | str, *, after: int = 0) -> dict[str, str]:
    """The environment in which `call` on files whose path matches the pattern fails with errno `do`, or kills.

    A pwrite does so once `after` bytes of the file are written.
    """
    return {
        "LD_PRELOAD": str(_library()),
        "FAULT_CALL": call,
        "FAULT_PATH": path,
        "FAULT_DO": str(do),
        "FAULT_AFTER": str(after),
    }


@cache
def _library() -> Path:
    folder = Path(_kept().name)
    path = folder / "faults.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-o", path, SOURCE, "-ldl"], check=True)
    return path


@cache
def _kept() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="hpcpipe-faults-")
