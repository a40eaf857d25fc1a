"""CRC-32 of a concatenation from the CRC-32 of its pieces, so that a file is summed in one pass over its data.

It knows the polynomial of `zlib.crc32` and nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
"""The CRC-32 polynomial of zlib with its bits reversed: bit 31 stands for x^0."""
_ONE = 1 << 31


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo the CRC polynomial, in reversed bit order."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=64)
def _square_chain(k: int) -> int:
    """x^(8 * 2^k) modulo the polynomial: what appending 2^k zero bytes multiplies a CRC by."""
    if k == 0:
        return _ONE >> 8
    half = _square_chain(k - 1)
    return _multiply(half, half)


@lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """x^(8 * length) modulo the polynomial. Cached, because the tensors of a model share few sizes."""
    operator = _ONE
    for k in range(length.bit_length()):
        if length >> k & 1:
            operator = _multiply(operator, _square_chain(k))
    return operator


def combine(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of a file, from `(crc, length in bytes)` of its consecutive pieces.

    Equal to `zlib.crc32` of the joined bytes (Mark Adler's `crc32_combine`, zlib); no pieces give 0.
    """
    total = 0
    for crc, length in pieces:
        total = _multiply(_shift(length), total) ^ crc
    return total
