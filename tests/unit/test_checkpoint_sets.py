from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcpipe.checkpoint.describe import describe
from hpcpipe.checkpoint.layout import COMMIT_NAME, FileReport, new_set_directory, rank_name
from hpcpipe.checkpoint.record import commit, read_record
from hpcpipe.checkpoint.sets import choose, find_sets, locate, newest_valid, open_set
from hpcpipe.checkpoint.structure import LockedError, check_structure
from hpcpipe.checkpoint.writer import write_rank_file
from hpcpipe.errors import CheckpointError
from tests.unit.checkpoint_samples import another_hdf5, layer_tree, same_tree, uncommit, write_set


def _newest_step(root: Path) -> int | None:
    chosen, _ = newest_valid(root)
    return None if chosen is None else chosen.step


def test_a_set_gives_back_ranks_layers_and_meta(tmp_path: Path) -> None:
    trees = [
        layer_tree(["embed", "block.0"]),
        layer_tree(["head"]) | {"stages/1/versions/4/head/weight": np.ones(3)},
    ]
    half = "layers/head/parameters/half"
    trees[1][half] = np.arange(4, dtype=np.uint16)
    directory = write_set(tmp_path, 50, trees, {"run_id": "r", "n": 1}, [half])

    found = open_set(directory)
    assert (found.step, found.ranks, found.meta) == (50, 2, {"run_id": "r", "n": 1})
    assert found.layers == ("embed", "block.0", "head")
    for rank, tree in enumerate(trees):
        part = found.read_rank(rank)
        assert same_tree(part.tree, tree)
        assert part.meta == {"rank": rank}
    head = found.read_layer("head")
    assert same_tree(head.tree, {p.removeprefix("layers/head/"): a for p, a in trees[1].items() if "layers/" in p})
    assert head.bf16 == {"parameters/half"}


def _flip_byte_of(directory: Path, rank: int, path: str) -> None:
    """Damage one byte of one array of a rank file."""
    entry = open_set(directory).index(rank).entries[path]
    with open(directory / rank_name(rank), "r+b") as file:
        file.seek(entry.offset)
        byte = file.read(1)[0]
        file.seek(entry.offset)
        file.write(bytes([byte ^ 1]))


def test_arrays_are_read_from_whichever_of_the_files_has_each(tmp_path: Path) -> None:
    half = "layers/b/parameters/half"
    trees = [layer_tree("a"), layer_tree("b") | {half: np.arange(4, dtype=np.uint16)}, layer_tree("c")]
    found = open_set(write_set(tmp_path, 1, trees, bf16=[half]))

    part = found.read_paths(lambda path: "/parameters/" in path, [1, 0])

    assert same_tree(
        part.tree, {path: array for tree in trees[:2] for path, array in tree.items() if "/parameters/" in path}
    )
    assert part.bf16 == {half}


def test_an_array_is_read_without_the_rest_of_its_file(tmp_path: Path) -> None:
    directory = write_set(tmp_path, 1, [layer_tree("ab")])
    _flip_byte_of(directory, 0, "layers/a/parameters/weight")

    part = open_set(directory).read_paths(lambda path: path.startswith("layers/b/"), [0])
    assert same_tree(part.tree, layer_tree("b"))

    with pytest.raises(CheckpointError, match="dataset 'layers/a/parameters/weight' fails its CRC-32"):
        open_set(directory).read_paths(lambda path: path.startswith("layers/a/"), [0])


def test_a_set_is_verified_when_every_file_of_it_is(tmp_path: Path) -> None:
    found = open_set(write_set(tmp_path, 1, [layer_tree("a"), layer_tree("b")]))

    found.read_rank(1)
    assert not found.verified

    assert found.faults() == []
    assert found.verified


def test_staleness_counts_updates_of_several_minibatches_where_a_stage_is_replicated(tmp_path: Path) -> None:
    directory = new_set_directory(tmp_path, 10)
    tree = {f"stages/0/versions/{version}/a/w": np.ones(1) for version in (3, 6)}
    report = write_rank_file(directory, 0, tree, {"stages": {"0": {"replicas": 3}}})
    commit(directory, [report], {})

    _, (stage,) = describe(open_set(directory))

    # Updates behind minibatches 5, 8 and, in a short round, 9.
    assert stage.staleness(10) == 3


def test_what_a_set_does_not_hold_is_an_error_that_names_it(tmp_path: Path) -> None:
    found = open_set(write_set(tmp_path, 1, [layer_tree("a")]))
    with pytest.raises(CheckpointError, match="no layer 'b'"):
        found.read_layer("b")
    with pytest.raises(CheckpointError, match="written by 1 ranks and has no rank 1"):
        found.read_rank(1)


def test_a_layer_whose_name_begins_another_s_is_told_apart(tmp_path: Path) -> None:
    found = open_set(write_set(tmp_path, 1, [layer_tree(["l1", "l10", "l1.0"])]))
    assert same_tree(
        found.read_layer("l1").tree,
        {p.removeprefix("layers/l1/"): a for p, a in layer_tree(["l1"]).items()},
    )


def test_a_folder_without_record_is_no_set(tmp_path: Path) -> None:
    write_set(tmp_path, 1, [layer_tree("a")])
    uncommit(write_set(tmp_path, 2, [layer_tree("a")]))
    chosen, skipped = newest_valid(tmp_path)
    assert chosen is not None
    assert chosen.step == 1
    assert len(skipped) == 1
    assert "no commit record" in skipped[0]


def test_a_missing_rank_file_is_named_and_the_set_before_taken(tmp_path: Path) -> None:
    write_set(tmp_path, 1, [layer_tree("a")] * 3)
    directory = write_set(tmp_path, 2, [layer_tree("a")] * 3)
    (directory / rank_name(2)).unlink()
    chosen, skipped = newest_valid(tmp_path)
    assert chosen is not None
    assert chosen.step == 1
    assert rank_name(2) in skipped[0]
    with pytest.raises(CheckpointError, match=rank_name(2)):
        open_set(directory).read_rank(2)


def test_swapped_rank_files_are_noticed_even_with_equal_lengths(tmp_path: Path) -> None:
    directory = write_set(tmp_path, 1, [layer_tree("a")] * 2)
    a, b = directory / rank_name(0), directory / rank_name(1)
    assert a.stat().st_size == b.stat().st_size
    a.rename(directory / "x")
    b.rename(a)
    (directory / "x").rename(b)
    assert _newest_step(tmp_path) is None
    assert len(open_set(directory).faults()) == 2


def test_a_rank_file_of_another_set_is_noticed(tmp_path: Path) -> None:
    other = write_set(tmp_path, 1, [layer_tree("a", seed=1), layer_tree("b", seed=1)])
    directory = write_set(tmp_path, 2, [layer_tree("a", seed=2), layer_tree("b", seed=2)])
    shutil.copy(other / rank_name(1), directory / rank_name(1))
    assert _newest_step(tmp_path) == 1


def test_a_rank_file_that_says_it_is_of_another_rank_is_refused(tmp_path: Path) -> None:
    directory = new_set_directory(tmp_path, 1)
    report = write_rank_file(directory, 5, layer_tree("a"), {})
    (directory / rank_name(5)).rename(directory / rank_name(0))
    commit(directory, [report._replace(rank=0)], {})
    with pytest.raises(CheckpointError, match="is of rank 5, not of rank 0"):
        open_set(directory).read_rank(0)


def test_a_set_copied_to_another_step_is_skipped_and_to_another_name_still_opens(tmp_path: Path) -> None:
    directory = write_set(tmp_path, 1, [layer_tree("a")])
    shutil.copytree(directory, tmp_path / "step-0000000009")
    shutil.copytree(directory, tmp_path / "backup")
    chosen, skipped = newest_valid(tmp_path)
    assert chosen is not None
    assert chosen.path == directory
    assert "is of step 1" in skipped[0]
    assert open_set(tmp_path / "backup").step == 1


def test_a_set_of_another_run_is_passed_over_where_the_run_is_known(tmp_path: Path) -> None:
    mine, theirs = "a" * 16, "b" * 16
    write_set(tmp_path, 1, [layer_tree("a")], {"run": mine})
    write_set(tmp_path, 2, [layer_tree("a")], {"run": theirs})

    chosen, skipped = newest_valid(tmp_path, home=mine)

    assert chosen is not None
    assert chosen.step == 1
    assert skipped == [
        f"{tmp_path}/step-0000000002: is of another run ({theirs}), not of the run in this folder ({mine})"
    ]
    assert _newest_step(tmp_path) == 2


def test_stale_parts_of_an_uncommitted_attempt_are_overwritten_and_cleared(tmp_path: Path) -> None:
    stale = write_set(tmp_path, 5, [layer_tree("a", seed=9)] * 3)
    uncommit(stale)
    (stale / (rank_name(1) + ".tmp")).write_bytes(b"half a file")
    (stale / (rank_name(7) + ".tmp")).write_bytes(b"half a file")
    (stale / "notes.txt").write_text("the user's")

    directory = write_set(tmp_path, 5, [layer_tree("a"), layer_tree("b")])
    assert directory == stale
    assert {path.name for path in directory.iterdir()} == {COMMIT_NAME, rank_name(0), rank_name(1), "notes.txt"}
    assert open_set(directory).faults() == []


def test_a_committed_step_is_not_touched_until_its_successor_is_committed(tmp_path: Path) -> None:
    first = write_set(tmp_path, 5, [layer_tree("a", seed=1)])
    directory = new_set_directory(tmp_path, 5)
    assert directory != first
    report = write_rank_file(directory, 0, layer_tree("a", seed=2), {})
    chosen, _ = newest_valid(tmp_path)
    assert chosen is not None
    assert chosen.path == first

    commit(directory, [report], {})
    chosen, skipped = newest_valid(tmp_path)
    assert chosen is not None
    assert chosen.path == directory
    assert skipped == []
    assert [(info.step, info.attempt) for info in find_sets(tmp_path)] == [(5, 1), (5, 0)]


def test_every_rank_is_told_the_same_folder_until_the_commit(tmp_path: Path) -> None:
    answers = {new_set_directory(tmp_path, 5)}
    reports = []
    for rank in range(3):
        directory = new_set_directory(tmp_path, 5)
        answers.add(directory)
        reports.append(write_rank_file(directory, rank, {}, {}))
    assert answers == {tmp_path / "step-0000000005"}
    commit(answers.pop(), reports, {})
    assert new_set_directory(tmp_path, 5) == tmp_path / "step-0000000005.1"


def test_reports_survive_a_trip_as_six_integers(tmp_path: Path) -> None:
    directory = new_set_directory(tmp_path, 1)
    reports = [write_rank_file(directory, rank, layer_tree("a"), {}) for rank in range(2)]
    wire = np.array(reports, dtype=np.int64)
    commit(directory, [FileReport(*map(int, row)) for row in wire[::-1]], {})
    assert read_record(directory).files == tuple(reports)


def test_a_commit_without_all_ranks_or_files_is_refused(tmp_path: Path) -> None:
    directory = new_set_directory(tmp_path, 1)
    reports = [write_rank_file(directory, rank, layer_tree("a"), {}) for rank in range(2)]
    for wrong in ([], reports[1:], [reports[0]] * 2):
        with pytest.raises(ValueError, match="one report of each rank"):
            commit(directory, wrong, {})
    with pytest.raises(ValueError, match="not named"):
        commit(tmp_path, reports, {})
    (directory / rank_name(1)).unlink()
    with pytest.raises(CheckpointError, match="not committed"):
        commit(directory, reports, {})
    assert _newest_step(tmp_path) is None


def test_no_folder_and_an_empty_one_have_no_sets(tmp_path: Path) -> None:
    assert find_sets(tmp_path / "none") == []
    assert newest_valid(tmp_path) == (None, [])
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be listed"):
        find_sets(tmp_path / "file")


def test_names_that_only_look_like_sets_are_left_alone(tmp_path: Path) -> None:
    for name in ("step-1", "step-0000000001x", "step-0000000001.0", "steps", "step-00000000010.tmp"):
        (tmp_path / name).mkdir()
    assert find_sets(tmp_path) == []


def test_steps_beyond_ten_digits_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (9_999_999_999, 10_000_000_000, 5):
        write_set(tmp_path, step, [{}])
    assert [info.step for info in find_sets(tmp_path)] == [10_000_000_000, 9_999_999_999, 5]


@pytest.mark.parametrize("kind", ["run", "root", "set"])
def test_a_run_its_checkpoints_folder_or_one_set_all_lead_to_the_set(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "checkpoints"
    directory = write_set(root, 3, [layer_tree("a")])
    path = {"run": tmp_path, "root": root, "set": directory}[kind]
    assert choose(path, deep=True)[0].path == directory


def test_a_path_that_leads_to_no_set_is_one_clear_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError) as caught:
            locate(path)
        assert str(path) in str(caught.value)
    uncommit(write_set(tmp_path, 3, [layer_tree("a")]))
    with pytest.raises(CheckpointError, match=r"none of its 1 sets is valid; the newest: .*no commit record"):
        choose(tmp_path, deep=False)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"format": "x"},
        {"files": []},
        {"files": [1]},
        {"step": "1"},
        {"meta": []},
        {"created": None},
    ],
    ids=str,
)
def test_a_record_with_a_right_checksum_and_wrong_content_is_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    directory = write_set(tmp_path, 1, [layer_tree("a")])
    record = json.loads((directory / COMMIT_NAME).read_bytes())["record"] | change
    body = json.dumps(record).encode()
    digest = hashlib.sha256(body).hexdigest()
    (directory / COMMIT_NAME).write_bytes(b'{"sha256":"%s","record":%s}\n' % (digest.encode(), body))
    with pytest.raises(CheckpointError, match="no commit record that this hpcpipe reads"):
        open_set(directory)


def test_replicas_that_hold_different_values_of_one_array_are_noticed(tmp_path: Path) -> None:
    same = open_set(write_set(tmp_path, 1, [layer_tree("a"), layer_tree("a")]))
    assert len(list(same.layer_arrays(("parameters",)))) == 2
    other = open_set(write_set(tmp_path, 2, [layer_tree("a"), layer_tree("a", seed=1)]))
    with pytest.raises(CheckpointError, match="rank 1 and one before it differ in 'layers/a/parameters/weight'"):
        list(other.layer_arrays(("parameters",)))


def test_a_locked_file_is_no_reason_to_take_an_older_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HDF5_USE_FILE_LOCKING", raising=False)
    write_set(tmp_path, 1, [layer_tree("a")])
    with another_hdf5():
        directory = write_set(tmp_path, 2, [layer_tree("a")])
    with open(directory / rank_name(0), "rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        for attempt in (lambda: newest_valid(tmp_path), lambda: open_set(directory).read_rank(0)):
            with pytest.raises(LockedError, match=r"rank-00000.h5: .*errno 11.*HDF5_USE_FILE_LOCKING"):
                attempt()
        reader = (
            "import sys; from pathlib import Path; from hpcpipe.checkpoint.sets import open_set;"
            "print(open_set(Path(sys.argv[1])).faults())"
        )
        environment = os.environ | {"HDF5_USE_FILE_LOCKING": "FALSE"}
        done = subprocess.run(
            [sys.executable, "-c", reader, directory], env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.stdout == "[]\n", done.stderr
    assert _newest_step(tmp_path) == 2


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, 524])
def test_a_file_system_without_locks_is_named_with_errno_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    directory = write_set(tmp_path, 1, [layer_tree("a")])

    def no_locks(*_: object, **__: object) -> None:
        raise OSError(f"Unable to open file (unable to lock file, errno = {number}, error message = '...')")

    found = open_set(directory)
    monkeypatch.setattr(h5py, "File", no_locks)
    with pytest.raises(LockedError, match=f"errno {number}.*HDF5_USE_FILE_LOCKING=FALSE"):
        check_structure(directory / rank_name(0), found.record.files[0], found.index(0))


def test_a_file_that_is_laid_out_as_this_version_does_it_needs_no_lock(tmp_path: Path) -> None:
    directory = write_set(tmp_path, 1, [layer_tree("a")])
    with open(directory / rank_name(0), "rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert open_set(directory).faults() == []


def test_checkpoint_modules_load_neither_torch_nor_mpi() -> None:
    program = (
        "import sys, hpcpipe.cli.checkpoint as cli, hpcpipe.checkpoint.interval;"
        "assert not {'torch', 'mpi4py', 'h5py', 'numpy'} & sys.modules.keys();"
        "import hpcpipe.checkpoint.sets, hpcpipe.checkpoint.export, hpcpipe.checkpoint.digest,"
        " hpcpipe.checkpoint.background, hpcpipe.checkpoint.retention, hpcpipe.checkpoint.describe;"
        "assert not {'torch', 'mpi4py', 'mpi4py.MPI'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
