"""Where each parameter of a stage lies in one flat buffer.

Every weight version, prediction and optimizer state of a stage is one 1-D tensor with this layout. The layout
never owns memory: it allocates on request and hands out views.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ALIGNMENT_BYTES", "FlatLayout", "Slot"]

ALIGNMENT_BYTES = 64
"""Each slot starts on a cache line, so that whole lines can be written past the caches."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one parameter: `numel` elements from `offset` (in elements), in parameter group `group`."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    group: int


class FlatLayout:
    """Slots for a list of parameters, in the order given.

    Args:
        parameters: (name, shape, index of the parameter group) of each parameter. Shapes may be `()` or empty.
        dtype: a floating-point type; slot offsets are multiples of 64 bytes in it.

    Attributes:
        slots: one `Slot` per parameter.
        numel: length of a flat buffer in elements, padding included.
        dtype: the dtype of `allocate` when none is given.

    Raises:
        ValueError: a name that occurs twice, a negative group, or a dtype that is not floating-point.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, tuple[int, ...], int]], dtype: torch.dtype = torch.float32
    ) -> None:
        if not dtype.is_floating_point:
            raise ValueError(f"a flat layout holds floating-point numbers, got {dtype}")
        line = ALIGNMENT_BYTES // dtype.itemsize
        slots: list[Slot] = []
        seen: set[str] = set()
        offset = 0
        for name, shape, group in parameters:
            if name in seen:
                raise ValueError(f"parameter {name!r} is listed twice in one flat layout")
            if group < 0:
                raise ValueError(f"parameter {name!r}: group index {group} is negative")
            seen.add(name)
            numel = math.prod(shape)
            slots.append(Slot(name=name, shape=tuple(shape), offset=offset, numel=numel, group=group))
            offset += -(-numel // line) * line
        self.slots = tuple(slots)
        self.numel = offset
        self.dtype = dtype

    @property
    def group_count(self) -> int:
        """One more than the largest group index in use (0 without parameters)."""
        return max((slot.group + 1 for slot in self.slots), default=0)

    def allocate(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Tensor:
        """Return a 1-D tensor of zeros of length `numel`; torch's allocators align it to 64 bytes or more."""
        return torch.zeros(self.numel, device=device, dtype=self.dtype if dtype is None else dtype)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return name -> view of `flat` (1-D, length `numel`, any dtype) with the parameter's shape.

        Raises:
            ValueError: `flat` is not a contiguous 1-D tensor of this layout's length.
        """
        return {slot.name: view for slot, view in zip(self.slots, self.view_list(flat), strict=True)}

    def view_list(self, flat: Tensor) -> list[Tensor]:
        """Return the same views as `views`, as a list aligned with `slots`."""
        if flat.dim() != 1 or flat.numel() != self.numel or not flat.is_contiguous():
            raise ValueError(
                f"expected a contiguous 1-D tensor of {self.numel} elements, "
                f"got shape {tuple(flat.shape)} with strides {flat.stride()}"
            )
        return [flat[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in self.slots]
