"""Bytes that a rank of a stage needs at its fullest, from the stage's costs and its place in the pipeline.

It owns the memory model of the partitioner: how many versions of the weights are alive, how many passes are in
flight between F and B (PipeDream, SOSP'19, sections 3.1 and 3.3), and what each of them holds. It measures
nothing; what the framework and the MPI library take for themselves comes on top.

    P parameters, m ranks, w warm-up forwards of each, f passes in flight
    weights       P times the buffers below: every version alive and the one that an update is writing
        stash             w + 2
        vertical_sync     at the first stage w0 + 2 (r0, w0: its own), at others the lesser of w0 + 3 and
                          2 + ceil((r0 (w0 + 1) - 1) / m)
        none              2                              and w more while a cut in flight is being waited for
        spectrain         2, and the predictions         and w more while a cut in flight is being waited for
        gpipe, 1f1b       2
    gradients     P, and a float32 copy for the all-reduce where m > 1
    activations   f (saved for B + inputs of the stage)
                  f: pipedream w + 1; gpipe a rank's ceil(M / m) microbatches; 1f1b the lesser of both
    messages      one more activation that arrives meanwhile, two gradients from behind, one message out each way;
                  a rank that hears of p ranks before or behind it has a ring for each: in all p ceil(f / p) + p
                  activations, 2 p gradients
    and the optimizer's state and the module's buffers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import gcd

from hpcpipe.planning.costs import StageCost
from hpcpipe.schedule.orders import SYNCHRONOUS
from hpcpipe.schedule.policies import Policy, warm_up


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a rank of a stage holds at once, in numbers."""

    weights: int
    """Buffers of the size of the stage's weights: versions, predictions, and those kept for a cut."""
    in_flight: int
    """Passes between their F and their B."""
    arriving: int = 0
    """Places for inputs that may arrive while those are held; none at the first stage, which loads its own."""
    returning: int = 2
    """Places for gradients from behind."""
    buffers: int = 1
    """Copies of the module's buffers (BatchNorm): a cut in flight keeps those before each F."""


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """Bytes on a rank of a stage, by what they are for."""

    weights: int
    gradients: int
    state: int
    activations: int
    messages: int
    buffers: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))


def held(
    schedule: str,
    policy: str,
    *,
    stage: int,
    replicas: Sequence[int],
    microbatches: int = 1,
    cut_in_flight: bool = False,
) -> Held:
    """What a rank of `stage` holds in a pipeline of `replicas[s]` ranks for stage s.

    `cut_in_flight`: checkpoints are cut without a drain, so that the weights (or predictions) of forwards that a
    cut will find in flight are kept until it is written.
    """
    alone = held_at(
        schedule,
        policy,
        warm_up=warm_up(stage, replicas),
        ranks=replicas[stage],
        first_ranks=replicas[0],
        total=sum(replicas),
        is_first=stage == 0,
        microbatches=microbatches,
        cut_in_flight=cut_in_flight,
    )
    before = _peers(replicas[stage], replicas[stage - 1]) if stage else 1
    behind = _peers(replicas[stage], replicas[stage + 1]) if stage + 1 < len(replicas) else 1
    # Each ring holds its share of the passes in flight and has a place free.
    rings, returning = before * (-(-alone.in_flight // before) + 1), 2 * behind
    if schedule in SYNCHRONOUS:
        # Never more than the microbatches that there are before the flush.
        own = -(-microbatches // replicas[stage])
        rings, returning = min(rings, own), min(returning, own)
    return replace(
        alone,
        arriving=max(alone.arriving, rings - alone.in_flight) if stage else 0,
        returning=max(alone.returning, returning),
    )


def held_at(
    schedule: str,
    policy: str,
    *,
    warm_up: int,
    ranks: int,
    first_ranks: int,
    total: int,
    is_first: bool,
    microbatches: int = 1,
    cut_in_flight: bool = False,
) -> Held:
    """As `held`, for a stage of `ranks` ranks of which only the warm-up is known; 0 is that of the last stage.

    `first_ranks` are those of the first stage and `total` those of the pipeline; only vertical_sync asks for them.
    Messages come from one rank on each side.
    """
    if schedule in SYNCHRONOUS:
        own = -(-microbatches // ranks)
        return Held(
            weights=2,
            in_flight=own if schedule == "gpipe" else min(warm_up + 1, own),
            arriving=0 if is_first else 1,
        )
    kept = warm_up if cut_in_flight and Policy(policy) in (Policy.NONE, Policy.SPECTRAIN) else 0
    versions = {
        Policy.STASH: warm_up + 1,
        Policy.VERTICAL_SYNC: bound_versions(ranks, first_ranks, total, is_first),
        Policy.NONE: 1,
        Policy.SPECTRAIN: 1 + _predictions(warm_up, is_first),
    }
    return Held(
        weights=versions[Policy(policy)] + 1 + kept,
        in_flight=warm_up + 1,
        arriving=0 if is_first else 1,
        buffers=warm_up + 2 if cut_in_flight else 1,
    )


def bound_versions(ranks: int, first_ranks: int, total: int, is_first: bool) -> int:
    """Versions alive at once under vertical_sync, where a minibatch keeps the one it found at the first stage.

    A minibatch enters with a version up to r0 (w0 + 1) - 1 minibatches old, r0 and w0 of the first stage, and so
    do all r0 of its round there: of the versions in between only w0 are read, and only one is made every `ranks`
    minibatches. At most one more than there are.
    """
    entry_warm_up = (total - 1) // first_ranks
    if is_first:
        return entry_warm_up + 1
    oldest = first_ranks * (entry_warm_up + 1) - 1
    return min(1 - -oldest // ranks, entry_warm_up + 2)


def stage_bytes(cost: StageCost, held: Held, ranks: int) -> StageBytes:
    """Bytes on a rank of a stage of `ranks` ranks."""
    return StageBytes(
        weights=cost.parameter_bytes * held.weights,
        gradients=cost.parameter_bytes + (cost.reduced_bytes if ranks > 1 else 0),
        state=cost.state_bytes,
        activations=held.in_flight * (cost.saved_bytes + cost.input_bytes),
        messages=held.arriving * cost.input_bytes
        + held.returning * cost.gradient_bytes
        + cost.output_bytes
        + cost.input_gradient_bytes,
        buffers=cost.buffer_bytes * held.buffers,
    )


def plan_bytes(
    costs: Sequence[StageCost],
    replicas: Sequence[int],
    *,
    schedule: str,
    policy: str,
    microbatches: int = 1,
    cut_in_flight: bool = False,
) -> tuple[StageBytes, ...]:
    """Bytes on a rank of each stage of a plan with `replicas[s]` ranks for stage s."""
    most = (
        held(
            schedule,
            policy,
            stage=stage,
            replicas=replicas,
            microbatches=microbatches,
            cut_in_flight=cut_in_flight,
        )
        for stage in range(len(costs))
    )
    return tuple(map(stage_bytes, costs, most, replicas))


def _peers(own: int, others: int) -> int:
    """Of how many of the `others` ranks one of `own` ranks hears, where both take minibatches in turn."""
    return others // gcd(own, others)


def _predictions(warm_up: int, is_first: bool) -> int:
    """Predicted weights alive at once: for the next F and the next B, of which some stages need but one.

    Stage 0 meets its own target in B, and at the last stage F and B aim from the same version.
    """
    if warm_up == 0:
        return 0 if is_first else 1
    return 1 if is_first else 2
