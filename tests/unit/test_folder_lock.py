"""The lock on a run's folder: who has it, when it is stale, and that nobody loses it without noticing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from hpcpipe.engine import folder_lock
from hpcpipe.engine.folder_lock import LEAVING_S, LOCK_NAME, SETTLE_S, STALE_AFTER_S, Clock, FolderLock
from hpcpipe.engine.lock_holder import Fate, Holder
from hpcpipe.errors import FolderError, FolderLostError

SLURM = {"SLURM_JOB_ID": "17"}


@dataclass
class Folder:
    """A folder, a clock that only sleeping moves, and what was said; `every_second` runs while somebody sleeps."""

    path: Path
    said: list[str] = field(default_factory=list)
    now: float = 0.0
    every_second: Callable[[], None] = lambda: None

    @property
    def lock(self) -> Path:
        return self.path / LOCK_NAME

    def take(self, holder: Holder | None = None) -> FolderLock:
        clock = Clock(steady=lambda: self.now, sleep=self._sleep)
        return FolderLock.take(self.path, holder or Holder.here("a" * 16), say=self.said.append, clock=clock)

    def held_by(self, holder: Holder, *, age: float = 0.0) -> Holder:
        """Leave the lock of another process, renewed `age` seconds ago."""
        self.lock.write_bytes(holder.encode())
        then = time.time_ns() - int(age * 1e9)
        os.utime(self.lock, ns=(then, then))
        return holder

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.every_second()


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def ended_process() -> int:
    """The id of a process that has been there a moment ago."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def elsewhere(**changes: object) -> Holder:
    """A process of another host."""
    return replace(Holder.here("b" * 16), host="n0", boot="another boot", pid=4711, **changes)  # type: ignore[arg-type]


def test_a_lock_names_run_host_process_and_job_and_goes_with_its_release(folder: Folder) -> None:
    lock = folder.take(Holder.here("a" * 16, {"PBS_JOBID": "99.server"}))

    content = json.loads(folder.lock.read_bytes())
    assert (content["run"], content["pid"], content["job"]) == ("a" * 16, os.getpid(), "PBS job 99.server")
    assert abs(content["since"] - time.time()) < 60
    lock.release()
    lock.release()
    assert list(folder.path.iterdir()) == []


def test_a_folder_in_use_by_a_living_process_of_this_host_is_refused_in_one_line(folder: Folder) -> None:
    lock = folder.take(Holder.here("a" * 16, SLURM))

    with pytest.raises(FolderError) as caught:
        folder.take()

    assert f"in use by process {os.getpid()} on " in str(caught.value)
    assert "(Slurm job 17, since " in str(caught.value)
    assert "last sign of life 0 s ago): choose another folder with --out, or stop that run" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert folder.now < LEAVING_S + 1
    lock.check()
    lock.release()


def test_the_lock_of_a_process_of_this_host_that_is_gone_is_taken_over_at_once(folder: Folder) -> None:
    gone = folder.held_by(replace(Holder.here("b" * 16), pid=ended_process()))

    lock = folder.take()

    assert folder.now <= SETTLE_S
    assert folder.said == [
        f"{folder.path} was held by process {gone.pid} on {gone.host}, which is gone: taken over"
    ]
    lock.check()
    lock.release()


def test_a_process_id_that_was_given_to_another_process_is_told_by_its_start(folder: Folder) -> None:
    mine = Holder.here("b" * 16)
    assert mine.started is not None
    folder.held_by(replace(mine, started=mine.started - 1))

    folder.take().release()

    assert folder.now <= SETTLE_S


def test_a_process_that_has_ended_and_was_not_waited_for_is_gone(folder: Folder) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()
    mine = Holder.here("a" * 16)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)

    started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    assert mine.fate_of(replace(mine, pid=process.pid, started=started)) is Fate.GONE
    process.stdout.close()
    process.wait()


def test_a_process_that_is_about_to_end_is_given_the_time_to(folder: Folder) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    folder.held_by(replace(Holder.here("b" * 16), pid=process.pid, started=started))

    def end() -> None:
        process.kill()
        process.wait()

    folder.every_second = end
    folder.take().release()

    assert 0.0 < folder.now <= LEAVING_S + SETTLE_S
    assert process.stdin is not None
    process.stdin.close()


@pytest.mark.parametrize("differs", ["boot", "namespace", "host"])
def test_a_host_or_container_of_the_same_name_does_not_mislead(folder: Folder, differs: str) -> None:
    # A process of that number is not there, but it would be looked for in the wrong place.
    other = replace(Holder.here("b" * 16), pid=ended_process(), **{differs: "another"})  # type: ignore[arg-type]
    folder.held_by(other)
    folder.every_second = folder.lock.touch

    with pytest.raises(FolderError, match=f"in use by process {other.pid} "):
        folder.take()


def test_a_fresh_lock_of_another_host_is_watched_and_refused_when_it_is_renewed(folder: Folder) -> None:
    folder.held_by(elsewhere(job="Slurm job 17"), age=3)
    folder.every_second = lambda: folder.lock.touch() if folder.now >= 7 else None

    with pytest.raises(FolderError, match=r"in use by process 4711 on n0 \(Slurm job 17, since"):
        folder.take()

    assert 7 <= folder.now < 9
    assert len(folder.said) == 1
    assert (
        "may be in use by process 4711 on n0: looking for up to 57 s whether that is still there" in folder.said[0]
    )


def test_a_fresh_lock_of_another_host_that_is_not_renewed_is_taken_over_within_a_minute(folder: Folder) -> None:
    folder.held_by(elsewhere(), age=20)

    folder.take().release()

    assert 39 <= folder.now <= 40 + 1 + SETTLE_S
    assert len(folder.said) == 2
    assert "process 4711 on n0, which has shown no sign of life for 60 s: taken over" in folder.said[1]


def test_an_old_lock_of_another_host_is_taken_over_at_once(folder: Folder) -> None:
    folder.held_by(elsewhere(), age=75)

    folder.take().release()

    assert folder.now <= SETTLE_S
    assert "no sign of life for 75 s: taken over" in folder.said[0]


def test_file_times_in_the_future_only_make_a_lock_be_watched(folder: Folder) -> None:
    folder.held_by(elsewhere(), age=-3600)
    folder.take().release()
    assert folder.now <= STALE_AFTER_S + 1 + SETTLE_S

    folder.held_by(elsewhere(), age=-3600)
    folder.every_second = lambda: os.utime(folder.lock, ns=(0, time.time_ns() + 3_600_000_000_000))
    with pytest.raises(FolderError, match="last sign of life 0 s ago"):
        folder.take()


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_a_wall_clock_that_jumps_changes_nothing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    true = time.time
    lock = folder.take(elsewhere())
    monkeypatch.setattr(time, "time", lambda: true() + jump)
    folder.every_second = folder.lock.touch

    with pytest.raises(FolderError, match="in use"):
        folder.take()

    lock.check()
    lock.release()


def test_a_requeued_job_takes_over_from_its_own_earlier_incarnation_at_once(folder: Folder) -> None:
    before = replace(Holder.here("b" * 16, SLURM), boot="another boot")
    folder.held_by(before)
    folder.take(Holder.here("a" * 16, {**SLURM, "SLURM_RESTART_COUNT": "1"})).release()
    assert folder.now <= SETTLE_S

    folder.held_by(before)
    folder.every_second = folder.lock.touch
    for other in ({**SLURM, "SLURM_RESTART_COUNT": "0"}, {"SLURM_JOB_ID": "18", "SLURM_RESTART_COUNT": "1"}):
        with pytest.raises(FolderError, match="in use"):
            folder.take(Holder.here("a" * 16, other))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": "hpcpipe run lock"}',
        b"\xff" * 100,
        b"[" * 100_000,
        elsewhere().encode().replace(b'"n0"', b'"n0\\nforged line"'),
        elsewhere().encode().replace(b"4711", b"-1"),
        elsewhere().encode().replace(b"4711", b"NaN"),
        elsewhere().encode().replace(b"4711", b'"4711"'),
    ],
    ids=range(10),
)
def test_a_lock_file_that_says_nothing_is_judged_by_its_heartbeat(folder: Folder, content: bytes) -> None:
    assert Holder.decode(content) is None
    folder.lock.write_bytes(content)
    folder.take().release()
    assert 0 < folder.now <= STALE_AFTER_S + 1 + SETTLE_S
    assert "held by an unknown process, which has shown no sign of life" in folder.said[-1]

    folder.lock.write_bytes(content)
    folder.every_second = folder.lock.touch
    with pytest.raises(FolderError, match="in use by another run"):
        folder.take()


def test_a_lock_that_is_just_being_written_is_judged_when_it_is(folder: Folder) -> None:
    folder.lock.write_bytes(b"")
    gone = replace(Holder.here("b" * 16), pid=ended_process())
    folder.every_second = lambda: folder.held_by(gone) if not folder.lock.read_bytes() else None

    folder.take().release()

    assert folder.now <= 1 + SETTLE_S


def test_a_lock_that_is_given_back_while_it_is_watched_is_free(folder: Folder) -> None:
    folder.held_by(elsewhere())
    folder.every_second = lambda: folder.lock.unlink() if folder.now == 5 else None

    folder.take().release()

    assert 5 <= folder.now <= 6 + SETTLE_S


def test_a_lock_that_is_renewed_after_it_was_judged_is_put_back(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = folder.held_by(elsewhere(), age=75)
    rename = os.rename

    def at_the_last_moment(source: Path, target: Path) -> None:
        folder.lock.touch()
        rename(source, target)

    monkeypatch.setattr(os, "rename", at_the_last_moment)
    folder.every_second = folder.lock.touch
    with pytest.raises(FolderError, match="in use by process 4711 on n0"):
        folder.take()

    assert folder.lock.read_bytes() == holder.encode()
    assert list(folder.path.iterdir()) == [folder.lock]


def test_a_lock_is_put_back_where_there_are_no_hard_links(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = folder.held_by(elsewhere(), age=75)
    rename, renamed = os.rename, []

    def touched_before(source: Path, target: Path) -> None:
        if not renamed:
            folder.lock.touch()
        renamed.append(target)
        rename(source, target)

    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "rename", touched_before)
    monkeypatch.setattr(os, "link", no_links)
    folder.every_second = folder.lock.touch
    with pytest.raises(FolderError, match="in use by process 4711 on n0"):
        folder.take()

    assert folder.lock.read_bytes() == holder.encode()


def _compete(folder: Folder, start: threading.Barrier, won: list[FolderLock], lost: list[FolderError]) -> None:
    start.wait()
    try:
        lock = FolderLock.take(folder.path, Holder.here("a" * 16), say=folder.said.append)
        won.append(lock)
    except FolderError as error:
        lost.append(error)


def test_of_many_that_find_a_stale_lock_exactly_one_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a real clock: the losers wait for the winner, who is in this process and does not go.
    monkeypatch.setattr(folder_lock, "LEAVING_S", 0.4)
    monkeypatch.setattr(folder_lock, "SETTLE_S", 0.4)
    for turn in range(5):
        path = tmp_path / str(turn)
        path.mkdir()
        Folder(path).held_by(replace(Holder.here("b" * 16), pid=ended_process()))
        won: list[FolderLock] = []
        lost: list[FolderError] = []
        start = threading.Barrier(8)
        threads = [threading.Thread(target=_compete, args=(Folder(path), start, won, lost)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert (len(won), len(lost)) == (1, 7)
        won[0].check()
        won[0].release()
        assert list(path.iterdir()) == []


def test_a_lock_that_was_removed_or_taken_is_noticed_and_said_by_whom(folder: Folder) -> None:
    lock = folder.take()
    folder.lock.unlink()
    with pytest.raises(FolderLostError, match=r"no longer this run's \(run.lock was removed\)") as caught:
        lock.check(lambda _: None)
    assert caught.value.exit_code == 1

    folder.held_by(elsewhere())
    with pytest.raises(FolderLostError, match=r"\(process 4711 on n0 has taken it\): nothing more is written"):
        lock.check(lambda _: None)
    lock.release()
    assert folder.lock.exists()


def test_a_lock_that_is_put_back_in_time_was_never_lost(folder: Folder) -> None:
    lock = folder.take()
    aside = folder.lock.rename(folder.path / "aside")

    lock.check(lambda _: os.rename(aside, folder.lock))

    lock.release()


def test_a_lock_is_renewed_while_it_is_held_and_never_that_of_another(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.02)
    lock = folder.take()
    os.utime(folder.lock, ns=(0, 0))
    deadline = time.monotonic() + 10
    while folder.lock.stat().st_mtime_ns == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)

    folder.lock.unlink()
    folder.held_by(elsewhere(), age=75)
    before = folder.lock.stat().st_mtime_ns
    time.sleep(0.2)
    assert folder.lock.stat().st_mtime_ns == before
    lock.release()


def test_what_killed_processes_left_beside_a_lock_is_swept_away(folder: Folder) -> None:
    for name in ("run.lock.stale-0123456789abcdef", "run.lock.clock-0123456789abcdef"):
        (folder.path / name).touch()

    lock = folder.take()

    assert list(folder.path.iterdir()) == [folder.lock]
    lock.release()


def test_a_lock_that_does_not_fit_on_the_disk_leaves_nothing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        folder.take()
    assert list(folder.path.iterdir()) == []
