"""Job scripts run against stand-ins for launchers and schedulers, which note how they were called."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpcpipe.batch import JobRequest, write_script
from hpcpipe.checkpoint.layout import COMMIT_NAME, set_name

OUT = "runs/net-7"
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
}
ENVIRONMENTS = {
    "slurm": SLURM,
    "pbs": {"PBS_JOBID": "7.server", "PBS_NODEFILE": "nodes"},
    "lsf": {"LSB_JOBID": "7", "LSB_JOBINDEX": "0", "LSB_DJOB_HOSTFILE": "nodes"},
    "none": {},
}
# Leaves the checkpoint $GAIN if that is set, and ends with $CODE: the first time, if a later one has a $THEN.
LAUNCHER = """#!/bin/bash
echo "$(basename "$0") $*" >>calls
env | sort >environment
[[ -z ${GAIN:-} ]] || { mkdir -p "$GAIN" && : >"$GAIN/commit.json"; }
[[ -z ${STOP:-} ]] || : >"$STOP"
if [[ -n ${THEN:-} && $(grep -c "^$(basename "$0")" calls) -gt 1 ]]; then exit "$THEN"; fi
exit "$CODE"
"""
# Stops with a checkpoint as ranks do, but only when asked.
PATIENT = """#!/bin/bash
echo "$(basename "$0") $*" >>calls
trap 'echo "asked after $SECONDS s" >>calls; mkdir -p "$GAIN"; : >"$GAIN/commit.json"; exit 75' USR1
: >started
for ((i = 0; i < 200; i++)); do sleep 0.05; done
exit 1
"""
SCHEDULER = """#!/bin/bash
echo "$(basename "$0") $*" >>calls
[[ $# -gt 2 || ! -p /dev/stdin ]] || cat >submitted
echo 8.server
exit "${REFUSED:-0}"
"""


def request(scheduler: str, **changes: object) -> JobRequest:
    """A small job of four ranks on two nodes."""
    plain = JobRequest(
        command=("hpcpipe",),
        run_file="net.toml",
        name="net",
        scheduler=scheduler,
        launcher="srun" if scheduler == "slurm" else "mpirun",
        family="mpich",
        mpi="pmi2" if scheduler == "slurm" else None,
        nodes=2,
        ranks_per_node=2,
        cpus_per_rank=2,
        time_s=None if scheduler == "none" else 3600,
        out=OUT if scheduler == "none" else "runs/net",
        out_by_job=scheduler != "none",
        max_requeues=3,
        script="net.pbs",
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a script ended, and the commands that it called, in their order."""

    rc: int
    stderr: str
    calls: list[str]

    def called(self, program: str) -> int:
        """How often it called a program."""
        return sum(call.split()[0] == program for call in self.calls)


class Desk:
    """A folder with stand-ins on the PATH, in which scripts are run."""

    def __init__(self, folder: Path, *, launcher: str = LAUNCHER, without: tuple[str, ...] = ()) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        for name, text in (
            ("srun", launcher),
            ("mpirun", launcher),
            ("mpiexec", launcher),
            ("scontrol", SCHEDULER),
            ("qsub", SCHEDULER),
        ):
            if name not in without:
                (programs / name).write_text(text)
                (programs / name).chmod(0o755)
        # Without those of this machine, which may have a real Slurm.
        for name in ("basename", "bash", "cat", "env", "grep", "mkdir", "sed", "sleep", "sort", "timeout"):
            (programs / name).symlink_to(
                next(p for p in (Path("/usr/bin", name), Path("/bin", name)) if p.exists())
            )

    def add_checkpoint(self, step: int, attempt: int = 0, *, out: str = OUT) -> None:
        """A committed one."""
        path = self.folder / self.checkpoint(step, attempt, out=out)
        path.mkdir(parents=True)
        (path / COMMIT_NAME).touch()

    @staticmethod
    def checkpoint(step: int, attempt: int = 0, *, out: str = OUT) -> str:
        """Where it is, as hpcpipe calls it."""
        return f"{out}/checkpoints/{set_name(step, attempt)}"

    def start(self, job: JobRequest, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        """A script in the background, in the environment that its scheduler gives it."""
        script = self.folder / "net.pbs"
        script.write_text(write_script(job))
        environment = {**ENVIRONMENTS[job.scheduler], "PBS_O_WORKDIR": str(self.folder), **variables}
        with (self.folder / "stderr").open("w") as stderr:
            return subprocess.Popen(
                ["bash", str(script), *arguments],
                cwd=self.folder,
                env={"PATH": str(self.folder / "bin"), **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )

    def end(self, process: subprocess.Popen[bytes]) -> Ended:
        """Wait for it, and let nothing that it began outlive it."""
        try:
            process.wait(timeout=30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        stderr = (self.folder / "stderr").read_text()
        log = self.folder / "calls"
        calls = log.read_text().splitlines() if log.exists() else []
        for record in sorted(self.folder.glob("runs/*/job.log")):
            stderr += record.read_text()
        return Ended(rc=process.returncode, stderr=stderr, calls=calls)

    def run(self, job: JobRequest, *arguments: str, **variables: str) -> Ended:
        """Run a script to its end."""
        return self.end(self.start(job, *arguments, **variables))
