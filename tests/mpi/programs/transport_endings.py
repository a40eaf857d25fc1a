"""The ways in which a job ends. usage: transport_endings.py MODE; the odd rank is 1."""

from __future__ import annotations

import sys
import threading
import time

from hpcpipe.errors import ConfigError, DataError
from hpcpipe.transport.job import run_job
from hpcpipe.transport.world import World

HANG_S = 60.0


def wait_for_ever(world: World) -> None:
    """What ranks do whose neighbour has failed: wait for it, as in a receive."""
    world.barrier("a neighbour that never comes")


def live_thread() -> None:
    threading.Thread(target=time.sleep, args=(HANG_S,)).start()


def raises(world: World) -> int:
    if world.rank == 1:
        live_thread()
        raise ValueError("the forward pass broke")
    wait_for_ever(world)
    return 0


def raises_while_others_compute(world: World) -> int:
    if world.rank == 1:
        raise ValueError("the forward pass broke")
    until = time.monotonic() + HANG_S
    while time.monotonic() < until:
        sum(range(1000))
    return 0


def exits_3(world: World) -> int:
    if world.rank == 1:
        live_thread()
        sys.exit(3)
    wait_for_ever(world)
    return 0


def exits_0_alone(world: World) -> int:
    if world.rank == 1:
        sys.exit(0)
    wait_for_ever(world)
    return 0


def is_interrupted(world: World) -> int:
    if world.rank == 1:
        live_thread()
        raise KeyboardInterrupt
    wait_for_ever(world)
    return 0


def finds_bad_input(world: World) -> int:
    if world.rank == 1:
        raise DataError("data.path: no file /nowhere; give the path of an IDX file")
    wait_for_ever(world)
    return 0


def agrees_on_bad_input(world: World) -> int:
    with world.together("the run file"):
        raise ConfigError("model.depth = -1: must be positive")
    return 0


def agrees_on_one_bad_rank(world: World) -> int:
    with world.together("the data"):
        if world.rank == 1:
            raise DataError("data.path: no file /nowhere")
    return 0


def agrees_that_all_is_well(world: World) -> int:
    with world.together("the data"):
        pass
    return 0


def stops_for_requeue(world: World) -> int:
    return 75


def returns_different_codes(world: World) -> int:
    return 75 if world.rank == 1 else 0


def returns_4(world: World) -> int:
    return 4


def stalls(world: World) -> int:
    world.waiter.describe = lambda: f"stage {world.rank}"
    world.waiter.warn_after_s, world.waiter.abort_after_s = 0.5, 1.2
    if world.rank == 1:
        time.sleep(HANG_S)
    wait_for_ever(world)
    return 0


def prints_the_thread_level(world: World) -> int:
    if world.rank == 0:
        print(world.thread_level, world.notes)
    return 0


if __name__ == "__main__":
    sys.exit(run_job(globals()[sys.argv[1]]))
