"""Replicas of a stage on real ranks: each case of programs/group_cases.py is a test, run in a few mpiruns."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.mpi.launch import Result, run
from tests.mpi.programs.group_cases import CASES

RUNS: dict[int, list[str]] = {2: ["host", "aware", "staged"], 3: ["host", "staged"], 4: ["host"]}


@pytest.fixture(scope="module")
def outcome() -> Callable[[int], Result]:
    @cache
    def run_once(ranks: int) -> Result:
        return run("group_cases.py", ranks, *RUNS[ranks], timeout_s=120)

    return run_once


@pytest.mark.parametrize(
    ("ranks", "case"), [(ranks, case) for ranks, memories in RUNS.items() for case in CASES.names(memories)]
)
def test_case(ranks: int, case: str, outcome: Callable[[int], Result]) -> None:
    result = outcome(ranks)

    assert f"case {case} ok" in result.stdout.splitlines(), str(result)


@pytest.mark.parametrize("ranks", RUNS)
def test_the_ranks_end_well_and_in_silence(ranks: int, outcome: Callable[[int], Result]) -> None:
    result = outcome(ranks)

    assert (result.rc, result.stderr) == (0, "")
