"""`hpcpipe bench pipeline`: how much of the machine's throughput a pipeline reaches.

The yardstick is what the ranks reach as independent single processes that train the whole model at the same time,
with the same samples per update and no messages: the most that this machine can give. Both sides run in one job,
in turns, and medians are compared.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from hpcpipe.schedule import Action, Op

if TYPE_CHECKING:
    from hpcpipe.config import RunConfig
    from hpcpipe.datasets.protocol import Dataset
    from hpcpipe.engine.loop import Engine, Keeper
    from hpcpipe.engine.steering import Steering
    from hpcpipe.transport.transport import Transport
    from hpcpipe.transport.world import World


@click.command("pipeline")
@click.argument("run_file", metavar="RUN.toml", type=click.Path())
@click.option("--minibatches", default=16, show_default=True, help="Minibatches timed in each turn.")
@click.option("--turns", default=9, show_default=True, help="Turns of each side.")
@click.option("--set", "overrides", metavar="a.b=VALUE", multiple=True, help="Override a value of the run file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def pipeline(run_file: str, minibatches: int, turns: int, overrides: tuple[str, ...], as_json: bool) -> None:
    """Compare a pipeline with independent processes: mpirun -n 2 hpcpipe bench pipeline RUN.toml."""
    from hpcpipe.transport.job import run_job

    sys.exit(run_job(lambda world: _run(world, run_file, minibatches, turns, overrides, as_json)))


class Side:
    """One side of the comparison on this rank: an engine and its actions, run a few minibatches at a time."""

    def __init__(self, engine: Engine, actions: Iterator[Action], rows: int, stages: int) -> None:
        self._engine = engine
        self._actions = actions
        self._rows = rows
        self._stages = stages
        self.done = 0

    def advance(self, minibatches: int) -> float:
        """Run up to the update of the minibatch `minibatches` further on; seconds it took."""
        self.done += minibatches
        began = time.perf_counter()
        self._engine.run(self._until_update_of(self.done - 1))
        return time.perf_counter() - began

    def samples_per_s(self, minibatches: int, seconds: float) -> float:
        """Throughput of `minibatches` minibatches."""
        return minibatches * self._rows / seconds

    def _until_update_of(self, minibatch: int) -> Iterator[Action]:
        left = self._stages
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
    total = turns * (minibatches + settle) + 2 * world.size
    config, data = prepare(world, run_file, (*overrides, f"run.max_steps={total}", f"run.epochs={total}"))
    together, transport = side(world, config, data)
    alone, _ = side(world, config, data, alone=True)
    joint: list[float] = []
    limit: list[float] = []
    for _ in range(turns):
        together.advance(settle)
        seconds = world.all_gather_json(together.advance(minibatches), what="the pipeline's turn to end")
        joint.append(together.samples_per_s(minibatches, max(seconds)))
        alone.advance(settle)
        world.barrier("all ranks to begin their turn alone")
        seconds = world.all_gather_json(alone.advance(minibatches), what="the turn alone to end")
        limit.append(sum(alone.samples_per_s(minibatches, each) for each in seconds))
    transport.finish(discard=True)
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
    from hpcpipe.engine.steering import Steering
    from hpcpipe.observe.activity import Activity
    from hpcpipe.schedule import rank_actions
    from hpcpipe.transport.transport import Transport

    size = 1 if alone else world.size
    if alone:
        whole = config.pipeline.model_copy(update={"balance": "parameters", "stages": None})
        config = config.model_copy(update={"pipeline": whole})
    specs, plan, schedule = lay_out(config, data, size)
    stages = plan.stages_of(0 if alone else world.rank)
    device = torch.device("cpu")
    steering = steering or Steering(every=0, last=schedule.minibatches)
    runners, _ = build_runners(
        config,
        plan=plan,
        specs=specs,
        stages=stages,
        schedule=schedule,
        data=data,
        steering=steering,
        device=device,
    )
    transport = Transport(
        world,
        world.waiter,
        rank_of_stage=[world.rank] * plan.stages if alone else plan.rank_of_stage,
        device=device,
        cuda_aware=False,
        chunk_bytes=config.transport.chunk_bytes,
    )
    connect(config, runners, transport, plan=plan, schedule=schedule, data=data)
    engine = Engine(
        schedule=schedule,
        runners=runners,
        steering=steering,
        checkpoints=checkpoints or NoCheckpoints(),
        record=NoRecord(),
        activity=Activity(rank=world.rank, origin=time.perf_counter(), trace=False),
        progress=transport.progress,
        clip_norm=config.optimizer.clip_norm,
        norm_squared=lambda value: value,
        stop_on_nonfinite=False,
    )
    return Side(engine, rank_actions(schedule, stages), config.data.batch, len(stages)), transport


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
