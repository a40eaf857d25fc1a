from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from hpcpipe.checkpoint.crc import combine


@given(st.lists(st.binary(max_size=200), max_size=8))
def test_the_crc_of_the_pieces_combines_to_the_crc_of_the_whole(pieces: list[bytes]) -> None:
    assert combine((zlib.crc32(piece), len(piece)) for piece in pieces) == zlib.crc32(b"".join(pieces))


@given(st.integers(0, 40), st.integers(0, 1 << 20), st.binary(max_size=30))
def test_the_lengths_count_and_not_only_the_bytes(power: int, extra: int, tail: bytes) -> None:
    length = min((1 << power) + extra, 3 << 20)
    zeros = bytes(length)
    assert combine([(zlib.crc32(zeros), length), (zlib.crc32(tail), len(tail))]) == zlib.crc32(zeros + tail)


def test_a_length_beyond_four_gibibytes_is_not_cut_to_32_bits() -> None:
    gibibyte = (zlib.crc32(b"\1" * 1024), 1024)
    half, whole = combine([gibibyte] * 4096), combine([gibibyte] * 8192)
    assert combine([(half, 4 << 20), (half, 4 << 20)]) == whole

    huge = (1 << 33) + 5
    split = combine([(7, 3), (0, 1 << 32), (0, 1 << 32), (9, 5)])
    assert combine([(7, 3), (combine([(0, 1 << 33), (9, 5)]), huge)]) == split
