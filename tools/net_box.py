#!/usr/bin/env python3
"""Hosts with a slow network between them, on one Linux machine: network namespaces on a bridge, each link shaped.

    tools/net_box.py run --hosts 2 --rate 1gbit -- python -m hpcpipe train RUN.toml --out OUT

starts one rank on each host (`--ppn` for more) under MPICH's mpirun and ends with its exit code. Namespaces,
bridge and links are made for the run and removed behind it, whatever happened. Needs root, `ip` and `tc` (Debian:
iproute2), `unshare` (util-linux) and MPICH. All hosts share this machine's cores, files and memory; only the
network is theirs alone. Rates are shaped by the kernel's token bucket (tbf), each direction of a link for itself.

    tools/net_box.py run --hosts 2 --cut-off 1 --after 20 -- COMMAND
    tools/net_box.py cut 1

take a host off the network as a broken switch does, the second one in a box that stands: its packets vanish, its
processes go on. `mend 1` joins it again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

TOOLS = ("ip", "tc", "unshare")
ENTER = """#!/bin/bash
# enter HOST COMMAND...: run a command in that host's namespace, under its name.
host="$1"; shift
exec ip netns exec "@PREFIX@$host" unshare --uts bash -c 'hostname "$0"; exec "$@"' "host$host" "$@"
"""
AGENT = """#!/bin/bash
# hydra calls this as it would call ssh: [-options] ADDRESS COMMAND...; the address says in which namespace to run.
while [ "${1#-}" != "$1" ]; do shift; done
number="${1##*.}"; shift
exec @ENTER@ "$((number - 1))" bash -c "$*"
"""


@dataclass(frozen=True)
class Box:
    """`hosts` namespaces `prefix`0, `prefix`1, … with addresses 10.77.NET.1, …"""

    prefix: str
    net: int
    hosts: int
    rate: str

    def address(self, host: int) -> str:
        return f"10.77.{self.net}.{host + 1}"

    def namespace(self, host: int) -> str:
        return f"{self.prefix}{host}"

    def outside(self, host: int) -> str:
        return f"{self.prefix}o{host}"

    @property
    def bridge(self) -> str:
        return f"{self.prefix}br"


def command(*words: str) -> None:
    """Run one command; its own words are the error. Raises click.ClickException."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")


def quietly(*words: str) -> None:
    """Run one command that may have nothing to do."""
    subprocess.run(words, capture_output=True, check=False)


@contextmanager
def box(hosts: int, rate: str) -> Iterator[Box]:
    """Hosts on a bridge for as long as the block runs. Raises click.ClickException where they cannot be made."""
    for tool in TOOLS:
        if shutil.which(tool) is None:
            raise click.ClickException(f"{tool} is missing: install iproute2 and util-linux")
    if os.geteuid():
        raise click.ClickException("network namespaces need root: run this as root or in a container")
    # Names are at most 15 bytes long, and two boxes may stand at once.
    made = Box(prefix=f"hp{os.getpid() % 10**7}n", net=os.getpid() % 250 + 1, hosts=hosts, rate=rate)
    with ExitStack() as undo:
        undo.callback(quietly, "ip", "link", "del", made.bridge)
        command("ip", "link", "add", made.bridge, "type", "bridge")
        command("ip", "link", "set", made.bridge, "up")
        for host in range(hosts):
            undo.callback(quietly, "ip", "netns", "del", made.namespace(host))
            # The namespace goes when its last process does; the link must not wait for that.
            undo.callback(quietly, "ip", "link", "del", made.outside(host))
            connect(made, host)
        yield made


def connect(made: Box, host: int) -> None:
    """One namespace with a link to the bridge, shaped at both ends."""
    inside, outside, namespace = f"{made.prefix}i{host}", made.outside(host), made.namespace(host)
    command("ip", "netns", "add", namespace)
    command("ip", "link", "add", outside, "type", "veth", "peer", "name", inside)
    command("ip", "link", "set", inside, "netns", namespace)
    command("ip", "link", "set", outside, "master", made.bridge, "up")
    here = ("ip", "-n", namespace)
    command(*here, "addr", "add", f"{made.address(host)}/24", "dev", inside)
    command(*here, "link", "set", inside, "up")
    command(*here, "link", "set", "lo", "up")
    shape = ("root", "tbf", "rate", made.rate, "burst", "256k", "latency", "50ms")
    command("tc", "qdisc", "add", "dev", outside, *shape)
    command("tc", "-n", namespace, "qdisc", "add", "dev", inside, *shape)


def cut(link: str) -> None:
    """Let everything vanish that a host sends and is sent; `link` is the outer end of its link."""
    command("ip", "link", "set", link, "down")


@contextmanager
def cutting(link: str | None, due: Callable[[], bool]) -> Iterator[None]:
    """Cut `link` when `due` says so, if it does before the end of the block; None cuts nothing."""
    if link is None:
        yield
        return
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            if due():
                cut(link)
                click.echo(f"net_box: {link} is cut at {time.time():.1f}", err=True)
                return

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()


def link_of(host: int) -> str:
    """The outer end of the link of a host in the box that stands. Raises click.ClickException unless it is one."""
    shown = subprocess.run(["ip", "-j", "link", "show"], capture_output=True, text=True, check=False)
    names = [entry["ifname"] for entry in json.loads(shown.stdout or "[]")]
    found = [name for name in names if re.fullmatch(rf"hp\d+no{host}", name)]
    if len(found) != 1:
        raise click.ClickException(f"{len(found)} boxes with a host {host} stand, this needs one: run it as root")
    return found[0]


def mpirun_of(python: str) -> str:
    """MPICH's launcher beside this Python or on the PATH. Raises click.ClickException."""
    beside = Path(python).parent / "mpiexec.hydra"
    found = str(beside) if beside.exists() else shutil.which("mpiexec.hydra")
    if found is None:
        raise click.ClickException("mpiexec.hydra is missing: pip install mpich, or load the site's MPICH")
    return found


def launch(made: Box, ppn: int, words: Sequence[str], folder: Path) -> int:
    """Run `words` on `ppn` ranks of each host; the launcher's exit code."""
    enter, agent = folder / "enter", folder / "agent"
    enter.write_text(ENTER.replace("@PREFIX@", made.prefix))
    agent.write_text(AGENT.replace("@ENTER@", str(enter)))
    for script in (enter, agent):
        script.chmod(0o755)
    # The launcher must have an address that the hosts reach it at, so it runs on the first of them.
    line = [str(enter), "0", mpirun_of(sys.executable)]
    line += ["-launcher", "ssh", "-launcher-exec", str(agent)]
    line += ["-hosts", ",".join(made.address(host) for host in range(made.hosts))]
    line += ["-ppn", str(ppn), "-n", str(ppn * made.hosts)]
    environment = {**os.environ, "FI_PROVIDER": "tcp", "MPIR_CVAR_CH4_NETMOD": "ofi"}
    return subprocess.run([*line, *words], env=environment, check=False).returncode


@click.group()
def main() -> None:
    """Hosts with a slow network between them, on this machine."""


@main.command("run", context_settings={"ignore_unknown_options": True})
@click.option("--hosts", default=2, show_default=True, type=click.IntRange(1, 200), help="Number of hosts.")
@click.option("--ppn", default=1, show_default=True, type=click.IntRange(1), help="Ranks on each host.")
@click.option("--rate", default="1gbit", show_default=True, help="Rate of each host's link, as tc writes it.")
@click.option("--cut-off", metavar="HOST", type=click.IntRange(0), help="Cut this host off in mid-run.")
@click.option("--after", metavar="SECONDS", type=click.FloatRange(0), help="When to cut: so long after the start.")
@click.option("--when", metavar="FILE", type=click.Path(), help="When to cut: once this file is there, not empty.")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED)
def run_command(
    hosts: int,
    ppn: int,
    rate: str,
    cut_off: int | None,
    after: float | None,
    when: str | None,
    words: tuple[str, ...],
) -> None:
    """Run a command under mpirun, its ranks spread over the hosts."""
    if cut_off is None and (after is not None or when is not None):
        raise click.UsageError("--after and --when say when to cut a host off: say which with --cut-off HOST")
    if cut_off is not None and ((after is None) == (when is None) or cut_off >= hosts):
        raise click.UsageError(f"--cut-off needs a host from 0 to {hosts - 1}, and either --after or --when")
    began = time.monotonic()

    def due() -> bool:
        if after is not None:
            return time.monotonic() - began >= after
        file = Path(str(when))
        return file.exists() and file.stat().st_size > 0

    with (
        tempfile.TemporaryDirectory(prefix="net_box-") as folder,
        box(hosts, rate) as made,
        cutting(None if cut_off is None else made.outside(cut_off), due),
    ):
        code = launch(made, ppn, words, Path(folder))
    sys.exit(code)


@main.command("cut")
@click.argument("host", type=click.IntRange(0))
def cut_command(host: int) -> None:
    """Cut a host of the box that stands off the network."""
    cut(link_of(host))


@main.command("mend")
@click.argument("host", type=click.IntRange(0))
def mend_command(host: int) -> None:
    """Join a host that was cut off again."""
    command("ip", "link", "set", link_of(host), "up")


if __name__ == "__main__":
    main()
