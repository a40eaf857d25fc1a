"""Whether an exception says that memory ran out, of the host or of a GPU, and what a user can do about it."""

from __future__ import annotations

import sys

REMEDY = 'use more ranks, a smaller data.batch, or pipeline.plan = "auto" with pipeline.memory_limit'
# What torch's allocator for the host raises is a RuntimeError like any other.
_WORDS = ("can't allocate memory", "not enough memory", "std::bad_alloc", "bad allocation", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, is a failed allocation."""
    torch = sys.modules.get("torch")
    kinds = (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
    at: BaseException | None = error
    for _ in range(10):
        if at is None:
            return False
        if isinstance(at, kinds):
            return True
        if isinstance(at, RuntimeError) and any(words in str(at).lower() for words in _WORDS):
            return True
        at = at.__cause__
    return False
