"""Simulates a schedule: sets up the machine, lets it run and reads off the figures.

It owns which part of a run counts as its steady state; what an action costs comes from outside, what happens when
from the schedule's own lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from hpcpipe.errors import PlanError
from hpcpipe.planning.costs import ALLREDUCE_VOLUME
from hpcpipe.planning.topology import Topology
from hpcpipe.schedule import Schedule, warm_up_of
from hpcpipe.simulation.costs import StageCosts
from hpcpipe.simulation.events import Recorder
from hpcpipe.simulation.machine import Machine
from hpcpipe.simulation.network import Network
from hpcpipe.simulation.result import Resource, Simulated, Steady
from hpcpipe.simulation.whatif import WhatIf

BUCKET_BYTES = 25 * 2**20
"""Of an all-reduce, where the run file says nothing else."""
NOTHING = (0, 0)


def simulate(
    schedule: Schedule,
    costs: Sequence[StageCosts],
    topology: Topology,
    ranks_of_stage: Sequence[Sequence[int]],
    *,
    samples: int = 1,
    what_if: WhatIf | None = None,
    window: tuple[int, int] = NOTHING,
    bucket_bytes: int = BUCKET_BYTES,
    allreduce: str = "ring",
) -> Simulated:
    """Run `schedule` in simulated time.

    `costs` and `ranks_of_stage` are by stage, ranks numbered from 0, `ranks_of_stage[s][q]` executes replica q of
    stage s. `samples` are those of a minibatch. Events are kept of minibatches `window[0]` to before `window[1]`.
    `allreduce` is "ring" or "server" (see `planning.costs`).

    Raises PlanError: ranks or costs that do not fit the schedule, or ranks beyond the topology.
    """
    _check(schedule, costs, ranks_of_stage)
    if what_if is not None:
        costs, topology = [what_if.costs(cost) for cost in costs], what_if.topology(topology)
    topology.check_holds(len(set(chain(*ranks_of_stage))))
    span = steady_span(schedule)
    recorder = Recorder(window)
    machine = Machine(
        schedule,
        costs,
        Network(topology),
        ranks_of_stage,
        marks=span or (-1, -1),
        recorder=recorder,
        bucket_bytes=bucket_bytes,
        allreduce=allreduce,
    )
    seconds = machine.run()
    return Simulated(
        schedule=schedule,
        ranks_of_stage=tuple(tuple(ranks) for ranks in ranks_of_stage),
        seconds=seconds,
        samples=samples,
        steady=None if span is None else _steady(machine, span),
        busy=tuple(_share(rank.busy, seconds) for rank in machine.ranks),
        peak_bytes=tuple(rank.peak for rank in machine.ranks),
        level_bytes=_level_bytes(machine, ALLREDUCE_VOLUME[allreduce]),
        slowest=_slowest(machine, seconds),
        events=tuple(recorder.events),
        transfers=tuple(recorder.transfers),
    )


def in_flight(schedule: Schedule) -> int:
    """Minibatches that are under way at once when the pipeline is full."""
    if schedule.synchronous:
        return 1
    return (warm_up_of(schedule, 0) + 1) * schedule.replicas_of(0)


def steady_span(schedule: Schedule) -> tuple[int, int] | None:
    """Two weight versions that all stages have, behind the fill and before the drain; None in a short run.

    The fill is over when as many minibatches have gone through as fit into the pipeline, but irregularities live
    on for a while, so a quarter of a long run is left out at its begin, and an eighth at its end. With drains
    within the run, whole stretches are taken.
    """
    length, depth = schedule.minibatches - schedule.first, in_flight(schedule)
    begin = schedule.first + max(2 * depth if depth > 1 else 1, length // 4)
    end = schedule.minibatches - max(depth - 1, length // 8)
    if end - begin < max(2, depth // 2):
        return None
    begin, end = (schedule.next_boundary(version - 1) + 1 for version in (begin, end))
    if schedule.drain_every:
        begin = -(-begin // schedule.drain_every) * schedule.drain_every
        end -= (end - begin) % schedule.drain_every
    return (begin, end) if begin < end else None


def _check(schedule: Schedule, costs: Sequence[StageCosts], ranks_of_stage: Sequence[Sequence[int]]) -> None:
    if not len(costs) == len(ranks_of_stage) == schedule.stages:
        raise PlanError(
            f"a schedule of {schedule.stages} stages needs the costs and ranks of each, "
            f"got {len(costs)} and {len(ranks_of_stage)}"
        )
    counts = tuple(len(ranks) for ranks in ranks_of_stage)
    expected = tuple(schedule.replicas_of(stage) for stage in range(schedule.stages))
    if counts != expected:
        raise PlanError(f"the schedule has {list(expected)} replicas of its stages, got {list(counts)} ranks")
    owners = list(chain(*ranks_of_stage))
    ranks = set(owners)
    if ranks != set(range(len(ranks))):
        raise PlanError(f"ranks must be numbered from 0 without gaps, got {sorted(ranks)[:20]}")
    if max(counts) > 1 and len(owners) > len(ranks):
        raise PlanError("a plan with a replicated stage needs one rank for each replica of each stage")


def _steady(machine: Machine, span: tuple[int, int]) -> Steady | None:
    begin, end = span
    spent: list[tuple[float, float]] = []
    for rank in machine.ranks:
        (began, busy), (ended, busy_later) = rank.marks[begin], rank.marks[end]
        spent.append((ended - began, busy_later - busy))
    last = [spent[lane.rank.index][0] for lane in machine.lanes[-1]]
    return Steady(
        begin=begin,
        end=end,
        seconds=sum(last) / len(last),
        busy=tuple(_share(busy, elapsed) for elapsed, busy in spent),
    )


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0


def _level_bytes(machine: Machine, volume: float) -> dict[str, int]:
    sent: Counter[int] = Counter()
    for route in machine.routes:
        sent[route.level] += route.messages * route.nbytes
    for reduction in machine.reductions.values():
        # Each of m ranks sends (m-1)/m of the bytes `volume` times.
        sent[reduction.level] += round(reduction.rounds * volume * (reduction.size - 1) * reduction.nbytes)
    return {level.name: sent[index] for index, level in enumerate(machine.network.topology.levels)}


def _slowest(machine: Machine, seconds: float) -> Resource:
    """What was in use for the largest share of the run; the first of equals, ranks first."""
    stages = {lane.rank.index: lane.stage for lanes in machine.lanes for lane in lanes}
    uses = [(rank.busy, f"rank {rank.index} (stage {stages[rank.index]})") for rank in machine.ranks]
    uses += [
        (reduction.busy, f"the all-reduce of stage {stage}") for stage, reduction in machine.reductions.items()
    ]
    uses += [(port.busy, f"the {port.name}") for port in machine.network.ports]
    busy, name = max(uses, key=lambda use: use[0])
    return Resource(name=name, share=_share(busy, seconds))
