"""Writes a rank file while training goes on: one thread, one write at a time.

The thread is a daemon and stays out of the HDF5 library, so that neither an abort nor the end of the interpreter
waits for a disk; whoever wants the file waits for it explicitly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hpcpipe.checkpoint.layout import Array, FileReport
from hpcpipe.checkpoint.writer import RankFileWriter


class BackgroundWriter:
    """`submit`, then `poll` now and then (or `wait`) until the report comes back. For one thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._outcome: FileReport | BaseException | None = None
        self.seconds = 0.0
        """Wall time of the last finished write, fsync included, in seconds: C of Young and Daly."""

    @property
    def busy(self) -> bool:
        """Whether a write was submitted whose outcome nobody has taken yet; its arrays must stay as they are."""
        return self._thread is not None

    def submit(
        self,
        directory: Path,
        rank: int,
        tree: Mapping[str, Array],
        meta: Mapping[str, Any],
        bf16: Collection[str] = (),
    ) -> None:
        """Start `write_rank_file(directory, rank, tree, meta, bf16)`; the arrays must not change until it is done.

        Raises:
            RuntimeError: the outcome of the write before has not been taken.
            ValueError, TypeError: a path, dtype or meta that a checkpoint cannot hold; nothing was started.
        """
        if self._thread is not None:
            raise RuntimeError("a checkpoint write is still in flight: poll() or wait() for it first")
        writer = RankFileWriter(directory, rank, tree, meta, bf16)

        def work() -> None:
            start = time.perf_counter()
            try:
                self._outcome = writer.write()
            except BaseException as error:
                self._outcome = error
            self.seconds = time.perf_counter() - start

        self._thread = threading.Thread(target=work, name="hpcpipe-checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> FileReport | None:
        """The report, once, as soon as the file is on disk; None while it is written or nothing was submitted.

        Raises:
            OSError: what `RankFileWriter.write` raised, once.
        """
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> FileReport | None:
        """As `poll`, but waits up to `timeout` seconds for the end of the write (None: as long as it takes)."""
        if self._thread is None:
            return None
        self._thread.join(timeout)
        if self._thread.is_alive():
            return None
        outcome, self._thread, self._outcome = self._outcome, None, None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome
