"""The partitioner twice more, plainly: every plan one by one, and the dynamic program as it stands in the paper.

Both search the plan space of `hpcpipe.planning.search` (stages between nested ideals, contiguous ranks, all of
them used) with the formulas of `costs` and `memory`, and share none of its arrays or arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from hpcpipe.planning.costs import PlanTime, stage_costs
from hpcpipe.planning.memory import stage_bytes
from hpcpipe.planning.problem import Problem, Split, bytes_of, held_by, split_of, time_of


def every_plan(problem: Problem) -> Iterator[Split]:
    """All plans that keep to the problem's limits on stages and replicas, whatever memory they need."""
    for stages in nested(problem):
        if problem.max_stages is not None and len(stages) > problem.max_stages:
            continue
        for replicas in compositions(problem.ranks, len(stages)):
            if not problem.straight or max(replicas) == 1:
                yield split_of(problem, stages, replicas)


def fits(problem: Problem, split: Split, *, alone: bool = False) -> bool:
    """Whether each rank of a plan keeps to the limit on memory."""
    return problem.memory_bytes is None or most_bytes(problem, split, alone=alone) <= problem.memory_bytes


def most_bytes(problem: Problem, split: Split, *, alone: bool = False) -> int:
    """What the fullest rank of a plan needs; `alone`: as if each heard of one rank on each side only."""
    if not alone:
        return max(each.total for each in bytes_of(problem, split))
    totals = []
    costs = stage_costs(problem.profile, [stage.layers for stage in split.stages])
    for stage, (cost, ranks) in enumerate(zip(costs, split.replicas, strict=True)):
        held = replace(held_by(problem, split.replicas, stage), arriving=min(stage, 1), returning=2)
        totals.append(stage_bytes(cost, held, ranks).total)
    return max(totals)


def slow_bytes(problem: Problem, split: Split) -> float:
    """Bytes of the largest cut that leaves a group of the innermost level; -1 if none does."""
    cuts = times(problem, split).cuts
    return max((cut.nbytes for cut in cuts if cut.level > 0), default=-1)


def times(problem: Problem, split: Split) -> PlanTime:
    costs = stage_costs(problem.profile, [stage.layers for stage in split.stages])
    return time_of(problem, costs, [stage.ranks for stage in split.stages])


def least_seconds(problem: Problem, *, alone: bool = False) -> float:
    """The cost of the best of all plans; infinite if none fits."""
    fitting = (split.seconds for split in every_plan(problem) if fits(problem, split, alone=alone))
    return min(fitting, default=math.inf)


def nested(problem: Problem) -> Iterator[list[tuple[int, ...]]]:
    """All ways to cut the layers into a sequence of stages none of which reads a later one."""
    everything = frozenset(range(len(problem.profile.layers)))
    ideals = _ideals(problem)

    def continued(done: frozenset[int]) -> Iterator[list[tuple[int, ...]]]:
        if done == everything:
            yield []
        for ideal in ideals:
            if done < ideal:
                for rest in continued(ideal):
                    yield [tuple(sorted(ideal - done)), *rest]

    return continued(frozenset())


def compositions(total: int, parts: int) -> Iterator[list[int]]:
    """All ways to write `total` as a sum of `parts` numbers of at least 1, in order."""
    if parts == 1:
        if total >= 1:
            yield [total]
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield [first, *rest]


def program(problem: Problem) -> float:
    """The bottleneck of the best asynchronous plan of any number of stages, whatever memory it needs.

    A(I, q): the best way to run the layers outside the ideal I on the last q ranks, behind a stage that begins at
    a known rank. Its formulas are written out once more.
    """
    profile, total = problem.profile, problem.ranks
    everything = frozenset(range(len(profile.layers)))
    ideals = _ideals(problem)

    def stage(layers: frozenset[int], first: int, ranks: range) -> float:
        costs = [profile.layers[i] for i in layers]
        ends = (not first) * profile.data_s + (ranks.stop == total) * profile.targets_s
        messages = 2 * profile.message_s * ((first > 0) + (ranks.stop < total))
        compute = sum(x.forward_s + x.backward_s + x.update_s for x in costs)
        compute += 2 * profile.pass_overhead_s + messages + ends
        count = len(ranks)
        link = problem.topology.levels[problem.topology.level_of(ranks)]
        nbytes = sum(x.parameter_bytes for x in costs) * (2 if profile.about.get("dtype") == "bfloat16" else 1)
        moved = {"ring": 2, "server": 4}[problem.allreduce] * (count - 1) / count * nbytes
        exchange = moved / (link.allreduce_bandwidth or link.bandwidth) + 2 * (count - 1) * link.latency_s
        return max(compute, exchange if count > 1 else 0.0) / count

    def cut(done: frozenset[int], ranks: range) -> float:
        link = problem.topology.levels[problem.topology.level_of(ranks)]
        crossing = {a for a, b in profile.edges if a in done and b not in done}
        nbytes = 0
        for layer in (profile.layers[i] for i in crossing):
            back = layer.output_bytes if layer.gradient_bytes is None else layer.gradient_bytes
            nbytes += layer.output_bytes + back
        return nbytes / link.bandwidth + 2 * link.latency_s

    @cache
    def best(done: frozenset[int], first: int, before: int) -> float:
        """The layers that are not done, on the ranks from `first` on, behind a stage from rank `before` on."""
        if done == everything:
            return 0.0 if first == total else math.inf
        found = math.inf
        for ideal in ideals:
            if done < ideal:
                for end in [first + 1] if problem.straight else range(first + 1, total + 1):
                    slowest = stage(ideal - done, first, range(first, end))
                    if first:
                        slowest = max(slowest, cut(done, range(before, end)))
                    if slowest < found:
                        found = min(found, max(slowest, best(ideal, end, first)))
        return found

    return best(frozenset(), 0, 0)


def _ideals(problem: Problem) -> list[frozenset[int]]:
    """All sets of layers that hold whatever their layers read and part no layers with a weight in common."""
    layers = range(len(problem.profile.layers))
    reads: dict[int, set[int]] = {layer: set() for layer in layers}
    for source, reader in problem.profile.edges:
        reads[reader].add(source)
    together = [set(pair) for pair in problem.profile.shared]
    subsets = (frozenset(i for i in layers if mask >> i & 1) for mask in range(2 ** len(layers)))
    return [
        subset
        for subset in subsets
        if all(reads[layer] <= subset for layer in subset)
        and all(len(pair & subset) in (0, 2) for pair in together)
    ]
