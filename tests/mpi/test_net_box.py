"""Two hosts in network namespaces: other host names, a link as slow as asked, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.mpi.launch import ROOT, Result, supervise

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
