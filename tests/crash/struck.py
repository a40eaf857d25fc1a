"""Writes a checkpoint again and again, and each time is killed one step on the disk later.

python -m tests.crash.struck FOLDER    leaves FOLDER/0000, FOLDER/0001, ..., the last one of a process that lived

Every call that changes something on the disk is a step. A write is cut in two first, as it may be in truth.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from hpcpipe.checkpoint.layout import new_set_directory
from hpcpipe.checkpoint.record import commit
from hpcpipe.checkpoint.retention import retire
from hpcpipe.checkpoint.writer import write_rank_file
from tests.unit.checkpoint_samples import Array, random_array, uncommit

RANKS = 2
CALLS = ("open", "pwrite", "fsync", "replace", "unlink", "rmdir", "mkdir")


def tree(step: int, rank: int) -> dict[str, Array]:
    return {f"layers/l{rank}/parameters/w": random_array((3000,), "float32", 10 * step + rank)}


def checkpoint(root: Path, step: int) -> None:
    """What the ranks of a run do for one checkpoint."""
    directory = new_set_directory(root, step)
    reports = [write_rank_file(directory, rank, tree(step, rank), {"rank": rank}) for rank in range(RANKS)]
    commit(directory, reports, {"of": step})
    retire(root, keep_last=1)


def prepare(root: Path) -> None:
    """A folder with one set, and with what an earlier crash left of another."""
    checkpoint(root, 1)
    shutil.copytree(root / "step-0000000001", root / "step-0000000000")
    uncommit(root / "step-0000000000")
    (root / "step-0000000003").mkdir()
    (root / "step-0000000003" / "rank-00007.h5.tmp").write_bytes(b"half a file")


def die_at(step: int) -> None:
    """Kill this process when it is about to change something on the disk for the `step`-th time, from 0."""
    done = 0

    def before() -> None:
        nonlocal done
        if done == step:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1

    def watched(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            before()
            return real(*arguments, **options)

        return call

    def written(descriptor: int, data: Any, offset: int) -> int:
        half = memoryview(data)[: max(1, len(data) // 2)]
        before()
        return write(descriptor, half, offset)

    write = os.pwrite
    for name in CALLS:
        setattr(os, name, written if name == "pwrite" else watched(getattr(os, name)))


def main(folder: Path) -> None:
    sample = folder / "sample"
    prepare(sample)
    step = 0
    while True:
        root = folder / f"{step:04d}"
        shutil.copytree(sample, root)
        child = os.fork()
        if child == 0:
            die_at(step)
            checkpoint(root, 3)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            shutil.rmtree(sample)
            return
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        step += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
