"""Disks that fail under a running job: it trains on, ends clearly, or goes on after a kill at the worst moment."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcpipe.checkpoint.sets import find_sets, newest_valid
from tests.crash.faults import KILL, fault
from tests.crash.killing import digest_of, losses_of, run_file_of, train
from tests.mpi.launch import Result

RANKS = 2
SHORT = ("--set", "run.epochs=1")
"""45 minibatches, with a checkpoint every 8."""


def _loud(result: Result) -> list[str]:
    return [line for line in result.stderr.splitlines() if "NOT WRITTEN" in line or "could not be written" in line]


def _steps(out: Path) -> list[int]:
    return [info.step for info in find_sets(out / "checkpoints") if info.fault is None]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("unbroken")
    result = train(run_file_of(folder, "stash"), folder / "run", *SHORT, ranks=RANKS)
    assert result.rc == 0, str(result)
    return folder / "run"


def test_an_io_error_in_the_middle_of_a_write_costs_that_checkpoint_only(tmp_path: Path, unbroken: Path) -> None:
    out = tmp_path / "run"
    broken = fault("pwrite", "*/step-0000000016/rank-00001.h5.tmp", errno.EIO, after=5000)

    result = train(
        run_file_of(tmp_path, "stash"),
        out,
        *SHORT,
        "--set",
        "checkpoint.keep_last=9",
        ranks=RANKS,
        environment=broken,
    )

    assert result.rc == 0, str(result)
    (line,) = _loud(result)
    file = out / "checkpoints" / "step-0000000016" / "rank-00001.h5"
    assert f"step 16 was NOT WRITTEN: rank 1: Input/output error: {file}; failure 1 of 3 in a row" in line
    assert line.endswith("training goes on, that of step 8 still stands")
    assert _steps(out) == [45, 40, 32, 24, 8]
    assert not file.parent.exists()
    assert digest_of(out) == digest_of(unbroken)
    assert losses_of(out) == losses_of(unbroken)


def test_a_disk_that_stays_broken_ends_the_job_with_one_line_and_a_checkpoint_to_go_on_from(
    tmp_path: Path, unbroken: Path
) -> None:
    run_file, out = run_file_of(tmp_path, "stash"), tmp_path / "run"
    broken = fault("fsync", "*/step-00000000[1-9][0-9]/commit.json.tmp", errno.EDQUOT)

    ended = train(run_file, out, *SHORT, "--set", "checkpoint.max_failures=2", ranks=RANKS, environment=broken)

    assert ended.rc == 1, str(ended)
    assert "Traceback" not in ended.stderr
    first, last = _loud(ended)
    assert "step 16 was NOT WRITTEN" in first
    assert "Disk quota exceeded" in first
    assert "2 checkpoints in a row could not be written, so the run ends (checkpoint.max_failures = 2)" in last
    assert last.endswith("mend that and go on with --resume auto from step 8, the newest checkpoint")
    assert _steps(out) == [8]

    assert train(run_file, out, *SHORT, "--resume", "auto", ranks=RANKS).rc == 0
    assert digest_of(out) == digest_of(unbroken)


@pytest.mark.parametrize(
    ("call", "path", "newest"),
    [
        ("pwrite", "step-0000000016/rank-00001.h5.tmp", 8),
        ("rename", "step-0000000016/commit.json", 8),
        ("unlink", "step-0000000008/rank-00001.h5", 24),
    ],
    ids=["in a write", "before the commit", "in retention"],
)
def test_a_rank_killed_at_the_worst_moments_goes_on_to_the_bit_and_leaves_nothing_behind(
    tmp_path: Path, unbroken: Path, call: str, path: str, newest: int
) -> None:
    run_file, out = run_file_of(tmp_path, "stash"), tmp_path / "run"

    killed = train(run_file, out, *SHORT, ranks=RANKS, environment=fault(call, f"*/{path}", KILL, after=5000))

    assert killed.rc != 0, str(killed)
    found, _ = newest_valid(out / "checkpoints")
    assert found is not None
    assert found.step == newest

    again = train(run_file, out, *SHORT, "--resume", "auto", ranks=RANKS)

    assert again.rc == 0, str(again)
    assert f"(step {newest}); this run continues it to the bit" in again.stderr
    assert digest_of(out) == digest_of(unbroken)
    assert losses_of(out) == losses_of(unbroken)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-0000000040", "step-0000000045"]
    assert not list(out.rglob("*.tmp"))
    assert not (out / "run.lock").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        # A rank of an aborted job may still be about to end.
        subprocess.run(["umount", "--lazy", disk], check=True)


def _fill(disk: Path) -> None:
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    status = os.statvfs(disk)
    ballast.write_bytes(bytes(status.f_bavail * status.f_frsize))


def test_a_full_disk_costs_checkpoints_and_metrics_until_there_is_room_again(
    tmp_path: Path, small_disk: Path, unbroken: Path
) -> None:
    run_file, out = run_file_of(tmp_path, "stash"), small_disk / "run"
    stopped = fault("pwrite", "*/step-0000000024/rank-00000.h5.tmp", KILL)
    assert train(run_file, out, *SHORT, ranks=RANKS, environment=stopped).rc != 0
    shutil.rmtree(out / "checkpoints" / "step-0000000024")
    # All the room that there is becomes that of the lock that is taken over.
    _fill(small_disk)

    ended = train(run_file, out, *SHORT, "--resume", "auto", "--set", "checkpoint.max_failures=0", ranks=RANKS)

    assert ended.rc == 1, str(ended)
    assert "Traceback" not in ended.stderr
    assert f"{out}/run.toml was NOT WRITTEN, the run goes on without: " in ended.stderr
    assert "failure 3 in a row, training goes on, that of step 16 still stands" in ended.stderr
    assert _loud(ended)[-1].endswith("go on with --resume auto from step 16, the newest checkpoint")
    assert "metrics.jsonl CANNOT BE WRITTEN (No space left on device)" in ended.stderr
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    # The evaluation at the end has a line as well.
    assert f"metrics.jsonl: {46 - len(steps)} lines are missing that could not be written" in ended.stderr

    _fill(small_disk)
    refused = train(run_file, out, *SHORT, "--resume", "auto", ranks=RANKS)
    assert refused.rc == 2, str(refused)
    assert f"{out}: cannot be written (No space left on device)" in refused.stderr

    (small_disk / "ballast").unlink()
    again = train(run_file, out, *SHORT, "--resume", "auto", ranks=RANKS)
    assert again.rc == 0, str(again)
    assert digest_of(out) == digest_of(unbroken)
    assert losses_of(out) == losses_of(unbroken)
