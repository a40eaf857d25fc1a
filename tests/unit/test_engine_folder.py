"""The folder of a run: whose it is, what it is called, and what a run does about one that it cannot have."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcpipe.checkpoint.digest import digest
from hpcpipe.checkpoint.origin import RUN_NAME, read_run
from hpcpipe.checkpoint.sets import find_sets, open_set
from hpcpipe.config import RunConfig
from hpcpipe.engine.folder_lock import LOCK_NAME
from hpcpipe.engine.train import TrainOptions, train
from hpcpipe.errors import FolderError, FolderLostError, HpcpipeError
from tests.oracle.lone_world import LoneWorld
from tests.oracle.runs import configured, write_run_file


def _config(out: Path, steps: int = 6, **checkpoint: object) -> RunConfig:
    run = {"max_steps": steps, "progress": "lines"}
    return configured(out, run=run, checkpoint={"every": 2, "keep_last": 99, **checkpoint})


def _train(config: RunConfig, *, resume: str | None = None, overwrite: bool = False) -> Path:
    options = TrainOptions(run_file=str(write_run_file(config)), resume=resume, overwrite=overwrite)
    assert train(LoneWorld(), options) == 0
    return Path(config.run.out)


def _id_of(out: Path) -> str:
    run = read_run(out)
    assert run is not None
    return run.id


def _ids_of_sets(out: Path) -> dict[int, str]:
    return {info.step: open_set(info.path).meta["run"] for info in find_sets(out / "checkpoints")}


# -- ids --


def test_a_run_keeps_its_id_when_it_goes_on_and_a_fresh_start_gets_another(tmp_path: Path) -> None:
    out = _train(_config(tmp_path / "run"))
    first = _id_of(out)
    assert set(_ids_of_sets(out).values()) == {first}
    index = open_set(find_sets(out / "checkpoints")[0].path).index(0)
    assert (index.meta["step"], index.meta["run"]) == (6, first)

    _train(_config(out, 8), resume="auto")
    assert _id_of(out) == first
    assert _ids_of_sets(out) == dict.fromkeys((2, 4, 6, 8), first)

    _train(_config(out), overwrite=True)
    assert _id_of(out) != first
    assert _ids_of_sets(out) == dict.fromkeys((2, 4, 6), _id_of(out))


def test_auto_passes_over_sets_of_another_run_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, other = _train(_config(tmp_path / "run")), _train(_config(tmp_path / "other", 8))
    foreign = out / "checkpoints" / "step-0000000008"
    shutil.copytree(other / "checkpoints" / "step-0000000008", foreign)
    capsys.readouterr()

    _train(_config(out, 10, keep_last=1), resume="auto")

    said = capsys.readouterr().err
    reason = f"{foreign}: is of another run ({_id_of(other)}), not of the run in this folder ({_id_of(out)})"
    assert f"checkpoint passed over: {reason}" in said
    assert "(step 6); this run continues it" in said
    # Retention neither lets go of the newest set of this run for that of another, nor deletes what is not its own.
    assert _ids_of_sets(out) == {8: _id_of(other), 10: _id_of(out)}


def test_checkpoints_that_were_copied_without_their_folder_are_taken_for_what_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = _train(_config(tmp_path / "other"))
    out = tmp_path / "run"
    shutil.copytree(other / "checkpoints", out / "checkpoints")
    capsys.readouterr()

    _train(_config(out, 8), resume="auto")

    assert f"{out} does not say which run is in it: taken for {_id_of(other)}" in capsys.readouterr().err
    assert _id_of(out) == _id_of(other)
    assert set(_ids_of_sets(out).values()) == {_id_of(other)}


def test_a_run_from_a_checkpoint_of_another_folder_is_a_run_of_its_own_that_names_its_origin(
    tmp_path: Path,
) -> None:
    other = _train(_config(tmp_path / "other"))
    cut = other / "checkpoints" / "step-0000000004"

    out = _train(_config(tmp_path / "run", 8), resume=str(cut))

    run = read_run(out)
    assert run is not None
    assert run.id != _id_of(other)
    assert run.origin == f"step 4 of run {_id_of(other)} in {cut}"
    assert _ids_of_sets(out) == dict.fromkeys((6, 8), run.id)

    _train(_config(out, 10), resume="auto")
    assert read_run(out) == run


def test_a_checkpoint_of_the_folder_itself_that_is_named_goes_on_as_the_same_run(tmp_path: Path) -> None:
    out = _train(_config(tmp_path / "run"))
    before = _id_of(out)
    newest = str(out / "checkpoints" / "step-0000000006")

    _train(_config(out, 8), resume=newest)
    assert _id_of(out) == before

    (out / RUN_NAME).unlink()
    _train(_config(out, 10), resume=str(out))
    assert _id_of(out) == before


def test_a_run_file_that_does_not_say_which_run_it_is_stops_a_resume_in_one_line(tmp_path: Path) -> None:
    out = _train(_config(tmp_path / "run"))
    (out / RUN_NAME).write_text("{}")

    with pytest.raises(
        HpcpipeError, match=r"run.json: does not say which run is in this folder; remove it"
    ) as caught:
        _train(_config(out, 8), resume="auto")

    assert caught.value.exit_code == 2
    assert not (out / LOCK_NAME).exists()


# -- the lock --


def test_the_lock_is_held_while_a_run_trains_and_given_back_whatever_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, object]] = []
    replace_file = os.replace

    def looking(source: Path, target: Path) -> None:
        if Path(target).name == "commit.json":
            seen.append(json.loads((tmp_path / "run" / LOCK_NAME).read_text()))
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", looking)
    out = _train(_config(tmp_path / "run"))
    assert [entry["pid"] for entry in seen] == [os.getpid()] * 3
    assert not (out / LOCK_NAME).exists()
    _train(_config(out, 8), resume="auto")
    assert seen[-1]["run"] == _id_of(out)

    # Refused, because it ends before the checkpoint.
    with pytest.raises(HpcpipeError, match="this run ends at 2"):
        _train(_config(out, 2), resume="auto")
    assert not (out / LOCK_NAME).exists()


def test_a_run_that_is_refused_leaves_no_folder_behind(tmp_path: Path) -> None:
    config = configured(tmp_path / "run", data={"name": "digits", "batch": 100_000, "drop_last": True})

    with pytest.raises(HpcpipeError, match="batch"):
        _train(config)

    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("what", ["removed", "taken"])
def test_a_run_whose_folder_was_taken_away_commits_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    out = tmp_path / "run"
    replace_file = os.replace

    def interfering(source: Path, target: Path) -> None:
        replace_file(source, target)
        if str(target).endswith("step-0000000002/commit.json"):
            if what == "removed":
                (out / LOCK_NAME).unlink()
            else:
                (out / LOCK_NAME).write_text("somebody else")

    monkeypatch.setattr(os, "replace", interfering)
    with pytest.raises(FolderLostError, match=f"{out} is no longer this run's") as caught:
        _train(_config(out))

    assert caught.value.exit_code == 1
    assert [info.step for info in find_sets(out / "checkpoints") if info.fault is None] == [2]
    assert (out / LOCK_NAME).exists() == (what == "taken")


# -- folders that cannot be written --


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder with a run in it that cannot be written: on a read-only mount, as permissions do not bind root."""
    out = _train(_config(tmp_path / "disk" / "run"))
    disk = out.parent
    if os.geteuid() != 0:
        os.chmod(out, 0o555)
        os.chmod(disk, 0o555)
        yield out
        os.chmod(disk, 0o755)
        return
    subprocess.run(["mount", "--bind", disk, disk], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)
        yield out
    finally:
        subprocess.run(["umount", disk], check=True)


def _refusal_of(out: Path, resume: str | None, scratch: Path) -> str:
    """What a run into `out` says when it is refused at the start: one line and exit code 2."""
    config = configured(scratch / "elsewhere", run={"max_steps": 8})
    options = TrainOptions(
        run_file=str(write_run_file(config)), overrides=(f"run.out={str(out)!r}",), resume=resume
    )
    with pytest.raises(FolderError) as caught:
        train(LoneWorld(), options)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("name", "resume"), [("run", "auto"), ("fresh", None)])
def test_a_read_only_folder_is_one_line_at_the_start(
    tmp_path: Path, read_only: Path, name: str, resume: str | None
) -> None:
    out = read_only.with_name(name)
    said = _refusal_of(out, resume, tmp_path)
    assert re.fullmatch(
        rf"{out}: cannot be written \((Read-only file system|Permission denied)\): mend that, or choose another "
        "folder with --out",
        said,
    )


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_file_in_the_place_of_the_folder_is_one_line_at_the_start(tmp_path: Path, resume: str | None) -> None:
    file = tmp_path / "file"
    file.write_text("a file")
    assert "is no folder: choose another one with --out" in _refusal_of(file, resume, tmp_path)
    assert "cannot be written (Not a directory)" in _refusal_of(file / "run", resume, tmp_path)


# -- clocks --


def test_clocks_that_jump_and_files_from_the_future_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, calls = time.time, [0]

    def jumping() -> float:
        calls[0] += 1
        return true() + (-1e9, 1e9)[calls[0] % 2]

    whole = _train(_config(tmp_path / "whole", 12))
    monkeypatch.setattr(time, "time", jumping)
    out = _train(_config(tmp_path / "run", 6, keep_last=2))
    for number, path in enumerate(sorted(out.rglob("*"), reverse=True)):
        os.utime(path, (true() + 1e8 - number * 1e6,) * 2)

    _train(_config(out, 12, keep_last=2), resume="auto")

    assert calls[0] > 3
    assert [info.step for info in find_sets(out / "checkpoints")] == [12, 10]
    ends = [open_set(folder / "checkpoints" / "step-0000000012") for folder in (out, whole)]
    assert digest(ends[0]).overall == digest(ends[1]).overall


def test_minutes_between_checkpoints_are_those_of_a_clock_that_does_not_jump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + 1e9)

    out = _train(_config(tmp_path / "run", 12, every=0, minutes=60.0))

    assert [info.step for info in find_sets(out / "checkpoints")] == [12]


# -- a STOP file --


def test_a_file_that_stopped_an_earlier_run_is_refused_before_anything_else_happens(tmp_path: Path) -> None:
    """Else a job that continues itself would start and stop for ever."""
    out = _train(_config(tmp_path / "run"))
    (out / "STOP").touch()
    before = sorted(path.name for path in out.iterdir())

    with pytest.raises(FolderError) as caught:
        _train(_config(out, 8), resume="auto")

    assert str(caught.value) == (
        f"{out / 'STOP'} is there, from a request to stop an earlier run: remove it to let this one start"
    )
    assert caught.value.exit_code == 2
    assert sorted(path.name for path in out.iterdir()) == before
    (out / "STOP").unlink()
    _train(_config(out, 8), resume="auto")
