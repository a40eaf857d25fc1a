"""A port that carries messages within one process, with MPI's rules: matched by tag and in order, early or late.

Bytes are copied when a send and a receive have met and somebody tests either, never earlier: memory that is
changed or freed too soon shows. A message longer than its receive is an error.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque


class LoopPort:
    """Both ends of a channel of one process. `log` lists the sends as ("isend", tag, nbytes)."""

    def __init__(self, log: list[object] | None = None) -> None:
        self.log: list[object] = [] if log is None else log
        self.sends: defaultdict[int, deque[LoopSend]] = defaultdict(deque)
        self.receives: defaultdict[int, deque[LoopReceive]] = defaultdict(deque)

    def isend(self, address: int, nbytes: int, rank: int, tag: int) -> LoopSend:
        self.log.append(("isend", tag, nbytes))
        send = LoopSend(self, address, nbytes, tag)
        self.sends[tag].append(send)
        return send

    def irecv(self, address: int, nbytes: int, rank: int, tag: int) -> LoopReceive:
        receive = LoopReceive(self, address, nbytes, tag)
        receive.Start()
        return receive

    def recv_init(self, address: int, nbytes: int, rank: int, tag: int) -> LoopReceive:
        return LoopReceive(self, address, nbytes, tag)

    def match(self, tag: int) -> None:
        sends, receives = self.sends[tag], self.receives[tag]
        while sends and receives:
            send, receive = sends.popleft(), receives.popleft()
            if send.nbytes > receive.nbytes:
                raise RuntimeError(f"message of {send.nbytes} bytes truncated to {receive.nbytes}")
            ctypes.memmove(receive.address, send.address, send.nbytes)
            send.done = True
            receive.active = False

    @property
    def posted(self) -> int:
        return sum(len(queue) for queue in self.receives.values())

    @property
    def unmatched(self) -> int:
        return sum(len(queue) for queue in self.sends.values())


class LoopSend:
    def __init__(self, port: LoopPort, address: int, nbytes: int, tag: int) -> None:
        self.port, self.address, self.nbytes, self.tag = port, address, nbytes, tag
        self.done = False

    def Test(self) -> bool:
        self.port.match(self.tag)
        return self.done


class LoopReceive:
    def __init__(self, port: LoopPort, address: int, nbytes: int, tag: int) -> None:
        self.port, self.address, self.nbytes, self.tag = port, address, nbytes, tag
        self.active = False
        self.freed = False

    def Start(self) -> None:
        assert not self.active
        self.active = True
        self.port.receives[self.tag].append(self)

    def Test(self) -> bool:
        self.port.match(self.tag)
        return not self.active

    def Cancel(self) -> None:
        if self.active:
            self.port.receives[self.tag].remove(self)
            self.active = False

    def Free(self) -> None:
        assert not self.active
        self.freed = True
