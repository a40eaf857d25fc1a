"""What the actions of a stage cost in a simulation: seconds, bytes on the wire, bytes of memory.

A plain record, so that any numbers can be simulated, and its making from a profile. The formulas are those of
`planning.costs` and `planning.memory`; only what changes in the course of a run is told apart from the rest here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpcpipe.planning import costs as planned
from hpcpipe.planning.memory import held, stage_bytes
from hpcpipe.planning.profile import Profile
from hpcpipe.schedule import Schedule
from hpcpipe.schedule.policies import keeps_forward_weights


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """One stage on one rank. Seconds of one pass, with the CPU time of its messages; bytes of one message.

    `output_bytes` go to the stage behind, `input_gradient_bytes` to the one before. `ready` are the gradients in
    the order in which a backward pass makes them: (seconds since the pass began, bytes). Memory: `static_bytes`
    that never change, `version_bytes` for each live version of the weights, `saved_bytes` for each pass between
    its F and its B.
    """

    forward_s: float
    backward_s: float
    update_s: float = 0.0
    output_bytes: int = 0
    input_gradient_bytes: int = 0
    ready: tuple[tuple[float, int], ...] = ()
    static_bytes: int = 0
    version_bytes: int = 0
    saved_bytes: int = 0

    def buckets(self, bucket_bytes: int) -> list[tuple[float, int]]:
        """The gradients in buckets of at least `bucket_bytes`, the rest in the last: (ready, bytes) of each."""
        buckets: list[tuple[float, int]] = []
        gathered, when = 0, self.backward_s
        for when, nbytes in self.ready:
            gathered += nbytes
            if gathered >= bucket_bytes:
                buckets.append((when, gathered))
                gathered = 0
        if gathered or not buckets:
            buckets.append((when, gathered))
        return buckets


def costs_of(profile: Profile, stages: Sequence[Sequence[int]], schedule: Schedule) -> tuple[StageCosts, ...]:
    """The costs of stages that hold the layers `stages[s]` of a profile, as indices, when run by `schedule`.

    Raises PlanError as `planning.costs.stage_costs` does.
    """
    return tuple(
        _costs(profile, cost, schedule, stage) for stage, cost in enumerate(planned.stage_costs(profile, stages))
    )


def _costs(profile: Profile, cost: planned.StageCost, schedule: Schedule, stage: int) -> StageCosts:
    counts = schedule.replica_counts
    most = held(
        schedule.name,
        schedule.policy.value,
        stage=stage,
        replicas=counts,
        microbatches=schedule.microbatches,
    )
    # Live versions and passes in flight are counted action by action. Beside them stand the buffer that an update
    # writes and those for predictions.
    keeps = not schedule.synchronous and keeps_forward_weights(schedule.policy)
    rest = replace(most, weights=1 if keeps else most.weights - 1, in_flight=0)
    return StageCosts(
        forward_s=cost.forward_s,
        backward_s=cost.backward_s,
        update_s=cost.update_s,
        output_bytes=cost.output_bytes,
        input_gradient_bytes=cost.input_gradient_bytes,
        ready=_ready(profile, cost),
        static_bytes=stage_bytes(cost, rest, counts[stage]).total,
        version_bytes=cost.parameter_bytes,
        saved_bytes=cost.saved_bytes + cost.input_bytes,
    )


def _ready(profile: Profile, cost: planned.StageCost) -> tuple[tuple[float, int], ...]:
    """When each layer's gradients are ready in a backward pass: from the last layer to the first."""
    layers = [profile.layers[index] for index in reversed(cost.layers)]
    widening = planned.reduction_widening(profile)
    left = sum(layer.backward_s for layer in layers)
    ready = []
    for layer in layers:
        left -= layer.backward_s
        if layer.parameter_bytes:
            ready.append((max(0.0, cost.backward_s - left), layer.parameter_bytes * widening))
    return tuple(ready)
