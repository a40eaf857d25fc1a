from __future__ import annotations

from pathlib import Path

from tests.mpi.launch import run
from tests.unit.checkpoint_samples import another_hdf5, layer_tree, write_set


def test_ranks_have_foreign_files_looked_at_by_processes_that_are_no_ranks(tmp_path: Path) -> None:
    with another_hdf5():
        good = write_set(tmp_path / "good", 1, [layer_tree("a")])
    # A process of the launcher's that ends without MPI_Finalize would take the job with it.
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from mpi4py import MPI\n"
        "from hpcpipe.checkpoint.sets import open_set\n"
        "for turn in range(2):\n"
        "    MPI.COMM_WORLD.barrier()\n"
        "    assert open_set(Path(sys.argv[1])).faults() == []\n"
        "total = MPI.COMM_WORLD.allreduce(1)\n"
        "print(f'{total} ranks have read it')\n"
    )
    (tmp_path / "program.py").write_text(program)

    result = run(tmp_path / "program.py", 2, str(good))

    assert result.rc == 0, result
    assert result.stdout.count("2 ranks have read it") == 2
