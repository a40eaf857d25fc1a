"""The flat layout: where parameters lie, and that views and buffers agree with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcpipe.optim.flat import ALIGNMENT_BYTES, FlatLayout

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=8)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@given(shapes=SHAPES, dtype=DTYPES)
def test_slots_are_aligned_disjoint_and_in_order(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    layout = FlatLayout([(f"p{i}", shape, 0) for i, shape in enumerate(shapes)], dtype=dtype)

    end = 0
    for slot in layout.slots:
        assert slot.offset * dtype.itemsize % ALIGNMENT_BYTES == 0
        assert slot.offset >= end
        end = slot.offset + slot.numel
    assert end <= layout.numel
    assert layout.numel * dtype.itemsize % ALIGNMENT_BYTES == 0


@given(shapes=SHAPES)
def test_what_is_written_through_one_view_is_read_through_it_alone(shapes: list[tuple[int, ...]]) -> None:
    layout = FlatLayout([(f"p{i}", shape, 0) for i, shape in enumerate(shapes)])
    flat = layout.allocate()
    for index, view in enumerate(layout.views(flat).values()):
        view.fill_(index + 1)

    for index, (slot, view) in enumerate(zip(layout.slots, layout.view_list(flat), strict=True)):
        assert tuple(view.shape) == slot.shape
        assert bool((view == index + 1).all())
    assert int((flat != 0).sum()) == sum(slot.numel for slot in layout.slots)


def test_a_buffer_is_zero_and_starts_on_a_cache_line() -> None:
    layout = FlatLayout([("a", (3, 5), 0), ("b", (), 1)])
    for dtype in (None, torch.float64, torch.bfloat16):
        flat = layout.allocate("cpu", dtype)
        assert flat.shape == (layout.numel,)
        assert flat.dtype == (dtype or torch.float32)
        assert flat.data_ptr() % ALIGNMENT_BYTES == 0
        assert not flat.any()


def test_a_view_of_a_bfloat16_buffer_has_the_same_place() -> None:
    layout = FlatLayout([("a", (3,), 0), ("b", (4,), 0)])
    flat = layout.allocate(dtype=torch.bfloat16)
    layout.views(flat)["b"].fill_(1)
    assert flat.nonzero().flatten().tolist() == [16, 17, 18, 19]


def test_groups_are_counted_by_their_largest_index() -> None:
    assert FlatLayout([]).group_count == 0
    assert FlatLayout([("a", (1,), 0), ("b", (1,), 2)]).group_count == 3


def test_a_stage_without_parameters_has_an_empty_layout() -> None:
    layout = FlatLayout([])
    assert layout.numel == 0
    assert layout.views(layout.allocate()) == {}


def test_a_name_listed_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' is listed twice"):
        FlatLayout([("a", (1,), 0), ("a", (2,), 0)])


def test_an_integer_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="floating-point"):
        FlatLayout([("a", (1,), 0)], dtype=torch.int64)


def test_a_buffer_of_another_length_is_refused() -> None:
    layout = FlatLayout([("a", (20,), 0)])
    for flat in (torch.zeros(20), torch.zeros(32, 1), torch.zeros(64)[::2]):
        with pytest.raises(ValueError, match="expected a contiguous 1-D tensor of 32 elements"):
            layout.views(flat)
