"""Files and sets that were mixed up by hand: what stands in a wrong place is named, the next good set taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpcpipe.checkpoint.layout import new_set_directory, rank_name
from hpcpipe.checkpoint.origin import RUN_NAME, Run, read_run, write_run
from hpcpipe.checkpoint.record import commit
from hpcpipe.checkpoint.retention import retire
from hpcpipe.checkpoint.sets import choose, find_sets, newest_valid
from hpcpipe.checkpoint.writer import write_rank_file
from hpcpipe.cli.checkpoint import checkpoint
from hpcpipe.errors import CheckpointError
from tests.unit.checkpoint_samples import layer_tree

MINE, THEIRS = "a" * 16, "b" * 16


def _set(root: Path, step: int, run: str = MINE, *, seed: int = 0) -> Path:
    """A set of two ranks that hold different amounts of data, as training writes it."""
    directory = new_set_directory(root, step)
    reports = [
        write_rank_file(directory, rank, layer_tree(layers, seed=seed), {"step": step, "run": run, "stages": {}})
        for rank, layers in enumerate(["a", "bcd"])
    ]
    commit(directory, reports, {"run": run})
    return directory


def _verify(where: Path) -> Result:
    return CliRunner().invoke(checkpoint, ["verify", str(where)])


def _swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def test_rank_files_that_were_swapped_are_named_with_whose_they_are(tmp_path: Path) -> None:
    _set(tmp_path, 8)
    directory = _set(tmp_path, 16)
    zero, one = directory / rank_name(0), directory / rank_name(1)

    _swap(zero, one)

    remedy = "put the right file there, or use another set (`hpcpipe checkpoint list`)"
    lines = [
        f"{zero}: holds rank 1's data of step 16 of run {MINE}, not rank 0's of step 16; {remedy}",
        f"{one}: holds rank 0's data of step 16 of run {MINE}, not rank 1's of step 16; {remedy}",
    ]
    verified = _verify(tmp_path)
    assert verified.exit_code == 2
    assert verified.stderr.splitlines() == lines
    assert lines[0] in CliRunner().invoke(checkpoint, ["list", str(tmp_path)]).stdout
    found, skipped = newest_valid(tmp_path)
    assert found is not None
    assert (found.step, skipped) == (8, lines[:1])


def test_a_rank_file_of_another_step_is_named_though_its_length_is_right(tmp_path: Path) -> None:
    other, directory = _set(tmp_path, 8), _set(tmp_path, 16, seed=1)
    shutil.copy(other / rank_name(1), directory / rank_name(1))
    lengths = [folder.joinpath(rank_name(1)).stat().st_size for folder in (other, directory)]
    assert abs(lengths[0] - lengths[1]) <= 1

    found, skipped = newest_valid(tmp_path)

    assert found is not None
    assert found.step == 8
    assert "rank-00001.h5: holds rank 1's data of step 8 of run" in skipped[0]


def test_a_rank_file_of_another_run_at_the_same_step_is_named(tmp_path: Path) -> None:
    directory = _set(tmp_path / "mine", 16)
    other = _set(tmp_path / "theirs", 16, THEIRS, seed=1)
    shutil.copy(other / rank_name(1), directory / rank_name(1))

    (fault,) = _verify(directory).stderr.splitlines()

    assert f"holds rank 1's data of step 16 of run {THEIRS}, not rank 1's of step 16" in fault


def test_a_missing_rank_file_is_named_and_the_set_before_is_taken(tmp_path: Path) -> None:
    _set(tmp_path, 8)
    missing = _set(tmp_path, 16) / rank_name(1)
    missing.unlink()

    found, skipped = newest_valid(tmp_path)

    assert found is not None
    assert (found.step, skipped) == (8, [f"{missing}: No such file or directory"])
    assert f"{missing}: cannot be opened (No such file or directory)" in _verify(tmp_path).stderr


def test_a_file_that_is_merely_damaged_or_cut_off_is_nobody_else_s(tmp_path: Path) -> None:
    path = _set(tmp_path, 16) / rank_name(1)
    whole = path.read_bytes()
    at = whole.index(b'"stages"')
    path.write_bytes(whole[:at] + b"X" + whole[at + 1 :])
    assert "rank-00001.h5: dataset 'meta' fails its CRC-32" in _verify(tmp_path).stderr
    path.write_bytes(whole[:-1])
    assert f"has {len(whole) - 1} bytes" in _verify(tmp_path).stderr
    path.write_bytes(b"x" * len(whole))
    assert "dataset 'meta' fails its CRC-32" in _verify(tmp_path).stderr
    path.unlink()
    path.mkdir()
    assert "it is not a regular file" in _verify(tmp_path).stderr


# -- sets of another run --


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """The folder of a run with two sets of its own and a newer one of another run."""
    root = tmp_path / "run" / "checkpoints"
    _set(root, 8)
    _set(root, 16)
    write_run(tmp_path / "run", Run(id=MINE))
    shutil.copytree(_set(tmp_path / "theirs", 400, THEIRS), root / "step-0000000400")
    return tmp_path / "run"


def test_list_and_verify_show_sets_of_another_run_and_say_so(mixed: Path) -> None:
    listed = CliRunner().invoke(checkpoint, ["list", str(mixed)]).stdout.splitlines()
    assert [line.split()[0] for line in listed[1:]] == ["400", "16", "8"]
    assert listed[1].endswith(f"committed, but of another run ({THEIRS})")
    assert listed[2].endswith("  committed")

    verified = _verify(mixed)
    assert verified.exit_code == 0
    first, *others = verified.stdout.splitlines()
    assert first.endswith(f", of another run ({THEIRS})")
    assert len(others) == 2

    sets = json.loads(CliRunner().invoke(checkpoint, ["list", str(mixed), "--json"]).stdout)["sets"]
    assert [entry["other_run"] for entry in sets] == [THEIRS, None, None]


def test_the_newest_set_of_a_folder_is_one_of_its_own_run(mixed: Path) -> None:
    chosen, skipped = choose(mixed, deep=True)
    assert chosen.step == 16
    foreign = mixed / "checkpoints" / "step-0000000400"
    assert skipped == [f"{foreign}: is of another run ({THEIRS}), not of the run in this folder ({MINE})"]
    assert choose(foreign, deep=True)[0].step == 400


def test_retention_neither_counts_nor_touches_sets_of_another_run(mixed: Path) -> None:
    root = mixed / "checkpoints"
    _set(root, 24)

    retired = retire(root, 2, run=MINE)

    assert [path.name for path in retired.removed] == ["step-0000000008"]
    assert [info.step for info in find_sets(root)] == [400, 24, 16]


def test_sets_that_name_no_run_are_the_folder_s_own(tmp_path: Path) -> None:
    write_run(tmp_path, Run(id=MINE))
    _set(tmp_path / "checkpoints", 8, "an old name")
    assert choose(tmp_path, deep=True)[0].step == 8


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_run(tmp_path) is None
    run = Run.new("step 8 of another run")
    write_run(tmp_path, run)
    assert read_run(tmp_path) == run
    assert Run.new().id != Run.new().id


def test_a_damaged_run_file_is_never_taken_for_another_run(tmp_path: Path) -> None:
    write_run(tmp_path, Run.new("elsewhere"))
    path = tmp_path / RUN_NAME
    whole = path.read_bytes()
    for position in range(len(whole) - 1):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(
            CheckpointError, match=r"run.json: does not say which run is in this folder; remove it"
        ):
            read_run(tmp_path)
    for text in (b"", b"[]", b"{}", b"[" * 10**5, b"x" * 10**6):
        path.write_bytes(text)
        with pytest.raises(CheckpointError, match=r"run.json: "):
            read_run(tmp_path)
