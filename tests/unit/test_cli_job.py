from __future__ import annotations

import os
import stat
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpcpipe.cli.main import hpcpipe
from hpcpipe.errors import EXIT_USAGE, HpcpipeError
from hpcpipe.planning.plan_file import PlanFile, PlannedStage, save_plan
from hpcpipe.transport import installed
from hpcpipe.transport.installed import InstalledMpi, find_mpi
from tests.unit.planning_cases import chain, nodes

MPICH = InstalledMpi(family="mpich", name="MPICH 5.0.2", how="package mpich of this Python", package="mpich")
OPEN_MPI = InstalledMpi(family="openmpi", name="Open MPI", how="/opt/bin/mpirun --version")
CRAY = InstalledMpi(family="cray", name="Cray MPICH 8.1", how="CRAY_MPICH_VERSION is set")
RUN = """
[model]
name = "mlp"
[data]
name = "digits"
[optimizer]
name = "sgd"
lr = 0.1
momentum = 0.9
"""
SLURM = ("--scheduler", "slurm", "--nodes", "2", "--ranks-per-node", "2", "--time", "1:00:00")


class Here:
    """A folder with a run file, in which the command is called."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        monkeypatch.chdir(folder)
        # What this machine has of Slurm is no matter here.
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        monkeypatch.setattr("shutil.which", lambda name: None)
        self.finds(MPICH)
        self.holds("")

    def finds(self, mpi: InstalledMpi) -> None:
        self._monkeypatch.setattr(installed, "find_mpi", lambda environment: mpi)

    def holds(self, more: str) -> None:
        (self.folder / "net.toml").write_text(RUN + more)

    def call(self, *arguments: str) -> Result:
        return CliRunner().invoke(hpcpipe, ["job", "net.toml", *arguments])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    return Here(tmp_path, monkeypatch)


def refused(result: Result) -> str:
    assert isinstance(result.exception, HpcpipeError), result.output
    assert result.exception.exit_code == EXIT_USAGE
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_the_script_is_printed_and_what_it_assumes_goes_to_standard_error(here: Here) -> None:
    result = here.call(*SLURM, "--gpus-per-node", "2", "--cpus-per-task", "8")

    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("#!/bin/bash\n")
    assert f"cd {here.folder} || exit" in result.stdout
    assert "export MPIR_CVAR_CH4_NETMOD=ofi" in result.stdout
    for line in (
        "ranks: 2 x 2 = 4; one stage each",
        "launcher: srun --mpi=pmi2, for MPICH 5.0.2 (package mpich of this Python)",
        f"works in {here.folder}",
        "folder of the run: runs/net, followed by the job's number",
        "threads: 8 a rank (--cpus-per-task)",
        "GPUs: 2 a node",
        "SIGUSR1 300 s before the limit of 01:00:00 (--signal-before): at most 9 minibatches and one checkpoint",
        "goes on by itself at most 10 times",
        "not submitted: sbatch FILE",
    ):
        assert f"hpcpipe: {line}" in result.stderr, line


def test_a_file_is_executable_and_never_written_over_by_accident(here: Here) -> None:
    assert here.call(*SLURM, "-o", "job.sbatch").exit_code == 0
    first = (here.folder / "job.sbatch").read_text()
    message = refused(here.call(*SLURM, "-o", "job.sbatch", "--max-requeues", "1"))

    assert (here.folder / "job.sbatch").stat().st_mode & stat.S_IXUSR
    assert "job.sbatch: is there already; choose another name, or write over it with --force" in message
    assert (here.folder / "job.sbatch").read_text() == first
    assert "#   sbatch job.sbatch\n" in first
    assert here.call(*SLURM, "-o", "job.sbatch", "--max-requeues", "1", "--force").exit_code == 0
    assert "max_requeues=1\n" in (here.folder / "job.sbatch").read_text()


def test_a_folder_that_is_not_there_is_named(here: Here) -> None:
    assert "nowhere/job.sbatch: cannot be written" in refused(here.call(*SLURM, "-o", "nowhere/job.sbatch"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("[pipeline]\nreplicas = [2, 1]", "pipeline.replicas = [2, 1] of net.toml is for 3 ranks"),
        ("[pipeline]\nstages = 3", "pipeline.stages makes 3 stages"),
        ("[pipeline]\nbalance = [1, 1]", "pipeline.balance makes 2 stages"),
    ],
)
def test_ranks_that_do_not_fit_the_run_file_are_refused(here: Here, more: str, message: str) -> None:
    here.holds(more)

    said = refused(here.call(*SLURM))

    assert message in said
    assert "make 4" in said


def test_a_plan_says_for_how_many_ranks_it_is(here: Here) -> None:
    plan = PlanFile(
        stages=(PlannedStage(layers=("a",), ranks=(0, 1)), PlannedStage(layers=("b",), ranks=(2,))),
        schedule="pipedream",
        policy="stash",
        microbatches=1,
        profile=chain(2.0, 1.0),
        topology=nodes(4, 2),
    )
    save_plan(plan, here.folder / "plan.json")
    here.holds('[pipeline]\nplan = "plan.json"')

    assert "the plan plan.json is for 3 ranks" in refused(here.call(*SLURM))
    fitting = here.call("--scheduler", "none", "--ranks-per-node", "3")
    assert "stages of 2-1 replicas, by the plan plan.json" in fitting.stderr
    assert fitting.exit_code == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("[pipeline]\nreplicas = [3, 1]", "stages of 3-1 replicas"),
        ("[pipeline]\nstages = 8", "they share 8 stages"),
        ('[pipeline]\nplan = "auto"', "will decide at the start"),
    ],
)
def test_ranks_that_fit_are_told_what_they_will_do(here: Here, more: str, words: str) -> None:
    here.holds(more)

    assert words in here.call(*SLURM).stderr


def test_a_mistake_in_the_run_file_or_an_override_is_found_before_the_job_waits(here: Here) -> None:
    assert "optimizer.lr" in refused(here.call(*SLURM, "--set", "optimizer.lr=-1"))
    assert "--set run.epochs=3" in here.call(*SLURM, "--set", "run.epochs=3").stdout


def test_a_run_on_gpus_needs_some(here: Here) -> None:
    here.holds('[run]\ndevice = "cuda"')

    assert "needs --gpus-per-node" in refused(here.call(*SLURM))
    assert (
        "4 ranks share 1 on each node" in here.call(*SLURM, "--gpus-per-node", "1", "--ranks-per-node", "4").stderr
    )


@pytest.mark.parametrize(
    ("mpi", "plugin"), [(MPICH, "pmi2"), (OPEN_MPI, "pmix"), (CRAY, "cray_shasta")], ids=lambda x: str(x)[:12]
)
def test_the_plugin_of_srun_follows_the_mpi_library(here: Here, mpi: InstalledMpi, plugin: str) -> None:
    here.finds(mpi)
    result = here.call(*SLURM)

    assert f"srun --mpi={plugin} " in result.stdout
    assert ("MPIR_CVAR_CH4_NETMOD" in result.stdout) == (mpi is MPICH)
    assert f"launcher: srun --mpi={plugin}, for {mpi.name} ({mpi.how})" in result.stderr


def test_options_stand_over_what_was_found(here: Here) -> None:
    assert "srun --mpi=pmix_v4 " in here.call(*SLURM, "--mpi", "pmix_v4").stdout
    by_mpirun = here.call(*SLURM, "--launcher", "mpirun").stdout
    assert 'mpirun -n "$SLURM_NTASKS"' in by_mpirun
    assert "srun" not in by_mpirun.partition("set -uo pipefail")[2]


def test_a_library_of_unknown_kind_leaves_the_plugin_to_the_site(here: Here) -> None:
    here.finds(InstalledMpi(family="other", name="an MPI library of unknown kind", how="there is no mpirun"))

    assert "srun --kill-on-bad-exit=1" in here.call(*SLURM).stdout


def test_the_lead_follows_a_short_limit_and_can_be_given(here: Here) -> None:
    short = (*SLURM[:-1], "10min")

    assert "--signal=USR1@60\n" in here.call(*short).stdout
    assert "--signal=USR1@45\n" in here.call(*short, "--signal-before", "45").stdout
    assert "--signal=USR1@120\n" in here.call(*short, "--signal-before", "2min").stdout


def test_the_signal_is_one_that_the_run_obeys(here: Here) -> None:
    here.holds('[run]\nstop_signals = ["SIGUSR2", "SIGTERM"]')

    assert "--signal=USR2@300\n" in here.call(*SLURM).stdout
    assert "dies of SIGUSR2" in refused(here.call(*SLURM, "--launcher", "mpirun"))


def test_a_named_folder_is_taken_as_it_is(here: Here) -> None:
    result = here.call(*SLURM, "--out", "runs/mine")

    assert "out=${HPCPIPE_FOLDER:-runs/mine}\n" in result.stdout
    assert "folder of the run: runs/mine; " in result.stderr


def test_an_array_has_a_folder_and_a_seed_for_each_element(here: Here) -> None:
    result = here.call(*SLURM, "--array", "0-4")

    assert "folder of the run: runs/net, followed by the job's number and the seed" in result.stderr
    assert '--set run.seed="$index"' in result.stdout


def test_what_a_script_of_pbs_and_one_of_several_hosts_rely_on_is_said(here: Here) -> None:
    pbs = here.call("--scheduler", "pbs", *SLURM[2:], "-o", "net.pbs")
    plain = here.call("--scheduler", "none", "--nodes", "2", "--ranks-per-node", "2")

    assert f"submits itself again from {here.folder / 'net.pbs'}: keep the file there" in pbs.stderr
    assert f"script={here.folder / 'net.pbs'}\n" in (here.folder / "net.pbs").read_text()
    assert "names of the hosts: one a line in hosts.txt" in plain.stderr
    assert "no time limit; SIGUSR1 to this script asks for a checkpoint" in plain.stderr


def test_a_slurm_that_lacks_the_plugin_is_doubted(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    srun = here.folder / "srun"
    srun.write_text("#!/bin/sh\necho 'MPI plugin types are...'\necho none\necho pmi2\n")
    srun.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(srun))

    assert "Slurm does not list" not in here.call(*SLURM).stderr
    here.finds(OPEN_MPI)
    assert "Slurm does not list pmix here (srun --mpi=list): choose another with --mpi" in here.call(*SLURM).stderr


def test_the_command_in_a_script_is_that_of_this_installation(here: Here) -> None:
    script = here.call(*SLURM).stdout
    words = next(line for line in script.splitlines() if " train net.toml" in line).partition(" train ")[0].split()

    shown = subprocess.run(
        [*words, "--version"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert shown.stdout.startswith("hpcpipe, version ")


@pytest.mark.parametrize(
    ("packages", "environment", "said", "family", "package"),
    [
        ({"mpich": "5.0.2", "openmpi": "5.0.11"}, {}, "", "mpich", "mpich"),
        ({"openmpi": "5.0.11"}, {"CRAY_MPICH_VERSION": "8.1"}, "", "openmpi", "openmpi"),
        ({}, {"CRAY_MPICH_VERSION": "8.1"}, "", "cray", None),
        ({}, {}, "mpirun (Open MPI) 4.1.4\n", "openmpi", None),
        ({}, {}, "HYDRA build details:\n Version: 4.2\n", "mpich", None),
        ({}, {}, "Intel(R) MPI Library for Linux* OS, Version 2021.10\n", "mpich", None),
        ({}, {}, "mystery 1.0\n", "other", None),
    ],
)
def test_the_mpi_library_is_found_without_loading_it(
    monkeypatch: pytest.MonkeyPatch,
    packages: dict[str, str],
    environment: dict[str, str],
    said: str,
    family: str,
    package: str | None,
) -> None:
    def version(name: str) -> str:
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(installed, "mpirun_path", lambda: "/opt/bin/mpirun")
    monkeypatch.setattr(installed, "version_of", lambda mpirun: said)

    found = find_mpi(environment)

    assert (found.family, found.package) == (family, package)
    assert found.how


def test_a_machine_without_mpi_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: (_ for _ in ()).throw(metadata.PackageNotFoundError()))
    monkeypatch.setattr(installed, "mpirun_path", lambda: None)

    assert find_mpi({}).how == "there is no mpirun"
    assert installed.version_of("/no/such/mpirun") == ""
