"""A rank that forks helpers, and signals that reach the whole group: `python -m tests.unit.forking HOW`.

Started in a session of its own, so that the group is this process and what it forks. Prints what became of them.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hpcpipe.engine.forked
from hpcpipe.engine.signals import DEFAULT_SIGNALS, StopSignals

TOGETHER_S = 0.3
PAUSE_S = 0.1


def rank() -> StopSignals:
    """This process as a rank whose stop signals only ask for a stop."""
    hpcpipe.engine.forked.SAME_WITHIN_S = TOGETHER_S
    signals = StopSignals()
    signals.end_at_once = lambda: os._exit(99)
    signals.listen(DEFAULT_SIGNALS)
    return signals


def signal_everybody() -> None:
    """Both stop signals to the group, SIGTERM twice, as two launchers deliver it."""
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        os.killpg(0, number)
        time.sleep(0.02)


def ended(pid: int, within_s: float = 5.0) -> int | None:
    """How a child has ended, as a shell would say it; None if it goes on."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def dispositions(pid: int) -> dict[str, bool]:
    """Whether a process blocks, ignores or catches a stop signal."""
    lines = dict(
        line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    bits = sum(1 << (signal.Signals[name] - 1) for name in DEFAULT_SIGNALS)
    return {name: bool(int(lines[name], 16) & bits) for name in ("SigBlk", "SigIgn", "SigCgt")}


def bare() -> dict[str, Any]:
    """A helper from a bare fork, and a grandchild: through signals to all, then ended by its parent alone."""
    rank()
    helper = os.fork()
    if helper == 0:
        grandchild = os.fork()
        if grandchild == 0:
            time.sleep(60)
        time.sleep(2 * PAUSE_S + TOGETHER_S)
        alive = ended(grandchild, 0.0) is None
        os.kill(grandchild, signal.SIGKILL)
        os.write(1, b"grandchild lives\n" if alive else b"grandchild is gone\n")
        time.sleep(60)
    time.sleep(PAUSE_S)
    signal_everybody()
    after_all = ended(helper, 2 * TOGETHER_S)
    os.kill(helper, signal.SIGUSR1)
    began = time.monotonic()
    os.kill(helper, signal.SIGTERM)
    return {"after all": after_all, "after its own": ended(helper), "within": time.monotonic() - began < 2.0}


def busy() -> dict[str, Any]:
    """The rank and one of two helpers are in C code when SIGTERM comes, and no handler runs."""
    rank()
    pid = os.getpid()
    idle, computing = os.fork(), 0
    if idle == 0:
        time.sleep(60)
    computing = os.fork()
    if computing == 0:
        stay_in_c(PAUSE_S + 3 * TOGETHER_S)
        time.sleep(60)
    if os.fork() == 0:
        time.sleep(PAUSE_S)
        for process in (idle, computing, pid):
            os.kill(process, signal.SIGTERM)
        os._exit(0)
    stay_in_c(PAUSE_S + 2 * TOGETHER_S)
    time.sleep(3 * TOGETHER_S)
    gone = [ended(helper, 0.0) for helper in (idle, computing)]
    for helper in (idle, computing):
        os.kill(helper, signal.SIGKILL)
    return {"gone": gone}


def stay_in_c(seconds: float) -> None:
    """One call of C code that lets other threads run, and that no signal ends."""
    mutex, until = ctypes.create_string_buffer(64), time.time() + seconds
    timeout = (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9))
    library = ctypes.CDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_timedlock(mutex, timeout)


def pool() -> dict[str, Any]:
    """A pool of multiprocessing: it works on, and ends when it is told to."""
    rank()
    workers = multiprocessing.get_context("fork").Pool(2)
    before = workers.map(abs, range(-4, 0))
    signal_everybody()
    time.sleep(2 * TOGETHER_S)
    after = workers.map(abs, range(-4, 0))
    began = time.monotonic()
    workers.terminate()
    workers.join()
    return {"before": before, "after": after, "ended": time.monotonic() - began < 5.0}


def leaving() -> dict[str, Any]:
    """A pool that is terminated right behind a SIGTERM to the group, by a rank that is about to leave."""
    signals = rank()
    workers = multiprocessing.get_context("fork").Pool(2)
    workers.map(abs, range(4))
    os.killpg(0, signal.SIGTERM)
    time.sleep(PAUSE_S)
    signals.release()
    began = time.monotonic()
    workers.terminate()
    workers.join()
    return {"ended": time.monotonic() - began < 5.0}


def loader() -> dict[str, Any]:
    """torch's DataLoader with forked workers: all rows come, and its end is no crash."""
    from torch.utils.data import DataLoader

    rank()
    workers = DataLoader(
        range(12),  # type: ignore[arg-type]
        batch_size=2,
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=True,
    )
    rows = []
    for index, batch in enumerate(workers):
        rows += batch.tolist()
        if index == 1:
            signal_everybody()
            time.sleep(2 * TOGETHER_S)
    time.sleep(TOGETHER_S)
    began = time.monotonic()
    (one, _) = multiprocessing.active_children()
    one.terminate()
    one.join(5.0)
    code = one.exitcode
    del workers
    return {"rows": rows, "code": code, "ended": time.monotonic() - began < 10.0}


def program() -> dict[str, Any]:
    """Programs started by the rank and by a helper: as if nothing had been set."""
    rank()
    command = ["sleep", "30"]
    of_rank = subprocess.Popen(command)
    reader, writer = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.write(writer, str(subprocess.Popen(command, preexec_fn=lambda: None).pid).encode())
        time.sleep(60)
    of_helper = int(os.read(reader, 20))
    time.sleep(PAUSE_S)
    found = [dispositions(pid) for pid in (of_rank.pid, of_helper)]
    for pid in (of_rank.pid, of_helper, helper):
        os.kill(pid, signal.SIGKILL)
    of_rank.wait()
    return {"programs": found}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()), flush=True)
