"""[pipeline] plan = "auto": profiles the model, measures the links and plans, in the job that will train.

All ranks measure at the same time, as they will compute at the same time. The plan is kept in the run's folder,
and a run that is resumed takes it from there: measured anew another split might win, and the run could no longer
be continued to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hpcpipe.config import RunConfig
from hpcpipe.datasets.protocol import Dataset
from hpcpipe.engine.links import measure_topology
from hpcpipe.engine.measure import measure
from hpcpipe.engine.resources import cuda_aware
from hpcpipe.planning.figures import report_table
from hpcpipe.planning.plan_file import PlanFile, load_plan, parse_plan, plan_of, plan_table
from hpcpipe.planning.problem import Problem
from hpcpipe.planning.report import report_text
from hpcpipe.planning.topology import Topology, flat
from hpcpipe.planning.units import parse_size
from hpcpipe.simulation.choice import best_plan
from hpcpipe.transport.world import World

PLAN_NAME = "plan.json"
SWEEPS = 10
_SHARE_OF_DEVICE = 0.9
"""Of a GPU's memory: the rest is torch's, the driver's and the transport's."""
_MEMORY_BANDWIDTH = 1e10
"""Bytes a second, where there is nobody to talk to."""


def auto_plan(
    config: RunConfig,
    world: World,
    data: Dataset,
    *,
    device: torch.device,
    resuming: bool,
    say: Callable[[str], None],
) -> PlanFile:
    """The plan of this run, the same on every rank: the one in its folder if it is resumed, else a new one.

    All ranks call it. Raises as `new_plan` does, and PlanError for a plan in the folder that cannot be read.
    """
    kept = Path(config.run.out) / PLAN_NAME
    table: dict[str, Any] | None = None
    with world.together("looking for the plan of this run"):
        if world.rank == 0 and resuming and kept.is_file():
            table = _kept(kept, world.size, say)
    table = world.broadcast_json(table, what="the plan from rank 0")
    if table is not None:
        return parse_plan(table, source=str(kept))
    return new_plan(config, world, data, device=device, say=say)


def new_plan(
    config: RunConfig,
    world: World,
    data: Dataset,
    *,
    device: torch.device,
    say: Callable[[str], None],
    sweeps: int = SWEEPS,
    straight: bool = False,
    max_stages: int | None = None,
) -> PlanFile:
    """A plan from a profile and links measured now, the same on every rank. All ranks call it.

    `sweeps` over all layers are measured. `straight`, `max_stages`: as in `Problem`. `say` is told about it on
    rank 0. Raises PlanError where no plan fits, ModelError for a layer that cannot be measured.
    """
    if world.rank == 0:
        say(f"measuring the model on {world.size} rank{'s' if world.size > 1 else ''} at the same time")
    profile = measure(config, data, world, device=device, repeats=sweeps, concurrent=world.size > 1)
    topology = _links(config, world, device)
    table: dict[str, Any] | None = None
    with world.together("planning"):
        if world.rank == 0:
            report = best_plan(
                Problem(
                    profile=profile,
                    topology=topology,
                    ranks=world.size,
                    memory_bytes=_memory(config, device),
                    schedule=config.pipeline.schedule,
                    policy=config.pipeline.policy,
                    microbatches=config.pipeline.microbatches,
                    straight=straight,
                    max_stages=max_stages,
                    cut_in_flight=_cuts_in_flight(config),
                )
            )
            for line in report_text(report).splitlines():
                say(line)
            table = plan_table(plan_of(report.problem, report.split, predicted=report_table(report)))
    return parse_plan(world.broadcast_json(table, what="rank 0 to plan"), source="the plan of this run")


def _kept(path: Path, ranks: int, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The plan that the run began with, if it is for as many ranks as there are now."""
    plan = load_plan(path)
    if plan.ranks == ranks:
        say(f"plan: {path}, made when this run began")
        return plan_table(plan)
    say(f"plan: {path} is for {plan.ranks} ranks, but there are {ranks}; planning anew")
    return None


def _links(config: RunConfig, world: World, device: torch.device) -> Topology:
    if world.size == 1:
        return flat(1, _MEMORY_BANDWIDTH)
    topology, _, _ = measure_topology(world, device, cuda_aware=cuda_aware(config, world, device))
    return topology


def _memory(config: RunConfig, device: torch.device) -> int | None:
    """Bytes that a rank may need: as the run file says, or most of its GPU's."""
    if config.pipeline.memory_limit is not None:
        return parse_size(config.pipeline.memory_limit)
    if device.type == "cuda":
        return int(_SHARE_OF_DEVICE * torch.cuda.get_device_properties(device).total_memory)
    return None


def _cuts_in_flight(config: RunConfig) -> bool:
    cuts = config.checkpoint
    return cuts.cut == "inflight" and cuts.repeats
