from __future__ import annotations

import json
import math
import tempfile
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.checkpoint.layout import rank_name
from hpcpipe.checkpoint.reader import RankFile
from hpcpipe.checkpoint.writer import CHUNK, write_rank_file
from tests.unit.checkpoint_samples import DTYPES, Array, random_array, same_bits, same_tree

_SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (2, 3, 5), (1,) * 9]


def _every_dtype_and_shape() -> dict[str, Array]:
    return {
        f"layers/l.{i}/parameters/{dtype}": random_array(shape, dtype, 31 * i + k)
        for i, shape in enumerate(_SHAPES)
        for k, dtype in enumerate(DTYPES)
    }


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    tree = _every_dtype_and_shape()
    meta = {"step": 7, "nested": {"list": [1, 2.5, None, "ü"]}}
    bf16 = {path for path in tree if path.endswith("uint16")}
    report = write_rank_file(tmp_path, 3, tree, meta, bf16)

    with RankFile(tmp_path / rank_name(3), report) as file:
        part = file.part()
    assert same_tree(part.tree, tree)
    assert part.meta == meta
    assert part.bf16 == bf16


@st.composite
def _trees(draw: st.DrawFn) -> dict[str, Array]:
    part = st.text(st.characters(exclude_characters="/", categories=["L", "N", "P", "Zs"]), min_size=1, max_size=6)
    names = draw(
        st.lists(
            st.lists(part.filter(lambda p: p not in (".", "..") and p.isprintable()), min_size=1, max_size=8),
            max_size=6,
        )
    )
    tree: dict[str, Array] = {}
    for parts in names:
        path = "/".join(parts)
        if not any((path + "/").startswith(other + "/") or (other + "/").startswith(path + "/") for other in tree):
            shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
            tree[path] = random_array(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    return tree


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(_trees(), st.dictionaries(st.text(max_size=9), _json, max_size=3))
def test_what_is_read_is_what_was_written(tree: dict[str, Array], meta: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "step-0000000001"
        report = write_rank_file(directory, 0, tree, meta)
        data = (directory / rank_name(0)).read_bytes()
        assert (report.length, report.crc) == (len(data), zlib.crc32(data))
        with RankFile(directory / rank_name(0), report) as file:
            part = file.part()
    assert same_tree(part.tree, tree)
    assert part.meta == meta


def test_an_array_of_several_chunks_is_summed_and_written_whole(tmp_path: Path) -> None:
    tree = {"a": random_array((CHUNK + 3,), "uint8", 1), "b": random_array((2 * CHUNK // 8,), "float64", 2)}
    report = write_rank_file(tmp_path, 0, tree, {})
    assert zlib.crc32((tmp_path / rank_name(0)).read_bytes()) == report.crc
    with RankFile(tmp_path / rank_name(0), report) as file:
        assert same_tree(file.part().tree, tree)


def test_views_that_are_not_contiguous_or_not_little_endian_keep_their_values(tmp_path: Path) -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    tree = {
        "transposed": base.T,
        "strided": base[:, ::2],
        "big": base.astype(">f4"),
        "expanded": np.broadcast_to(base, (2, 4, 6)),
    }
    report = write_rank_file(tmp_path, 0, tree, {})
    with RankFile(tmp_path / rank_name(0), report) as file:
        for path, array in tree.items():
            assert same_bits(file.read(path), np.array(array, dtype="<f4", order="C"))


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    tree = _every_dtype_and_shape()
    first = write_rank_file(tmp_path / "a", 0, tree, {"x": 1})
    second = write_rank_file(tmp_path / "b", 0, tree, {"x": 1})
    assert first == second
    assert (tmp_path / "a" / rank_name(0)).read_bytes() == (tmp_path / "b" / rank_name(0)).read_bytes()


def test_plain_h5py_reads_the_file_and_finds_the_checksums_and_dtypes(tmp_path: Path) -> None:
    weight = random_array((5, 3), "float32", 1)
    half = random_array((4,), "uint16", 2)
    write_rank_file(
        tmp_path,
        0,
        {"layers/a/parameters/weight": weight, "layers/a/parameters/half": half},
        {},
        {"layers/a/parameters/half"},
    )
    with h5py.File(tmp_path / rank_name(0)) as file:
        layer = file["tree/layers/a/parameters"]
        assert same_bits(layer["weight"][()], weight)
        assert layer["weight"].chunks is None
        assert layer["half"].attrs["dtype"] == b"bfloat16"
        arrays = json.loads(file["meta"][()].tobytes())["arrays"]
        crc = f"{zlib.crc32(weight.tobytes()):08x}"
        assert arrays["layers/a/parameters/weight"] == ["float32", [5, 3], layer["weight"].id.get_offset(), crc]


def test_a_meta_beyond_the_64_kib_of_an_attribute_is_kept(tmp_path: Path) -> None:
    meta = {"config": "x" * 200_000}
    report = write_rank_file(tmp_path, 0, {}, meta)
    with RankFile(tmp_path / rank_name(0), report) as file:
        assert file.index.meta == meta


@pytest.mark.parametrize(
    "path", ["", "/a", "a/", "a//b", "a/./b", "../a", "a/\0", "a/\n", "/".join("abcdefghi"), "x" * 2000, "\ud800"]
)
def test_a_path_that_hdf5_would_read_otherwise_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match="path"):
        write_rank_file(tmp_path, 0, {path: np.zeros(1)}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_array_and_folder_at_once_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'a' is an array and also holds 'a/b'"):
        write_rank_file(tmp_path, 0, {"a/b": np.zeros(1), "a": np.zeros(1)}, {})


@pytest.mark.parametrize(
    "array",
    [
        np.array(["text"]),
        np.array([None]),
        np.zeros(2, "datetime64[s]"),
        np.zeros(2, "f4,i4"),
        np.zeros(1, np.longdouble),
    ],
)
def test_a_dtype_that_is_no_plain_number_is_refused_by_name(tmp_path: Path, array: Array) -> None:
    with pytest.raises(ValueError, match="array 'a' has dtype"):
        write_rank_file(tmp_path, 0, {"a": array}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("meta", [{"x": math.nan}, {"x": object()}])
def test_a_meta_that_is_not_json_is_refused_and_leaves_nothing(tmp_path: Path, meta: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        write_rank_file(tmp_path, 0, {"a": np.zeros(3)}, meta)
    assert list(tmp_path.iterdir()) == []


def test_bfloat16_must_be_uint16_in_the_tree(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype float32"):
        write_rank_file(tmp_path, 0, {"a": np.zeros(1, np.float32)}, {}, {"a"})
    with pytest.raises(ValueError, match="not in the tree"):
        write_rank_file(tmp_path, 0, {"a": np.zeros(1, np.uint16)}, {}, {"b"})


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"rank-00000\.h5"):
        write_rank_file(tmp_path / "file" / "step-0000000001", 0, {"a": np.zeros(1)}, {})
