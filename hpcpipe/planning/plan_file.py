"""Plan files: which layers and which ranks each stage has, with the profile and the topology behind the choice.

It owns the file between `hpcpipe plan` and `train --plan`, `simulate` and whoever asks later why: everything that
the prediction used is inside. It decides nothing; a loaded plan can be run by any model with these layers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcpipe.errors import PlanError
from hpcpipe.hints import did_you_mean
from hpcpipe.planning import records
from hpcpipe.planning.problem import Problem, Split
from hpcpipe.planning.profile import Profile, parse_profile, profile_table
from hpcpipe.planning.topology import Topology, parse_topology, topology_table
from hpcpipe.schedule.orders import ORDERS, SYNCHRONOUS
from hpcpipe.schedule.policies import Policy

FORMAT = "hpcpipe-plan"
VERSION = 1


@dataclass(frozen=True)
class PlannedStage:
    """The names of a stage's layers in the profile's order, and its ranks: one per replica, in their order."""

    layers: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """A plan: stages in order, how they are run, and what the prediction used.

    Every layer of the profile is in one stage, no layer reads from a later stage, and ranks 0..N-1 have one
    (stage, replica) each. A pass of the profile is a microbatch where `microbatches` > 1.

    Raises PlanError: any of this does not hold.
    """

    stages: tuple[PlannedStage, ...]
    schedule: str
    policy: str
    microbatches: int
    profile: Profile
    topology: Topology
    predicted: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What `hpcpipe plan` printed: throughput, bubble, seconds and bytes of each stage."""
    about: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """How the plan was asked for."""

    def __post_init__(self) -> None:
        _one_of(self.schedule, ORDERS, "schedule")
        _one_of(self.policy, [policy.value for policy in Policy], "policy")
        records.count(self.microbatches, "microbatches", unit="parts", least=1)
        if self.microbatches > 1 and self.schedule not in SYNCHRONOUS:
            raise PlanError(f'microbatches: must be 1 for "{self.schedule}", got {self.microbatches}')
        if not self.stages:
            raise PlanError("stages: must hold at least one stage, got none")
        self._check_layers()
        self._check_ranks()

    def _check_layers(self) -> None:
        number = {layer.name: index for index, layer in enumerate(self.profile.layers)}
        stage_of: dict[int, int] = {}
        for index, stage in enumerate(self.stages):
            where = f"stages[{index}].layers"
            if not stage.layers:
                raise PlanError(f"{where}: must hold at least one layer, got none")
            before = -1
            for name in stage.layers:
                if name not in number:
                    near = did_you_mean(str(name), number)
                    raise PlanError(f"{where}: {records.shown(name)} is no layer of the profile{near}")
                if number[name] in stage_of:
                    other = stage_of[number[name]]
                    raise PlanError(f"{where}: {records.shown(name)} is in stages[{other}] already")
                if number[name] < before:
                    raise PlanError(f"{where}: {records.shown(name)} stands behind a layer that it comes before")
                before = number[name]
                stage_of[before] = index
        for name, place in number.items():
            if place not in stage_of:
                raise PlanError(f"stages: {records.shown(name)}, a layer of the profile, is in none of them")
        for start, end in self.profile.edges:
            if stage_of[start] > stage_of[end]:
                reader, read = self.profile.layers[end].name, self.profile.layers[start].name
                raise PlanError(
                    f"stages[{stage_of[end]}].layers: {records.shown(reader)} reads from {records.shown(read)}, "
                    f"which is in the later stages[{stage_of[start]}]"
                )

    def _check_ranks(self) -> None:
        ranks = [rank for stage in self.stages for rank in stage.ranks]
        seen: set[int] = set()
        for index, stage in enumerate(self.stages):
            if not stage.ranks:
                raise PlanError(f"stages[{index}].ranks: must hold at least one rank, got none")
            for rank in stage.ranks:
                if type(rank) is not int or not 0 <= rank < len(ranks) or rank in seen:
                    expected = f"ranks, each of 0 to {len(ranks) - 1} once over all stages"
                    records.wrong(f"stages[{index}].ranks", expected, list(stage.ranks))
                seen.add(rank)
        self.topology.check_holds(len(ranks))

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of ranks of each stage."""
        return tuple(len(stage.ranks) for stage in self.stages)

    @property
    def ranks(self) -> int:
        return sum(self.replicas)


def plan_of(problem: Problem, split: Split, *, predicted: Mapping[str, Any] | None = None) -> PlanFile:
    """Return the answer to a problem as a plan. `predicted`: JSON values to keep with it."""
    names = [layer.name for layer in problem.profile.layers]
    return PlanFile(
        stages=tuple(
            PlannedStage(layers=tuple(names[layer] for layer in stage.layers), ranks=stage.ranks)
            for stage in split.stages
        ),
        schedule=problem.schedule,
        policy=problem.policy,
        microbatches=problem.microbatches,
        profile=problem.profile,
        topology=problem.topology,
        predicted=predicted or {},
        about={
            "ranks": problem.ranks,
            "memory_bytes": problem.memory_bytes,
            "straight": problem.straight,
            "max_stages": problem.max_stages,
            "allreduce": problem.allreduce,
            "cut_in_flight": problem.cut_in_flight,
        },
    )


def save_plan(plan: PlanFile, path: str | os.PathLike[str]) -> None:
    """Write `plan` to `path` as a whole or not at all. Raises PlanError: it cannot be written."""
    records.write(path, FORMAT, VERSION, plan_table(plan))


def plan_table(plan: PlanFile) -> dict[str, Any]:
    """Return the plan as JSON values."""
    return {
        "stages": [asdict(stage) for stage in plan.stages],
        "schedule": plan.schedule,
        "policy": plan.policy,
        "microbatches": plan.microbatches,
        "predicted": dict(plan.predicted),
        "about": dict(plan.about),
        "topology": topology_table(plan.topology),
        "profile": profile_table(plan.profile),
    }


def load_plan(path: str | os.PathLike[str]) -> PlanFile:
    """Return the plan at `path`.

    Raises PlanError: the file cannot be read, or anything in it is wrong; file, key, got and expected.
    """
    return parse_plan(records.parse(records.read_text(path, "plan"), path, FORMAT, VERSION), source=str(path))


def parse_plan(found: Any, *, source: str) -> PlanFile:
    """Return the plan that `plan_table` made a table of; `source` stands before every message.

    Raises PlanError as `load_plan` does.
    """
    try:
        given = dict(records.entries(found, PlanFile, ""))
        stages = records.listed(given["stages"], "stages")
        given["stages"] = tuple(_stage(entry, f"stages[{index}]") for index, entry in enumerate(stages))
        given["profile"] = parse_profile(given["profile"], source="profile")
        given["topology"] = parse_topology(given["topology"], source="topology")
        for key in ("predicted", "about"):
            given[key] = records.table(given.get(key, {}), key)
        return PlanFile(**given)
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from None


def _stage(entry: Any, where: str) -> PlannedStage:
    given = records.entries(entry, PlannedStage, where)
    layers = records.listed(given["layers"], f"{where}.layers")
    return PlannedStage(
        layers=tuple(records.text(name, f"{where}.layers") for name in layers),
        ranks=tuple(records.listed(given["ranks"], f"{where}.ranks")),
    )


def _one_of(found: object, choices: Any, key: str) -> None:
    if not isinstance(found, str) or found not in choices:
        near = did_you_mean(found, choices) if isinstance(found, str) else ""
        wanted = ", ".join(f'"{choice}"' for choice in choices)
        raise PlanError(f"{key}: must be one of {wanted}, got {records.shown(found)}{near}")
