"""Training whose checkpoints are one file for all ranks, on Debian's stack, and what others make of them.

The updates are plain torch (`optimizer.backend`) wherever runs of two stacks are compared: the compiled update of
AdamW may round otherwise, and need not be there for Debian's Python.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from hpcpipe.checkpoint.digest import digest
from hpcpipe.checkpoint.layout import rank_name
from hpcpipe.checkpoint.sets import CheckpointSet, choose, find_sets, open_set
from hpcpipe.checkpoint.writer import write_rank_file
from hpcpipe.cli.main import hpcpipe
from hpcpipe.config import RunConfig
from tests.crash.killing import TIME_LIMIT_S, ranks_of, running, wait_for_steps
from tests.mpi.launch import run_alone
from tests.mpi.pipeline_runs import Trained, train_from
from tests.oracle.moving import CUT, REPLICATED, SPECTRAIN, STEPS, cut_of, moving
from tests.oracle.replay import replay
from tests.oracle.runs import assert_same, held_by, write_run_file

Start = Callable[..., list[str]]

LONG = {"max_steps": 200}
WIDE = {"name": "mlp", "hidden": (160, 160, 160, 160)}
SHARED = {"file": "shared"}
RANKS_OF = {"4 ranks": 4, "2 ranks": 2, "1 rank": 1, "replicas": 4}
PAIRS = {name: (f"{name}, a file each", f"{name}, one file") for name in RANKS_OF}
EXACT = {
    "one file to one file": ("4 ranks", 4, "4 ranks, one file", SHARED),
    "one file with replicas": ("replicas", 4, "replicas, one file", SHARED),
    "one file to a file each": ("4 ranks", 4, "4 ranks, one file", {}),
    "one file to 2 ranks": ("4 ranks", 2, "4 ranks, one file", SHARED),
    "a file each to one file on 1 rank": ("4 ranks", 1, "4 ranks, a file each", SHARED),
    "MPICH to Open MPI": ("4 ranks", 2, "MPICH", SHARED),
}
"""What it must equal, on how many ranks, from whose cut, into which kind of files."""
TO_MPICH = {"Open MPI to MPICH": "4 ranks", "Open MPI to MPICH with replicas": "replicas"}


def _pipeline(name: str) -> dict[str, Any]:
    return REPLICATED if name == "replicas" else SPECTRAIN


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


def _out(folder: Path, name: str) -> Path:
    return folder / name.replace(" ", "-").replace(",", "")


@pytest.fixture(scope="module")
def trained(folder: Path, on_debian: Start, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """One job for each number of ranks on Debian's stack, and one on ours between them."""
    found: dict[str, Trained] = {}
    for ranks in (4, 2, 1):
        configs: dict[str, RunConfig] = {}
        starts = {}
        for name, (each, one) in PAIRS.items():
            if RANKS_OF[name] == ranks:
                configs[each] = moving(_out(folder, each), _pipeline(name))
                configs[one] = moving(_out(folder, one), _pipeline(name), checkpoint=SHARED)
        for name, (like, number, source, checkpoint) in EXACT.items():
            if number == ranks:
                configs[name] = moving(_out(folder, name), _pipeline(like), checkpoint=checkpoint)
                starts[name] = cut_of(_out(folder, source))
        if ranks == 2:
            configs["2 stages"] = moving(_out(folder, "2 stages"), {"stages": 2}, checkpoint=SHARED)
            starts["2 stages"] = cut_of(_out(folder, PAIRS["replicas"][1]))
            configs["long"] = moving(_out(folder, "long"), {"stages": 2}, run=LONG)
            configs["wide"] = moving(_out(folder, "wide"), SPECTRAIN, model=WIDE)
        found |= train_from(configs, starts, ranks, tmp_path_factory.mktemp(f"on{ranks}"), start=on_debian)
        if ranks == 4:
            found |= _on_mpich(folder, tmp_path_factory.mktemp("mpich"))
    return found


def _on_mpich(folder: Path, scratch: Path) -> dict[str, Trained]:
    configs = {name: moving(_out(folder, name), _pipeline(like)) for name, like in TO_MPICH.items()}
    starts = {name: cut_of(_out(folder, PAIRS[like][1])) for name, like in TO_MPICH.items()}
    configs["MPICH"] = moving(_out(folder, "MPICH"), SPECTRAIN)
    return train_from(configs, starts, 4, scratch)


@pytest.mark.parametrize("name", PAIRS)
def test_one_file_holds_what_the_files_of_all_ranks_hold(
    folder: Path, trained: dict[str, Trained], name: str, tmp_path: Path
) -> None:
    each, one = PAIRS[name]
    for step in (CUT, 2 * CUT, STEPS):
        apart, together = (open_set(cut_of(_out(folder, run), step)) for run in (each, one))
        assert (apart.ranks, together.ranks) == (RANKS_OF[name], 1)
        parts = [apart.read_rank(rank) for rank in range(apart.ranks)]
        whole = together.read_rank(0)
        arrays = {path: array for part in parts for path, array in part.tree.items()}
        assert whole.tree.keys() == arrays.keys()
        for path, array in arrays.items():
            assert whole.tree[path].dtype == array.dtype
            np.testing.assert_array_equal(whole.tree[path], array, err_msg=path)
        assert whole.meta["stages"] == {key: meta for part in parts for key, meta in part.meta["stages"].items()}
        assert digest(apart) == digest(together)
        # Another HDF5 lays it out alike, so that readers of either find what they expect between the arrays.
        write_rank_file(tmp_path, 0, whole.tree, whole.meta, whole.bf16)
        assert (together.path / rank_name(0)).read_bytes() == (tmp_path / rank_name(0)).read_bytes()
    assert_same(trained[one].outcome, trained[each].outcome)


def test_the_number_of_ranks_and_the_mpi_library_change_no_bit(folder: Path, trained: dict[str, Trained]) -> None:
    for name in ("4 ranks", "2 ranks", "1 rank"):
        assert_same(trained[PAIRS[name][1]].outcome, trained["MPICH"].outcome)


@pytest.mark.parametrize("name", [*EXACT, *TO_MPICH])
def test_the_same_pipeline_goes_on_to_the_bit_from_either_kind_of_files_under_either_library(
    folder: Path, trained: dict[str, Trained], name: str
) -> None:
    like = EXACT[name][0] if name in EXACT else TO_MPICH[name]
    unbroken, continued = trained[PAIRS[like][0]].outcome, trained[name]

    assert "continues it to the bit" in continued.said
    assert continued.outcome.losses == unbroken.losses[CUT:]
    ends = [_newest(_out(folder, run)) for run in (name, PAIRS[like][0])]
    assert digest(ends[0]) == digest(ends[1])


def test_another_plan_goes_on_from_one_file_as_the_replay_does(folder: Path, trained: dict[str, Trained]) -> None:
    start = held_by(cut_of(_out(folder, PAIRS["replicas"][1])), "buffers_next")
    config = moving(folder / "reference", {"stages": 2})

    assert "what differs now: stages, replicas; this run is equivalent" in trained["2 stages"].said
    assert_same(trained["2 stages"].outcome, replay(config, 2, begin=CUT, start=start))


@pytest.mark.parametrize("name", ["4 ranks", "replicas"])
def test_the_command_line_reads_one_file_as_it_reads_several(
    folder: Path, trained: dict[str, Trained], name: str, tmp_path: Path
) -> None:
    each, one = (str(_out(folder, run)) for run in PAIRS[name])

    assert _says("list", one).count("committed") == 3
    assert _says("verify", one).count("1 files") == 3
    assert _says("show", "--digest", one).splitlines()[-1] == _says("show", "--digest", each).splitlines()[-1]
    shown = [_says("show", str(cut_of(Path(run)))) for run in (each, one)]
    staleness = [set(re.findall(r"(stage \d+): .*\((staleness up to \d+)\)", text)) for text in shown]
    assert staleness[0] == staleness[1] != set()
    exported = [tmp_path / f"{kind}.safetensors" for kind in ("each", "one")]
    for run, path in zip((each, one), exported, strict=True):
        _says("export", run, "-o", str(path))
    assert exported[0].read_bytes() == exported[1].read_bytes()


def _says(*arguments: str) -> str:
    result = CliRunner().invoke(hpcpipe, ["checkpoint", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_that_is_killed_goes_on_from_one_file_to_the_bit(
    folder: Path, trained: dict[str, Trained], on_debian: Start, tmp_path: Path
) -> None:
    config = moving(tmp_path / "killed", {"stages": 2}, run=LONG, checkpoint=SHARED)
    with running(write_run_file(config), tmp_path / "killed", ranks=2, start=on_debian) as process:
        wait_for_steps(tmp_path / "killed", 3 * CUT)
        os.kill(ranks_of(process)[-1], signal.SIGKILL)
        process.communicate(timeout=TIME_LIMIT_S)
    assert process.returncode != 0
    # The set that was being written may be in pieces.
    reached = choose(tmp_path / "killed", deep=True)[0].step
    assert 2 * CUT <= reached < LONG["max_steps"]

    resumed = train_from({"killed": config}, {"killed": "auto"}, 2, tmp_path, start=on_debian)["killed"]

    assert f"(step {reached}); this run continues it to the bit" in resumed.said
    assert_same(resumed.outcome, trained["long"].outcome)


def test_a_full_disk_costs_the_set_that_was_being_written_and_training_goes_on(
    folder: Path, trained: dict[str, Trained], on_debian: Start, tmp_path: Path
) -> None:
    sizes = [_size(cut_of(_out(folder, "wide"), step)) for step in (CUT, 2 * CUT, STEPS)]
    out = tmp_path / "full"
    config = moving(out, SPECTRAIN, model=WIDE, checkpoint=SHARED)

    # Room for the first set and the last, which has nothing in flight.
    with _disk(out / "checkpoints", sizes[0] + (sizes[1] + sizes[2]) // 2):
        run = train_from({"full": config}, {}, 2, tmp_path, start=on_debian)["full"]
        held = sorted(info.step for info in find_sets(out / "checkpoints"))
        verified = _says("verify", str(out))

    assert f"checkpoint of step {2 * CUT} was NOT WRITTEN: writing " in run.said
    assert "MB are free there" in run.said
    assert f"that of step {CUT} still stands" in run.said
    assert held == [CUT, STEPS]
    assert verified.count("ok") == 2
    assert_same(run.outcome, trained["wide"].outcome)


def _size(path: Path) -> int:
    """Bytes of a set in whole pages."""
    return sum(-(-file.stat().st_size // 4096) * 4096 for file in path.iterdir())


@contextmanager
def _disk(path: Path, size: int) -> Iterator[None]:
    """A disk of its own at `path`, for the block."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("no file system may be mounted here")
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def _newest(out: Path) -> CheckpointSet:
    found, skipped = choose(out, deep=True)
    assert skipped == []
    return found


def test_the_doctor_says_that_debians_h5py_has_mpi(on_debian: Start) -> None:
    python = next(word for word in on_debian(["-V"], 1) if word.endswith("python"))

    said = run_alone(["-m", "hpcpipe"], "doctor", python=python)

    assert said.rc == 0, said
    assert "with MPI: one file per rank, or one for all" in said.stdout
