"""Has a file that HDF5 must look at looked at by a process of its own, so that nothing in it can harm this one.

The HDF5 library crashes, runs in circles or takes all memory on some files that were made to that end. It meets
them only in a short-lived child with limits on time and memory, which knows nothing of MPI, the batch system or
this process but where Python's modules are, and says one line.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcpipe.checkpoint.layout import FileReport
from hpcpipe.checkpoint.structure import REFUSAL, LockedError, NoVerdictError
from hpcpipe.errors import CheckpointError
from hpcpipe.untrusted import one_line

PROGRAM = Path(__file__).with_name("inspector.py")
SECONDS = 60.0
"""Of wall time, for a process that needs a third of one: file systems and busy nodes may be slow."""
SECONDS_PER_ARRAY = 2e-3
"""Twenty times what the walk takes."""
LONGEST_ANSWER = 1 << 16
_KEPT = (
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PATH",
    "TMPDIR",
    "HDF5_USE_FILE_LOCKING",
    "HDF5_DISABLE_VERSION_CHECK",
)
"""All that the child gets of the environment: a variable of a launcher would make it a rank."""
_SET = {
    "HDF5_PLUGIN_PRELOAD": "::",
    "MPI4PY_RC_INITIALIZE": "false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""No plugins, which HDF5 loads by the names in a file; no MPI where h5py was built with it; no idle threads."""
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS)


def inspect_apart(path: Path, report: FileReport, arrays: int) -> None:
    """Have the structure of a rank file of so many `arrays` compared with its index, in a process of its own.

    Raises:
        LockedError: another process holds the file, or the file system has no locks.
        NoVerdictError: the process could not run, or was ended by somebody else.
        CheckpointError: it is no HDF5 file, holds what a rank file must not, differs from its index, or does harm.
    """
    seconds = SECONDS + SECONDS_PER_ARRAY * arrays
    request = {"path": os.fspath(path), "report": list(report), "modules": sys.path, "seconds": seconds}
    try:
        answer, code = _run([sys.executable, "-I", os.fspath(PROGRAM)], json.dumps(request).encode(), seconds)
    except TimeoutError as error:
        raise CheckpointError(
            f"{path}: the HDF5 library was not done with it after {seconds:.0f} s; {REFUSAL}"
        ) from error
    except OSError as error:
        raise _no_verdict(path, f"no process to do so can be started ({error.strerror})") from error
    if code < 0:
        raise _ended(path, -code)
    said = _parse(answer)
    if said is None:
        raise _no_verdict(path, f"the process that should do so ended with exit code {code} and said nothing")
    kind, text = said
    if kind == "fine":
        return
    if kind == "failed":
        raise _no_verdict(path, text)
    raise (LockedError if kind == "locked" else CheckpointError)(text)


def _run(command: Sequence[str], request: bytes, seconds: float) -> tuple[bytes, int]:
    """What `command` says and its exit code; TimeoutError when it takes longer. It is gone in any case."""
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | _SET
    end = time.monotonic() + seconds
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Signals to the job's process group mean the ranks.
        start_new_session=True,
    ) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                child.stdin.write(request)
                child.stdin.close()
            except BrokenPipeError:
                # It has ended already; its exit code will tell.
                pass
            answer = _read(child.stdout.fileno(), end)
            if len(answer) > LONGEST_ANSWER:
                child.kill()
            return answer, child.wait(max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            child.kill()


def _read(descriptor: int, end: float) -> bytes:
    """All that comes, up to the longest answer."""
    data = b""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while len(data) <= LONGEST_ANSWER:
        if not poll.poll(max(end - time.monotonic(), 0.0) * 1e3):
            raise TimeoutError
        piece = os.read(descriptor, LONGEST_ANSWER)
        if not piece:
            break
        data += piece
    return data


def _parse(answer: bytes) -> tuple[str, str] | None:
    """(kind, text) of an answer; None if it is none."""
    try:
        found: Any = json.loads(answer) if len(answer) <= LONGEST_ANSWER else None
    except (ValueError, RecursionError):
        return None
    if isinstance(found, list) and len(found) == 2 and all(isinstance(part, str) for part in found):
        return found[0], one_line(found[1], 2000)
    return None


def _ended(path: Path, number: int) -> CheckpointError:
    """What it means that the child was ended by a signal."""
    if number in _CRASHES:
        name = signal.Signals(number).name
        return CheckpointError(
            f"{path}: the HDF5 library crashed on it ({name}, in a process of its own); {REFUSAL}"
        )
    if number in (signal.SIGXCPU, signal.SIGALRM):
        return CheckpointError(f"{path}: the HDF5 library did not come to an end with it; {REFUSAL}")
    return _no_verdict(path, f"the process that should do so was ended by signal {number}")


def _no_verdict(path: Path, why: str) -> NoVerdictError:
    return NoVerdictError(
        f"{path}: its structure could not be examined ({why}), which says nothing about the file; try again"
    )
