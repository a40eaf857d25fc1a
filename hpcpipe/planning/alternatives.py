"""What a plan was chosen over, and what keeps it from being faster.

It owns the plans that a user would otherwise have tried by hand: pure data parallelism, a straight pipeline, two
stages, fewer ranks (the comparisons of PipeDream, SOSP'19, section 5). It prints nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hpcpipe.errors import PlanError
from hpcpipe.planning.costs import stage_costs
from hpcpipe.planning.graph import Ideals
from hpcpipe.planning.problem import Problem, Split, bytes_of, split_of, time_of
from hpcpipe.planning.search import partition
from hpcpipe.planning.units import show_size

MOST_RANKS = 64
"""Beyond this many ranks nobody is told that fewer would do: it would take as many searches."""
_MOST_PAIRS = 50_000
"""Cuts times ranks of two stages that are all tried in a second or two."""
_AS_FAST = 1 + 1e-9
"""Two sums of the same seconds may differ by rounding."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The best plan of some kind for the same ranks and memory, or why there is none."""

    name: str
    split: Split | None
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a plan waits for: "compute" or "all-reduce" of a stage, or the "cut" behind it; seconds a minibatch."""

    what: str
    stage: int
    seconds: float

    def __str__(self) -> str:
        if self.what == "cut":
            return f"the cut between stages {self.stage} and {self.stage + 1}"
        return f"the {self.what} of stage {self.stage}"


def alternatives(problem: Problem) -> tuple[Alternative, ...]:
    """The plans that the answer to `problem` is compared with; it may be one of them.

    The problem's own restrictions (`straight`, `max_stages`) do not hold for them.
    """
    free = replace(problem, straight=False, max_stages=None)
    found = [_data_parallel(free), _straight(free), _two_stages(free)]
    if problem.straight or problem.max_stages is not None:
        found.append(_best("any stages", free))
    return tuple(found)


def is_allowed(problem: Problem, split: Split) -> bool:
    """Whether a plan keeps to the problem's restrictions `straight` and `max_stages`."""
    if problem.straight and max(split.replicas) > 1:
        return False
    return problem.max_stages is None or len(split.stages) <= problem.max_stages


def fewer_ranks(problem: Problem, chosen: Split) -> Split | None:
    """A plan for fewer ranks that is as fast as `chosen`; None if none was found. Straight if `chosen` is.

    If one rank less, or a whole number of innermost groups, is as fast, the fewest are looked for by halving;
    fewer still may do where the cost does not rise from number to number. Nothing is tried beyond MOST_RANKS
    ranks, nor where even ranks that never wait would be slower.
    """
    if problem.ranks > MOST_RANKS:
        return None
    seconds = chosen.seconds * _AS_FAST
    kind = replace(problem, straight=max(chosen.replicas) == 1)
    most, group = problem.ranks - 1, problem.topology.levels[0].size
    least = max(1, math.ceil(_passes_s(problem) / seconds)) if seconds else 1
    best = None
    for ranks in dict.fromkeys((most, most // group * group)):
        if best is None and ranks >= least:
            best = _as_fast(kind, ranks, seconds)
    if best is None:
        return None
    too_few, enough = least - 1, sum(best.replicas)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        found = _as_fast(kind, middle, seconds)
        if found is None:
            too_few = middle
        else:
            best, enough = found, middle
    return best


def limits(problem: Problem, split: Split) -> tuple[Limit, ...]:
    """What each stage and each cut of a plan takes, the slowest first: a faster plan must relieve that one."""
    time = time_of(
        problem,
        stage_costs(problem.profile, [stage.layers for stage in split.stages]),
        [stage.ranks for stage in split.stages],
    )
    found = [
        Limit(
            what="compute" if stage.compute_s >= stage.allreduce_s else "all-reduce",
            stage=index,
            seconds=stage.seconds,
        )
        for index, stage in enumerate(time.stages)
    ]
    found += [Limit(what="cut", stage=index, seconds=cut.seconds) for index, cut in enumerate(time.cuts)]
    return tuple(sorted(found, key=lambda limit: -limit.seconds))


def work_s(problem: Problem) -> float:
    """Seconds of one minibatch on a single rank: its layers' passes and updates, and nothing else."""
    return _passes_s(problem) + sum(layer.update_s for layer in problem.profile.layers)


def _passes_s(problem: Problem) -> float:
    return problem.passes * sum(layer.forward_s + layer.backward_s for layer in problem.profile.layers)


def _best(name: str, problem: Problem) -> Alternative:
    try:
        return Alternative(name=name, split=partition(problem))
    except PlanError as error:
        return Alternative(name=name, split=None, why_not=str(error))


def _as_fast(problem: Problem, ranks: int, seconds: float) -> Split | None:
    split = _best("fewer", replace(problem, ranks=ranks)).split
    return split if split is not None and split.seconds <= seconds else None


def _data_parallel(problem: Problem) -> Alternative:
    split = split_of(problem, [tuple(range(len(problem.profile.layers)))], [problem.ranks])
    lacking = _lacking(problem, split)
    return Alternative(name="data parallel", split=None if lacking else split, why_not=lacking)


def _straight(problem: Problem) -> Alternative:
    name, layers = "straight pipeline", len(problem.profile.layers)
    if problem.ranks > layers:
        why_not = f"{problem.ranks} ranks are more than {layers} layer{'s' * (layers > 1)}"
        return Alternative(name=name, split=None, why_not=why_not)
    return _best(name, replace(problem, straight=True))


def _two_stages(problem: Problem) -> Alternative:
    """The best plan of two stages, even where a single one would cost less."""
    name = "two stages"
    if problem.ranks == 1 or len(problem.profile.layers) == 1:
        return Alternative(name=name, split=None, why_not="one rank, or one layer, is one stage")
    ideals = Ideals(problem.profile)
    if ideals.count * problem.ranks > _MOST_PAIRS:
        return Alternative(
            name=name, split=None, why_not="not looked for, there are too many; --max-stages 2 does"
        )
    tried = []
    for cut in range(1, ideals.count - 1):
        layers = [ideals.layers(0, cut), ideals.layers(cut, ideals.count - 1)]
        costs = stage_costs(problem.profile, layers)
        for first in range(1, problem.ranks):
            ranks = [tuple(range(first)), tuple(range(first, problem.ranks))]
            tried.append((time_of(problem, costs, ranks).seconds, cut, first))
    least = ""
    for _, cut, first in sorted(tried):
        layers = [ideals.layers(0, cut), ideals.layers(cut, ideals.count - 1)]
        split = split_of(problem, layers, [first, problem.ranks - first])
        lacking = _lacking(problem, split)
        if not lacking:
            return Alternative(name=name, split=split)
        least = least or lacking
    return Alternative(name=name, split=None, why_not=f"none fits, the fastest {least}")


def _lacking(problem: Problem, split: Split) -> str:
    """What a plan needs beyond the limit of memory; empty if it fits."""
    needed = max(each.total for each in bytes_of(problem, split))
    limit = problem.memory_bytes
    if limit is None or needed <= limit:
        return ""
    return f"needs {show_size(needed)} a rank, {show_size(needed - limit)} too much"
