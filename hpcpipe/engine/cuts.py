"""Copies of what a rank's stages hold at a cut, collected while one stage after the other passes it.

A stage may be at the next cut before the rank's last one has passed this one. Memory of copies that are on disk is
used again. Nothing is written here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from hpcpipe.engine.runner import StageRunner
from hpcpipe.engine.snapshot import HostCopies, meta_name, named_state, stage_meta


@dataclass(kw_only=True)
class Cut:
    """The state of the rank's stages at one cut: host copies, what `stage_meta` says, and the seconds it took."""

    copies: HostCopies
    stage_metas: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Cuts:
    """The cuts that some of the rank's `places` stages (or replicas of one) have passed, and not all."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._gathering: dict[int, Cut] = {}
        self._spare: list[HostCopies] = []

    @property
    def pending(self) -> bool:
        """Whether there is one."""
        return bool(self._gathering)

    def knows(self, step: int) -> bool:
        """Whether some stage has passed the cut at `step`, and not all."""
        return step in self._gathering

    def take(self, runner: StageRunner) -> Cut | None:
        """Copy the state of a stage that has just passed a cut; the whole cut when it was the last to do so."""
        step = runner.weights.newest
        cut = self._gathering.get(step) or self._begin(step)
        began = time.perf_counter()
        for path, tensor in named_state(runner):
            cut.copies.copy(path, tensor)
        cut.stage_metas[meta_name(runner.place)] = stage_meta(runner)
        cut.seconds += time.perf_counter() - began
        return self._gathering.pop(step) if len(cut.stage_metas) == self._places else None

    def give_back(self, copies: HostCopies) -> None:
        """Nobody reads these copies any more."""
        self._spare.append(copies)

    def _begin(self, step: int) -> Cut:
        copies = self._spare.pop() if self._spare else HostCopies()
        copies.clear()
        cut = self._gathering[step] = Cut(copies=copies)
        return cut
