from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from hpcpipe.cli import doctor as module
from hpcpipe.cli.doctor import doctor, lines_of


@pytest.fixture(scope="module")
def report() -> dict[str, object]:
    result = CliRunner().invoke(doctor, ["--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.output)
    return found


def test_doctor_names_the_mpi_library_and_what_it_grants(report: dict[str, dict[str, object]]) -> None:
    mpi = report["mpi"]

    assert str(mpi["library"]).startswith(("MPICH", "Open MPI"))
    assert mpi["thread_level"] == "funneled"
    assert isinstance(mpi["cuda_aware"], bool)
    assert mpi["cuda_aware_how"]


def test_doctor_compares_mpirun_with_the_library(report: dict[str, dict[str, object]]) -> None:
    assert report["mpirun"]["matches"] is True


def test_doctor_says_what_every_part_is_and_what_would_be_used(report: dict[str, object]) -> None:
    assert {"torch", "gpus", "cupy", "extension", "h5py", "threads", "uses"} <= report.keys()
    text = "\n".join(lines_of(report))
    for part in ("MPI ", "mpirun", "extension", "h5py", "torch", "GPUs", "threads", "would use"):
        assert part in text


def test_doctor_survives_an_mpi_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")

    result = CliRunner().invoke(doctor)

    assert result.exit_code == 1
    assert "MPI        cannot be used" in result.output
    assert "no usable MPI library" in result.output
    assert "would use  nothing yet" in result.output


def test_doctor_survives_an_mpi_that_crashes_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROBE_TIMEOUT_S", 0.001)

    assert "timed out" in module.probe_mpi()["error"]


def test_doctor_inside_a_job_step_probes_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}.items():
        monkeypatch.setenv(name, value)

    assert "error" not in module.probe_mpi()


def test_doctor_reports_a_missing_part_as_a_line() -> None:
    def broken() -> dict[str, object]:
        raise ImportError("undefined symbol:\n  xyz")

    assert module._guarded(broken) == {"error": "ImportError: undefined symbol: xyz"}
