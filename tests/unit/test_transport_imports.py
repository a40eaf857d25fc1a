from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpcpipe

PACKAGE = Path(hpcpipe.__file__).parent


def test_only_the_world_imports_mpi() -> None:
    importing = re.compile(r"^\s*(from mpi4py import|import mpi4py\.MPI|from mpi4py\.MPI)", re.MULTILINE)

    found = {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if importing.search(path.read_text())
    }

    assert found == {"transport/world.py"}


def test_nothing_is_pickled_on_the_wire() -> None:
    # mpi4py's lower-case calls pickle.
    pickling = re.compile(
        r"\b(comm|communicator|_comm|COMM_WORLD)\.(send|recv|isend|irecv|bcast|gather|allgather)\(|pickle"
    )

    for path in (PACKAGE / "transport").glob("*.py"):
        code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
        assert not pickling.search(code), path


@pytest.mark.parametrize("module", ["hpcpipe.cli.doctor", "hpcpipe.bench.link", "hpcpipe.transport.launcher"])
def test_what_a_login_node_imports_loads_neither_mpi_nor_torch(module: str) -> None:
    heavy = "('torch', 'mpi4py', 'cupy', 'h5py')"
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"

    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )

    assert shown.stdout == "[]\n"
