"""Ways to spoil bytes and JSON documents, drawn by hypothesis or by a random generator."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

TIMES = int(os.environ.get("HPCPIPE_FUZZ_EXAMPLES", "1"))


def some(examples: int) -> settings:
    """So many examples, the same in every run; the environment can ask for more, drawn anew."""
    return settings(
        max_examples=examples * TIMES,
        derandomize=TIMES == 1,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


NASTY: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7,
    2**31,
    2**32 + 1,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    10**30,
    0.5,
    -0.0,
    1e308,
    1e-308,
    "",
    "0",
    "-1",
    "x",
    "..",
    "a/../b",
    "/",
    "\0",
    "\ud800",
    "\x1b[2J",
    "é\n",
    "x" * 3000,
    [],
    [0],
    [[]],
    [None],
    [2**62, 2**62],
    ["float32", [1], 0, "00000000"],
    {},
    {"": 0},
    {"0": []},
    {"0": [1]},
    {"x": {"y": {"z": 1}}},
]
"""JSON values that a reader may not expect."""


def mutated_bytes(*seeds: bytes, most: int = 6) -> st.SearchStrategy[bytes]:
    """One of `seeds` after some edits at places of any kind: flipped, cut out, put in, doubled, moved, cut off."""
    return st.tuples(st.sampled_from(seeds), st.randoms(use_true_random=False), st.integers(1, most)).map(
        lambda drawn: _edited(drawn[0], drawn[1], drawn[2], seeds)
    )


def edited(seed: bytes, rng: random.Random, others: tuple[bytes, ...] = ()) -> bytes:
    """The same by a random generator."""
    return _edited(seed, rng, rng.randint(1, 6), (seed, *others))


def _edited(data: bytes, rng: random.Random, edits: int, seeds: tuple[bytes, ...]) -> bytes:
    for _ in range(edits):
        data = _edit(data, rng, seeds)
    return data


def _edit(data: bytes, rng: random.Random, seeds: tuple[bytes, ...]) -> bytes:
    at = rng.randrange(len(data) + 1)
    length = min(rng.choice((1, 1, 2, 4, 8, rng.randint(1, 200))), len(data) - at)
    piece = data[at : at + length]
    kind = rng.randrange(10)
    if kind == 0:
        return data[:at] + bytes(byte ^ 1 << rng.randrange(8) for byte in piece) + data[at + length :]
    if kind == 1:
        return data[:at] + rng.randbytes(length) + data[at + length :]
    if kind == 2:
        number = rng.choice((0, 1, 2**7, 2**8, 2**15, 2**16, 2**31, 2**32, 2**63, 2**64)) - rng.randrange(2)
        return data[:at] + (number % 2 ** (8 * length)).to_bytes(length, "little") + data[at + length :]
    if kind == 3:
        return data[:at] + data[at + length :]
    if kind == 4:
        return data[:at] + piece * rng.randint(2, 5) + data[at + length :]
    if kind == 5:
        other = rng.choice(seeds)
        start = rng.randrange(len(other) + 1)
        return data[:at] + other[start : start + rng.randint(1, 300)] + data[at:]
    if kind == 6:
        return (
            data[:at] + bytes([rng.choice(b'0123456789-+.eE"[]{},:\\ \n\xff\0ntf')]) * length + data[at + length :]
        )
    if kind == 7:
        return data[: rng.randint(at, len(data))]
    # Addresses in binary files, so that they lead elsewhere, or round in a circle.
    to, source = (8 * rng.randrange(len(data) // 8 + 1) for _ in range(2))
    return data[:to] + data[source : source + 8] + data[to + 8 :]


def mutated_json(document: Any, most: int = 3) -> st.SearchStrategy[Any]:
    """`document` with some values replaced by nasty ones, by others of its own, or gone; some keys renamed."""
    return st.tuples(st.randoms(use_true_random=False), st.integers(1, most)).map(
        lambda drawn: spoiled(document, drawn[0], drawn[1])
    )


def spoiled(document: Any, rng: random.Random, changes: int = 1) -> Any:
    """The same by a random generator."""
    document = {"": copy.deepcopy(document)}
    for _ in range(changes):
        places = list(_places(document))
        holder, key = rng.choice(places)
        kind = rng.randrange(5)
        if kind == 0 and holder is not document:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict) and holder is not document:
            holder[rng.choice([value for value in NASTY if isinstance(value, str)])] = holder.pop(key)
        elif kind == 2:
            other, its = rng.choice(places)
            holder[key] = copy.deepcopy(other[its])
        else:
            holder[key] = copy.deepcopy(rng.choice(NASTY))
    return document[""]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _places(value[key])


def encoded(document: Any) -> bytes:
    """JSON, as small as the writers of hpcpipe write it."""
    return json.dumps(document, separators=(",", ":")).encode()
