from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcpipe.errors import TransportError
from hpcpipe.transport import header
from hpcpipe.transport.header import Layout, State, decode_tail, encode_tail, slot_layout

DTYPES = [dtype for dtype in header._DTYPES if dtype is not None]

slots = st.one_of(
    st.none(),
    st.builds(
        slot_layout,
        st.sampled_from(DTYPES),
        st.lists(st.integers(min_value=0, max_value=2**40), max_size=4).map(tuple),
        st.booleans(),
    ),
)
layouts = st.builds(
    Layout,
    kind=st.integers(min_value=0, max_value=2),
    depth=st.integers(min_value=1, max_value=100),
    state=st.sampled_from(State),
    rows=st.one_of(st.none(), st.integers(min_value=0, max_value=10**9)),
    full_rows=st.one_of(st.none(), st.integers(min_value=1, max_value=10**9)),
    slots=st.lists(slots, max_size=20).map(tuple),
)


@given(layouts)
def test_a_header_says_all_of_a_layout(layout: Layout) -> None:
    assert decode_tail(encode_tail(layout)) == layout


def test_every_dtype_of_a_tensor_that_torch_can_fill_has_a_code() -> None:
    for name in ("float32", "float64", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64"):
        assert slot_layout(getattr(torch, name), (2, 3), False).nbytes == 6 * getattr(torch, name).itemsize


def test_a_dtype_without_a_code_is_refused_by_name() -> None:
    with pytest.raises(TransportError, match=r"dtype torch\.quint8 cannot cross a stage boundary"):
        slot_layout(torch.quint8, (2,), False)


def test_more_tensors_than_a_header_holds_are_refused_with_both_numbers() -> None:
    layout = _layout(slot_layout(torch.float32, (1,), False), header.MAX_SLOTS + 1)

    with pytest.raises(TransportError, match="64 tensors at one stage boundary: at most 63"):
        encode_tail(layout)


def test_more_dimensions_than_a_header_holds_are_refused() -> None:
    layout = _layout(slot_layout(torch.float32, (1,) * 12, False), 60)

    with pytest.raises(
        TransportError, match="60 tensors with 720 dimensions do not fit into a header of 512 words"
    ):
        encode_tail(layout)


@pytest.mark.parametrize(
    "words", [(0, 1), (0, 2, 9, 1, 1, 0), (0, 2, 0, 1, 1, 1, 0x10100), (0, 2, 0, 1, 1, 1, 0x1C8)]
)
def test_a_header_that_makes_no_sense_is_an_error_and_not_a_guess(words: tuple[int, ...]) -> None:
    with pytest.raises(TransportError, match="header that hpcpipe cannot read"):
        decode_tail(struct.pack(f"{len(words)}q", *words))


def _layout(slot: header.SlotLayout, count: int) -> Layout:
    return Layout(kind=0, depth=1, state=State.FULL, rows=None, full_rows=None, slots=(slot,) * count)
