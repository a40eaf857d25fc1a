"""Ranks that write one file together: `shared_file_cases.py FOLDER`; every case runs on any number of ranks."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from hpcpipe.checkpoint import shared_file
from hpcpipe.checkpoint.layout import FileReport, rank_name
from hpcpipe.checkpoint.writer import write_rank_file
from hpcpipe.errors import CheckpointError
from hpcpipe.transport.job import run_job
from hpcpipe.transport.world import World
from tests.unit.checkpoint_samples import DTYPES, Array, random_array

SHAPES = ((), (3,), (0, 4), (2, 3, 5))


def tree_of(rank: int) -> tuple[dict[str, Array], list[str]]:
    """What a rank holds: every dtype in every shape, and one array of bfloat16."""
    tree = {
        f"layers/l{rank}/buffers/{dtype}{len(shape)}": random_array(shape, dtype, 100 * rank + number)
        for number, dtype in enumerate(DTYPES)
        for shape in SHAPES
    }
    brain = f"stages/{rank}/versions/7/l{rank}/weight"
    tree[brain] = random_array((4, 6), "uint16", rank)
    tree[f"layers/l{rank}/parameters/big"] = random_array((150, 70), "float32", rank)
    return tree, [brain]


def meta_of(rank: int) -> dict[str, Any]:
    return {"step": 3, "run": None, "stages": {str(rank): {"layers": [f"l{rank}"], "replica": 0}}}


def check_written(world: World, folder: Path, holders: range) -> None:
    """Write what the ranks in `holders` have, and compare with what one process writes of all of it."""
    tree, bf16 = tree_of(world.rank) if world.rank in holders else ({}, [])
    meta = meta_of(world.rank) if world.rank in holders else {"step": 3, "run": None, "stages": {}}

    report = shared_file.write_shared_file(world, folder / "together", tree, meta, bf16)

    if world.rank == 0:
        held = [tree_of(rank) for rank in holders]
        together = {path: array for tree, _ in held for path, array in tree.items()}
        brains = [path for _, bf16 in held for path in bf16]
        merged = {
            "step": 3,
            "run": None,
            "stages": {k: v for r in holders for k, v in meta_of(r)["stages"].items()},
        }
        alone = write_rank_file(folder / "alone", 0, together, merged, brains)
        assert report == alone
        assert os.listdir(folder / "together") == [rank_name(0)]
        contents = [(folder / name / rank_name(0)).read_bytes() for name in ("together", "alone")]
        assert contents[0] == contents[1]
    reports = world.all_gather_json(report, what="the reports")
    assert {FileReport(*one) for one in reports} == {report}


def the_file_has_the_bytes_that_one_process_would_give_it(world: World, folder: Path) -> None:
    check_written(world, folder, range(world.size))


def ranks_without_arrays_take_part(world: World, folder: Path) -> None:
    check_written(world, folder, range(world.size // 2, world.size))


def arrays_longer_than_one_write_come_in_parts(world: World, folder: Path) -> None:
    with mock.patch.object(shared_file, "MOST_AT_ONCE", 1000):
        check_written(world, folder, range(world.size))


def check_failure(world: World, folder: Path, patch: AbstractContextManager[Any], word: str) -> None:
    """When the last rank fails all hear of it in the same words, nothing is left, and the next write is well."""
    last = world.size - 1
    tree, bf16 = tree_of(world.rank)
    said = "nothing"
    with patch if world.rank == last else nullcontext():
        try:
            shared_file.write_shared_file(world, folder / "together", tree, meta_of(world.rank), bf16)
        except CheckpointError as error:
            said = str(error)
    assert set(world.all_gather_json(said, what="what was said")) == {said}
    assert f"rank {last}: " in said, said
    assert word in said, said
    assert os.listdir(folder / "together") == []
    world.barrier("all to have looked")
    check_written(world, folder, range(world.size))


def a_rank_that_cannot_reach_the_file_fails_all(world: World, folder: Path) -> None:
    def not_there(path: Any, flags: int, *mode: int, real: Any = os.open) -> int:
        if flags == os.O_RDWR:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return int(real(path, flags, *mode))

    check_failure(world, folder, mock.patch.object(os, "open", not_there), "No such file or directory")


def a_rank_that_cannot_write_its_arrays_fails_all(world: World, folder: Path) -> None:
    broken = mock.patch.object(shared_file.h5d, "open", side_effect=OSError("bad sector"))
    check_failure(world, folder, broken, "bad sector")


def a_rank_that_cannot_sync_fails_all(world: World, folder: Path) -> None:
    broken = mock.patch.object(shared_file, "_sync", side_effect=OSError(5, "Input/output error"))
    check_failure(world, folder, broken, "Input/output error")


CASES = [
    the_file_has_the_bytes_that_one_process_would_give_it,
    ranks_without_arrays_take_part,
    arrays_longer_than_one_write_come_in_parts,
    a_rank_that_cannot_reach_the_file_fails_all,
    a_rank_that_cannot_write_its_arrays_fails_all,
    a_rank_that_cannot_sync_fails_all,
]


def main(world: World) -> int:
    for case in CASES:
        case(world, Path(sys.argv[1]) / case.__name__)
        if world.rank == 0:
            print(case.__name__, flush=True)
    return 0


if __name__ == "__main__":
    assert np.lib.NumpyVersion(np.__version__) < "2.0.0", "Debian's h5py was built for an older NumPy"
    sys.exit(run_job(main))
