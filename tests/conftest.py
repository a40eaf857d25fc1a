"""What holds for all tests: a header that names the libraries, tests of a GPU, and no skipped test in CI.

CI installs everything that a test may need, so a test that is skipped there has not been run by anybody.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hpcpipe.transport.launcher import mpirun_path

GPU_TESTS = Path(__file__).parent / "gpu"
SHARED_FIXTURES = ("tests/slurm", "tests/debian")
"""Folders whose tests share what takes long to set up."""
NO_GPU = "no CUDA device on this machine"


def pytest_report_header() -> list[str]:
    """Name what is under test beside hpcpipe itself."""
    packages = ("torch", "mpi4py", "numpy", "h5py")
    versions = [f"{name} {_version(name)}" for name in packages]
    return [f"hpcpipe: {', '.join(versions)}; {_mpirun_version()}; {os.cpu_count()} cores, {platform.machine()}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in tests/gpu."""
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.needs_gpu)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run beside each other, let one worker run a whole file, or a folder with common fixtures."""
    from xdist.scheduler import LoadFileScheduling

    class ByFolder(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            folder = nodeid.rpartition("::")[0].rpartition("/")[0]
            return folder if folder in SHARED_FIXTURES else super()._split_scope(nodeid)

    return ByFolder(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of a GPU where there is none."""
    if item.get_closest_marker("needs_gpu") and not has_gpu():
        pytest.skip(NO_GPU)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI, turn a skip into a failure that gives its reason."""
    report = yield
    expected_to_fail = hasattr(report, "wasxfail")
    may_skip = item.get_closest_marker("needs_gpu") is not None and not has_gpu()
    if report.skipped and not expected_to_fail and in_ci() and not may_skip:
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {_reason(report)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole module that skips itself while it is imported."""
    report = yield
    may_skip = GPU_TESTS in collector.path.parents and not has_gpu()
    if report.skipped and in_ci() and not may_skip:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} was skipped, which CI does not allow: {_reason(report)}"
    return report


def in_ci() -> bool:
    """Whether this is a run of CI."""
    return os.environ.get("CI", "").lower() == "true"


@cache
def has_gpu() -> bool:
    """Whether torch can use a CUDA device here."""
    import torch

    return torch.cuda.is_available()


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    found = report.longrepr
    return found[2] if isinstance(found, tuple) else str(found)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _mpirun_version() -> str:
    path = mpirun_path()
    if path is None:
        return "no mpirun"
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    lines = [line.strip() for line in (shown.stdout + shown.stderr).splitlines() if line.strip()]
    version = next((line for line in lines if line.startswith("Version")), lines[0] if lines else "unknown")
    return f"{path} ({' '.join(version.split())})"
