"""A run that is killed and resumed ends with the same bits as one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hpcpipe.checkpoint.digest import digest
from hpcpipe.checkpoint.sets import choose
from tests.mpi.launch import Result, descendants, kill_tree, mpirun, rank_environment, run

HPCPIPE = ["-m", "hpcpipe"]
RANKS = 3
TIME_LIMIT_S = 120.0

RUN = """
[run]
epochs = 5
log_every = 1
[model]
name = "mlp"
hidden = [32, 32, 32, 32]
activation = "tanh"
dropout = 0.1
batchnorm = true
[data]
name = "digits"
batch = 32
[pipeline]
policy = "{policy}"
[optimizer]
name = "{optimizer}"
lr = {lr}
[lr_schedule]
name = "cosine"
[eval]
every = 50
[checkpoint]
every = 8
"""
LR = {"sgd": 0.05, "adamw": 0.003}


def _run_file(folder: Path, policy: str, optimizer: str = "sgd") -> Path:
    path = folder / "run.toml"
    path.write_text(RUN.format(policy=policy, optimizer=optimizer, lr=LR[optimizer]))
    return path


def _train(run_file: Path, out: Path, *options: str, ranks: int = RANKS) -> Result:
    return run(HPCPIPE, ranks, "train", str(run_file), "--out", str(out), *options, timeout_s=TIME_LIMIT_S)


def _digest(out: Path) -> str:
    found, skipped = choose(out, deep=True)
    assert not skipped
    return digest(found).overall


def _losses(out: Path) -> list[tuple[int, float]]:
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]


def _kill_one_rank(run_file: Path, out: Path, after_s: float, chooser: random.Random) -> int | None:
    """Start a run, kill one of its ranks after a while; its exit code, None if it ended before."""
    command = mpirun(HPCPIPE, RANKS, "train", str(run_file), "--out", str(out), "--resume", "auto")
    process = subprocess.Popen(
        command,
        env=rank_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        time.sleep(after_s)
        ranks = [pid for pid in descendants(process.pid) if _is_rank(pid)]
        if ranks:
            os.kill(chooser.choice(ranks), signal.SIGKILL)
        rc = process.wait(timeout=TIME_LIMIT_S)
    finally:
        kill_tree(process.pid)
    return rc if ranks else None


def _is_rank(pid: int) -> bool:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"hpcpipe" in arguments and b"-n" not in arguments


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("policy", ["stash", "spectrain"])
def test_a_run_killed_at_any_moment_and_resumed_equals_the_unbroken_one_to_the_bit(
    tmp_path: Path, policy: str, optimizer: str
) -> None:
    run_file = _run_file(tmp_path, policy, optimizer)
    unbroken = _train(run_file, tmp_path / "unbroken")
    assert unbroken.rc == 0, str(unbroken)
    chooser = random.Random(f"{policy} {optimizer}")

    for _ in range(3):
        # Two thirds of a run: some kills come before the first checkpoint, most in the middle.
        rc = _kill_one_rank(run_file, tmp_path / "killed", chooser.uniform(0.3, 0.7) * unbroken.seconds, chooser)
        assert rc != 0
    last = _train(run_file, tmp_path / "killed", "--resume", "auto")

    assert last.rc == 0, str(last)
    assert _digest(tmp_path / "killed") == _digest(tmp_path / "unbroken")
    assert _losses(tmp_path / "killed") == _losses(tmp_path / "unbroken")


def test_the_same_stages_on_other_ranks_continue_to_the_bit(tmp_path: Path) -> None:
    run_file = _run_file(tmp_path, "spectrain")
    options = ["--set", "pipeline.stages=4", "--set", "run.epochs=1", "--set", "checkpoint.keep_last=99"]
    assert _train(run_file, tmp_path / "one", *options, ranks=1).rc == 0

    cut = tmp_path / "one" / "checkpoints" / "step-0000000016"
    resumed = _train(run_file, tmp_path / "four", *options, "--resume", str(cut), ranks=4)

    assert resumed.rc == 0, str(resumed)
    assert "continues it to the bit" in resumed.stderr
    assert _digest(tmp_path / "four") == _digest(tmp_path / "one")


def test_a_restart_on_another_number_of_stages_goes_on_from_the_weights_of_the_cut(tmp_path: Path) -> None:
    run_file = _run_file(tmp_path, "spectrain")
    assert _train(run_file, tmp_path / "run", "--set", "run.epochs=2").rc == 0

    resumed = _train(run_file, tmp_path / "run", "--resume", "auto", "--set", "run.epochs=4", ranks=2)

    assert resumed.rc == 0, str(resumed)
    assert "equivalent, not bit-identical" in resumed.stderr
    losses = dict(_losses(tmp_path / "run"))
    assert sorted(losses) == list(range(1, 181))
    # It goes on where it was: not at the loss of a fresh model, and downwards.
    assert losses[91] < 0.5 * losses[1]
    assert sum(losses[step] for step in range(160, 181)) < sum(losses[step] for step in range(91, 112))


@pytest.mark.parametrize("ask", ["one rank gets SIGUSR1", "a file named STOP appears"])
def test_a_request_to_stop_ends_all_ranks_with_75_and_a_checkpoint_that_continues_to_the_bit(
    tmp_path: Path, ask: str
) -> None:
    run_file = _run_file(tmp_path, "spectrain")
    # A total of its own, so that the learning rates do not depend on where the run ends.
    longer = ["--set", "run.epochs=40", "--set", "lr_schedule.total=1800"]
    out = tmp_path / "stopped"
    process = subprocess.Popen(
        mpirun(HPCPIPE, RANKS, "train", str(run_file), "--out", str(out), *longer),
        env=rank_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _wait_for_steps(out, 30)
        if ask.endswith("SIGUSR1"):
            os.kill(max(pid for pid in descendants(process.pid) if _is_rank(pid)), signal.SIGUSR1)
        else:
            (out / "STOP").touch()
        _, stderr = process.communicate(timeout=TIME_LIMIT_S)
    finally:
        kill_tree(process.pid)
    assert process.returncode == 75, stderr

    (out / "STOP").unlink(missing_ok=True)
    stopped_at = choose(out, deep=True)[0].step
    assert stopped_at < 40 * 45
    resumed = _train(run_file, out, "--resume", "auto", *longer, "--set", f"run.max_steps={stopped_at + 20}")
    assert "continues it to the bit" in resumed.stderr, str(resumed)
    whole = _train(
        run_file,
        tmp_path / "whole",
        *longer,
        "--set",
        f"run.max_steps={stopped_at + 20}",
        "--set",
        "checkpoint.every=0",
    )
    assert (resumed.rc, whole.rc) == (0, 0)
    assert _digest(out) == _digest(tmp_path / "whole")


def test_sigterm_to_one_rank_is_a_request_to_stop_as_well(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_file = _run_file(tmp_path, "stash")
    process = subprocess.Popen(
        mpirun(HPCPIPE, 2, "train", str(run_file), "--out", str(out), "--set", "run.epochs=400"),
        env=rank_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_for_steps(out, 10)
        os.kill(next(pid for pid in descendants(process.pid) if _is_rank(pid)), signal.SIGTERM)
        assert process.wait(timeout=TIME_LIMIT_S) == 75
    finally:
        kill_tree(process.pid)
    assert choose(out, deep=True)[0].step >= 10


def test_a_fresh_start_does_not_bury_earlier_checkpoints(tmp_path: Path) -> None:
    run_file = _run_file(tmp_path, "stash")
    assert _train(run_file, tmp_path / "run", "--set", "run.max_steps=5", ranks=1).rc == 0
    before = _digest(tmp_path / "run")

    again = _train(run_file, tmp_path / "run", "--set", "run.max_steps=5", ranks=1)

    assert again.rc == 2
    assert "--resume auto" in again.stderr
    assert _digest(tmp_path / "run") == before


def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    run_file = _run_file(tmp_path, "stash")
    assert _train(run_file, tmp_path / "run", "--set", "run.max_steps=5", ranks=1).rc == 0

    other = _train(run_file, tmp_path / "run", "--resume", "auto", "--set", "model.hidden=[16,16]", ranks=1)

    assert other.rc == 2
    lines = other.stderr.splitlines()
    assert len(lines) == 1
    assert "another model" in lines[0]


def _wait_for_steps(out: Path, steps: int) -> None:
    deadline = time.monotonic() + TIME_LIMIT_S
    while time.monotonic() < deadline:
        try:
            if len((out / "metrics.jsonl").read_text().splitlines()) >= steps:
                return
        except FileNotFoundError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"{out} did not come to {steps} steps")


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

    _refused(_train(_run_file(tmp_path, "stash"), tmp_path / "x", *settings, ranks=2), word)


@pytest.mark.parametrize(("text", "word"), [(None, "data.path"), ("too short", "sequence")])
def test_a_missing_or_short_text_is_one_line_and_exit_code_2(tmp_path: Path, text: str | None, word: str) -> None:
    if text is not None:
        (tmp_path / "corpus.txt").write_text(text)
    run_file = tmp_path / "run.toml"
    run_file.write_text(TEXT.format(path=tmp_path / "corpus.txt"))

    _refused(_train(run_file, tmp_path / "x", ranks=2), word)


def _refused(result: Result, word: str) -> None:
    lines = [line for line in result.stderr.splitlines() if line.startswith("hpcpipe:")]
    assert result.rc == 2, str(result)
    assert len(lines) == 1, str(result)
    assert "run.toml" in lines[0] or "--set" in lines[0], str(result)
    assert word in lines[0], str(result)
