"""Jobs and job steps on a Slurm box, and what became of them, as the tests here want them."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.crash.killing import digest_of, losses_of
from tests.mpi.launch import Result, going_on, rank_environment, supervise
from tests.slurm.unhurried import NAP
from tools.slurm_box import Box, standing

RANKS = 2
STEPS = 400
JOB_LIMIT_S = 200.0
SRUN = ("srun", "--mpi=pmi2", "--nodes=2", "--ntasks=2")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

RUN = f"""
[run]
max_steps = {STEPS}
epochs = 100
log_every = 1
progress = "off"
[model]
name = "tests.slurm.unhurried:build"
[data]
name = "digits"
[pipeline]
policy = "spectrain"
[optimizer]
name = "sgd"
lr = 0.05
momentum = 0.9
[lr_schedule]
name = "cosine"
[checkpoint]
every = 100
"""


class Outcome(NamedTuple):
    """What a run came to: the digest of its last checkpoint, and its losses by step."""

    digest: str
    losses: list[tuple[int, float]]


def outcome(out: Path) -> Outcome:
    """What the run in a folder has come to."""
    return Outcome(digest_of(out), losses_of(out))


@dataclass(frozen=True)
class Job:
    """A batch job: `number` as sbatch gave it, `log` with what all its restarts printed."""

    cluster: Cluster
    number: str
    log: Path

    def shown(self) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        done = self.cluster.command("scontrol", "show", "job", self.number)
        return dict(re.findall(r"(\S+?)=(\S*)", done.stdout))

    def wait(self) -> dict[str, str]:
        """Wait for the job's end; its last fields. Raises AssertionError when it takes too long."""
        return self.wait_for(*ENDED)

    def wait_for(self, *states: str) -> dict[str, str]:
        """Wait until the job is in one of these states; its fields then."""
        deadline = time.monotonic() + JOB_LIMIT_S
        while (fields := self.shown())["JobState"] not in states:
            assert time.monotonic() < deadline, f"not {' or '.join(states)} within {JOB_LIMIT_S:g} s: {self}"
            time.sleep(0.2)
        return fields

    def __str__(self) -> str:
        printed = self.log.read_text() if self.log.exists() else "nothing"
        return f"job {self.number}: {self.shown()}\n--- printed\n{printed}"


@dataclass(frozen=True)
class Cluster:
    """A Slurm box with a folder for the files of its jobs."""

    box: Box
    folder: Path

    def command(self, *words: str, timeout_s: float = 60.0) -> Result:
        """Run a command that finds this Slurm, and beside it this Python and its programs."""
        return supervise(words, timeout_s=timeout_s, environment=self.variables(), cwd=self.folder)

    def variables(self, nap_s: float = 0.0) -> dict[str, str]:
        """The environment of all that runs here; each minibatch of a run takes `nap_s` seconds longer."""
        path = f"{Path(sys.executable).parent}:{rank_environment()['PATH']}"
        # The addresses of MPICH's other network layer may not fit into a message of Slurm's PMI.
        return {**self.box.environment, "PATH": path, "MPIR_CVAR_CH4_NETMOD": "ofi", NAP: str(nap_s)}

    def submit(self, script: Path, *options: str, nap_s: float = 0.0) -> Job:
        """Hand a script to sbatch."""
        log = self.folder / f"{script.name}.%j.log"
        words = ["sbatch", "--parsable", f"--output={log}", *options, str(script)]
        done = supervise(words, timeout_s=60.0, environment=self.variables(nap_s), cwd=self.folder)
        assert done.rc == 0, done
        number = done.stdout.strip()
        return Job(self, number, Path(str(log).replace("%j", number)))

    def script(self, name: str, lines: str) -> Path:
        """A batch script of these lines, for two nodes with a rank on each."""
        path = self.folder / name
        head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --open-mode=append\n"
        path.write_text(head + lines)
        return path

    def written(self, name: str, *options: str) -> Path:
        """The script that `hpcpipe job` writes for the run, on two nodes with a rank on each."""
        where = ("--scheduler", "slurm", "--nodes", "2", "--ranks-per-node", "1")
        done = self.command("hpcpipe", "job", self.run_file.name, *where, *options, "--output", name)
        assert done.rc == 0, done
        return self.folder / name

    @property
    def run_file(self) -> Path:
        """The run of all tests."""
        path = self.folder / "run.toml"
        if not path.exists():
            path.write_text(RUN)
        return path

    def train(self, out: Path, *options: str) -> list[str]:
        """The words that start the run or go on with it."""
        return ["hpcpipe", "train", str(self.run_file), "--out", str(out), "--resume", "auto", *options]

    @contextmanager
    def step(self, *words: str, nap_s: float = 0.0) -> Iterator[subprocess.Popen[str]]:
        """A command such as srun that goes on while the block does; nothing of it is left behind it."""
        variables = self.variables(nap_s)
        with going_on(words, environment=variables, cwd=self.folder, stderr=subprocess.STDOUT) as process:
            yield process


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster of two nodes for as long as the block runs."""
    with standing(nodes=2, cpus=16) as box:
        yield Cluster(box, folder)
