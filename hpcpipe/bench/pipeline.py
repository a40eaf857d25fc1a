"""`hpcpipe bench pipeline`: how much of the machine's throughput a pipeline reaches.

The yardstick is what the ranks reach as independent single processes that train the whole model at the same time,
with as many samples per minibatch and no messages: the most that this machine can give. Both sides run in one job,
in turns, and medians are compared.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from hpcpipe.errors import ConfigError
from hpcpipe.schedule import Action, Op

if TYPE_CHECKING:
    from hpcpipe.config import RunConfig
    from hpcpipe.datasets.protocol import Dataset
    from hpcpipe.engine.loop import Engine, Keeper
    from hpcpipe.engine.runner import StageRunner
    from hpcpipe.engine.steering import Steering
    from hpcpipe.schedule import Schedule
    from hpcpipe.transport.transport import Transport
    from hpcpipe.transport.world import World


@click.command("pipeline")
@click.argument("run_file", metavar="RUN.toml", type=click.Path())
@click.option(
    "--minibatches",
    default=16,
    show_default=True,
    help="Minibatches timed in each turn; up to the end of a round.",
)
@click.option("--turns", default=9, show_default=True, help="Turns of each side.")
@click.option("--set", "overrides", metavar="a.b=VALUE", multiple=True, help="Override a value of the run file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def pipeline(run_file: str, minibatches: int, turns: int, overrides: tuple[str, ...], as_json: bool) -> None:
    """Compare a pipeline with independent processes: mpirun -n 2 hpcpipe bench pipeline RUN.toml."""
    from hpcpipe.transport.job import run_job

    sys.exit(run_job(lambda world: _run(world, run_file, minibatches, turns, overrides, as_json)))


class Side:
    """One side of the comparison on this rank: an engine and its actions, run a few minibatches at a time."""

    def __init__(
        self,
        schedule: Schedule,
        engine: Engine,
        runners: Collection[StageRunner],
        actions: Iterator[Action],
        rows: int,
    ) -> None:
        self._schedule = schedule
        self._engine = engine
        self._runners = runners
        self._actions = actions
        self._rows = rows
        self.done = 0

    def advance(self, minibatches: int) -> tuple[int, float]:
        """Run up to the update `minibatches` minibatches further on, or the next that ends a round of all stages.

        Returns the number of minibatches and the seconds they took.
        """
        before = self.done
        self.done = self._schedule.next_boundary(before + minibatches - 1) + 1
        began = time.perf_counter()
        self._engine.run(self._until_update_of(self.done - 1))
        return self.done - before, time.perf_counter() - began

    def samples_per_s(self, minibatches: int, seconds: float) -> float:
        """Throughput of `minibatches` minibatches."""
        return minibatches * self._rows / seconds

    def forget(self) -> None:
        """Drop the graphs of minibatches in flight, which Python's collector cannot see through."""
        for runner in self._runners:
            runner.in_flight.clear()

    def _until_update_of(self, minibatch: int) -> Iterator[Action]:
        left = len(self._runners)
        for action in self._actions:
            yield action
            if action.op is Op.UPDATE and action.minibatch == minibatch:
                left -= 1
                if not left:
                    return


def _run(
    world: World, run_file: str, minibatches: int, turns: int, overrides: tuple[str, ...], as_json: bool
) -> int:
    # The first minibatches of a turn still find messages and caches as the other side left them.
    settle = world.size + 1
    # Twice as many as asked for, because turns go on to the end of a round; what is left over is never run.
    total = 2 * turns * (minibatches + settle) + 2 * world.size
    config, data = prepare(world, run_file, (*overrides, f"run.max_steps={total}", f"run.epochs={total}"))
    together, transport = side(world, config, data)
    alone, _ = side(world, config, data, alone=True)
    joint: list[float] = []
    limit: list[float] = []
    for _ in range(turns):
        together.advance(settle)
        count, own = together.advance(minibatches)
        seconds = world.all_gather_json(own, what="the pipeline's turn to end")
        joint.append(together.samples_per_s(count, max(seconds)))
        alone.advance(settle)
        world.barrier("all ranks to begin their turn alone")
        count, own = alone.advance(minibatches)
        seconds = world.all_gather_json(own, what="the turn alone to end")
        limit.append(sum(alone.samples_per_s(count, each) for each in seconds))
    transport.finish(discard=True)
    for one in (together, alone):
        one.forget()
    if world.rank == 0:
        _report(config, joint, limit, as_json)
    return 0


def prepare(world: World, run_file: str, overrides: Sequence[str]) -> tuple[RunConfig, Dataset]:
    """The run file and its data; torch computes with the threads that the file says, else with one."""
    import torch

    from hpcpipe.config import load_run
    from hpcpipe.datasets.build import build_dataset

    with world.together("reading the run file"):
        config = load_run(run_file, overrides)
        if config.pipeline.plan == "auto":
            raise ConfigError(
                f'{run_file}: pipeline.plan: "auto" plans for training only; name a plan file with --set '
                "pipeline.plan=PLAN.json"
            )
        data = build_dataset(config.data, config.run.seed)
    torch.set_num_threads(config.run.threads or 1)
    return config, data


def side(
    world: World,
    config: RunConfig,
    data: Dataset,
    *,
    alone: bool = False,
    steering: Steering | None = None,
    checkpoints: Keeper | None = None,
) -> tuple[Side, Transport]:
    """This rank's part of the pipeline over all ranks; with `alone` the whole model, and no other rank."""
    import torch

    from hpcpipe.engine.assemble import build_runners, connect, lay_out
    from hpcpipe.engine.loop import Engine, NoCheckpoints, NoRecord
    from hpcpipe.engine.planned import plan_named
    from hpcpipe.engine.steering import Steering
    from hpcpipe.observe.activity import Activity
    from hpcpipe.schedule import rank_actions
    from hpcpipe.transport.transport import Transport

    size = 1 if alone else world.size
    if alone:
        config = config.unsplit()
    chosen = config.pipeline.plan
    file = None if chosen is None else plan_named(chosen, world)
    specs, plan, schedule = lay_out(config, data, size, file)
    places = plan.places_of(0 if alone else world.rank)
    device = torch.device("cpu")
    steering = steering or Steering(schedule, every=0)
    runners, _ = build_runners(
        config,
        plan=plan,
        specs=specs,
        places=places,
        schedule=schedule,
        data=data,
        steering=steering,
        device=device,
    )
    transport = Transport(
        world,
        world.waiter,
        ranks_of_stage=[[world.rank]] * plan.stages if alone else plan.ranks_of_stage,
        device=device,
        cuda_aware=False,
        chunk_bytes=config.transport.chunk_bytes,
    )
    connect(config, runners, transport, plan=plan, schedule=schedule, data=data)
    activity = Activity(rank=world.rank, origin=time.perf_counter(), trace=False)
    world.waiter.task = activity.task
    engine = Engine(
        schedule=schedule,
        runners=runners,
        steering=steering,
        checkpoints=checkpoints or NoCheckpoints(),
        record=NoRecord(),
        activity=activity,
        progress=transport.progress,
        clip_norm=config.optimizer.clip_norm,
        norm_squared=lambda value: value,
        stop_on_nonfinite=False,
    )
    actions = rank_actions(schedule, places)
    return Side(schedule, engine, runners.values(), actions, config.data.batch), transport


def _report(config: RunConfig, joint: list[float], limit: list[float], as_json: bool) -> None:
    fractions = [ours / most for ours, most in zip(joint, limit, strict=True)]
    result = {
        "samples_per_s": statistics.median(joint),
        "limit_samples_per_s": statistics.median(limit),
        "fraction_of_limit": statistics.median(fractions),
        "fractions": fractions,
        "policy": config.pipeline.policy,
    }
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(
        f"pipeline {result['samples_per_s']:.1f} samples/s, limit {result['limit_samples_per_s']:.1f}, "
        f"fraction {result['fraction_of_limit']:.3f} (turns: {', '.join(f'{f:.3f}' for f in fractions)})"
    )
