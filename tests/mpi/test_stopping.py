"""A run that is asked to stop: by whom, when and how often, and what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcpipe.checkpoint.sets import choose, find_sets
from tests.crash.killing import HPCPIPE, TIME_LIMIT_S, ranks_of, running, wait_for_steps
from tests.mpi.launch import PROGRAMS, Result, run, run_alone

RUN = """
[run]
epochs = 4000
log_every = 1
[model]
name = "builder:build"
[data]
name = "digits"
batch = 32
[optimizer]
name = "sgd"
lr = 0.05
[checkpoint]
every = 8
"""
BUILDER = """
from torch.nn import Linear, Tanh

def build():
    return [("a", Linear(64, 16)), ("b", Tanh()), ("c", Linear(16, 10))]
"""
SLOW_DISK = """
import os, threading, time

fsync = os.fsync

def slow(descriptor):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(1.0)
    fsync(descriptor)

os.fsync = slow
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that goes on for long, of a model of the user's."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "builder.py").write_text(BUILDER)
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def slow_disk(run_file: Path) -> Path:
    """The same run, where each checkpoint takes seconds to reach the disk."""
    (run_file.parent / "builder.py").write_text(SLOW_DISK + BUILDER)
    return run_file


def send(process: subprocess.Popen[str], rank: int, *signals: signal.Signals) -> None:
    for number in signals:
        os.kill(ranks_of(process)[rank], number)


def end_of(process: subprocess.Popen[str]) -> list[str]:
    """What hpcpipe has said, once the run has ended."""
    _, stderr = process.communicate(timeout=TIME_LIMIT_S)
    return [line.removeprefix("hpcpipe: ") for line in stderr.splitlines() if line.startswith("hpcpipe: ")]


def newest(out: Path) -> int:
    return choose(out, deep=True)[0].step


def wait_for_a_write(out: Path) -> None:
    """Until there is a committed set, and a newer one that is not yet."""
    until = time.monotonic() + TIME_LIMIT_S
    while time.monotonic() < until:
        sets = find_sets(out / "checkpoints")
        if any(info.committed for info in sets) and not sets[0].committed:
            return
        time.sleep(0.02)
    raise AssertionError(f"{out}: no checkpoint is written beside an older one")


@pytest.mark.parametrize(
    ("rank", "signals", "during_a_write"),
    [
        (0, [signal.SIGUSR1], False),
        (1, [signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR1], True),
        (2, [signal.SIGTERM, signal.SIGTERM], False),
    ],
    ids=["SIGUSR1", "SIGUSR1 again and again during a write", "SIGTERM and a copy"],
)
def test_one_rank_that_is_asked_stops_all_with_75_and_one_line_says_who_it_was(
    run_file: Path, tmp_path: Path, rank: int, signals: Sequence[signal.Signals], during_a_write: bool
) -> None:
    out = tmp_path / "run"
    with running(slow_disk(run_file) if during_a_write else run_file, out) as process:
        if during_a_write:
            wait_for_a_write(out)
        else:
            wait_for_steps(out, 10)
        for number in signals:
            send(process, rank, number)
            time.sleep(0.3 if during_a_write else 0.0)
        lines = end_of(process)

    assert process.returncode == 75, lines
    bound = "within 7 minibatches and one write"
    assert f"stop: SIGUSR1, SIGTERM, {out}/STOP; {bound}" in lines
    (taken_up,) = [line for line in lines if "stopping" in line]
    assert (
        taken_up == f"{signals[0].name} at rank {rank}: stopping with a checkpoint of step {newest(out)}, {bound}"
    )


def test_a_second_sigterm_ends_the_job_at_once_and_leaves_the_older_checkpoint_valid(
    run_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with running(slow_disk(run_file), out) as process:
        wait_for_a_write(out)
        send(process, 2, signal.SIGTERM)
        time.sleep(1.2)
        send(process, 2, signal.SIGTERM)
        began = time.monotonic()
        lines = end_of(process)

    assert process.returncode == 143, lines
    assert time.monotonic() - began < 5
    (line,) = [line for line in lines if "a second SIGTERM" in line]
    assert line.startswith("rank 2 on ")
    assert line.endswith(f": a second SIGTERM: ending at once; the newest checkpoint is of step {newest(out)}")


def test_of_ranks_that_all_get_a_second_sigterm_one_speaks(run_file: Path, tmp_path: Path) -> None:
    """As when the launcher passes on what it gets."""
    out = tmp_path / "run"
    with running(slow_disk(run_file), out) as process:
        wait_for_a_write(out)
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(1.2)
        os.kill(process.pid, signal.SIGTERM)
        lines = end_of(process)

    assert process.returncode == 143, lines
    (line,) = [line for line in lines if "a second SIGTERM" in line]
    assert line.startswith("rank 0 on ")


def test_a_signal_behind_the_last_update_lets_the_run_end_with_0(run_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running(slow_disk(run_file), out, "--set", "run.max_steps=12", ranks=2) as process:
        wait_for_steps(out, 12)
        send(process, 1, signal.SIGTERM)
        send(process, 0, signal.SIGUSR1)
        lines = end_of(process)

    assert process.returncode == 0, lines
    assert newest(out) == 12


def early(run_file: Path, number: str, module: str, *, ranks: int) -> Result:
    """A run of which the last rank gets the signal before it imports the module."""
    program = [str(PROGRAMS / "early_signal.py"), number, str(ranks - 1), module]
    arguments = ("train", str(run_file), "--out", str(run_file.parent / "run"))
    if ranks == 1:
        return run_alone(program, *arguments, timeout_s=TIME_LIMIT_S)
    return run(program, ranks, *arguments, timeout_s=TIME_LIMIT_S)


@pytest.mark.parametrize(("number", "module"), [("SIGUSR1", "mpi4py.MPI"), ("SIGTERM", "builder")])
def test_a_signal_while_a_rank_starts_stops_the_run_at_its_first_cut(
    run_file: Path, tmp_path: Path, number: str, module: str
) -> None:
    result = early(run_file, number, module, ranks=2)

    assert result.rc == 75, str(result)
    assert f"signal before {module}" in result.stdout
    assert f"{number} at rank 1: stopping" in result.stderr
    assert newest(tmp_path / "run") <= 5


def test_a_single_process_that_gets_a_signal_while_it_loads_torch_ends_with_75_as_well(
    run_file: Path, tmp_path: Path
) -> None:
    result = early(run_file, "SIGTERM", "torch", ranks=1)

    assert result.rc == 75, str(result)
    assert newest(tmp_path / "run") == 1


def test_a_run_stops_by_itself_before_the_end_of_its_allocation(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000))
    limit = ("--set", 'run.stop_before="0.5h"')

    result = run(HPCPIPE, 2, "train", str(run_file), "--out", str(out), *limit, timeout_s=TIME_LIMIT_S)

    assert result.rc == 75, str(result)
    assert "no more than run.stop_before (30 min), so the run stops at its first cut" in result.stderr
    assert "hpcpipe: the time limit (run.stop_before): stopping with a checkpoint of step 1," in result.stderr
    assert newest(out) == 1
