"""A writer killed at any moment leaves the set before, or the new one whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcpipe.checkpoint.sets import newest_valid
from tests.crash import struck
from tests.unit.checkpoint_samples import Array, random_array, same_bits

_RANKS = 2
_COUNT = 500_000

_WRITER = """
import sys
from pathlib import Path
from hpcpipe.checkpoint.layout import new_set_directory
from hpcpipe.checkpoint.record import commit
from hpcpipe.checkpoint.retention import retire
from hpcpipe.checkpoint.writer import write_rank_file
from tests.crash.test_checkpoint_kill import _RANKS, _tree

root, step = Path(sys.argv[1]), int(sys.argv[2])
while True:
    step += 1
    directory = new_set_directory(root, step)
    reports = [write_rank_file(directory, rank, _tree(step, rank), {"rank": rank}) for rank in range(_RANKS)]
    commit(directory, reports, {"of": step})
    print(step, flush=True)
    retire(root, keep_last=2)
"""


def _tree(step: int, rank: int) -> dict[str, Array]:
    return {
        f"layers/l{rank}/parameters/{name}": random_array((_COUNT,), "float32", 10 * step + rank) for name in "ab"
    }


def test_a_writer_killed_at_random_moments_never_costs_a_committed_set(tmp_path: Path) -> None:
    rng = random.Random(7)
    last = 0
    for _ in range(12):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, tmp_path, str(last)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        reported = int(writer.stdout.readline())
        time.sleep(rng.uniform(0.0, 0.25))
        writer.send_signal(signal.SIGKILL)
        rest = [int(line) for line in writer.stdout.read().split()]
        writer.stdout.close()
        writer.wait()
        reported = max([reported, *rest])

        found, _ = newest_valid(tmp_path)
        assert found is not None
        # Killed between the commit and the line that tells of it, the newer set is there and whole.
        assert found.step in (reported, reported + 1)
        assert found.meta == {"of": found.step}
        for rank in range(_RANKS):
            tree = found.read_rank(rank).tree
            assert all(same_bits(tree[path], array) for path, array in _tree(found.step, rank).items())
        last = found.step
    assert last >= 12


def test_a_writer_killed_at_each_single_step_leaves_a_whole_set_and_the_next_one_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-m", "tests.crash.struck", tmp_path], check=True, timeout=240)
    # Nobody pulls the plug on what follows.
    monkeypatch.setattr(os, "fsync", lambda _: None)

    roots = sorted(tmp_path.iterdir())
    newest = []
    for root in roots:
        found, _ = newest_valid(root)
        assert found is not None, root
        for rank in range(struck.RANKS):
            stored = found.read_rank(rank).tree
            assert all(same_bits(stored[path], a) for path, a in struck.tree(found.step, rank).items())
        newest.append(found.step)

        struck.checkpoint(root, 4)
        assert [path.name for path in root.iterdir()] == ["step-0000000004"], root
        assert len(list(root.rglob("*"))) == 1 + struck.RANKS + 1

    # The older set up to one step, the newer from there on; steps before, at and behind the commit were hit.
    commit_at = newest.index(3)
    assert newest == [1] * commit_at + [3] * (len(newest) - commit_at)
    assert commit_at > 20
    assert len(newest) - commit_at > 10
