"""Debian's stack beside the one under test: parallel h5py on HDF5 1.10, mpi4py 3.1 and Open MPI 4.1."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mpi.launch import ROOT, mpirun

VENV = ROOT / "build" / "debian"


@pytest.fixture(scope="session")
def on_debian() -> Callable[..., list[str]]:
    """Makes a command line as `launch.mpirun` does, but for Debian's stack."""
    launcher = shutil.which("mpirun.openmpi")
    if launcher is None or not Path("/usr/lib/python3/dist-packages/h5py/_debian_h5py_mpi").exists():
        pytest.skip("no python3-h5py-mpi and openmpi-bin of Debian here")
    script = ["bash", str(ROOT / "tools" / "debian_venv.sh"), str(VENV)]
    made = subprocess.run(script, capture_output=True, text=True, timeout=240, check=False)
    assert made.returncode == 0, made.stderr
    return functools.partial(mpirun, launcher=launcher, python=str(VENV / "bin" / "python"))
