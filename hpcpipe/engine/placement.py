"""Where a rank stands on its host: its number among the ranks there, and how many CPUs are its own.

Every rank tells the others once what it alone can see: its launcher's variables, its affinity, its cgroup. What
follows from that is worked out here by pure functions, and on every rank alike.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcpipe.transport.launcher import LocalClaim, local_claim
from hpcpipe.transport.world import World


@dataclass(frozen=True, kw_only=True)
class Quota:
    """CPU time that the processes of a cgroup get together, in CPUs; `group` is the one that has the limit."""

    cpus: float
    group: str


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What one rank sees. `cpus` are the numbers of those that it may run on."""

    host: str
    claim: LocalClaim | None
    cpus: frozenset[int]
    quota: Quota | None


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What follows for one rank.

    local_rank: its number among the ranks of its host, 0 first.
    cpus: how many CPUs it may run on; `share` of them are its own where other ranks may run on them, too.
    sharing: how many ranks, this one included, run on the most crowded of them.
    quota: CPUs that its cgroup leaves to it, None without a limit; `quota_sharing` ranks share that limit.
    remarks: a line for each thing that a user should know of.
    """

    local_rank: int
    cpus: int
    share: float
    sharing: int
    quota: float | None
    quota_sharing: int
    remarks: tuple[str, ...]


def find_placement(world: World, environment: Mapping[str, str] = os.environ) -> Placement:
    """This rank's placement; every rank calls it."""
    mine = Sight(
        host=world.host,
        claim=local_claim(environment),
        cpus=frozenset(os.sched_getaffinity(0)),
        quota=cpu_quota(),
    )
    everyone = world.all_gather_json(_as_json(mine), what="what all ranks see of their hosts")
    return placement_of(world.rank, [_from_json(entry) for entry in everyone])


def placement_of(rank: int, sights: Sequence[Sight]) -> Placement:
    """The placement of `rank` by what all ranks see, in their order."""
    mine = sights[rank]
    here = {other: sight for other, sight in enumerate(sights) if sight.host == mine.host}
    local_rank, remark = _local_rank(rank, here)
    users = Counter(cpu for sight in here.values() for cpu in sight.cpus)
    quota, quota_sharing = None, 1
    if mine.quota is not None:
        quota_sharing = sum(
            sight.quota is not None and sight.quota.group == mine.quota.group for sight in here.values()
        )
        quota = mine.quota.cpus / quota_sharing
    return Placement(
        local_rank=local_rank,
        cpus=len(mine.cpus),
        # Ranks bound to the same CPUs divide them; those of ranks bound elsewhere are left whole.
        share=sum(1 / users[cpu] for cpu in mine.cpus),
        sharing=max(users[cpu] for cpu in mine.cpus),
        quota=quota,
        quota_sharing=quota_sharing,
        remarks=() if remark is None else (remark,),
    )


def _local_rank(rank: int, here: Mapping[int, Sight]) -> tuple[int, str | None]:
    """The launcher's number if it can be believed, else that of the ranks before this one; and a remark.

    Variables inherited from a launcher further up are the same for several ranks of a host. A number that only
    differs from the count is right: the launcher knows of ranks whose containers give the host other names.
    """
    counted = sum(other < rank for other in here)
    claim = here[rank].claim
    if claim is None:
        return counted, None
    heard = Counter(sight.claim for sight in here.values())
    host = here[rank].host
    if None in heard or max(heard.values()) > 1 or len({said.variable for said in heard if said}) > 1:
        return counted, (
            f"{claim.variable} does not tell the ranks of {host} apart (it may come from an outer launcher): they "
            "are numbered by counting"
        )
    if claim.rank == counted:
        return counted, None
    return claim.rank, (
        f"rank {rank} is number {claim.rank} on its host by {claim.variable}, but number {counted} by counting "
        f"the ranks of {host}: the variable stands"
    )


def cpu_quota(membership: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/sys/fs/cgroup")) -> Quota | None:
    """The tightest limit on CPU time of this process's cgroup and those above it; None without one.

    Reads version 2 (cpu.max) and version 1 (cpu.cfs_quota_us); what cannot be read sets no limit.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return None
    found = []
    for line in lines:
        if len(line) != 3 or not (line[1] == "" or "cpu" in line[1].split(",")):
            continue
        root = mounts / line[1] if line[1] else mounts
        group = root / line[2].strip("/")
        # Inside a container the path may be that of the host; its own cgroup is then the root that it sees.
        levels = [group, *group.parents] if group.is_dir() and ".." not in group.parts else [root]
        for level in levels:
            limit = _limit(level)
            if limit is not None:
                found.append(Quota(cpus=limit, group=str(level)))
            if level == root:
                break
    return min(found, key=lambda quota: quota.cpus, default=None)


def _limit(group: Path) -> float | None:
    """CPUs that one cgroup allows, by the files in its folder."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = [word for name in names for word in (group / name).read_text().split()]
        except OSError:
            continue
        if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):
            return int(words[0]) / int(words[1])
    return None


def _as_json(sight: Sight) -> list[Any]:
    claim = None if sight.claim is None else [sight.claim.rank, sight.claim.variable]
    quota = None if sight.quota is None else [sight.quota.cpus, sight.quota.group]
    # As one number, so that a thousand ranks on hosts of hundreds of CPUs do not gather megabytes.
    return [sight.host, claim, f"{sum(1 << cpu for cpu in sight.cpus):x}", quota]


def _from_json(entry: list[Any]) -> Sight:
    host, claim, mask, quota = entry
    bits = int(mask, 16)
    return Sight(
        host=host,
        claim=None if claim is None else LocalClaim(rank=claim[0], variable=claim[1]),
        cpus=frozenset(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1),
        quota=None if quota is None else Quota(cpus=quota[0], group=quota[1]),
    )
