"""Progress of a run for people: a bar on a terminal, a line now and then in a batch log.

One rank shows it. Under a launcher stderr is a pipe even on a terminal, so `auto` shows lines there; a script that
knows better asks for the bar.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

LINES_EVERY_S = 10.0


def say(line: str) -> None:
    """A line for people, on stderr at once."""
    print(f"hpcpipe: {line}", file=sys.stderr, flush=True)


class Progress:
    """Shows how far a run of `total` steps is, from step `start` on. `mode`: auto, bar, lines or off."""

    def __init__(self, *, mode: str, total: int, start: int) -> None:
        if mode == "auto":
            mode = "bar" if sys.stderr.isatty() else "lines"
        self._mode = mode
        self._total = total
        self._start = start
        self._began = time.monotonic()
        self._shown = self._began
        self._bar: Any = None
        if mode == "bar":
            self._bar = tqdm(total=total, initial=start, unit="minibatch", dynamic_ncols=True, smoothing=0.1)

    def step(self, step: int, text: str) -> None:
        """`step` updates are done; `text` says how it goes."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._mode == "lines":
            now = time.monotonic()
            if now - self._shown >= LINES_EVERY_S or step == self._total:
                self._shown = now
                left = (now - self._began) / max(1, step - self._start) * (self._total - step)
                self.say(f"step {step}/{self._total}  {text}  {left:.0f} s left")

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.write(f"hpcpipe: {line}", file=sys.stderr)
        elif self._mode != "off":
            say(line)

    def close(self) -> None:
        """Leave the bar as it is and start a new line."""
        if self._bar is not None:
            self._bar.close()
