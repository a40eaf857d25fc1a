"""Checkpoints in one file for all ranks, through parallel HDF5: all of them meet at a cut and write it together.

Every rank passes the same cuts in the same order, and before it passes one it has sent whatever another rank needs
to come to its own; so all of them get to the meeting, each after its own last update. Otherwise the same as
`checkpoints`, with the waiting that this costs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from hpcpipe.checkpoint.interval import young_daly
from hpcpipe.checkpoint.layout import new_set_directory, set_name
from hpcpipe.checkpoint.shared_file import has_parallel_hdf5, write_shared_file
from hpcpipe.engine.committing import Committer
from hpcpipe.engine.cuts import Cut, Cuts
from hpcpipe.engine.runner import StageRunner
from hpcpipe.errors import CheckpointError, ConfigError
from hpcpipe.transport.deadline import limited
from hpcpipe.transport.wait import Waiter
from hpcpipe.transport.world import World

SLOWEST_DISK = 1e6
"""Bytes per second below which a write is taken for lost."""


def refuse_without_parallel_hdf5() -> None:
    """Raise ConfigError, with its remedy, where h5py cannot write one file from several processes."""
    if not has_parallel_hdf5():
        raise ConfigError(
            'checkpoint.file = "shared" needs an h5py that was built with MPI, and this one was not: install one '
            "(Debian: python3-h5py-mpi with python3-mpi4py, under mpirun; from source: HDF5_MPI=ON CC=mpicc pip "
            'install --no-binary=h5py h5py), or set checkpoint.file = "rank"'
        )


def ranks_of_one_file(ranks_of_stage: Sequence[Sequence[int]]) -> list[list[int]]:
    """Whose file holds each replica of each stage, for the record of a set: readers find one file, rank 0's."""
    return [[0] * len(ranks) for ranks in ranks_of_stage]


class SharedCheckpoints:
    """The part of one rank in checkpoints of one file; takes what `checkpoints.Checkpoints` takes."""

    def __init__(self, committer: Committer, *, world: World, waiter: Waiter, places: int) -> None:
        self.write_seconds = 0.0
        self._committer = committer
        self._world = world
        self._waiter = waiter
        self._cuts = Cuts(places)

    def optimal_interval(self, between_failures_s: float) -> float:
        """Seconds between checkpoints after Young and Daly, from the measured cost of the last one; 0 before."""
        return young_daly(self.write_seconds, between_failures_s) if self.write_seconds else 0.0

    def take(self, runner: StageRunner) -> bool:
        """Copy the state of a stage that has just passed a cut; True when it was the rank's last stage to do so.

        Then waits for all other ranks, and writes the set together with them.

        Raises:
            FolderLostError: on rank 0, as `Committer.commit`.
        """
        step = runner.weights.newest
        cut = self._cuts.take(runner)
        if cut is None:
            return False
        # HDF5 is not entered before all are there: only waits of our own keep the messages of others moving.
        mine = np.array([float(sum(array.nbytes for array in cut.copies.arrays.values()))])
        total = self._world.all_reduce_sum(mine, what=f"all ranks to come to the checkpoint of step {step}")
        began = time.perf_counter()
        with (
            self._limited(float(total[0])),
            self._waiter.patiently(),
            self._waiter.busy(f"writing the checkpoint of step {step}"),
        ):
            self._write(step, cut)
        self.write_seconds = cut.seconds + time.perf_counter() - began
        self._cuts.give_back(cut.copies)
        return True

    def _limited(self, nbytes: float) -> AbstractContextManager[None]:
        """An end for a meeting in which a rank is lost: inside HDF5 the others cannot ask for it."""
        stall = self._waiter.abort_after_s
        return limited(None if stall is None else stall + nbytes / SLOWEST_DISK)

    def poll(self) -> None:
        """There is nothing to look after between two cuts."""

    def finish(self) -> int | None:
        """The step committed last, the same on every rank."""
        with self._waiter.patiently():
            step: int | None = self._world.broadcast_json(
                self._committer.committed, what="the step of the last checkpoint"
            )
        return step

    def _write(self, step: int, cut: Cut) -> None:
        directory = Path(self._world.broadcast_json(self._directory(step), what="the folder of the checkpoint"))
        meta = {"step": step, "run": self._committer.run, "stages": cut.stage_metas}
        try:
            report = write_shared_file(self._world, directory, cut.copies.arrays, meta, cut.copies.bf16)
        except CheckpointError as error:
            if self._world.rank == 0:
                self._committer.failed(step, directory, str(error))
            return
        if self._world.rank == 0:
            self._committer.commit(step, directory, [report])

    def _directory(self, step: int) -> str:
        """The folder for the set, as rank 0 finds it; what is wrong with it shows when it is written to."""
        try:
            return str(new_set_directory(self._committer.root, step))
        except OSError:
            return str(self._committer.root / set_name(step))
