"""A run that is killed and resumed ends with the same bits as one that was not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hpcpipe.checkpoint.sets import choose
from tests.crash.killing import (
    TIME_LIMIT_S,
    digest_of,
    losses_of,
    ranks_of,
    run_file_of,
    running,
    train,
    wait_for_steps,
)
from tests.mpi.launch import Result


def test_the_same_stages_on_other_ranks_continue_to_the_bit(tmp_path: Path) -> None:
    run_file = run_file_of(tmp_path, "spectrain")
    options = ["--set", "pipeline.stages=4", "--set", "run.epochs=1", "--set", "checkpoint.keep_last=99"]
    assert train(run_file, tmp_path / "one", *options, ranks=1).rc == 0

    cut = tmp_path / "one" / "checkpoints" / "step-0000000016"
    resumed = train(run_file, tmp_path / "four", *options, "--resume", str(cut), ranks=4)

    assert resumed.rc == 0, str(resumed)
    assert "continues it to the bit" in resumed.stderr
    assert digest_of(tmp_path / "four") == digest_of(tmp_path / "one")


def test_a_restart_on_another_number_of_stages_goes_on_from_the_weights_of_the_cut(tmp_path: Path) -> None:
    run_file = run_file_of(tmp_path, "spectrain")
    assert train(run_file, tmp_path / "run", "--set", "run.epochs=2").rc == 0

    resumed = train(run_file, tmp_path / "run", "--resume", "auto", "--set", "run.epochs=4", ranks=2)

    assert resumed.rc == 0, str(resumed)
    assert "equivalent, not bit-identical" in resumed.stderr
    losses = dict(losses_of(tmp_path / "run"))
    assert sorted(losses) == list(range(1, 181))
    # It goes on where it was: not at the loss of a fresh model, and downwards.
    assert losses[91] < 0.5 * losses[1]
    assert sum(losses[step] for step in range(160, 181)) < sum(losses[step] for step in range(91, 112))


@pytest.mark.parametrize("ask", ["one rank gets SIGUSR1", "a file named STOP appears"])
def test_a_request_to_stop_ends_all_ranks_with_75_and_a_checkpoint_that_continues_to_the_bit(
    tmp_path: Path, ask: str
) -> None:
    run_file = run_file_of(tmp_path, "spectrain")
    # A total of its own, so that the learning rates do not depend on where the run ends.
    longer = ["--set", "run.epochs=40", "--set", "lr_schedule.total=1800"]
    out = tmp_path / "stopped"
    with running(run_file, out, *longer) as process:
        wait_for_steps(out, 30)
        if ask.endswith("SIGUSR1"):
            os.kill(ranks_of(process)[-1], signal.SIGUSR1)
        else:
            (out / "STOP").touch()
        _, stderr = process.communicate(timeout=TIME_LIMIT_S)
    assert process.returncode == 75, stderr

    (out / "STOP").unlink(missing_ok=True)
    stopped_at = choose(out, deep=True)[0].step
    assert stopped_at < 40 * 45
    resumed = train(run_file, out, "--resume", "auto", *longer, "--set", f"run.max_steps={stopped_at + 20}")
    assert "continues it to the bit" in resumed.stderr, str(resumed)
    whole = train(
        run_file,
        tmp_path / "whole",
        *longer,
        "--set",
        f"run.max_steps={stopped_at + 20}",
        "--set",
        "checkpoint.every=0",
    )
    assert (resumed.rc, whole.rc) == (0, 0)
    assert digest_of(out) == digest_of(tmp_path / "whole")


def test_sigterm_to_one_rank_is_a_request_to_stop_as_well(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_file = run_file_of(tmp_path, "stash")
    with running(run_file, out, "--set", "run.epochs=400", ranks=2) as process:
        wait_for_steps(out, 10)
        os.kill(ranks_of(process)[0], signal.SIGTERM)
        process.communicate(timeout=TIME_LIMIT_S)
    assert process.returncode == 75
    assert choose(out, deep=True)[0].step >= 10


def test_a_fresh_start_does_not_bury_earlier_checkpoints(tmp_path: Path) -> None:
    run_file = run_file_of(tmp_path, "stash")
    assert train(run_file, tmp_path / "run", "--set", "run.max_steps=5", ranks=1).rc == 0
    before = digest_of(tmp_path / "run")

    again = train(run_file, tmp_path / "run", "--set", "run.max_steps=5", ranks=1)

    assert again.rc == 2
    assert "--resume auto" in again.stderr
    assert digest_of(tmp_path / "run") == before


def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    run_file = run_file_of(tmp_path, "stash")
    assert train(run_file, tmp_path / "run", "--set", "run.max_steps=5", ranks=1).rc == 0

    other = train(run_file, tmp_path / "run", "--resume", "auto", "--set", "model.hidden=[16,16]", ranks=1)

    assert other.rc == 2
    lines = other.stderr.splitlines()
    assert len(lines) == 1
    assert "another model" in lines[0]


TEXT = """
[model]
name = "gpt"
width = 16
depth = 1
heads = 2
[data]
name = "text"
path = "{path}"
sequence = 64
[optimizer]
name = "sgd"
lr = 0.1
"""


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["optimizer.momentun=0.9"], 'did you mean "momentum"'),
        (["data.batch=100000", "data.drop_last=true"], "data.batch"),
        (["run.max_steps=0"], "run.max_steps"),
        (["pipeline.stages=99"], "99"),
        (["model.name=mlpp"], 'did you mean "mlp"'),
    ],
)
def test_a_mistake_in_the_run_file_is_one_line_and_exit_code_2(
    tmp_path: Path, overrides: list[str], word: str
) -> None:
    settings = [argument for override in overrides for argument in ("--set", override)]

    _refused(train(run_file_of(tmp_path, "stash"), tmp_path / "x", *settings, ranks=2), word)


@pytest.mark.parametrize(("text", "word"), [(None, "data.path"), ("too short", "sequence")])
def test_a_missing_or_short_text_is_one_line_and_exit_code_2(tmp_path: Path, text: str | None, word: str) -> None:
    if text is not None:
        (tmp_path / "corpus.txt").write_text(text)
    run_file = tmp_path / "run.toml"
    run_file.write_text(TEXT.format(path=tmp_path / "corpus.txt"))

    _refused(train(run_file, tmp_path / "x", ranks=2), word)


def _refused(result: Result, word: str) -> None:
    lines = [line for line in result.stderr.splitlines() if line.startswith("hpcpipe:")]
    assert result.rc == 2, str(result)
    assert len(lines) == 1, str(result)
    assert "run.toml" in lines[0] or "--set" in lines[0], str(result)
    assert word in lines[0], str(result)
