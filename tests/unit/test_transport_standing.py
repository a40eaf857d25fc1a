from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcpipe.transport.standing import (
    LONGEST_PACKET,
    MOST_PEERS,
    TOKEN_BYTES,
    Answer,
    Notice,
    Packet,
    Question,
    Standing,
    decode,
    encode,
    listed,
)

TOKEN = bytes(range(TOKEN_BYTES))
WAITS = Standing(waits=True, what="activation of minibatch 71 from rank 1", seconds=58.0, peers=(1,))


def _fields(**changed: object) -> bytes:
    fields = {"answer": 1, "rank": 1, "waits": True, "what": "it", "seconds": 1.0, "peers": [0], **changed}
    return TOKEN + json.dumps(fields).encode()


@pytest.mark.parametrize(
    "packet",
    [
        Question(rank=2, serial=7),
        Notice(rank=1, code=75),
        Notice(rank=1, code=None),
        Answer(rank=3, serial=7, standing=WAITS),
        Answer(rank=3, serial=7, standing=Standing(what="F of minibatch 71", seconds=12.3)),
        Answer(rank=3, serial=7, standing=Standing(waits=True, peers=None)),
    ],
)
def test_a_packet_arrives_as_it_was_sent(packet: Packet) -> None:
    assert decode(TOKEN, encode(TOKEN, packet), size=4) == packet


def test_a_packet_without_the_token_is_noise() -> None:
    data = encode(bytes(TOKEN_BYTES), Question(rank=0, serial=1))

    assert decode(TOKEN, data, size=4) is None


@given(st.binary(max_size=200))
def test_whatever_follows_the_token_breaks_nothing(data: bytes) -> None:
    decode(TOKEN, TOKEN + data, size=4)
    decode(TOKEN, data, size=4)


@pytest.mark.parametrize(
    "data",
    [
        _fields(rank=4),
        _fields(rank=-1),
        _fields(rank=True),
        _fields(answer="1"),
        _fields(peers=[9]),
        _fields(peers="all"),
        _fields(seconds=10**300),
        _fields(seconds=float("nan")),
        _fields(seconds="1"),
        _fields(waits=1),
        _fields(what=None),
        _fields(what="x" * LONGEST_PACKET),
        TOKEN + b"[1]",
        TOKEN + b"{",
        TOKEN + b"[" * 900,
        TOKEN + b'{"ask":"1","rank":0}',
        TOKEN + b'{"end":"1","rank":0}',
        TOKEN,
        b"",
    ],
)
def test_a_packet_that_no_rank_would_send_is_noise(data: bytes) -> None:
    assert decode(TOKEN, data, size=4) is None


@pytest.mark.parametrize("what", ["x" * 5000, "🂡" * 5000, '"\\' * 2000])
def test_an_answer_is_short_whatever_is_waited_for(what: str) -> None:
    standing = Standing(waits=True, what=what, peers=tuple(range(1000)))

    data = encode(TOKEN, Answer(rank=0, serial=1, standing=standing))

    assert len(data) <= LONGEST_PACKET
    found = decode(TOKEN, data, size=2000)
    assert isinstance(found, Answer)
    assert found.standing.what.endswith("…")


def test_more_peers_than_a_packet_names_are_everybody() -> None:
    standing = Standing(waits=True, peers=tuple(range(MOST_PEERS + 1)))

    found = decode(TOKEN, encode(TOKEN, Answer(rank=0, serial=1, standing=standing)), size=100)

    assert isinstance(found, Answer)
    assert found.standing.peers is None


def test_what_is_printed_cannot_move_the_cursor() -> None:
    found = decode(TOKEN, _fields(what="\x1b[2Jit\n"), size=4)

    assert isinstance(found, Answer)
    assert found.standing.what == "?[2Jit?"


@pytest.mark.parametrize(
    ("standing", "words"),
    [
        (WAITS, "waits for activation of minibatch 71 from rank 1 for 58 s"),
        (Standing(what="F of minibatch 71", seconds=65.2), "works on F of minibatch 71 for 65 s"),
        (Standing(), "works for 0 s"),
    ],
)
def test_a_standing_in_words(standing: Standing, words: str) -> None:
    assert standing.words() == words


@pytest.mark.parametrize(("ranks", "words"), [([3], "3"), ([0, 2], "0 and 2"), ([0, 1, 2], "0, 1 and 2")])
def test_ranks_are_listed_as_people_do(ranks: list[int], words: str) -> None:
    assert listed(ranks) == words
