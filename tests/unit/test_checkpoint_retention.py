from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.checkpoint import retention
from hpcpipe.checkpoint.layout import COMMIT_NAME
from hpcpipe.checkpoint.retention import retire
from hpcpipe.checkpoint.sets import find_sets
from tests.unit.checkpoint_samples import fake_set, uncommit


def _steps(root: Path) -> list[int]:
    return [info.step for info in find_sets(root)]


def test_the_newest_sets_stay_and_older_ones_go(tmp_path: Path) -> None:
    paths = [fake_set(tmp_path, step) for step in (10, 20, 30, 40)]
    retired = retire(tmp_path, keep_last=2)
    assert retired == (paths[:2], [])
    assert _steps(tmp_path) == [40, 30]


def test_every_m_th_set_stays_for_good(tmp_path: Path) -> None:
    for step in range(50, 451, 50):
        fake_set(tmp_path, step)
        retire(tmp_path, keep_last=1, keep_every=200)
    assert _steps(tmp_path) == [450, 400, 200]


def test_the_first_set_past_a_multiple_stands_for_it_when_steps_are_uneven(tmp_path: Path) -> None:
    for step in (40, 90, 130, 160, 310, 350, 390):
        fake_set(tmp_path, step)
        retire(tmp_path, keep_last=1, keep_every=100)
    assert _steps(tmp_path) == [390, 310, 130]


def test_nothing_goes_while_only_uncommitted_sets_are_newer(tmp_path: Path) -> None:
    fake_set(tmp_path, 10)
    for step in (20, 30):
        fake_set(tmp_path, step, committed=False)
    assert retire(tmp_path, keep_last=1) == ([], [])
    assert _steps(tmp_path) == [30, 20, 10]


def test_a_set_with_a_missing_file_does_not_count_as_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        fake_set(tmp_path, step)
    (tmp_path / "step-0000000030" / "rank-00000.h5").unlink()
    assert retire(tmp_path, keep_last=1).removed == [tmp_path / "step-0000000010"]
    assert _steps(tmp_path) == [30, 20]


def test_leftovers_older_than_the_newest_set_and_overtaken_attempts_go(tmp_path: Path) -> None:
    fake_set(tmp_path, 10, committed=False)
    first = fake_set(tmp_path, 20)
    second = fake_set(tmp_path, 20)
    later = fake_set(tmp_path, 30, committed=False)
    assert retire(tmp_path, keep_last=5).removed == [tmp_path / "step-0000000010", first]
    assert [info.path for info in find_sets(tmp_path)] == [later, second]


def test_files_that_hpcpipe_did_not_write_stay_and_are_reported(tmp_path: Path) -> None:
    old = fake_set(tmp_path, 10)
    (old / "notes.txt").write_text("mine")
    fake_set(tmp_path, 20)
    fake_set(tmp_path, 30)
    retired = retire(tmp_path, keep_last=1)
    assert retired.removed == [tmp_path / "step-0000000020"]
    assert len(retired.faults) == 1
    assert str(old) in retired.faults[0]
    assert [path.name for path in old.iterdir()] == ["notes.txt"]


def test_a_crash_in_the_middle_leaves_a_set_that_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = fake_set(tmp_path, 10)
    fake_set(tmp_path, 20)

    def crash(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(retention, "sync_directory", crash)
        with pytest.raises(KeyboardInterrupt):
            retire(tmp_path, keep_last=1)
    assert (old / "rank-00000.h5").exists()
    assert [info.fault is None for info in find_sets(tmp_path)] == [True, False]
    assert retire(tmp_path, keep_last=1).removed == [old]


@pytest.mark.parametrize(("last", "every"), [(0, None), (-1, None), (1, 0)])
def test_keeping_nothing_is_refused(tmp_path: Path, last: int, every: int | None) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        retire(tmp_path, last, every)


def test_no_folder_has_nothing_to_retire(tmp_path: Path) -> None:
    assert retire(tmp_path / "none", 1) == ([], [])


_events = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from(["committed", "committed", "uncommitted", "damaged"])),
    max_size=12,
)


@settings(max_examples=30, deadline=None)
@given(_events, st.integers(1, 4), st.none() | st.integers(1, 30))
def test_retention_keeps_what_it_promises_after_any_history(
    events: list[tuple[int, str]], last: int, every: int | None
) -> None:
    root = Path(tempfile.mkdtemp())
    valid: list[int] = []
    step = 0
    for distance, kind in events:
        step += distance
        directory = fake_set(root, step)
        if kind == "uncommitted":
            uncommit(directory)
        elif kind == "damaged":
            (directory / "rank-00000.h5").write_bytes(b"")
        else:
            valid.append(step)
        before = set(_steps(root))
        retired = retire(root, last, every)
        left = set(_steps(root))

        newest = max(valid, default=-1)
        first_in_window = {s // every: s for s in reversed(valid) if s >= every} if every else {}
        assert left & set(valid) == {*valid[-last:], *first_in_window.values()}
        assert {s for s in before if s > newest} <= left
        assert {s for s in left if s < newest} <= set(valid)
        assert len(retired.removed) == len(before - left)
        assert retire(root, last, every) == ([], [])
    shutil.rmtree(root)


def test_the_record_is_the_first_file_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_set(tmp_path, 10)
    fake_set(tmp_path, 20)
    order: list[str] = []
    unlink = Path.unlink

    def noted(path: Path, missing_ok: bool = False) -> None:
        order.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", noted)
    retire(tmp_path, keep_last=1)
    assert order == [COMMIT_NAME, "rank-00000.h5"]
