"""Many runs of the engine in one mpirun: starting Python on every rank takes longer than a small run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpcpipe.config import RunConfig
from tests.mpi.launch import run
from tests.oracle.runs import Outcome, outcome_of, write_run_file


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
    run_files = [str(write_run_file(config)) for config in configs.values()]
    listed = directory / "runs.json"
    listed.write_text(json.dumps(run_files))
    result = run("pipeline_cases.py", ranks, str(listed), timeout_s=timeout_s)
    assert result.rc == 0, result
    return {name: outcome_of(Path(config.run.out)) for name, config in configs.items()}
