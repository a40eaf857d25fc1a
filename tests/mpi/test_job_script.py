"""The script of `hpcpipe job`, unedited, under a real mpirun: asked to stop, it goes on and completes the run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.mpi.launch import kill_tree, rank_environment, run_alone

RUN = """
[run]
epochs = 12
log_every = 1
[model]
name = "mlp"
hidden = [32]
[data]
name = "digits"
batch = 32
[pipeline]
policy = "stash"
[optimizer]
name = "sgd"
lr = 0.05
"""
STEPS = 12 * 45
LIMIT_S = 90.0


def test_a_script_without_a_scheduler_goes_on_after_a_stop_until_the_run_is_complete(tmp_path: Path) -> None:
    (tmp_path / "net.toml").write_text(RUN)
    arguments = ("job", "net.toml", "--scheduler", "none", "--ranks-per-node", "2", "-o", "net.sh")
    written = run_alone(["-m", "hpcpipe"], *arguments, cwd=tmp_path)
    assert written.rc == 0, str(written)

    metrics, log = tmp_path / "runs" / "net" / "metrics.jsonl", tmp_path / "log"
    with log.open("w") as stream:
        script = subprocess.Popen(
            ["./net.sh"], cwd=tmp_path, env=rank_environment(), stdin=subprocess.DEVNULL, stderr=stream
        )
    try:
        until = time.monotonic() + LIMIT_S
        while not (metrics.exists() and metrics.stat().st_size):
            assert script.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.02)
        script.send_signal(signal.SIGUSR1)
        code = script.wait(timeout=LIMIT_S)
    finally:
        kill_tree(script.pid)

    said = log.read_text()
    assert code == 0, said
    assert "net: goes on from its checkpoint" in said
    assert "this run continues it to the bit" in said
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert list(dict.fromkeys(steps)) == list(range(1, STEPS + 1))
    assert sys.executable.rpartition("/")[0] in (tmp_path / "net.sh").read_text()
