"""The plan file that a run file names by [pipeline] plan: read once, by rank 0, and known to all ranks.

It reads a plan file and says where the run is another one than the plan was made for. It never looks at the model:
whether the plan fits is for `plan` to say.
"""

from __future__ import annotations

import torch

from hpcpipe.config import RunConfig
from hpcpipe.planning.plan_file import PlanFile, load_plan, parse_plan, plan_table
from hpcpipe.transport.world import World


def plan_named(path: str, world: World) -> PlanFile:
    """The plan in the file `path`, the same on every rank. All ranks call it.

    Raises PlanError for a file that is no plan.
    """
    table = None
    with world.together("reading the plan"):
        if world.rank == 0:
            table = plan_table(load_plan(path))
    return parse_plan(world.broadcast_json(table, what="the plan from rank 0"), source=path)


def remarks(file: PlanFile, config: RunConfig, device: torch.device) -> list[str]:
    """A line about a plan that was made for another run than this one; nothing if it was not.

    Another batch or type costs other times and bytes, so the plan may be a bad one here, or not fit in memory.
    """
    pipeline, about = config.pipeline, file.profile.about
    # Only the asynchronous schedule has a policy.
    policy = file.policy if file.schedule == pipeline.schedule == "pipedream" else None
    compared = {
        "schedule": (file.schedule, pipeline.schedule),
        "policy": (policy, pipeline.policy),
        "microbatches": (file.microbatches, pipeline.microbatches),
        "batch": (about.get("batch"), config.data.batch),
        "dtype": (about.get("dtype"), config.run.dtype),
        "device": (about.get("device"), device.type),
        "optimizer": (about.get("optimizer"), config.optimizer.name),
        "threads": (about.get("threads"), torch.get_num_threads()),
    }
    other = {key: pair for key, pair in compared.items() if pair[0] is not None and pair[0] != pair[1]}
    if not other:
        return []
    made_for = ", ".join(f"{key} {was}" for key, (was, _) in other.items())
    now = ", ".join(f"{key} {is_now}" for key, (_, is_now) in other.items())
    return [
        f"{pipeline.plan}: was made for {made_for}, but this run has {now}: its predictions do not hold here, and "
        "another split may be better; profile and plan again"
    ]
