"""Many runs of the engine in one mpirun: starting Python on every rank takes longer than a small run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcpipe.config import RunConfig
from tests.mpi.launch import mpirun, supervise
from tests.oracle.runs import Outcome, outcome_of, write_run_file


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run leaves, and what it has said on stderr."""

    outcome: Outcome
    said: str


def train_each(
    configs: Mapping[str, RunConfig], ranks: Mapping[str, int], factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """The same for runs on different numbers of ranks: one job for each number."""
    found: dict[str, Outcome] = {}
    for number in sorted(set(ranks.values())):
        mine = {name: config for name, config in configs.items() if ranks[name] == number}
        found |= train_all(mine, number, factory.mktemp(f"on{number}"))
    return found


def train_all(
    configs: Mapping[str, RunConfig], ranks: int, directory: Path, *, timeout_s: float = 240.0
) -> dict[str, Outcome]:
    """What each run leaves, by its name; all are trained on `ranks` ranks of one job."""
    trained = train_from(configs, {}, ranks, directory, timeout_s=timeout_s)
    return {name: one.outcome for name, one in trained.items()}


def train_from(
    configs: Mapping[str, RunConfig],
    resume: Mapping[str, Path | str],
    ranks: int,
    directory: Path,
    *,
    start: Callable[..., list[str]] = mpirun,
    timeout_s: float = 240.0,
) -> dict[str, Trained]:
    """The same for runs of which some go on from a checkpoint; `start` makes a command line as `mpirun` does."""
    run_files = {name: str(write_run_file(config)) for name, config in configs.items()}
    listed = directory / "runs.json"
    sources = {name: str(path) for name, path in resume.items()}
    listed.write_text(json.dumps([[path, sources.get(name)] for name, path in run_files.items()]))
    result = supervise(start("pipeline_cases.py", ranks, str(listed)), timeout_s=timeout_s)
    assert result.rc == 0, result
    said: dict[str, list[str]] = {}
    for line in result.stderr.splitlines():
        if line.startswith("run "):
            said[line.removeprefix("run ")] = []
        elif said:
            said[list(said)[-1]].append(line)
    return {
        name: Trained(outcome=outcome_of(Path(config.run.out)), said="\n".join(said[run_files[name]]))
        for name, config in configs.items()
    }
