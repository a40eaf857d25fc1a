"""One profiling job on one rank: from the run file to the profile.

Agrees on what to measure and on what, and shows how far it is. The measuring is `measure`'s business, the figures
for people are the command's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from hpcpipe.config import RunConfig
from hpcpipe.datasets.build import build_dataset
from hpcpipe.engine.measure import measure
from hpcpipe.engine.placement import Placement, find_placement
from hpcpipe.engine.resources import choose_device, set_threads
from hpcpipe.engine.run_file import agreed_run, naming
from hpcpipe.errors import LauncherError
from hpcpipe.observe.progress import Progress
from hpcpipe.planning.profile import Profile
from hpcpipe.transport.world import World


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """What the command line says. `concurrent`: all ranks measure at the same time, else rank 0 alone."""

    run_file: str
    overrides: tuple[str, ...] = ()
    repeats: int
    concurrent: bool = False


def take_profile(world: World, options: ProfileOptions) -> Profile:
    """The profile of the run file's model, the same on every rank.

    Raises UserError for a run file, data or a model that cannot be used.
    """
    if options.concurrent and world.size == 1:
        raise LauncherError(
            "--concurrent needs several ranks, there is 1: start them with mpirun -n N hpcpipe profile ..."
        )
    config = agreed_run(world, options.run_file, options.overrides)
    placement = find_placement(world)
    with naming(options.run_file):
        with world.together("preparing device and data"):
            device = choose_device(config, placement)
            data = build_dataset(config.data, config.run.seed)
        _set_threads(config, placement, options)
        progress = _Shown(config, world)
        try:
            return measure(
                config,
                data,
                world,
                device=device,
                repeats=options.repeats,
                concurrent=options.concurrent,
                step=progress.step,
            )
        finally:
            progress.close()


def _set_threads(config: RunConfig, placement: Placement, options: ProfileOptions) -> None:
    """As many as each rank of the run will have: its share of the cores is known where all ranks are here."""
    if options.concurrent or config.run.threads is not None or "OMP_NUM_THREADS" in os.environ:
        set_threads(config, placement)
    else:
        torch.set_num_threads(1)


class _Shown:
    """How far rank 0 is, for people."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self._mode = config.run.progress if world.rank == 0 else "off"
        self._progress: Progress | None = None

    def step(self, done: int, total: int) -> None:
        """`done` sweeps of `total` are over."""
        if self._progress is None:
            self._progress = Progress(mode=self._mode, total=total, start=0)
        self._progress.step(done, "measuring")

    def close(self) -> None:
        """Leave the terminal as it is."""
        if self._progress is not None:
            self._progress.close()
