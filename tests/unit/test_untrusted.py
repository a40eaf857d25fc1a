from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpcpipe.untrusted import DEEPEST, MOST_CONTAINERS, one_line, open_plain, parse_json, printable, read_plain


def test_a_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_plain(tmp_path / "file", 7) == read_plain(tmp_path / "link", 7) == b"content"
    with pytest.raises(OSError, match="more than 6 bytes"):
        read_plain(tmp_path / "file", 6)


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")], ids=["fifo", "folder", "device"]
)
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, make: object) -> None:
    make(tmp_path / "x")  # type: ignore[operator]
    with pytest.raises(OSError, match="not a regular file"):
        open_plain(tmp_path / "x")


def test_a_link_that_leads_round_in_a_circle_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to("x")
    with pytest.raises(OSError, match="symbolic link"):
        open_plain(tmp_path / "x")


def test_what_python_writes_as_json_is_read() -> None:
    document = {"a": [1, 2.5, None, True, "ü\n"], "b": {"c": {}}, "": -(10**300)}
    assert parse_json(json.dumps(document)) == parse_json(json.dumps(document).encode()) == document


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "Expecting value"),
        (b"\xff", "utf-8"),
        ("{}".encode("utf-16"), "utf-8"),
        (b"{} {}", "Extra data"),
        (b'{"a":1,"b":2,"a":3}', 'key "a" stands twice'),
        (b"NaN", "NaN is no number"),
        (b"[-Infinity]", "-Infinity is no number"),
        (b"9" * 10_000, "digits"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1), "nested too deeply"),
        (b"[" + b"{}," * MOST_CONTAINERS + b"1]", "objects and lists"),
    ],
    ids=range(11),
)
def test_what_another_program_might_read_otherwise_is_refused_in_one_line(text: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        parse_json(text)
    assert str(caught.value).isprintable()


def test_as_deep_as_allowed_is_read() -> None:
    assert parse_json(b"[" * DEEPEST + b"]" * DEEPEST)


def test_text_for_people_holds_nothing_that_a_terminal_obeys() -> None:
    assert printable("a\x1b[2Jü\ud800\n") == "a\\x1b[2Jü\\ud800\\n"
    assert one_line(ValueError("a\n  b\x07")) == "a b\\x07"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line("x" * 10**6)) == 300
