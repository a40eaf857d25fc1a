"""What a mistaken word was perhaps meant to be: the hint at the end of many messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean "x"?` for the choice closest to `word`, or an empty string when none is close."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f'; did you mean "{by_lower[close[0]]}"?' if close else ""
