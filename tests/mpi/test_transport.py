"""The transport between real ranks: each case of programs/transport_cases.py is a test, run in a few mpiruns."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.mpi.launch import Result, run
from tests.mpi.programs.transport_cases import CASES

# The smallest rendezvous limit of UCX makes every message wait for its receiver, as large ones do.
RUNS: dict[int, tuple[list[str], dict[str, str]]] = {
    2: (["host", "aware", "staged"], {}),
    3: (["host", "staged"], {"UCX_RNDV_THRESH": "0"}),
    4: (["host"], {}),
}


@pytest.fixture(scope="module")
def outcome() -> Callable[[int], Result]:
    @cache
    def run_once(ranks: int) -> Result:
        memories, environment = RUNS[ranks]
        return run("transport_cases.py", ranks, *memories, environment=environment, timeout_s=120)

    return run_once


@pytest.mark.parametrize(
    ("ranks", "case"), [(ranks, case) for ranks, (memories, _) in RUNS.items() for case in CASES.names(memories)]
)
def test_case(ranks: int, case: str, outcome: Callable[[int], Result]) -> None:
    result = outcome(ranks)

    assert f"case {case} ok" in result.stdout.splitlines(), str(result)


@pytest.mark.parametrize("ranks", RUNS)
def test_the_ranks_end_well_and_in_silence(ranks: int, outcome: Callable[[int], Result]) -> None:
    result = outcome(ranks)

    assert (result.rc, result.stderr) == (0, "")
