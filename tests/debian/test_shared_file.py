"""One file for all ranks, written through parallel HDF5: under both of Open MPI's ways to the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mpi.launch import supervise

PROGRAM = Path(__file__).parent / "programs" / "shared_file_cases.py"
CASES = 6


@pytest.mark.parametrize(("ranks", "way"), [(1, "ompio"), (2, "romio321"), (4, "ompio")])
def test_all_ranks_write_one_file_or_fail_together(
    tmp_path: Path, on_debian: Callable[..., list[str]], ranks: int, way: str
) -> None:
    command = on_debian(PROGRAM, ranks, str(tmp_path))
    result = supervise(command, timeout_s=120, environment={"OMPI_MCA_io": way})

    assert result.rc == 0, result
    assert len(result.stdout.split()) == CASES, result
