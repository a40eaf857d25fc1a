from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcpipe.transport.out_of_memory import is_out_of_memory

FAR_TOO_MUCH = 1 << 55


def test_the_host_that_has_no_memory_left_is_recognised() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(FAR_TOO_MUCH, dtype=torch.uint8)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(FAR_TOO_MUCH, np.uint8)

    assert is_out_of_memory(of_torch.value)
    assert is_out_of_memory(of_numpy.value)


def test_a_gpu_that_has_no_memory_left_is_recognised() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))


def test_what_was_raised_from_it_is_recognised() -> None:
    error = ValueError("layer 3 failed")
    error.__cause__ = MemoryError()

    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [ValueError("out of memory"), RuntimeError("shapes differ"), KeyError("memory")])
def test_other_errors_are_not(error: Exception) -> None:
    assert not is_out_of_memory(error)
