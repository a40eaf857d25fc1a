"""Two jobs on one folder, and what a job that was killed leaves of its claim to it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from click.testing import CliRunner

from hpcpipe.checkpoint.sets import choose, find_sets
from hpcpipe.cli.checkpoint import checkpoint
from tests.crash.killing import (
    TIME_LIMIT_S,
    digest_of,
    losses_of,
    ranks_of,
    run_file_of,
    running,
    train,
    wait_for_steps,
)
from tests.mpi.launch import kill_tree

RANKS = 2
SHORT = ("--set", "run.epochs=1")
LONG = ("--set", "run.epochs=400", "--set", "checkpoint.every=20")


def _lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("hpcpipe: ")]


def test_a_second_job_on_a_folder_is_refused_in_one_line_and_the_first_goes_on_unharmed(tmp_path: Path) -> None:
    run_file, out = run_file_of(tmp_path, "stash"), tmp_path / "run"
    with running(run_file, out, *LONG, ranks=RANKS) as first:
        wait_for_steps(out, 25)
        holder = json.loads((out / "run.lock").read_text())
        assert holder["pid"] in ranks_of(first)

        for resume in (["--resume", "auto"], ["--overwrite"]):
            second = train(run_file, out, *resume, ranks=RANKS)
            assert second.rc == 2, str(second)
            (line,) = _lines(second.stderr)
            assert f"{out} is in use by process {holder['pid']} on {holder['host']} (since " in line
            assert line.endswith("s ago): choose another folder with --out, or stop that run")

        # Who only reads is not hindered.
        for command in (["list"], ["verify"], ["show"], ["export", "-o", str(tmp_path / "weights.safetensors")]):
            done = CliRunner().invoke(checkpoint, [*command, str(out)])
            assert done.exit_code == 0, (command, done.output, done.exception)

        os.kill(ranks_of(first)[0], signal.SIGTERM)
        _, stderr = first.communicate(timeout=TIME_LIMIT_S)
    assert first.returncode == 75, stderr
    assert not (out / "run.lock").exists()
    assert all(info.fault is None for info in find_sets(out / "checkpoints"))
    stopped = choose(out, deep=True)[0].step
    assert [step for step, _ in losses_of(out)] == list(range(1, stopped + 1))


def test_a_killed_job_does_not_hinder_the_one_that_goes_on_right_after(tmp_path: Path) -> None:
    run_file, out = run_file_of(tmp_path, "stash"), tmp_path / "run"
    unbroken = train(run_file, tmp_path / "unbroken", *SHORT, ranks=RANKS)
    assert unbroken.rc == 0, str(unbroken)
    with running(run_file, out, *LONG, "--set", "lr_schedule.total=45", ranks=RANKS) as job:
        wait_for_steps(out, 22)
        pid = json.loads((out / "run.lock").read_text())["pid"]
        kill_tree(job.pid)
        job.communicate(timeout=TIME_LIMIT_S)
    assert (out / "run.lock").exists()

    again = train(run_file, out, "--resume", "auto", *SHORT, ranks=RANKS)

    assert again.rc == 0, str(again)
    said = [line for line in _lines(again.stderr) if "run.lock" in line or "held by" in line or "may be" in line]
    assert len(said) == 1
    assert f"{out} was held by process {pid} on " in said[0]
    assert said[0].endswith(", which is gone: taken over")
    assert again.seconds < unbroken.seconds + 30
    assert not (out / "run.lock").exists()
    assert digest_of(out) == digest_of(tmp_path / "unbroken")
