from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hpcpipe.errors import TransportError
from hpcpipe.transport.agreement import Agreement, rows_of, state_of
from hpcpipe.transport.header import Layout, slot_layout

Shape = tuple[int, ...]


def _layout(
    *shapes: Shape | None, full_rows: int | None, rows: int | None = None, dtype: torch.dtype = torch.float32
) -> Layout:
    rows = rows_of(shapes) if rows is None else rows
    return Layout(
        kind=0,
        depth=1,
        state=state_of(rows, full_rows),
        rows=rows,
        full_rows=full_rows,
        slots=tuple(None if shape is None else slot_layout(dtype, shape, False) for shape in shapes),
    )


def _agreed(*layouts: Layout) -> Agreement:
    agreement = Agreement()
    for layout in layouts:
        agreement.admit(layout, lambda: "here")
    return agreement


def _sizes(agreement: Agreement) -> Sequence[Shape | None]:
    return [slot if slot is None else slot.shape for slot in agreement.full]


def test_the_first_full_message_fixes_the_sizes() -> None:
    assert _sizes(_agreed(_layout((8, 16), (8,), full_rows=8))) == [(8, 16), (8,)]


def test_a_short_minibatch_first_leaves_the_sizes_open_until_a_full_one() -> None:
    assert _sizes(_agreed(_layout((3, 16), full_rows=8))) == [None]
    assert _sizes(_agreed(_layout((3, 16), full_rows=8), _layout((8, 16), full_rows=8))) == [(8, 16)]


def test_without_full_rows_the_first_message_is_a_full_one() -> None:
    assert _sizes(_agreed(_layout((3, 16), full_rows=None))) == [(3, 16)]


def test_a_slot_that_was_absent_in_the_first_message_is_agreed_when_it_comes() -> None:
    assert _sizes(_agreed(_layout((8, 4), None, full_rows=8), _layout((8, 4), (8,), full_rows=8))) == [
        (8, 4),
        (8,),
    ]


@pytest.mark.parametrize(
    ("full", "short", "rows"),
    [
        (((8, 16), (8,)), ((3, 16), (3,)), 3),
        (((5, 8, 16),), ((5, 3, 16),), 3),
        (((40, 16), (8, 2)), ((15, 16), (3, 2)), 3),
        (((8, 16), ()), ((3, 16), ()), 3),
        (((8, 16),), ((0, 16),), 0),
        (((8, 16), (7,)), ((2, 16), (7,)), 2),
    ],
)
def test_a_short_minibatch_is_normal(full: Sequence[Shape], short: Sequence[Shape], rows: int) -> None:
    agreement = _agreed(_layout(*full, full_rows=8, rows=8))

    assert agreement.admit(_layout(*short, full_rows=8, rows=rows), lambda: "here") is False
    assert _sizes(agreement) == list(full)


@pytest.mark.parametrize(
    ("full", "changed", "rows", "message"),
    [
        (
            (8, 16),
            (8, 17),
            8,
            r"here: tensor 0: expected float32 \(8, 16\), got float32 \(8, 17\) in a full minibatch",
        ),
        ((8, 16), (8, 12), 8, r"expected float32 \(8, 16\), got float32 \(8, 12\) in a full minibatch of 8 rows"),
        ((8, 16), (4, 17), 4, r"expected float32 \(8, 16\), got float32 \(4, 17\)"),
        ((8, 16), (4, 12), 4, r"expected float32 \(8, 16\), got float32 \(4, 12\)"),
        ((8, 16), (5, 16), 4, r"got float32 \(5, 16\) in 4 of 8 rows"),
        ((8, 16), (8, 16, 1), 8, r"expected float32 \(8, 16\), got float32 \(8, 16, 1\)"),
    ],
)
def test_another_shape_is_an_error_with_both_shapes(full: Shape, changed: Shape, rows: int, message: str) -> None:
    agreement = _agreed(_layout(full, full_rows=8, rows=8))

    with pytest.raises(TransportError, match=message):
        agreement.admit(_layout(changed, full_rows=8, rows=rows), lambda: "here")


def test_tensors_that_shrink_by_different_ratios_are_an_error() -> None:
    agreement = _agreed(_layout((8, 4), (8,), full_rows=None))

    with pytest.raises(TransportError, match=r"tensor 1: .* shorter by another ratio than the other tensors"):
        agreement.admit(_layout((4, 4), (3,), full_rows=None), lambda: "here")


def test_a_larger_message_after_the_full_one_is_an_error() -> None:
    agreement = _agreed(_layout((3, 16), full_rows=None))

    with pytest.raises(TransportError, match=r"expected float32 \(3, 16\), got float32 \(8, 16\)"):
        agreement.admit(_layout((8, 16), full_rows=None), lambda: "here")


def test_another_dtype_is_an_error() -> None:
    agreement = _agreed(_layout((8, 16), full_rows=8))

    with pytest.raises(TransportError, match=r"expected float32 \(8, 16\), got bfloat16 \(8, 16\)"):
        agreement.admit(_layout((8, 16), full_rows=8, dtype=torch.bfloat16), lambda: "here")


def test_another_number_of_tensors_is_an_error() -> None:
    agreement = _agreed(_layout((8, 16), (8,), full_rows=8))

    with pytest.raises(TransportError, match="here: expected 2 tensors, got 1"):
        agreement.admit(_layout((8, 16), full_rows=8), lambda: "here")
