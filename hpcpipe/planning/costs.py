"""What a stage, a cut and a whole plan cost in seconds: the formulas that the partitioner and the simulator share.

It owns the cost model of the partitioner (PipeDream, SOSP'19, section 3.1): compute C, all-reduce of the
parameters P over a stage's ranks, and transfer of the activations o and their gradients over a cut. It searches
nothing and knows no order of actions.

    one minibatch     T = max over stages s and cuts of
    stage of m ranks      max(C, all-reduce) / m        every rank has one of m minibatches, all update together
    cut                   (o + gradient of o) / bandwidth + 2 latency
    gpipe, 1f1b       with M microbatches a minibatch, and (M + stages - 1) / M for the flush:
    stage of m ranks      max(ceil(M / m) (F + B) + U, all-reduce)       one all-reduce a minibatch
    cut                   M times as above
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpcpipe.errors import PlanError
from hpcpipe.planning.profile import LayerCost, Profile
from hpcpipe.planning.topology import Level, Topology
from hpcpipe.schedule.orders import SYNCHRONOUS

ALLREDUCE_VOLUME = {"ring": 2.0, "server": 4.0}
"""Times (m-1)/m of the parameters that an all-reduce moves over each rank's link. "ring": reduce-scatter and
all-gather; "server": through parameter servers, as PipeDream's code counts."""
_HALF_PRECISION = ("bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """What a set of layers costs as the stage of a pipeline: seconds and bytes of one pass, on one rank.

    The seconds hold everything that a rank does in a pass: layers, overhead, messages, loading data and targets.
    """

    layers: tuple[int, ...]
    """Layers of the profile, in its order."""
    forward_s: float
    backward_s: float
    update_s: float
    """Of one update, not of a pass."""
    parameter_bytes: int
    reduced_bytes: int
    """Gradients as an all-reduce moves them: float32 also for weights of half precision."""
    state_bytes: int
    buffer_bytes: int
    saved_bytes: int
    input_bytes: int
    """Activations that arrive from the stage before, those that skip this stage included; or loaded inputs."""
    output_bytes: int
    """Activations that leave for the stage behind; 0 at the last."""
    gradient_bytes: int
    """Gradients that come back from the stage behind; 0 at the last."""
    input_gradient_bytes: int
    """Gradients that go back to the stage before; 0 at the first."""


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Seconds of a stage of several ranks."""

    ranks: tuple[int, ...]
    compute_s: float
    """Of one rank between two updates: its passes and the update."""
    allreduce_s: float
    """Of one update."""
    seconds: float
    """Per minibatch: the share in the bottleneck."""


@dataclass(frozen=True, kw_only=True)
class CutTime:
    """Bytes and seconds of the cut between two stages, per minibatch, there and back."""

    level: int
    """The topology's level at which the ranks of both stages meet."""
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PlanTime:
    """Seconds per minibatch of a plan."""

    stages: tuple[StageTime, ...]
    cuts: tuple[CutTime, ...]
    """`cuts[s]` lies between stages s and s+1."""
    bottleneck_s: float
    """The largest of all stages and cuts."""
    seconds: float
    """The bottleneck, and for synchronous schedules the flush."""


def transfer_s(level: Level, nbytes: float) -> float:
    """Seconds of one message of `nbytes` bytes between two ranks of a group of `level`."""
    return nbytes / level.bandwidth + level.latency_s


def allreduce_s(level: Level, nbytes: float, ranks: int, kind: str = "ring") -> float:
    """Seconds of an all-reduce of `nbytes` bytes among `ranks` ranks of a group of `level`; 0 for one rank.

    Ring: 2(m-1)/m bytes over each link in 2(m-1) steps; "server": 4(m-1)/m bytes (PipeDream's code).
    """
    if ranks == 1:
        return 0.0
    moved = ALLREDUCE_VOLUME[kind] * (ranks - 1) / ranks * nbytes
    return moved / level.reduce_bandwidth + 2 * (ranks - 1) * level.latency_s


def returned_bytes(layer: LayerCost) -> int:
    """Bytes of the gradient of a layer's output."""
    return layer.output_bytes if layer.gradient_bytes is None else layer.gradient_bytes


def reduction_widening(profile: Profile) -> int:
    """Bytes that an all-reduce moves for a byte of parameters: gradients are summed in float32 or wider."""
    return 2 if profile.about.get("dtype") in _HALF_PRECISION else 1


def stage_costs(profile: Profile, stages: Sequence[Sequence[int]]) -> tuple[StageCost, ...]:
    """The cost of each stage of a pipeline; `stages[s]` are the layers of stage s as indices.

    A layer's output is charged once at every cut that it crosses on the way to any layer behind. A pass sends or
    receives one message per neighbour.

    Raises PlanError: a stage without layers, a layer in no stage or in two, or one that reads a later stage.
    """
    stage_of = _stage_of(profile, stages)
    last = len(stages) - 1
    reaches = _last_readers(profile, stage_of)
    activations, gradients = [profile.input_bytes] + [0] * (last + 1), [0] * (last + 2)
    for index, layer in enumerate(profile.layers):
        back = returned_bytes(layer)
        for cut in range(stage_of[index] + 1, reaches[index] + 1):
            activations[cut] += layer.output_bytes
            gradients[cut] += back
    costs = []
    for stage, indices in enumerate(stages):
        layers = [profile.layers[index] for index in sorted(indices)]
        messages = profile.message_s * ((stage > 0) + (stage < last))
        overhead = profile.pass_overhead_s + messages
        loading = (stage == 0) * profile.data_s + (stage == last) * profile.targets_s
        costs.append(
            StageCost(
                layers=tuple(sorted(indices)),
                forward_s=math.fsum([*(layer.forward_s for layer in layers), overhead, loading]),
                backward_s=math.fsum([*(layer.backward_s for layer in layers), overhead]),
                update_s=math.fsum(layer.update_s for layer in layers),
                parameter_bytes=(parameters := sum(layer.parameter_bytes for layer in layers)),
                reduced_bytes=parameters * reduction_widening(profile),
                state_bytes=sum(layer.state_bytes for layer in layers),
                buffer_bytes=sum(layer.buffer_bytes for layer in layers),
                saved_bytes=sum(layer.saved_bytes for layer in layers),
                input_bytes=activations[stage],
                output_bytes=activations[stage + 1],
                gradient_bytes=gradients[stage + 1],
                input_gradient_bytes=gradients[stage],
            )
        )
    return tuple(costs)


def plan_time(
    costs: Sequence[StageCost],
    ranks: Sequence[Sequence[int]],
    topology: Topology,
    *,
    schedule: str = "pipedream",
    microbatches: int = 1,
    allreduce: str = "ring",
) -> PlanTime:
    """What a plan costs: `ranks[s]` are the ranks of stage s. The formulas stand at the top of this module.

    Raises PlanError: ranks beyond the topology.
    """
    synchronous = schedule in SYNCHRONOUS
    stages = []
    for cost, owners in zip(costs, ranks, strict=True):
        count = len(owners)
        passes = -(-microbatches // count) if synchronous else 1
        compute = passes * (cost.forward_s + cost.backward_s) + cost.update_s
        level = topology.levels[topology.level_of(owners)]
        exchange = allreduce_s(level, cost.reduced_bytes, count, allreduce)
        shared = 1 if synchronous else count
        stages.append(
            StageTime(
                ranks=tuple(owners),
                compute_s=compute,
                allreduce_s=exchange,
                seconds=max(compute, exchange) / shared,
            )
        )
    cuts = [
        _cut_time(cost, topology, topology.level_of([*before, *behind]), microbatches if synchronous else 1)
        for cost, before, behind in zip(costs, ranks, ranks[1:], strict=False)
    ]
    bottleneck = max([*(stage.seconds for stage in stages), *(cut.seconds for cut in cuts)])
    return PlanTime(
        stages=tuple(stages),
        cuts=tuple(cuts),
        bottleneck_s=bottleneck,
        seconds=bottleneck * flush_factor(schedule, microbatches, len(stages)),
    )


def flush_factor(schedule: str, microbatches: int, stages: int) -> float:
    """Time of a minibatch with its fill and drain, in steady states of the slowest stage: (M + stages - 1) / M."""
    return (microbatches + stages - 1) / microbatches if schedule in SYNCHRONOUS else 1.0


def _cut_time(cost: StageCost, topology: Topology, level: int, passes: int) -> CutTime:
    link = topology.levels[level]
    return CutTime(
        level=level,
        nbytes=passes * (cost.output_bytes + cost.gradient_bytes),
        seconds=passes * (transfer_s(link, cost.output_bytes) + transfer_s(link, cost.gradient_bytes)),
    )


def _stage_of(profile: Profile, stages: Sequence[Sequence[int]]) -> list[int]:
    """The stage of each layer; raises PlanError if some layer has none or reads a later one."""
    found = [-1] * len(profile.layers)
    for stage, indices in enumerate(stages):
        if not indices:
            raise PlanError(f"stage {stage} holds no layer: a stage must hold at least one")
        for index in indices:
            if found[index] != -1:
                raise PlanError(f"layer {profile.layers[index].name!r} is in stages {found[index]} and {stage}")
            found[index] = stage
    for index, stage in enumerate(found):
        if stage == -1:
            raise PlanError(f"layer {profile.layers[index].name!r} is in no stage")
    for source, reader in profile.edges:
        if found[source] > found[reader]:
            raise PlanError(
                f"layer {profile.layers[reader].name!r} of stage {found[reader]} reads "
                f"{profile.layers[source].name!r} of stage {found[source]}: stages must follow the edges"
            )
    return found


def _last_readers(profile: Profile, stage_of: Sequence[int]) -> list[int]:
    """The last stage that reads each layer's output; its own where nobody else does."""
    last = list(stage_of)
    for source, reader in profile.edges:
        last[source] = max(last[source], stage_of[reader])
    return last
