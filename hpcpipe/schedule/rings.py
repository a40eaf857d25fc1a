"""How many messages of each channel need memory at the receiving end.

The depth is what the consumer holds at once and one place more, into which the next message can arrive meanwhile;
but never more than can be under way. It follows from the action lists alone, so no timing can make it too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

from hpcpipe.schedule.actions import Place
from hpcpipe.schedule.dryrun import Channel, Traffic, dry_run
from hpcpipe.schedule.program import Schedule
from hpcpipe.schedule.ranks import checked_groups, rank_actions


def depths_of(traffic: Traffic) -> dict[Channel, int]:
    """Ring depth of each channel that a dry run has used."""
    return {channel: min(most, traffic.held.get(channel, 0) + 1) for channel, most in traffic.under_way.items()}


def ring_depths(schedule: Schedule, groups: Sequence[Sequence[Place]] | None = None) -> dict[Channel, int]:
    """Receive-ring depth of each channel (source, destination, "activation" | "gradient" | "evaluation").

    `groups` are the places of each rank, one each by default. Cheap for a run of any length: a longer one repeats
    the steady state of the short one that is looked at. A channel that carries no message has no entry. Raises
    ConfigError for groups that do not share out the places.
    """
    checked = checked_groups(schedule, groups)
    return depths_of(dry_run([list(rank_actions(short_run(schedule), places)) for places in checked]))


def short_run(schedule: Schedule) -> Schedule:
    """A run of a few minibatches that fills, repeats, evaluates and drains as `schedule` does."""
    common = schedule.common_round
    length = 4 if schedule.synchronous else 4 * (schedule.ranks + common)
    span = schedule.minibatches - schedule.first
    length += (span - length) % common
    if span <= length:
        return schedule
    every = schedule.evaluate_every
    evaluates = every > 0 and schedule.minibatches // every > schedule.first // every
    return replace(
        schedule,
        first=0,
        minibatches=length,
        drain_every=min(schedule.drain_every, length),
        evaluate_every=min(every, length) if evaluates else 0,
        evaluation_batches=min(schedule.evaluation_batches, 2 * lcm(*schedule.replica_counts)),
    )
