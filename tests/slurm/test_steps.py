"""Job steps started by srun: asked to stop, killed, or started without the right PMI."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hpcpipe.checkpoint.sets import choose
from tests.crash.killing import wait_for_steps
from tests.slurm.cluster import SRUN, Cluster

SOON_S = 10.0


def ranks_of(out: Path) -> list[int]:
    """Process ids of the ranks that train into `out`, whose parents are Slurm's and not srun."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(out).encode() in words and not words[0].endswith(b"srun"):
            found.append(int(place.name))
    return sorted(found)


@pytest.mark.parametrize("options", [(), ("--kill-on-bad-exit=1",)], ids=["plain", "kill-on-bad-exit"])
def test_a_step_that_is_asked_to_stop_ends_with_75(
    slurm: Cluster, tmp_path: Path, options: tuple[str, ...]
) -> None:
    name = f"--job-name={tmp_path.name}"
    with slurm.step(*SRUN, name, *options, *slurm.train(tmp_path), nap_s=0.1) as step:
        wait_for_steps(tmp_path, 3)
        asked = slurm.command("scancel", "--signal=USR1", name.replace("job-name", "name"))
        assert asked.rc == 0, asked
        printed, _ = step.communicate(timeout=60)

    assert step.returncode == 75, printed
    assert choose(tmp_path, deep=True)[0].step > 0


@pytest.mark.parametrize("options", [(), ("--kill-on-bad-exit=1",)], ids=["plain", "kill-on-bad-exit"])
def test_a_killed_rank_ends_its_step_soon_and_not_with_0(
    slurm: Cluster, tmp_path: Path, options: tuple[str, ...]
) -> None:
    with slurm.step(*SRUN, *options, *slurm.train(tmp_path), nap_s=0.1) as step:
        wait_for_steps(tmp_path, 3)
        os.kill(ranks_of(tmp_path)[-1], signal.SIGKILL)
        printed, _ = step.communicate(timeout=SOON_S)

    assert step.returncode not in (0, 75), printed


def test_a_launcher_that_starts_singletons_is_refused_in_one_line(slurm: Cluster, tmp_path: Path) -> None:
    done = slurm.command("srun", "--mpi=none", *SRUN[2:], *slurm.train(tmp_path))

    assert done.rc == 2, done
    told = [line for line in done.stderr.splitlines() if not line.startswith("srun: ")]
    assert len(told) == 1, done
    assert "started 2 ranks" in told[0]
    assert "a world of 1" in told[0]
    assert "srun --mpi=pmi2" in told[0]
