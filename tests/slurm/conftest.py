"""One Slurm for all tests here, with the jobs that take their time submitted before the first test begins."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.crash.killing import train
from tests.mpi.launch import ROOT
from tests.slurm.cluster import RANKS, Cluster, Job, Outcome, cluster, outcome
from tools.slurm_box import Refused, find_programs

# Fixtures of jobs that mostly wait, for their time limit or for their turn.
EARLY = ("shipped_job", "written_job", "timed_job", "array_job")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster that the tests share."""
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(scope="session", autouse=True)
def early(request: pytest.FixtureRequest) -> None:
    """Submit the jobs that tests of this session will ask about, so that they wait side by side."""
    try:
        find_programs()
    except Refused as missing:
        pytest.skip(missing.message)
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    for name in EARLY:
        if name in wanted:
            request.getfixturevalue(name)


@pytest.fixture(scope="session")
def unbroken(slurm: Cluster) -> Callable[[int], Outcome]:
    """What becomes of the run of a seed without naps, nor a stop on its way."""

    @cache
    def of_seed(seed: int) -> Outcome:
        out = slurm.folder / f"unbroken-{seed}"
        result = train(slurm.run_file, out, "--set", f"run.seed={seed}", ranks=RANKS)
        assert result.rc == 0, result
        return outcome(out)

    return of_seed


@pytest.fixture(scope="session")
def shipped_job(slurm: Cluster) -> Job:
    """The script of jobs/ for long runs, with the run of these tests in the place of its own, on two nodes."""
    jobs = slurm.folder / "jobs"
    jobs.mkdir()
    script = Path(shutil.copy(ROOT / "jobs" / "slurm-chain.sbatch", jobs))
    shutil.copy(slurm.run_file, jobs / "text-gpt.toml")
    (slurm.folder / ".venv").symlink_to(sys.prefix)
    # Slurm looks at limits twice a minute: the signal comes 10 to 40 s before the end.
    options = ("--nodes=2", "--ntasks-per-node=1", "--time=1", "--signal=USR1@10")
    return slurm.submit(script, *options, nap_s=0.2)


@pytest.fixture(scope="session")
def written_job(slurm: Cluster) -> Job:
    """What `hpcpipe job` writes for the run and a limit of a minute."""
    return slurm.submit(slurm.written("written.sh", "--time", "1min"), nap_s=0.2)


@pytest.fixture(scope="session")
def timed_job(slurm: Cluster) -> Job:
    """A job that stops half a minute before its limit of one, without a signal."""
    command = slurm.train(slurm.folder / "timed", "--set", "run.stop_before=30s")
    lines = f"srun --mpi=pmi2 {' '.join(command)}\nexit $?\n"
    return slurm.submit(slurm.script("timed.sh", lines), "--time=1", nap_s=0.2)


@pytest.fixture(scope="session")
def array_job(slurm: Cluster) -> Job:
    """An array of two seeds, written by `hpcpipe job`."""
    return slurm.submit(slurm.written("seeds.sh", "--time", "10min", "--array", "0-1"), nap_s=0.05)
