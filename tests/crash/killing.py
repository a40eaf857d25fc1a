"""Runs that are killed, stopped and resumed, as tests of restart want them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.mpi.launch import Result, descendants, going_on, mpirun, run
from tools.torture_parts.jobs import HPCPIPE, is_rank
from tools.torture_parts.runs import digest_of as digest_of
from tools.torture_parts.runs import losses_of as losses_of
from tools.torture_parts.runs import steps_of, write_run_file

RANKS = 3
TIME_LIMIT_S = 120.0


def run_file_of(folder: Path, policy: str, optimizer: str = "sgd") -> Path:
    return write_run_file(folder, policy=policy, optimizer=optimizer)


def train(
    run_file: Path, out: Path, *options: str, ranks: int = RANKS, environment: Mapping[str, str] | None = None
) -> Result:
    arguments = ("train", str(run_file), "--out", str(out), *options)
    return run(HPCPIPE, ranks, *arguments, timeout_s=TIME_LIMIT_S, environment=environment)


@contextmanager
def running(
    run_file: Path, out: Path, *options: str, ranks: int = RANKS, start: Callable[..., list[str]] = mpirun
) -> Iterator[subprocess.Popen[str]]:
    """A run that goes on while the block does; nothing of it is left behind it. `start` makes its command line."""
    command = start(HPCPIPE, ranks, "train", str(run_file), "--out", str(out), *options)
    with going_on(command, stdout=subprocess.DEVNULL) as process:
        yield process


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks that are alive, in ascending order."""
    return sorted(pid for pid in descendants(process.pid) if is_rank(pid))


def kill_one_rank(
    run_file: Path, out: Path, *options: str, after_s: float, chooser: random.Random, ranks: int = RANKS
) -> int | None:
    """Start a run, kill one of its ranks after a while; its exit code, None if it ended before."""
    with running(run_file, out, "--resume", "auto", *options, ranks=ranks) as process:
        time.sleep(after_s)
        alive = ranks_of(process)
        if alive:
            os.kill(chooser.choice(alive), signal.SIGKILL)
        process.communicate(timeout=TIME_LIMIT_S)
    return process.returncode if alive else None


def wait_for_steps(out: Path, steps: int) -> None:
    deadline = time.monotonic() + TIME_LIMIT_S
    while time.monotonic() < deadline:
        if steps_of(out) >= steps:
            return
        time.sleep(0.05)
    raise AssertionError(f"{out} did not come to {steps} steps")
