"""Checkpoints that cannot be written cost the checkpoint, not the run, until too many in a row have failed."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcpipe.checkpoint.digest import digest
from hpcpipe.checkpoint.layout import FileReport
from hpcpipe.checkpoint.sets import find_sets, open_set
from hpcpipe.engine.committing import Committer
from hpcpipe.engine.failures import WriteFailures, reason_of
from hpcpipe.engine.train import TrainOptions, train
from hpcpipe.errors import FolderLostError
from tests.oracle.lone_world import LoneWorld
from tests.oracle.runs import configured, write_run_file
from tests.unit.checkpoint_samples import fake_set

STEPS = 10


def _train(out: Path, **checkpoint: Any) -> None:
    checkpoint = {"every": 2, "keep_last": 99, **checkpoint}
    config = configured(out, run={"max_steps": STEPS}, checkpoint=checkpoint)
    assert train(LoneWorld(), TrainOptions(run_file=str(write_run_file(config)))) == 0


def _steps(out: Path) -> list[int]:
    return [info.step for info in find_sets(out / "checkpoints") if info.fault is None]


def _fail(monkeypatch: pytest.MonkeyPatch, call: str, number: int, when: Callable[[str], bool]) -> None:
    """Let a call of `os` fail with errno `number` on files whose path, of their descriptor or given, is so."""
    real = getattr(os, call)

    def failing(first: Any, *rest: Any, **options: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
        if when(path):
            raise OSError(number, os.strerror(number))
        return real(first, *rest, **options)

    monkeypatch.setattr(os, call, failing)


def _is_set(path: str, *steps: int) -> bool:
    return any(f"/step-{step:010d}/" in path for step in steps)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG])
def test_training_goes_on_with_a_loud_line_and_a_success_starts_the_count_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    _fail(monkeypatch, "pwrite", number, lambda path: _is_set(path, 4, 8) and path.endswith("rank-00000.h5.tmp"))

    _train(tmp_path / "run", max_failures=2)

    root = tmp_path / "run" / "checkpoints"
    assert capsys.readouterr().err.splitlines() == [
        f"hpcpipe: checkpoint of step {step} was NOT WRITTEN: rank 0: {os.strerror(number)}: "
        f"{root}/step-{step:010d}/rank-00000.h5; failure 1 of 2 in a row, training goes on, that of step "
        f"{step - 2} still stands"
        for step in (4, 8)
    ]
    assert _steps(tmp_path / "run") == [10, 6, 2]
    assert not list(root.rglob("*.tmp"))
    assert not (root / "step-0000000004").exists()


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
def test_a_commit_record_that_cannot_be_written_counts_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    _fail(monkeypatch, call, errno.ENOSPC, lambda path: _is_set(path, 4) and "commit.json" in path)

    _train(tmp_path / "run")

    said = capsys.readouterr().err
    file = tmp_path / "run" / "checkpoints" / "step-0000000004" / "commit.json"
    assert f"step 4 was NOT WRITTEN: No space left on device: {file}; failure 1 of 3 in a row" in said
    assert _steps(tmp_path / "run") == [10, 8, 6, 2]
    assert not (tmp_path / "run" / "checkpoints" / "step-0000000004").exists()


def test_too_many_failures_in_a_row_end_the_run_with_one_line_that_names_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _fail(monkeypatch, "pwrite", errno.EDQUOT, lambda path: path.endswith(".h5.tmp") and not _is_set(path, 2))

    with pytest.raises(FolderLostError) as caught:
        _train(tmp_path / "run", max_failures=3)

    root = tmp_path / "run" / "checkpoints"
    assert str(caught.value) == (
        f"{root}: 3 checkpoints in a row could not be written, so the run ends (checkpoint.max_failures = 3); the "
        f"last, of step 8: rank 0: Disk quota exceeded: {root}/step-0000000008/rank-00000.h5; mend that and go on "
        "with --resume auto from step 2, the newest checkpoint"
    )
    assert caught.value.exit_code == 1
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert _steps(tmp_path / "run") == [2]


def test_without_a_limit_only_the_last_checkpoint_must_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        _fail(patch, "pwrite", errno.ENOSPC, lambda path: path.endswith(".h5.tmp") and not _is_set(path, STEPS))
        _train(tmp_path / "run", max_failures=0)
    assert "failure 4 in a row, training goes on, there is no older one" in capsys.readouterr().err
    assert _steps(tmp_path / "run") == [STEPS]

    _fail(monkeypatch, "pwrite", errno.ENOSPC, lambda path: path.endswith(".h5.tmp") and _is_set(path, STEPS))
    with pytest.raises(FolderLostError) as caught:
        _train(tmp_path / "other", max_failures=0)
    assert caught.value.exit_code == 1
    assert re.search(
        r"the last checkpoint, of step 10, could not be written: rank 0: No space left on device: .*; mend that "
        "and go on with --resume auto from step 8, the newest checkpoint$",
        str(caught.value),
    )


def test_a_folder_that_cannot_even_be_looked_at_is_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Path.exists

    def stale(path: Path) -> bool:
        if _is_set(str(path), 4):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path)

    monkeypatch.setattr(Path, "exists", stale)
    _train(tmp_path / "run")

    assert "step 4 was NOT WRITTEN: rank 0: Stale file handle: " in capsys.readouterr().err
    monkeypatch.undo()
    assert _steps(tmp_path / "run") == [10, 8, 6, 2]


def test_a_failed_write_changes_nothing_of_what_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _train(tmp_path / "whole")
    _fail(monkeypatch, "pwrite", errno.EIO, lambda path: _is_set(path, 4, 6) and path.endswith(".h5.tmp"))
    _train(tmp_path / "run")

    ends = [open_set(tmp_path / name / "checkpoints" / "step-0000000010") for name in ("whole", "run")]
    assert digest(ends[0]).overall == digest(ends[1]).overall


def test_files_that_a_run_can_do_without_are_missed_loudly_and_again_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = ("run.toml.tmp", "summary.json.tmp", "trace.json.tmp")
    _fail(monkeypatch, "pwrite", errno.ENOSPC, lambda path: path.endswith(lacking))
    out = tmp_path / "run"
    config = configured(out, run={"max_steps": 3, "trace": True})

    assert train(LoneWorld(), TrainOptions(run_file=str(write_run_file(config)))) == 0

    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in said[:3]] == [
        f"{out / name} was NOT WRITTEN, the run goes on without"
        for name in ("run.toml", "trace.json", "summary.json")
    ]
    assert said[3:] == [f"hpcpipe: {out} lacks what could not be written: run.toml, trace.json, summary.json"]
    assert not [path for path in out.iterdir() if path.name.startswith(("run.toml", "summary", "trace"))]


def test_metrics_that_do_not_fit_are_counted_and_never_leave_a_torn_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    real, calls = os.pwrite, [0]

    def filling(descriptor: int, data: Any, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("metrics.jsonl"):
            calls[0] += 1
            if 3 <= calls[0] <= 8:
                # A disk that takes half of a line before it is full.
                if calls[0] % 2:
                    return real(descriptor, data[:10], offset)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", filling)
    _train(out)

    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [1, 2, 6, 7, 8, 9, 10]
    assert capsys.readouterr().err.splitlines() == [
        f"hpcpipe: {out}/metrics.jsonl CANNOT BE WRITTEN (No space left on device): training goes on, and lines "
        "are lost until that is mended",
        f"hpcpipe: {out}/metrics.jsonl is written again; 3 lines are missing that could not be written",
        f"hpcpipe: {out}/metrics.jsonl: 3 lines are missing that could not be written",
    ]


def test_nothing_is_deleted_where_it_cannot_be_seen_whose_folder_it_is(tmp_path: Path) -> None:
    def unreachable() -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "run.lock")

    said: list[str] = []
    committer = Committer(tmp_path, meta={}, keep_last=1, keep_every=None, say=said.append, check=unreachable)
    directory = fake_set(tmp_path, 4, committed=False)

    committer.commit(4, directory, [FileReport(0, 10, 0, 0, 0, 0)])
    committer.failed(4, directory, "rank 0: no reason")

    assert [path.name for path in directory.iterdir()] == ["rank-00000.h5"]
    assert committer.committed is None
    assert "NOT WRITTEN: Stale file handle: run.lock; failure 1 in a row" in said[0]
    assert "NOT WRITTEN: rank 0: no reason (Stale file handle: run.lock); failure 2 in a row" in said[1]


def test_reasons_name_every_rank_that_failed_with_its_error_and_a_file() -> None:
    reason = reason_of([(3, errno.EIO), (1, errno.ENOSPC), (2, errno.ENOSPC)], lambda rank: Path(f"rank-{rank}"))

    assert reason == "ranks 1, 2: No space left on device: rank-1; rank 3: Input/output error: rank-3"


def test_one_failure_is_one_too_many_where_the_run_file_says_so() -> None:
    failures = WriteFailures(Path("here"), limit=1, say=pytest.fail)

    with pytest.raises(FolderLostError, match=r"here: 1 checkpoint could not be written, so the run ends"):
        failures.note(8, "no reason", None)
