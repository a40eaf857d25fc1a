"""The lock on the folder of a run: a file that one process holds, and that goes stale when that process is gone.

It needs nothing of the file system but that creating a file that must not exist, and renaming one, each succeed
for one process only, which NFS and Lustre promise; locks of the kernel (flock) many of them do not have. Ages are
told by the file server's clock, that of the times it gives to files, so hosts may disagree about the time. The
holder is never asked; whoever has lost its lock finds out before it commits anything.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcpipe.durable import write_all
from hpcpipe.engine.lock_holder import Fate, Holder
from hpcpipe.errors import FolderError, FolderLostError

LOCK_NAME = "run.lock"
BEAT_S = 10.0
"""Seconds between two renewals: a few file operations a minute, which no file server minds."""
STALE_AFTER_S = 60.0
"""A lock that was not renewed for so long is stale: five beats may be lost to a slow server or a busy host."""
LOOK_EVERY_S = 1.0
LEAVING_S = 3.0
"""How long a process on this very host may take to end: that of a job that was killed a moment ago."""
SETTLE_S = 1.0
"""How long a lock that was taken over is left alone before it counts: others may have judged the old one, too, and
the slowest of them takes the new one aside by mistake."""
_PUT_BACK_S = 2.0
"""How long the lock may be away while another process looks whether it took the right one aside."""
_MAX_BYTES = 64 << 10
_ATTEMPTS = 20


@dataclass(frozen=True)
class Clock:
    """The time as a lock sees it; `steady` only goes forward, in seconds."""

    steady: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class _Seen:
    """A lock file as it was found; equal if nobody has renewed or replaced it in between."""

    inode: int
    renewed_ns: int
    holder: Holder | None


class FolderLock:
    """The lock on `folder`, held from `take` to `release`, or until the process is gone."""

    def __init__(self, folder: Path, holder: Holder, descriptor: int) -> None:
        """Use `take`."""
        self._folder = folder
        self._holder = holder
        self._descriptor = descriptor
        self._over = threading.Event()
        self._beat = threading.Thread(target=self._renew, name="hpcpipe-lock", daemon=True)
        self._beat.start()

    @classmethod
    def take(
        cls, folder: Path, holder: Holder, *, say: Callable[[str], None], clock: Clock | None = None
    ) -> FolderLock:
        """Take the lock on `folder`, which exists, for `holder`, this process.

        Waits for up to `STALE_AFTER_S` seconds where it takes that to see whether a holder is still there, and
        tells `say` of that and of a lock that it takes over.

        Raises:
            FolderError: another process holds it; one line that says who.
            OSError: the folder cannot be written.
        """
        clock = clock or Clock()
        judge = _Judge(folder, holder, say, clock)
        for attempt in range(_ATTEMPTS):
            descriptor = _create(folder / LOCK_NAME, holder.encode())
            if descriptor is None:
                judge.clear()
                continue
            if attempt:
                clock.sleep(SETTLE_S)
            if not attempt or _is_of(look(folder / LOCK_NAME), holder):
                _sweep(folder)
                return cls(folder, holder, descriptor)
            os.close(descriptor)
        raise FolderError(f"{folder}: other runs take it again and again; choose another folder with --out")

    def check(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """See that the lock is still this one.

        Raises:
            FolderLostError: it was removed or another process has it; one line.
            OSError: it cannot be looked at.
        """
        for last in (False, True):
            seen = look(self._folder / LOCK_NAME)
            if _is_of(seen, self._holder):
                return
            if not last:
                sleep(_PUT_BACK_S)
        who = f"{LOCK_NAME} was removed" if seen is None else f"{seen.holder or 'an unknown process'} has taken it"
        raise FolderLostError(
            f"{self._folder} is no longer this run's ({who}): nothing more is written there; see that no other "
            "run uses it, then go on with --resume auto"
        )

    def release(self) -> None:
        """Give the lock back; harmless if it is lost, or given back already."""
        if self._over.is_set():
            return
        self._over.set()
        self._beat.join()
        os.close(self._descriptor)
        # A server that is away leaves a lock that goes stale, which is no reason to end otherwise.
        with suppress(OSError):
            if _is_of(look(self._folder / LOCK_NAME), self._holder):
                (self._folder / LOCK_NAME).unlink()

    def _renew(self) -> None:
        while not self._over.wait(BEAT_S):
            # By descriptor: the lock of somebody who has taken over must not seem fresher than it is. Whether a
            # renewal that fails matters is seen by `check`.
            with suppress(OSError):
                os.utime(self._descriptor)


class _Judge:
    """Looks at the lock of another process until it may be taken or must be let be."""

    def __init__(self, folder: Path, mine: Holder, say: Callable[[str], None], clock: Clock) -> None:
        self._folder = folder
        self._path = folder / LOCK_NAME
        self._mine = mine
        self._say = say
        self._clock = clock
        self._announced = False

    def clear(self) -> None:
        """Return when the lock is out of the way, or may be. Raises FolderError if it is somebody's."""
        seen = look(self._path)
        if seen is None:
            return
        reason = self._stale(seen)
        if reason is not None and self._remove(seen):
            self._say(f"{self._folder} was held by {seen.holder or 'an unknown process'}, {reason}: taken over")

    def _stale(self, seen: _Seen) -> str | None:
        """Why the lock is nobody's any more; None if it changed meanwhile. Raises FolderError if it is held."""
        fate = Fate.UNKNOWN if seen.holder is None else self._mine.fate_of(seen.holder)
        if seen.holder is not None and fate is Fate.ALIVE:
            fate = self._await_end(seen.holder)
            if fate is Fate.ALIVE:
                raise self._in_use(seen)
        if fate is Fate.GONE:
            return "which is gone"
        age = self._age(seen)
        if age > STALE_AFTER_S:
            return f"which has shown no sign of life for {age:.0f} s"
        return self._watch(seen, min(STALE_AFTER_S, STALE_AFTER_S - age))

    def _await_end(self, holder: Holder) -> Fate:
        deadline = self._clock.steady() + LEAVING_S
        while self._mine.fate_of(holder) is Fate.ALIVE and self._clock.steady() < deadline:
            self._clock.sleep(LEAVING_S / 20)
        return self._mine.fate_of(holder)

    def _watch(self, seen: _Seen, seconds: float) -> str | None:
        if not self._announced:
            self._announced = True
            self._say(
                f"{self._folder} may be in use by {seen.holder or 'an unknown process'}: "
                f"looking for up to {seconds:.0f} s whether that is still there"
            )
        deadline = self._clock.steady() + seconds
        while self._clock.steady() < deadline:
            self._clock.sleep(LOOK_EVERY_S)
            current = look(self._path)
            if current is None or (current.inode, current.holder) != (seen.inode, seen.holder):
                return None
            if current != seen:
                raise self._in_use(current)
        return f"which has shown no sign of life for {STALE_AFTER_S:.0f} s"

    def _in_use(self, seen: _Seen) -> FolderError:
        holder = seen.holder
        if holder is None:
            return FolderError(f"{self._folder} is in use by another run: choose another folder with --out")
        about = [] if holder.job is None else [holder.job]
        about.append(f"since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(holder.since))}")
        about.append(f"last sign of life {max(0.0, self._age(seen)):.0f} s ago")
        return FolderError(
            f"{self._folder} is in use by {holder} ({', '.join(about)}): choose another folder with --out, or "
            "stop that run"
        )

    def _age(self, seen: _Seen) -> float:
        """Seconds since the lock was renewed, by the file server's clock."""
        probe = self._aside("clock")
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            # The time that the server, not this host, thinks it is.
            os.utime(descriptor)
            return (os.fstat(descriptor).st_mtime_ns - seen.renewed_ns) / 1e9
        finally:
            os.close(descriptor)
            probe.unlink(missing_ok=True)

    def _remove(self, seen: _Seen) -> bool:
        """Take away the lock that was judged; False if it is another one, or renewed, by the time it is ours."""
        aside = self._aside("stale")
        if look(self._path) != seen:
            return False
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return False
        right = look(aside) == seen
        if not right:
            _put_back(aside, self._path)
        aside.unlink(missing_ok=True)
        return right

    def _aside(self, what: str) -> Path:
        return self._folder / f"{LOCK_NAME}.{what}-{self._mine.token}"


def look(path: Path) -> _Seen | None:
    """The lock file as it is; None if there is none."""
    try:
        # Opening makes an NFS client ask the server, which a mere stat may not.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(descriptor)
        return _Seen(status.st_ino, status.st_mtime_ns, Holder.decode(os.read(descriptor, _MAX_BYTES)))
    finally:
        os.close(descriptor)


def _is_of(seen: _Seen | None, holder: Holder) -> bool:
    return seen is not None and seen.holder is not None and seen.holder.token == holder.token


def _put_back(aside: Path, path: Path) -> None:
    """Give a lock its name again whose holder is alive; if a third process has got in between, that one has it."""
    try:
        os.link(aside, path)
    except (FileExistsError, FileNotFoundError):
        return
    except OSError:
        # A file system without hard links; the moment in which this is wrong is short, and `check` finds it.
        if not path.exists():
            os.rename(aside, path)


def _create(path: Path, content: bytes) -> int | None:
    """A descriptor of the new lock file; None if there is one already. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return None
    try:
        write_all(descriptor, content, 0)
        os.fsync(descriptor)
    except BaseException:
        os.close(descriptor)
        path.unlink()
        raise
    return descriptor


def _sweep(folder: Path) -> None:
    """Remove what processes have left that were killed while they looked at a lock."""
    for path in folder.glob(f"{LOCK_NAME}.*"):
        with suppress(OSError):
            path.unlink()
