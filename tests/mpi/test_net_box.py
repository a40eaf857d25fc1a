"""Two hosts in network namespaces: other host names, a link as slow as asked, and nothing left behind."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mpi.launch import ROOT, Result, supervise
from tools.torture_parts.runs import write_run_file

pytestmark = pytest.mark.alone

LINK_BYTES = 4 << 20
PROGRAM = f"""
import time
import numpy
from hpcpipe.transport.world import World

world = World.connect()
data = numpy.zeros({LINK_BYTES}, numpy.uint8)
world.barrier("both ranks to be there")
began = time.perf_counter()
if world.rank == 0:
    world.communicator.Send(data, 1)
else:
    world.communicator.Recv(data, 0)
    megabits = {8 * LINK_BYTES} / (time.perf_counter() - began) / 1e6
    print("hosts", *world.hosts, "megabits per second", round(megabits))
world.disconnect()
"""


def net_box(*words: str) -> Result:
    return supervise([sys.executable, str(ROOT / "tools" / "net_box.py"), "run", *words], timeout_s=90)


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_ranks_on_two_hosts_talk_over_the_link_between_them() -> None:
    result = net_box("--rate", "200mbit", "--", sys.executable, "-c", PROGRAM)

    assert result.rc == 0, result
    words = result.stdout.split()
    assert words[:3] == ["hosts", "host0", "host1"]
    # The shaper lets a burst pass, so the rate is an upper bound with some allowance.
    assert int(words[-1]) < 250


@pytest.mark.parametrize("code", [0, 3])
def test_a_box_ends_with_the_exit_code_of_its_ranks_and_leaves_no_host_behind(code: int) -> None:
    before = namespaces()

    result = net_box("--", sys.executable, "-c", f"raise SystemExit({code})")

    assert result.rc == code, result
    assert namespaces() == before


ABORT_S = 6.0


def running(word: str) -> list[str]:
    """Command lines of the processes that have `word` in theirs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line:
            found.append(line)
    return found


def test_training_ends_by_itself_in_time_when_a_host_is_cut_off(tmp_path: Path) -> None:
    file = write_run_file(tmp_path, policy="stash", optimizer="sgd", epochs=10**4, every=0)
    out = tmp_path / "out"
    box = ["--ppn", "2", "--cut-off", "1", "--when", str(out / "metrics.jsonl"), "--"]
    limits = [f"--set=run.stall_abort_s={ABORT_S}", f"--set=run.stall_warning_s={ABORT_S / 2}"]

    result = net_box(*box, sys.executable, "-m", "hpcpipe", "train", str(file), "--out", str(out), *limits)

    ended = time.time()
    assert result.rc == 1, result
    # The file is written when the first minibatches are done: the cut came at most a moment later.
    (cut_at,) = (float(at) for at in re.findall(r"net_box: .* is cut at (\S+)", result.stderr))
    assert ended - cut_at < ABORT_S + 5.0, result
    last = next(line for line in reversed(result.stderr.splitlines()) if line.startswith("[rank "))
    blamed = r"ranks? [23].* on host host1 (does|do) not answer for \d+ s: frozen, or (its|their) host is cut off$"
    assert re.search(blamed, last), result
    assert re.match(r"\[rank [01]\] .*TransportError: rank [01] \(stage [01]\) waited for ", last)
    # On the other side the ranks end by themselves, too.
    while running(str(file)):
        assert time.time() - cut_at < 2 * (ABORT_S + 5.0), running(str(file))
        time.sleep(0.1)
