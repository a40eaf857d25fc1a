"""The program that looks at one rank file with HDF5, in a process of its own, and says what is wrong with it.

Started by `fence`, as a file, with a request on standard input; its answer is one JSON list on standard output:
what kind of answer it is, and a line of text. It limits itself before it opens the file.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

MEMORY = 512 << 20
"""Bytes for the walk of a file, beyond what Python, h5py and the index have taken."""
_FALLBACK_MEMORY = 8 << 30
_GRACE_S = 5


def main() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        # The batch system may send these to every process of a step; they mean the ranks.
        signal.signal(number, signal.SIG_IGN)
    request = json.loads(sys.stdin.buffer.read())
    _limit_time(request["seconds"])
    # Not what Python would make of the environment and the working directory: the modules of whoever asks.
    sys.path[:] = request["modules"]
    kind, text = _answer(request)
    os.write(1, json.dumps([kind, text]).encode())
    # What HDF5 does when the interpreter ends is no longer of interest.
    os._exit(0)


def _answer(request: dict[str, Any]) -> tuple[str, str]:
    try:
        from hpcpipe.checkpoint.layout import FileReport, Index
        from hpcpipe.checkpoint.structure import REFUSAL, LockedError, check_structure
        from hpcpipe.errors import CheckpointError

        path, report = Path(request["path"]), FileReport(*request["report"])
        with open(path, "rb") as file:
            file.seek(report.index_offset)
            index = Index.decode(file.read(report.index_length), report.length)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {str(error)[:300]}"
    _limit_memory()
    try:
        check_structure(path, report, index)
    except LockedError as error:
        return "locked", str(error)
    except CheckpointError as error:
        return "refused", str(error)
    except MemoryError:
        return "refused", f"{path}: the HDF5 library needs more than {MEMORY >> 20} MiB for it; {REFUSAL}"
    return "fine", ""


def _limit_time(seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Whoever asked ends this process in time; the alarm is for when he has ended himself.
    signal.alarm(int(seconds) + _GRACE_S)
    _lower(resource.RLIMIT_CPU, int(seconds / 2), hard=int(seconds))


def _limit_memory() -> None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
    except (OSError, ValueError, IndexError):
        most = _FALLBACK_MEMORY
    _lower(resource.RLIMIT_AS, most)
    _lower(resource.RLIMIT_FSIZE, 0)


def _lower(limit: int, most: int, *, hard: int | None = None) -> None:
    """Set a limit to `most` and `hard` (also `most` without it), or leave it where it is lower."""
    wanted = (most, most if hard is None else hard)
    present = resource.getrlimit(limit)
    soft, hard = (
        new if old == resource.RLIM_INFINITY else min(new, old) for new, old in zip(wanted, present, strict=True)
    )
    resource.setrlimit(limit, (soft, hard))


if __name__ == "__main__":
    main()
