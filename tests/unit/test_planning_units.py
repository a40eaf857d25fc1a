"""Quantities as people write them: bits and bytes, powers of ten and of two, and one line for what is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcpipe.errors import PlanError
from hpcpipe.planning.units import parse_bandwidth, parse_size, parse_time, show_size


def refusal(parse: Callable[[str], float], text: str) -> str:
    with pytest.raises(PlanError) as caught:
        parse(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12.5e9", 12.5e9),
        ("1", 1.0),
        ("10GB/s", 10e9),
        ("10 GB/s", 10e9),
        ("  10GB/s ", 10e9),
        (".5MB/s", 0.5e6),
        ("1e3kB/s", 1e6),
        ("3B/s", 3.0),
        ("2TB/s", 2e12),
        ("10GBps", 10e9),
    ],
)
def test_a_bandwidth_is_bytes_a_second(text: str, expected: float) -> None:
    assert parse_bandwidth(text) == expected


@pytest.mark.parametrize("text", ["8Gbit/s", "8Gbits/s", "8Gb/s", "8Gbps", "8 gbit/s", "8e9bit/s"])
def test_a_bit_is_an_eighth_of_a_byte(text: str) -> None:
    assert parse_bandwidth(text) == 1e9


@pytest.mark.parametrize(("text", "expected"), [("1KiB/s", 2**10), ("1GiB/s", 2**30), ("8Mibit/s", 2**20)])
def test_a_binary_prefix_of_a_bandwidth_is_a_power_of_two(text: str, expected: float) -> None:
    assert parse_bandwidth(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "fast", "GB/s", "10GB", "10G", "10GB/", "10XB/s", "-1GB/s", "1,5GB/s", "10GB/h", "nan", "1_0", "1\n2"],
)
def test_what_is_no_bandwidth_is_shown_how_to_write_one(text: str) -> None:
    assert refusal(parse_bandwidth, text) == (
        f'{text!r} is no bandwidth: write it as "10GB/s", "1Gbit/s" or bytes a second, "12.5e9"'
    )


@pytest.mark.parametrize("text", ["0", "0GB/s", "1e999", "1e300GB/s"])
def test_a_bandwidth_is_above_zero_and_finite(text: str) -> None:
    assert refusal(parse_bandwidth, text) == f"{text!r} is no usable bandwidth: it must be above 0 and finite"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("2e9", 2 * 10**9),
        ("512B", 512),
        ("1kB", 10**3),
        ("1KiB", 2**10),
        ("1.5GB", 15 * 10**8),
        ("1.5 GiB", 3 * 2**29),
        ("40GiB", 40 * 2**30),
        ("40gib", 40 * 2**30),
        ("40G", 40 * 10**9),
        ("40Gi", 40 * 2**30),
        ("1TiB", 2**40),
    ],
)
def test_a_size_is_whole_bytes_in_powers_of_ten_or_two(text: str, expected: int) -> None:
    found = parse_size(text)

    assert (found, type(found)) == (expected, int)


@pytest.mark.parametrize("text", ["", "much", "GiB", "40Gbit", "40GB/s", "-1GB", "4 0", "1e", "infinity"])
def test_what_is_no_size_is_shown_how_to_write_one(text: str) -> None:
    assert refusal(parse_size, text) == f'{text!r} is no size: write it as "40GiB", "1.5GB" or in bytes, "2e9"'


def test_a_size_beyond_any_memory_is_refused() -> None:
    assert refusal(parse_size, "1e9PiB") == "'1e9PiB' is no usable size: it must be at least 0 and finite"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0.0),
        ("0.002", 0.002),
        ("2s", 2.0),
        ("1.5ms", 1.5e-3),
        ("20us", 20e-6),
        ("20µs", 20e-6),  # the micro sign
        ("20μs", 20e-6),  # the Greek letter
        ("5 ns", 5e-9),
        ("2min", 120.0),
    ],
)
def test_a_time_is_seconds(text: str, expected: float) -> None:
    assert parse_time(text) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("text", ["", "soon", "us", "20 u", "20MS", "1h", "-1s"])
def test_what_is_no_time_is_shown_how_to_write_one(text: str) -> None:
    assert refusal(parse_time, text) == f'{text!r} is no time: write it as "20us", "1.5ms" or in seconds, "0.002"'


def test_an_endless_time_is_refused() -> None:
    assert refusal(parse_time, "1e999s") == "'1e999s' is no usable time: it must be at least 0 and finite"


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (-(2**20), "-1 MiB"),
        (2**40, "1 TiB"),
        (2000 * 2**40, "2000 TiB"),
    ],
)
def test_a_size_is_shown_in_the_largest_binary_unit(nbytes: float, shown: str) -> None:
    assert show_size(nbytes) == shown


@pytest.mark.parametrize("nbytes", [1, 999, 5 * 2**10, 3 * 2**20, 40 * 2**30, 7 * 2**40])
def test_a_size_is_read_as_it_is_shown(nbytes: int) -> None:
    assert parse_size(show_size(nbytes)) == nbytes
