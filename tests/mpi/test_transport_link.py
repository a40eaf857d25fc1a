from __future__ import annotations

import json

import pytest

from tests.mpi.launch import run


def test_a_link_is_measured_against_raw_mpi() -> None:
    result = run("transport_link.py", 2)

    assert result.rc == 0, str(result)
    rows = json.loads(result.stdout)
    assert [row["bytes"] for row in rows] == [8, 1 << 16]
    for row in rows:
        assert row["overhead_us"] == pytest.approx(row["ours_us"] - row["raw_us"], abs=0.01)
        assert row["fraction_of_raw"] == pytest.approx(row["raw_us"] / row["ours_us"], rel=0.01)
        assert row["raw_gb_s"] > 0


def test_a_link_has_two_ends() -> None:
    result = run("transport_link.py", 3)

    assert result.rc == 2
    assert "bench link needs 2 ranks, not 3" in result.stderr
