"""Runs a Python program on several ranks under the mpirun of this environment, with a time limit from outside.

A hang becomes a failed test: when the time is up, the launcher and every process below it are killed, also those
that the launcher has put into sessions of their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.torture_parts import jobs
from tools.torture_parts.jobs import launch_line

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs"
TIMED_OUT = 124


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended; `rc` is 124 when it was killed for taking too long."""

    rc: int
    stdout: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"exit code {self.rc} after {self.seconds:.1f} s\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


def run(
    program: str | Path | Sequence[str],
    ranks: int,
    *arguments: str,
    timeout_s: float = 60.0,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Result:
    """Run `program` on `ranks` ranks.

    program: a file (a bare name is looked up in tests/mpi/programs), or what follows `python` as a list, such as
        `["-m", "hpcpipe.cli.main", "train"]`.
    """
    return supervise(mpirun(program, ranks, *arguments), timeout_s=timeout_s, environment=environment, cwd=cwd)


def run_alone(
    program: str | Path | Sequence[str],
    *arguments: str,
    timeout_s: float = 60.0,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    python: str = sys.executable,
) -> Result:
    """The same without mpirun: one process, as a user starts it by mistake or on purpose."""
    command = [python, *_python_arguments(program), *arguments]
    return supervise(command, timeout_s=timeout_s, environment=environment, cwd=cwd)


def mpirun(
    program: str | Path | Sequence[str],
    ranks: int,
    *arguments: str,
    launcher: str | None = None,
    python: str = sys.executable,
) -> list[str]:
    """The command line of such a run, for tests that start and kill it themselves, or with another stack."""
    return launch_line(ranks, [*_python_arguments(program), *arguments], launcher=launcher, python=python)


def rank_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a run here, with this checkout importable."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return jobs.rank_environment({"PYTHONPATH": path, **(extra or {})})


def supervise(
    command: Sequence[str],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Result:
    """Run a command to its end or for `timeout_s` seconds, and leave no process of it behind."""
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        env=rank_environment(environment),
        cwd=cwd or ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
        rc = process.returncode
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        stdout, stderr = process.communicate()
        rc = TIMED_OUT
    return Result(rc=rc, stdout=stdout, stderr=stderr, seconds=time.monotonic() - started)


@contextmanager
def going_on(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
) -> Iterator[subprocess.Popen[str]]:
    """A command that goes on while the block does; nothing of it is left behind it."""
    process = subprocess.Popen(
        command,
        env=rank_environment(environment),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill_tree(process.pid)


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants, found before the first of them dies."""
    for victim in [*descendants(pid), pid]:
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            continue


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`, deepest last."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command in parentheses may itself hold spaces and parentheses.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    front = [pid]
    while front:
        front = [child for parent in front for child in children.get(parent, [])]
        found += front
    return found


def _python_arguments(program: str | Path | Sequence[str]) -> list[str]:
    if isinstance(program, (str, Path)):
        path = Path(program)
        return [str(path if path.is_absolute() else PROGRAMS / path)]
    return list(program)
