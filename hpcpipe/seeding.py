"""Where random numbers start: seeds as pure functions of names and numbers, so that no state has to be kept.

Layers are initialised from (run seed, layer name), and draw in a pass from (run seed, minibatch, microbatch,
layer); neither depends on how many ranks share the layers, and a repeated pass draws the same numbers again.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """SplitMix64's finaliser: neighbouring minibatches get unrelated seeds (Steele et al., OOPSLA 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def layer_key(seed: int, layer: str) -> int:
    """64 bits that stand for a layer in a run."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{layer}".encode()).digest()[:8], "little")


def pass_seed(key: int, minibatch: int, microbatch: int) -> int:
    """Seed of one layer's random numbers in one pass; `key` from `layer_key`. Non-negative, below 2^63."""
    return _mix(_mix(key ^ minibatch) + microbatch & _MASK) >> 1


def stable_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that is the same in every process and for ever (Python's `hash` is neither)."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def seeded(*parts: int | str) -> Iterator[None]:
    """Seed the CPU generators of torch, NumPy and Python from `parts`, and restore them all afterwards."""
    seed = stable_seed(*parts)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    # Not torch.manual_seed, which would seed the generators of all GPUs as well and leave them so.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
