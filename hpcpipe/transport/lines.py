"""The sockets between the ranks of a job: where each can be asked, and whether its kernel says that it is gone.

One socket hears the questions of others; for its own questions a rank has one connected socket for each rank it
asks, because the kernel reports a closed port at the other end to connected sockets only. Packets without the
token of the job are not heard. Nothing here blocks, except `listen` and `greet`.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import select
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpcpipe.transport.own_host import addresses, host_key
from hpcpipe.transport.standing import (
    LONGEST_PACKET,
    TOKEN_BYTES,
    Answer,
    Notice,
    Packet,
    Question,
    decode,
    encode,
)

OPEN_SOCKETS = 64
GREETED_HOSTS = 64
"""Other hosts that are tried at the start; of the ranks on any others nobody is told that they are gone."""
GREET_AGAIN_S = 0.05

Address = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How one rank can be asked. host: see `own_host.host_key`; name: the host's; port: of its socket."""

    host: str
    name: str
    addresses: tuple[str, ...]
    port: int
    token: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Entry:
        return cls(**{**fields, "addresses": tuple(fields["addresses"])})


class Lines:
    """The sockets of one rank. It hears nobody before `begin`.

    rank: whose sockets these are.
    host: name of its host.
    key: replaces the key of the host, in tests.

    entry: what the others have to know.
    hosts: host name of every rank.

    Raises OSError where no socket can be had.
    """

    def __init__(self, rank: int, host: str, *, key: str | None = None) -> None:
        self.rank = rank
        self.hosts: list[str] = [host]
        self._own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._own.bind(("", 0))
        self.entry = Entry(
            host=host_key(host) if key is None else key,
            name=host,
            addresses=tuple(addresses()),
            port=self._own.getsockname()[1],
            token=secrets.token_bytes(TOKEN_BYTES).hex(),
        )
        self._token: bytes | None = None
        self._entries: Sequence[Entry] = [self.entry]
        self._routes: dict[str, str] = {self.entry.host: "127.0.0.1"}
        self._asking: dict[int, socket.socket] = {}
        self._serials = itertools.count(1)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._entries)

    def begin(self, entries: Sequence[Entry]) -> None:
        """Learn where everybody is: `entries` of all ranks, by rank. The token is that of rank 0."""
        self._entries = list(entries)
        self.hosts = [entry.name for entry in entries]
        self._token = bytes.fromhex(entries[0].token)

    def greet(self, seconds: float) -> list[str]:
        """Find the way to every other host, which has begun, too; the names of those that do not answer."""
        ranks_of: dict[str, list[int]] = {}
        for rank, entry in enumerate(self._entries):
            if entry.host != self.entry.host:
                ranks_of.setdefault(entry.host, []).append(rank)
        # The ranks of one host spread over those of the other.
        one_of = {host: ranks[self.rank % len(ranks)] for host, ranks in ranks_of.items()}
        missing = dict(itertools.islice(one_of.items(), GREETED_HOSTS))
        until = time.monotonic() + seconds
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.bind(("", 0))
            while missing and time.monotonic() < until:
                for rank in missing.values():
                    entry = self._entries[rank]
                    for address in entry.addresses:
                        self._send(asking, Question(rank=self.rank, serial=self.serial()), (address, entry.port))
                for address, answer in self._answers(asking, GREET_AGAIN_S):
                    host = self._entries[answer.rank].host
                    if missing.get(host) == answer.rank:
                        self._routes[host] = address
                        del missing[host]
        return [self._entries[rank].name for rank in missing.values()]

    def serial(self) -> int:
        """A number that no question has had."""
        return next(self._serials)

    def listen(self) -> tuple[Packet | None, Address] | None:
        """Wait for a packet at this rank's socket; None for the packet where it is noise, None when closed."""
        try:
            data, sender = self._own.recvfrom(LONGEST_PACKET + 1)
        except OSError:
            return None
        if not data and self._own.fileno() < 0:
            return None
        return self._decoded(data), sender

    def answer(self, packet: Answer, to: Address) -> None:
        """Answer a question."""
        self._send(self._own, packet, to)

    def tell_all(self, notice: Notice) -> None:
        """Tell every other rank."""
        for rank in range(self.size):
            address = self._address(rank)
            if rank != self.rank and address is not None:
                self._send(self._own, notice, address)

    def ask(self, rank: int) -> bool:
        """Send a question to a rank; False when its host says that its process has ended."""
        line = self._line(rank)
        if line is None or self._token is None:
            return True
        try:
            line.send(encode(self._token, Question(rank=self.rank, serial=self.serial())))
        except ConnectionRefusedError:
            return not self._believes(rank)
        except OSError:
            # A network that takes no packet is a rank that does not answer.
            return True
        return True

    def heard_from(self, rank: int) -> tuple[list[Answer], bool]:
        """The answers of a rank that have come since last time; False when its host says that it has ended."""
        line = self._asking.get(rank)
        found: list[Answer] = []
        while line is not None:
            try:
                packet = self._decoded(line.recv(LONGEST_PACKET + 1))
            except ConnectionRefusedError:
                return found, not self._believes(rank)
            except OSError:
                break
            if isinstance(packet, Answer) and packet.rank == rank:
                found.append(packet)
        return found, True

    def close(self) -> None:
        """Hear nothing more."""
        # A thread that sits in recvfrom is not woken by closing its socket.
        with contextlib.suppress(OSError):
            self._own.shutdown(socket.SHUT_RDWR)
        self.forget()

    def forget(self) -> None:
        """Close the sockets of this process only: another one that has them keeps them open."""
        for one in (self._own, *self._asking.values()):
            one.close()
        self._asking.clear()

    def _decoded(self, data: bytes) -> Packet | None:
        return None if self._token is None else decode(self._token, data, size=self.size)

    def _address(self, rank: int) -> Address | None:
        entry = self._entries[rank]
        route = self._routes.get(entry.host) or next(iter(entry.addresses), None)
        return None if route is None else (route, entry.port)

    def _send(self, through: socket.socket, packet: Packet, to: Address) -> None:
        # Whoever cannot be reached does not answer: that says all.
        if self._token is not None:
            with contextlib.suppress(OSError):
                through.sendto(encode(self._token, packet), to)

    def _answers(self, asking: socket.socket, wait_s: float) -> Iterator[tuple[str, Answer]]:
        """Answers that come within `wait_s`, with the addresses they come from."""
        until = time.monotonic() + wait_s
        while (left := until - time.monotonic()) > 0 and select.select([asking], [], [], left)[0]:
            with contextlib.suppress(OSError):
                data, (address, _) = asking.recvfrom(LONGEST_PACKET + 1)
                packet = self._decoded(data)
                if isinstance(packet, Answer):
                    yield address, packet

    def _line(self, rank: int) -> socket.socket | None:
        """The socket for questions to a rank, None where there is no way to it."""
        line = self._asking.pop(rank, None)
        if line is None:
            address = self._address(rank)
            if address is None:
                return None
            try:
                line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            except OSError:
                return None
            line.setblocking(False)
            try:
                line.connect(address)
            except OSError:
                line.close()
                return None
        self._asking[rank] = line
        if len(self._asking) > OPEN_SOCKETS:
            self._asking.pop(next(iter(self._asking))).close()
        return line

    def _believes(self, rank: int) -> bool:
        """Whether a refusal says that the process has ended: a firewall refuses, too, but lets nothing through."""
        return self._entries[rank].host in self._routes
