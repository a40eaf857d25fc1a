"""What the two ends of a channel have agreed on: slots, dtypes, dimensions, and the sizes of a full minibatch.

Both ends hold one and feed it the same layouts in the same order, so they know the same at the same message.
The first message fixes the number of slots, and per slot dtype and number of dimensions; the first *full* one
fixes the sizes, which are the most that may come from then on. A shorter message is normal when it is a short
minibatch: in each tensor at most one dimension is smaller, everywhere by the same ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcpipe.errors import TransportError
from hpcpipe.transport.header import Layout, SlotLayout, State


class Agreement:
    """The agreement of one end of one channel.

    `full` holds, per slot, the layout of a full minibatch, or None while it is not known.
    """

    def __init__(self) -> None:
        self.full: list[SlotLayout | None] = []
        self._first: list[SlotLayout | None] | None = None

    def admit(self, layout: Layout, where: Callable[[], str]) -> bool:
        """Check one layout and learn from it; True when something new was agreed.

        where: names the message in an error, as in "stage 1, activation of minibatch 7 from stage 0".

        Raises TransportError naming the slot, what was expected and what came.
        """
        learned = self._first is None
        if self._first is None:
            self._first = [None] * len(layout.slots)
            self.full = [None] * len(layout.slots)
        if len(layout.slots) != len(self._first):
            raise TransportError(f"{where()}: expected {len(self._first)} tensors, got {len(layout.slots)}")
        shrinks: set[tuple[int, int]] = set()
        for index, slot in enumerate(layout.slots):
            if slot is None:
                continue
            first, full = self._first[index], self.full[index]
            if first is not None and (first.dtype != slot.dtype or len(first.shape) != len(slot.shape)):
                raise _mismatch(where, index, full or first, slot, "")
            if first is None:
                self._first[index] = slot
                learned = True
            if full is not None:
                _check_sizes(layout, index, full, slot, shrinks, where)
            elif layout.state is State.FULL:
                self.full[index] = slot
                learned = True
        return learned


def rows_of(shapes: Sequence[Sequence[int] | None]) -> int | None:
    """The leading dimension of the first tensor that has dimensions: what `rows` is when nobody says it."""
    for shape in shapes:
        if shape:
            return shape[0]
    return None


def state_of(rows: int | None, full_rows: int | None) -> State:
    """FULL when the message is as large as messages get: full rows, nothing that varies, or nobody says."""
    return State.FULL if full_rows is None or rows is None or rows == full_rows else State.OPEN


def _check_sizes(
    layout: Layout,
    index: int,
    full: SlotLayout,
    slot: SlotLayout,
    shrinks: set[tuple[int, int]],
    where: Callable[[], str],
) -> None:
    changed = [(e, g) for e, g in zip(full.shape, slot.shape, strict=True) if e != g]
    if not changed:
        return
    if layout.state is State.FULL and layout.full_rows is not None:
        raise _mismatch(where, index, full, slot, f" in a full minibatch of {layout.full_rows} rows")
    if len(changed) > 1 or changed[0][1] > changed[0][0]:
        raise _mismatch(where, index, full, slot, "")
    expected, got = changed[0]
    shrinks.add((expected, got))
    if any(got * e != expected * g for e, g in shrinks):
        raise _mismatch(where, index, full, slot, ", shorter by another ratio than the other tensors")
    if layout.full_rows is None or layout.rows is None or layout.rows > layout.full_rows:
        return
    if got * layout.full_rows != expected * layout.rows:
        raise _mismatch(where, index, full, slot, f" in {layout.rows} of {layout.full_rows} rows")


def _mismatch(
    where: Callable[[], str], index: int, expected: SlotLayout | None, got: SlotLayout, detail: str
) -> TransportError:
    return TransportError(f"{where()}: tensor {index}: expected {expected}, got {got}{detail}")
