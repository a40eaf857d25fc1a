"""Runs that are killed, stopped and resumed, as tests of restart want them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcpipe.checkpoint.digest import digest
from hpcpipe.checkpoint.sets import choose
from tests.mpi.launch import Result, descendants, kill_tree, mpirun, rank_environment, run

HPCPIPE = ["-m", "hpcpipe"]
RANKS = 3
TIME_LIMIT_S = 120.0

RUN = """
[run]
epochs = 5
log_every = 1
[model]
name = "mlp"
hidden = [32, 32, 32, 32]
activation = "tanh"
dropout = 0.1
batchnorm = true
[data]
name = "digits"
batch = 32
[pipeline]
policy = "{policy}"
[optimizer]
name = "{optimizer}"
lr = {lr}
[lr_schedule]
name = "cosine"
[eval]
every = 50
[checkpoint]
every = 8
"""
LR = {"sgd": 0.05, "adamw": 0.003}


def run_file_of(folder: Path, policy: str, optimizer: str = "sgd") -> Path:
    path = folder / "run.toml"
    path.write_text(RUN.format(policy=policy, optimizer=optimizer, lr=LR[optimizer]))
    return path


def train(run_file: Path, out: Path, *options: str, ranks: int = RANKS) -> Result:
    return run(HPCPIPE, ranks, "train", str(run_file), "--out", str(out), *options, timeout_s=TIME_LIMIT_S)


def digest_of(out: Path) -> str:
    found, skipped = choose(out, deep=True)
    assert not skipped
    return digest(found).overall


def losses_of(out: Path) -> list[tuple[int, float]]:
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]


@contextmanager
def running(run_file: Path, out: Path, *options: str, ranks: int = RANKS) -> Iterator[subprocess.Popen[str]]:
    """A run that goes on while the block does; nothing of it is left behind it."""
    process = subprocess.Popen(
        mpirun(HPCPIPE, ranks, "train", str(run_file), "--out", str(out), *options),
        env=rank_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill_tree(process.pid)


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


def is_rank(pid: int) -> bool:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"hpcpipe" in arguments and b"-n" not in arguments


def wait_for_steps(out: Path, steps: int) -> None:
    deadline = time.monotonic() + TIME_LIMIT_S
    while time.monotonic() < deadline:
        try:
            if len((out / "metrics.jsonl").read_text().splitlines()) >= steps:
                return
        except FileNotFoundError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"{out} did not come to {steps} steps")
