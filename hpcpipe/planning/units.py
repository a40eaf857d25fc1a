"""Quantities as people write them: "10GB/s", "1Gbit/s", "40GiB", "20us".

It owns the spelling of bandwidths, sizes and times on the command line and in run files. It knows nothing of what
they measure. GB is 10^9 bytes and GiB 2^30; a bit is an eighth of a byte.
"""

from __future__ import annotations

import math
import re

from hpcpipe.errors import PlanError

_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµμ/]*)\s*")
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_PREFIXES = {**_DECIMAL, **_BINARY}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9, "min": 60.0}
_LARGEST = 2.0**63


def parse_bandwidth(text: str) -> float:
    """Bytes per second in `text`: a number alone, or one with B/s or bit/s, as in "10GB/s" and "1Gbit/s".

    Raises PlanError: it is no such thing, zero, or beyond any link.
    """
    number, unit = _split(text)
    factor = _bandwidth_unit(unit)
    if number is None or factor is None:
        raise PlanError(f'{text!r} is no bandwidth: write it as "10GB/s", "1Gbit/s" or bytes a second, "12.5e9"')
    return _in_range(number * factor, text, "bandwidth", zero=False)


def parse_size(text: str) -> int:
    """Whole bytes in `text`: a number alone, or one with B and a prefix, as in "40GiB" and "1.5GB".

    Raises PlanError: it is no such thing, or beyond any memory.
    """
    number, unit = _split(text)
    word = unit.lower().removesuffix("b")
    if number is None or word not in _PREFIXES:
        raise PlanError(f'{text!r} is no size: write it as "40GiB", "1.5GB" or in bytes, "2e9"')
    return round(_in_range(number * _PREFIXES[word], text, "size", zero=True))


def parse_time(text: str) -> float:
    """Seconds in `text`: a number alone, or one with s, ms, us, ns or min, as in "20us".

    Raises PlanError: it is no such thing.
    """
    number, unit = _split(text)
    if number is None or unit not in _SECONDS:
        raise PlanError(f'{text!r} is no time: write it as "20us", "1.5ms" or in seconds, "0.002"')
    return _in_range(number * _SECONDS[unit], text, "time", zero=True)


def show_size(nbytes: float) -> str:
    """Return a size in the largest binary unit that leaves at least one: "1.5 GiB", "512 B"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def _split(text: str) -> tuple[float | None, str]:
    found = _QUANTITY.fullmatch(text)
    return (float(found[1]), found[2]) if found else (None, "")


def _bandwidth_unit(unit: str) -> float | None:
    """Bytes a second in one of `unit`; None if it is none."""
    if not unit:
        return 1.0
    for end in ("/s", "ps"):
        if unit.endswith(end):
            amount = unit.removesuffix(end)
            break
    else:
        return None
    # In "Gb/s" a small b is a bit, in "GB/s" a capital one is a byte.
    for end, share in (("bits", 1 / 8), ("bit", 1 / 8), ("b", 1 / 8), ("B", 1.0)):
        if amount.endswith(end):
            prefix = amount.removesuffix(end).lower()
            return _PREFIXES[prefix] * share if prefix in _PREFIXES else None
    return None


def _in_range(value: float, text: str, what: str, *, zero: bool) -> float:
    if not math.isfinite(value) or value > _LARGEST or (value == 0 and not zero):
        raise PlanError(f"{text!r} is no usable {what}: it must be {'at least' if zero else 'above'} 0 and finite")
    return value
