"""What a process can say of the host it runs on: which host that is, and at which addresses others reach it.

Two hosts may have the same name, and two containers of one host may not see each other's network: so ranks count
as neighbours only where kernel and network are the same, too.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_SIOCGIFADDR = 0x8915
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
MOST_ADDRESSES = 8


def host_key(name: str) -> str:
    """The same for two processes exactly when 127.0.0.1 is the same place for them; `name` is the host's."""
    parts = [name]
    try:
        parts.append(_BOOT_ID.read_text().strip())
        parts.append(str(os.stat(_NETWORK).st_ino))
    except OSError:
        # No Linux, or no /proc: the name must do.
        pass
    return "/".join(parts)


def addresses() -> list[str]:
    """IPv4 addresses of this host by which others may reach it, without loopback; may be empty."""
    found: dict[str, None] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, interface in socket.if_nameindex():
            address = _address_of(asking, interface)
            if address is not None:
                found[address] = None
    if not found:
        try:
            entries = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        except OSError:
            entries = []
        found = dict.fromkeys(str(entry[4][0]) for entry in entries)
    return [address for address in found if not address.startswith("127.")][:MOST_ADDRESSES]


def _address_of(asking: socket.socket, interface: str) -> str | None:
    if fcntl is None:
        return None
    request = struct.pack("256s", interface.encode()[:15])
    try:
        answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return None  # the interface has no IPv4 address
    return socket.inet_ntoa(answer[20:24])
