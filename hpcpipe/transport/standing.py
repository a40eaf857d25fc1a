"""What the ranks of a job tell each other outside MPI: who does what for how long, in small packets.

Every packet begins with the job's token; whatever lacks it, or says what nobody would, is taken for noise. Pure
functions of bytes: sockets and clocks belong to `roll_call`.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TOKEN_BYTES = 16
LONGEST_PACKET = 1024
LONGEST_TEXT = 200
LONGEST_S = 1e9
MOST_PEERS = 32
"""Ranks named in one packet: whoever waits for more is said to wait for everybody."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What the main thread of one rank does at one moment.

    waits: whether it waits, for a message, for other ranks or for a disk; otherwise it works.
    what: what for or at what, as "activation of minibatch 71 from rank 1" or "F of minibatch 71"; may be empty.
    seconds: for how long.
    peers: the ranks it waits for; None is everybody else.
    """

    waits: bool = False
    what: str = ""
    seconds: float = 0.0
    peers: tuple[int, ...] | None = ()

    def words(self) -> str:
        """As a predicate: "waits for activation of minibatch 71 from rank 1 for 58 s"."""
        verb = "waits" if self.waits else "works"
        joined = f" {'for' if self.waits else 'on'} {self.what}" if self.what else ""
        return f"{verb}{joined} for {self.seconds:.0f} s"


@dataclass(frozen=True, kw_only=True)
class Question:
    """Rank `rank` asks what the receiver does; the answer repeats `serial`."""

    rank: int
    serial: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What rank `rank` does, in answer to the question `serial`."""

    rank: int
    serial: int
    standing: Standing


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Rank `rank` ends the job with `code`, or is about to say why it has to end, where `code` is None."""

    rank: int
    code: int | None


Packet = Question | Answer | Notice


def encode(token: bytes, packet: Packet) -> bytes:
    """The bytes of a packet, at most `LONGEST_PACKET`."""
    fields: dict[str, Any]
    if isinstance(packet, Question):
        fields = {"ask": packet.serial, "rank": packet.rank}
    elif isinstance(packet, Notice):
        fields = {"end": packet.code, "rank": packet.rank}
    else:
        standing = packet.standing
        peers = standing.peers
        fields = {
            "answer": packet.serial,
            "rank": packet.rank,
            "waits": standing.waits,
            "what": _shortened(standing.what),
            "seconds": round(standing.seconds, 1),
            "peers": None if peers is None or len(peers) > MOST_PEERS else list(peers),
        }
    return token + json.dumps(fields, separators=(",", ":"), ensure_ascii=True).encode()


def decode(token: bytes, data: bytes, *, size: int) -> Packet | None:
    """The packet that `data` holds, None for anything else. `size`: number of ranks."""
    if not hmac.compare_digest(data[:TOKEN_BYTES], token) or len(data) > LONGEST_PACKET:
        return None
    try:
        fields = json.loads(data[TOKEN_BYTES:])
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not _is_rank(fields.get("rank"), size):
        return None
    rank = fields["rank"]
    if "ask" in fields:
        return Question(rank=rank, serial=fields["ask"]) if type(fields["ask"]) is int else None
    if "end" in fields:
        code = fields["end"]
        return Notice(rank=rank, code=code) if code is None or type(code) is int else None
    standing = _standing(fields, size)
    if standing is None or type(fields.get("answer")) is not int:
        return None
    return Answer(rank=rank, serial=fields["answer"], standing=standing)


def listed(ranks: Sequence[int]) -> str:
    """Ranks as people list them: "3", "0 and 2", "0, 1 and 2"."""
    *others, last = [str(rank) for rank in ranks]
    return f"{', '.join(others)} and {last}" if others else last


def _standing(fields: dict[str, Any], size: int) -> Standing | None:
    waits, what, seconds, peers = (fields.get(key) for key in ("waits", "what", "seconds", "peers"))
    if not (isinstance(waits, bool) and isinstance(what, str) and isinstance(seconds, (int, float))):
        return None
    if not 0 <= seconds < LONGEST_S:
        return None
    if peers is not None and not (isinstance(peers, list) and all(_is_rank(peer, size) for peer in peers)):
        return None
    # What is printed was sent by somebody who knew the token, and still must not move the cursor.
    text = "".join(letter if letter.isprintable() else "?" for letter in what)
    return Standing(waits=waits, what=text, seconds=float(seconds), peers=None if peers is None else tuple(peers))


def _is_rank(value: object, size: int) -> bool:
    return type(value) is int and 0 <= value < size


def _shortened(text: str) -> str:
    # Letters outside ASCII take up to twelve bytes each in JSON.
    room = LONGEST_TEXT if text.isascii() else LONGEST_TEXT // 6
    return text if len(text) <= room else text[: room - 1] + "…"
