"""The ways in which a job ends. usage: transport_endings.py MODE; the odd rank is 1."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch

from hpcpipe.errors import ConfigError, DataError
from hpcpipe.transport.job import run_job
from hpcpipe.transport.transport import Transport
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


def is_signalled_while_it_leaves(world: World) -> int:
    """Every rank gets a signal again and again until its process is gone."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    rank = os.getpid()
    if os.fork() == 0:
        while os.getppid() == rank:
            time.sleep(0.005)
            os.kill(rank, signal.SIGTERM)
        os._exit(0)
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


def replicas(world: World) -> tuple[Transport, int]:
    """The transport and the stage of a rank where rank 0 is stage 0 and all others are replicas of stage 1."""
    world.waiter.warn_after_s, world.waiter.abort_after_s = 0.5, 1.2
    stages = [[0], list(range(1, world.size))]
    transport = Transport(world, world.waiter, ranks_of_stage=stages, device=torch.device("cpu"), cuda_aware=False)
    return transport, min(world.rank, 1)


def a_replica_never_joins(world: World) -> int:
    transport, stage = replicas(world)
    if stage == 0 or world.rank == 1:
        time.sleep(HANG_S)
    transport.group(stage)
    return 0


def sums(world: World, before: Callable[[], object]) -> int:
    """An all-reduce of stage 1; its first replica does something before its last bucket is ready."""
    transport, stage = replicas(world)
    if stage == 0:
        time.sleep(HANG_S)
    reducer = transport.group(stage).reducer(torch.ones(1 << 20), [(1 << 19, 1 << 20), (0, 1 << 19)])
    reducer.begin()
    reducer.ready(0)
    if world.rank == 1:
        before()
    reducer.ready(1)
    reducer.finish("the all-reduce of stage 1, minibatch 7")
    return 0


def a_replica_never_sums(world: World) -> int:
    return sums(world, lambda: time.sleep(HANG_S))


def raises_during_a_sum(world: World) -> int:
    def fail() -> None:
        raise ValueError("the backward pass broke")

    return sums(world, fail)


def prints_the_thread_level(world: World) -> int:
    if world.rank == 0:
        print(world.thread_level, world.notes)
    return 0


if __name__ == "__main__":
    sys.exit(run_job(globals()[sys.argv[1]]))
