"""A tenth of what tools/torture.py is meant for: kills, damaged sets, full disks and frozen ranks, with a seed."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.mpi.launch import ROOT, Result, supervise

KILLS, CORRUPT, DISK_FULL, FREEZE = 20, 50, 2, 2
LIMIT_S = 560.0

pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@pytest.fixture(scope="module")
def torture(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """All four kinds at once, as they share the runs that they are compared with."""
    words = ["--kills", KILLS, "--corrupt", CORRUPT, "--disk-full", DISK_FULL, "--freeze", FREEZE, "--json"]
    words += ["--keep", tmp_path_factory.mktemp("torture")]
    return supervise([sys.executable, str(ROOT / "tools" / "torture.py"), *map(str, words)], timeout_s=LIMIT_S)


def _row(result: Result, kind: str) -> dict[str, Any]:
    assert result.stdout, str(result)
    found = json.loads(result.stdout)
    assert [failure for failure in found["failures"] if failure["kind"] == kind] == [], str(result)
    (row,) = (row for row in found["kinds"] if row["kind"] == kind)
    return dict(row)


def test_runs_killed_at_any_moment_end_to_the_bit_as_if_nothing_had_happened(torture: Result) -> None:
    row = _row(torture, "kills")

    assert (row["trials"], row["as specified"], row["hangs"], row["wrong"]) == (KILLS, KILLS, 0, 0)
    # Moments in which a kill can do harm were met, not only quiet ones.
    assert {"in the middle of a file", "in the middle of a deletion"} & row["met"].keys()
    assert {"of one rank", "of all ranks", "of the launcher"} <= row["met"].keys()


def test_every_damaged_set_is_noticed_and_none_is_loaded_wrongly(torture: Result) -> None:
    row = _row(torture, "corrupt")

    assert (row["trials"], row["as specified"], row["wrong"]) == (CORRUPT, CORRUPT, 0)
    assert len(row["met"]) >= 8


def test_a_full_disk_ends_as_specified_and_costs_no_older_set(torture: Result) -> None:
    row = _row(torture, "disk-full")

    assert (row["trials"], row["as specified"], row["hangs"], row["wrong"]) == (DISK_FULL, DISK_FULL, 0, 0)


def test_a_frozen_rank_ends_the_job_by_name_and_in_time(torture: Result) -> None:
    row = _row(torture, "freeze")

    assert (row["trials"], row["as specified"], row["hangs"], row["wrong"]) == (FREEZE, FREEZE, 0, 0)
    assert torture.rc == 0, str(torture)
