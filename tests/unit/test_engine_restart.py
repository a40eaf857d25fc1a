"""A run that goes on from a cut in its middle ends with the bits of the unbroken one, whatever was in flight."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional

from hpcpipe.checkpoint.digest import digest
from hpcpipe.checkpoint.export import export
from hpcpipe.checkpoint.sets import choose, find_sets, open_set
from hpcpipe.config import RunConfig
from hpcpipe.engine.train import TrainOptions, train
from hpcpipe.errors import CheckpointError, NonFiniteError
from hpcpipe.schedule import Policy, Schedule, cut_at
from tests.oracle.lone_world import LoneWorld
from tests.oracle.runs import Outcome, configured, failure_of, outcome_of, write_run_file

NET = {
    "name": "mlp",
    "hidden": (12, 11, 10, 9),
    "activation": "tanh",
    "dropout": 0.2,
    "batchnorm": True,
}
STEPS = 29
EVERY = 8


def _config(out: Path, **sections: Mapping[str, Any]) -> RunConfig:
    given = {
        "run": {"max_steps": STEPS},
        "model": NET,
        "checkpoint": {"every": EVERY, "keep_last": 99},
        "lr_schedule": {"name": "cosine", "total": 100},
        **sections,
    }
    return configured(out, **given)


def _run(config: RunConfig, *, resume: str | None = None) -> str:
    """Train; the digest of the last checkpoint."""
    assert train(LoneWorld(), TrainOptions(run_file=str(write_run_file(config)), resume=resume)) == 0
    return digest(choose(Path(config.run.out), deep=True)[0]).overall


def _cut(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:010d}"


STALE = {"stages": 4}
CASES: dict[str, dict[str, Any]] = {
    "stash": {"pipeline": {**STALE, "policy": "stash"}},
    "vertical_sync": {"pipeline": {**STALE, "policy": "vertical_sync"}},
    "none": {"pipeline": {**STALE, "policy": "none"}},
    "spectrain": {"pipeline": {**STALE, "policy": "spectrain"}},
    "spectrain local": {"pipeline": {**STALE, "policy": "spectrain", "target": "local"}},
    "spectrain damped": {"pipeline": {**STALE, "policy": "spectrain", "target": "damped"}},
    "spectrain adamw": {
        "pipeline": {**STALE, "policy": "spectrain"},
        "optimizer": {"name": "adamw", "lr": 0.01},
    },
    "stash adamw": {"pipeline": {**STALE, "policy": "stash"}, "optimizer": {"name": "adamw", "lr": 0.01}},
    "spectrain drained": {
        "pipeline": {**STALE, "policy": "spectrain"},
        "checkpoint": {"every": EVERY, "keep_last": 99, "cut": "drain"},
    },
    "spectrain bfloat16": {
        "pipeline": {**STALE, "policy": "spectrain"},
        "run": {"max_steps": STEPS, "dtype": "bfloat16"},
    },
    "gpipe": {"pipeline": {"stages": 3, "schedule": "gpipe", "microbatches": 3}},
    "1f1b": {"pipeline": {"stages": 3, "schedule": "1f1b", "microbatches": 4}},
    "one stage": {"pipeline": {"stages": 1, "policy": "stash"}},
    "compiled update": {
        "pipeline": {**STALE, "policy": "spectrain"},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "backend": "auto"},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_resuming_from_any_cut_equals_the_unbroken_run_to_the_bit(tmp_path: Path, case: str) -> None:
    whole = _config(tmp_path / "whole", **CASES[case])
    expected = _run(whole)

    for step in (EVERY, 3 * EVERY):
        out = tmp_path / f"from{step}"
        resumed = _run(_config(out, **CASES[case]), resume=str(_cut(tmp_path / "whole", step)))

        assert resumed == expected
        ends = [outcome_of(folder).losses for folder in (out, tmp_path / "whole")]
        assert ends[0] == ends[1][step:]


def test_a_run_that_is_resumed_again_and_again_still_equals_the_unbroken_one(tmp_path: Path) -> None:
    expected = _run(_config(tmp_path / "whole", **CASES["spectrain"]))

    previous = tmp_path / "whole"
    for step in (EVERY, 2 * EVERY, 3 * EVERY):
        out = tmp_path / f"part{step}"
        last = _run(_config(out, **CASES["spectrain"]), resume=str(_cut(previous, step)))
        previous = out

    assert last == expected


def test_a_cut_holds_the_versions_and_minibatches_that_the_schedule_says(tmp_path: Path) -> None:
    _run(_config(tmp_path / "run", **CASES["vertical_sync"]))
    found = open_set(_cut(tmp_path / "run", 2 * EVERY))
    schedule = Schedule(name="pipedream", stages=4, minibatches=STEPS, policy=Policy.VERTICAL_SYNC)

    stages = found.index(0).meta["stages"]

    for stage in range(4):
        cut = cut_at(schedule, stage, 2 * EVERY - 1)
        assert tuple(stages[str(stage)]["versions"]) == cut.versions
        assert tuple(int(j) for j in stages[str(stage)]["in_flight"]) == cut.in_flight


def test_resuming_with_another_learning_rate_says_so_and_fills_the_pipeline_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(_config(tmp_path / "whole", **CASES["spectrain"]))
    other = {
        **CASES["spectrain"],
        "run": {"max_steps": STEPS, "progress": "lines"},
        "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
    }

    _run(_config(tmp_path / "other", **other), resume=str(_cut(tmp_path / "whole", EVERY)))

    said = capsys.readouterr().err
    assert "what differs now: learning rate, optimizer; this run is equivalent, not bit-identical" in said


def test_another_split_goes_on_with_weights_buffers_and_optimizer_state_of_the_cut(tmp_path: Path) -> None:
    # Without staleness the split cannot matter, so the restart on another one must equal the unbroken run.
    synchronous = {"pipeline": {"stages": 4, "schedule": "gpipe"}}
    expected = outcome_of_run(_config(tmp_path / "whole", **synchronous))

    fewer = _config(tmp_path / "fewer", pipeline={"stages": 2, "schedule": "gpipe"})
    resumed = outcome_of_run(fewer, resume=str(_cut(tmp_path / "whole", EVERY)))

    assert resumed.losses == pytest.approx(expected.losses[EVERY:], rel=1e-4)
    for name, weight in expected.weights.items():
        assert resumed.weights[name].allclose(weight, rtol=1e-4, atol=1e-6), name
    for name, buffer in expected.buffers.items():
        assert resumed.buffers[name].allclose(buffer, rtol=1e-4, atol=1e-6), name


def test_a_restart_on_another_plan_begins_from_the_buffers_before_the_next_forward(tmp_path: Path) -> None:
    _run(_config(tmp_path / "whole", **CASES["stash"]))
    found = open_set(_cut(tmp_path / "whole", EVERY))

    for stage, described in found.index(0).meta["stages"].items():
        tree = found.read_layer(described["layers"][0]).tree
        # Forwards of the minibatches in flight have counted already, those of another plan come again.
        assert int(tree["buffers/norm.num_batches_tracked"]) == EVERY + 3 - int(stage)
        assert int(tree["buffers_next/norm.num_batches_tracked"]) == EVERY


def test_a_run_can_be_made_longer(tmp_path: Path) -> None:
    # The learning rate does not depend on the end of the run, so the end of the first run is no end.
    constant = {**CASES["stash"], "lr_schedule": {"name": "constant"}}
    _run(_config(tmp_path / "run", **constant))

    _run(_config(tmp_path / "run", **{**constant, "run": {"max_steps": STEPS + 10}}), resume="auto")

    losses = outcome_of(tmp_path / "run").losses
    assert len(losses) == STEPS + 10


def test_a_finished_run_that_is_started_again_ends_well_and_changes_nothing(tmp_path: Path) -> None:
    config = _config(tmp_path / "run", **CASES["spectrain"])
    expected = _run(config)

    assert _run(config, resume="auto") == expected


def test_a_checkpoint_beyond_the_end_of_the_run_is_refused_in_one_line(tmp_path: Path) -> None:
    _run(_config(tmp_path / "run", **CASES["stash"]))
    shorter = _config(tmp_path / "run", **{**CASES["stash"], "run": {"max_steps": STEPS - 1}})

    with pytest.raises(CheckpointError, match=f"is at step {STEPS}, but this run ends at {STEPS - 1}"):
        _run(shorter, resume="auto")


def test_resuming_where_nothing_was_written_starts_at_0_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(tmp_path / "run", run={"max_steps": 3, "progress": "lines"})

    _run(config, resume="auto")

    assert "no checkpoint to resume from: starting at step 0" in capsys.readouterr().err


def test_an_older_checkpoint_of_the_same_folder_is_not_resumed_under_newer_ones(tmp_path: Path) -> None:
    config = _config(tmp_path / "run", **CASES["stash"])
    _run(config)

    with pytest.raises(CheckpointError, match=r"holds newer checkpoints \(up to step 29\)"):
        _run(config, resume=str(_cut(tmp_path / "run", EVERY)))


def test_a_checkpoint_named_by_its_path_is_refused_if_any_byte_of_it_is_damaged(tmp_path: Path) -> None:
    _run(_config(tmp_path / "run", **{**CASES["stash"], "run": {"max_steps": 9}}))
    chosen = _cut(tmp_path / "run", EVERY)
    # What another plan would begin with is read by no rank of this one.
    unread = next(e for path, e in open_set(chosen).index(0).entries.items() if "/buffers_next/" in path)
    with open(chosen / "rank-00000.h5", "r+b") as file:
        file.seek(unread.offset)
        byte = file.read(1)[0]
        file.seek(unread.offset)
        file.write(bytes([byte ^ 1]))

    with pytest.raises(
        CheckpointError, match=r"rank-00000.h5: fails its CRC-32 in dataset 'layers/.*/buffers_next/"
    ):
        _run(_config(tmp_path / "other", **CASES["stash"]), resume=str(chosen))


def test_a_run_starts_from_the_weights_of_a_safetensors_file_or_a_checkpoint(tmp_path: Path) -> None:
    _run(_config(tmp_path / "first", **CASES["stash"]))
    weights = tmp_path / "weights.safetensors"
    export(choose(tmp_path / "first", deep=True)[0], weights)

    outcomes = []
    for number, source in enumerate((weights, tmp_path / "first")):
        run = {"max_steps": 3, "init_from": str(source)}
        outcomes.append(outcome_of_run(_config(tmp_path / f"second{number}", **{**CASES["stash"], "run": run})))

    fresh = outcome_of_run(_config(tmp_path / "fresh", **{**CASES["stash"], "run": {"max_steps": 3}}))
    assert outcomes[0].losses == outcomes[1].losses
    assert outcomes[0].losses[0] < fresh.losses[0]


def test_weights_of_another_model_are_refused_in_one_line(tmp_path: Path) -> None:
    _run(_config(tmp_path / "first", **CASES["stash"]))
    weights = tmp_path / "weights.safetensors"
    export(choose(tmp_path / "first", deep=True)[0], weights)

    other = {**CASES["stash"], "model": {**NET, "hidden": (12, 11, 10, 8)}, "run": {"init_from": str(weights)}}
    with pytest.raises(CheckpointError, match="stored with shape"):
        _run(_config(tmp_path / "second", **other))


def outcome_of_run(config: RunConfig, *, resume: str | None = None) -> Outcome:
    """Train, and what the run ends with."""
    _run(config, resume=resume)
    return outcome_of(Path(config.run.out))


def test_metrics_of_the_resumed_run_have_every_step_once(tmp_path: Path) -> None:
    config = _config(tmp_path / "run", **CASES["stash"])
    _run(_config(tmp_path / "run", **{**CASES["stash"], "run": {"max_steps": 12}}))
    _run(config, resume="auto")

    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries if "loss" in entry] == list(range(1, STEPS + 1))


def test_auto_takes_a_first_checkpoint_at_once_and_then_one_per_measured_interval(tmp_path: Path) -> None:
    failing_often = {"auto": True, "mtbf_hours": 1e-9, "keep_last": 99}
    _run(_config(tmp_path / "often", **{**CASES["spectrain"], "checkpoint": failing_often}))
    failing_seldom = {"auto": True, "mtbf_hours": 1e6, "keep_last": 99}
    _run(_config(tmp_path / "seldom", **{**CASES["spectrain"], "checkpoint": failing_seldom}))

    steps = {
        name: sorted(info.step for info in find_sets(tmp_path / name / "checkpoints"))
        for name in ("often", "seldom")
    }
    assert steps["seldom"] == [1, STEPS]
    assert len(steps["often"]) > 3


def huge_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Finite, but its gradient is too much for any step."""
    return functional.cross_entropy(output, targets) * 1e37


def test_weights_that_are_not_finite_are_never_committed(tmp_path: Path) -> None:
    exploding = {
        "loss": {"name": f"{__name__}:huge_loss"},
        "optimizer": {"name": "sgd", "lr": 1e4, "momentum": 0.9},
        "checkpoint": {"every": 1},
    }
    config = _config(tmp_path / "run", **{**CASES["stash"], **exploding})

    message = failure_of(config, NonFiniteError)

    assert "no checkpoint is taken" in message
    assert find_sets(tmp_path / "run" / "checkpoints") == []
