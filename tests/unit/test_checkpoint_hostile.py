"""Files that hpcpipe did not write so, each in a set whose lengths and checksums are all right."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from h5py import h5d, h5o, h5p, h5s, h5t

from hpcpipe.checkpoint.layout import Index, rank_name
from hpcpipe.checkpoint.record import read_record
from hpcpipe.checkpoint.sets import newest_valid, open_set
from hpcpipe.errors import CheckpointError
from tests.unit.checkpoint_samples import another_hdf5, layer_tree, recommit, write_set

WEIGHT = "tree/layers/a/parameters/weight"
SHAPE = (6, 2)
CRC = "00000000"


def _contiguous(file: h5py.File, name: str, shape: tuple[int, ...], *, early: bool = True) -> h5py.Dataset:
    plist = h5p.create(h5p.DATASET_CREATE)
    plist.set_layout(h5d.CONTIGUOUS)
    plist.set_alloc_time(h5d.ALLOC_TIME_EARLY if early else h5d.ALLOC_TIME_LATE)
    dataset = h5d.create(file.id, name.encode(), h5t.IEEE_F32LE, h5s.create_simple(shape), plist)
    return h5py.Dataset(dataset)


def _external_link(file: h5py.File) -> None:
    file[WEIGHT] = h5py.ExternalLink("/etc/hostname", "/x")


def _soft_link(file: h5py.File) -> None:
    file[WEIGHT] = h5py.SoftLink("/tree/layers/a/parameters/bias")


def _soft_link_loop(file: h5py.File) -> None:
    file[WEIGHT] = h5py.SoftLink("/" + WEIGHT)


def _hard_link_to_a_group_above(file: h5py.File) -> None:
    file[WEIGHT] = file["tree"]


def _hard_link_to_another_dataset(file: h5py.File) -> None:
    file[WEIGHT] = file["tree/layers/a/parameters/bias"]


def _virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout(SHAPE, "<f4")
    layout[:] = h5py.VirtualSource("/etc/hostname", "x", SHAPE)
    file.create_virtual_dataset(WEIGHT, layout)


def _external_storage(file: h5py.File) -> None:
    file.create_dataset(WEIGHT, SHAPE, "<f4", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)])


def _object_reference(file: h5py.File) -> None:
    file.create_dataset(WEIGHT, data=np.array([file["tree"].ref], h5py.ref_dtype))


def _region_reference(file: h5py.File) -> None:
    bias = file["tree/layers/a/parameters/bias"]
    file.create_dataset(WEIGHT, data=np.array([bias.regionref[:2]], h5py.regionref_dtype))


def _text(file: h5py.File) -> None:
    file.create_dataset(WEIGHT, data=["text"], dtype=h5py.string_dtype())


def _compound(file: h5py.File) -> None:
    file.create_dataset(WEIGHT, data=np.zeros(3, "f4,i4"))


def _big_endian(file: h5py.File) -> None:
    file.create_dataset(WEIGHT, data=np.zeros(SHAPE, ">f4"))


def _named_type(file: h5py.File) -> None:
    file[WEIGHT] = np.dtype("<f4")


def _dataset_of_a_named_type(file: h5py.File) -> None:
    file["type"] = np.dtype("<f4")
    file.create_dataset(WEIGHT, SHAPE, dtype=file["type"])
    del file["type"]


def _compressed(file: h5py.File) -> None:
    file.create_dataset(WEIGHT, data=np.zeros(SHAPE, "<f4"), compression="gzip")


def _huge_without_data(file: h5py.File) -> None:
    _contiguous(file, WEIGHT, (2**40,), early=False)


def _overflowing(file: h5py.File) -> None:
    file.create_dataset(WEIGHT, (2**31, 2**31), "<f4", chunks=(1, 1))


def _never_allocated(file: h5py.File) -> None:
    _contiguous(file, WEIGHT, SHAPE, early=False)


def _no_dataspace(file: h5py.File) -> None:
    file.create_dataset(WEIGHT, data=h5py.Empty("<f4"))


def _another_place(file: h5py.File) -> None:
    _contiguous(file, "takes the old place", SHAPE)
    _contiguous(file, WEIGHT, SHAPE)
    del file["takes the old place"]


def _another_shape(file: h5py.File) -> None:
    _contiguous(file, WEIGHT, (4,))


def _too_deep(file: h5py.File) -> None:
    file.create_group("tree/" + "/".join("abcdefghi"))


def _additional_dataset(file: h5py.File) -> None:
    _contiguous(file, "tree/b", (3,))


def _outside_the_tree(file: h5py.File) -> None:
    _contiguous(file, "b", (3,))


def _missing(file: h5py.File) -> None:
    """The weight stays deleted."""


def _no_meta(file: h5py.File) -> None:
    _contiguous(file, "keeps the file long", (2000,))
    del file["meta"]


def _dots(file: h5py.File) -> None:
    file["tree"].create_group("..")


def _with_attribute(file: h5py.File) -> None:
    _contiguous(file, WEIGHT, SHAPE)
    file[WEIGHT].attrs["dtype"] = "float32"


def _with_a_huge_attribute(file: h5py.File) -> None:
    _contiguous(file, WEIGHT, SHAPE)
    file[WEIGHT].attrs.create("dtype", np.zeros(128 << 20, np.uint8))


def _with_many_attributes(file: h5py.File) -> None:
    _contiguous(file, WEIGHT, SHAPE)
    for number in range(20):
        file[WEIGHT].attrs[f"a{number}"] = 1


def _group_with_attribute(file: h5py.File) -> None:
    _contiguous(file, WEIGHT, SHAPE)
    file["tree/layers"].attrs["x"] = 1


def _root_with_attribute(file: h5py.File) -> None:
    _contiguous(file, WEIGHT, SHAPE)
    file.attrs["x"] = 1


def _fill_value(file: h5py.File) -> None:
    plist = h5p.create(h5p.DATASET_CREATE)
    plist.set_layout(h5d.CONTIGUOUS)
    plist.set_fill_value(np.array(1.0, "<f4"))
    dataset = h5d.create(file.id, WEIGHT.encode(), h5t.IEEE_F32LE, h5s.create_simple(SHAPE), plist)
    dataset.write(h5s.ALL, h5s.ALL, np.zeros(SHAPE, "<f4"))


def _comment(file: h5py.File) -> None:
    _contiguous(file, WEIGHT, SHAPE)
    h5o.set_comment(file[WEIGHT].id, b"hello")


def _deep_chain(file: h5py.File) -> None:
    group = file["tree"]
    for _ in range(1000):
        group = group.create_group("g")


def _many_groups(file: h5py.File) -> None:
    for number in range(1000):
        file["tree"].create_group(f"{number}/g")


HOSTILE: list[tuple[Callable[[h5py.File], None], str]] = [
    (_external_link, "external link"),
    (_soft_link, "soft link"),
    (_soft_link_loop, "soft link"),
    (_hard_link_to_a_group_above, "linked more than once"),
    (_hard_link_to_another_dataset, "linked more than once"),
    (_virtual, "virtual"),
    (_external_storage, "another file"),
    (_object_reference, "references"),
    (_region_reference, "references"),
    (_text, "type that a checkpoint cannot hold"),
    (_compound, "type that a checkpoint cannot hold"),
    (_big_endian, "type that a checkpoint cannot hold"),
    (_named_type, "named type"),
    (_dataset_of_a_named_type, "type that a checkpoint cannot hold"),
    (_compressed, "chunked"),
    (_huge_without_data, "declares 4398046511104 bytes in a file of"),
    (_overflowing, "chunked"),
    (_never_allocated, "that the file does not hold"),
    (_no_dataspace, "no dataspace"),
    (_another_place, "lies at .* but the index says"),
    (_another_shape, "but the index says"),
    (_too_deep, "nested deeper than 8"),
    (_additional_dataset, "'b' is missing in the index"),
    (_outside_the_tree, "no part of a rank file"),
    (_missing, "'layers/a/parameters/weight' is missing in the file"),
    (_no_meta, "no index"),
    (_dots, "name that is not allowed"),
    (_with_attribute, "says that it holds float32|no short text"),
    (_with_a_huge_attribute, "has an attribute dtype that is no short text"),
    (_with_many_attributes, "has attributes other than dtype"),
    (_group_with_attribute, "'layers' has attributes"),
    (_root_with_attribute, "'/' has attributes"),
    (_fill_value, "has a fill value"),
    (_comment, "has a comment"),
    (_deep_chain, "nested deeper than 8"),
    (_many_groups, "is missing in the file"),
]


@pytest.mark.parametrize(("change", "why"), HOSTILE, ids=[change.__name__[1:] for change, _ in HOSTILE])
def test_a_file_with_a_foreign_object_is_refused_in_one_line(
    tmp_path: Path, change: Callable[[h5py.File], None], why: str
) -> None:
    good = write_set(tmp_path, 1, [layer_tree("a")])
    bad = write_set(tmp_path, 2, [layer_tree("a")])
    with h5py.File(bad / rank_name(0), "r+", libver="latest") as file:
        del file[WEIGHT]
        change(file)
    recommit(bad)

    chosen, (refusal,) = newest_valid(tmp_path)

    assert chosen is not None
    assert chosen.path == good
    assert re.search(why, refusal)
    assert refusal.isprintable()
    assert rank_name(0) in refusal


def test_a_link_whose_name_is_a_path_is_refused(tmp_path: Path) -> None:
    for number, name in enumerate((b"we/ght", b"..\0\0\0\0", b"\xff\xfe\xfd\xfc\xfb\xfa", b"\x1b[31mx")):
        with another_hdf5(oldest=True):
            directory = write_set(tmp_path, number, [layer_tree("a")])
        path = directory / rank_name(0)
        data = path.read_bytes()
        assert data.count(b"weight\0") > 0
        path.write_bytes(data.replace(b"weight\0", name + b"\0"))
        recommit(directory)

        with pytest.raises(CheckpointError, match="name that is not allowed") as caught:
            open_set(directory).read_rank(0)
        assert str(caught.value).isprintable()


def test_a_user_block_is_refused(tmp_path: Path) -> None:
    directory = write_set(tmp_path, 1, [layer_tree("a")])
    (report,) = read_record(directory).files
    data = (directory / rank_name(0)).read_bytes()
    (directory / rank_name(0)).write_bytes(bytes(512) + data)
    recommit(directory, index_offset=report.index_offset + 512)
    with pytest.raises(CheckpointError, match="user block"):
        open_set(directory).read_rank(0)


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "complex64"])
def test_an_attribute_that_says_another_dtype_than_the_index_is_refused(tmp_path: Path, dtype: str) -> None:
    array = np.zeros(3, "uint16" if dtype == "bfloat16" else dtype)
    for number, change in enumerate((b"float99", None)):
        directory = write_set(tmp_path, number, [{"a": array}], bf16=["a"] if dtype == "bfloat16" else [])
        with h5py.File(directory / rank_name(0), "r+") as file:
            del file["tree/a"].attrs["dtype"]
            if change is not None:
                file["tree/a"].attrs["dtype"] = np.bytes_(change)
        recommit(directory)
        with pytest.raises(
            CheckpointError, match=f"dataset 'a' says that it holds .*, but the index says {dtype}"
        ):
            open_set(directory).read_rank(0)


def test_an_untouched_recommitted_set_is_still_good(tmp_path: Path) -> None:
    directory = write_set(tmp_path, 1, [layer_tree("a")])
    recommit(directory)
    assert open_set(directory).faults() == []


@pytest.mark.parametrize(
    "content", [b"", b"text", b"\x89HDF\r\n\x1a\n" + bytes(900)], ids=["empty", "text", "torn"]
)
def test_a_committed_file_that_is_no_hdf5_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    directory = write_set(tmp_path, 1, [layer_tree("a")])
    (report,) = read_record(directory).files
    index = (directory / rank_name(0)).read_bytes()[report.index_offset :][: report.index_length]
    (directory / rank_name(0)).write_bytes(content + bytes(report.index_offset) + index + bytes(2000))
    recommit(directory, index_offset=len(content) + report.index_offset)
    with pytest.raises(CheckpointError, match="cannot be read as HDF5") as caught:
        open_set(directory).read_rank(0)
    assert "\n" not in str(caught.value)


def test_a_fifo_or_folder_in_the_place_of_a_file_does_not_stop_us(tmp_path: Path) -> None:
    directory = write_set(tmp_path, 1, [layer_tree("a")])
    found = open_set(directory)
    (directory / rank_name(0)).unlink()
    for make in (os.mkfifo, os.mkdir):
        make(directory / rank_name(0))
        with pytest.raises(CheckpointError, match="not a regular file"):
            found.read_rank(0)
        (directory / rank_name(0)).rename(directory / make.__name__)


def _index(arrays: object, **changes: object) -> bytes:
    document = {"format": "hpcpipe rank file", "version": 1, "rank": 0, "meta": {}, "arrays": arrays}
    return json.dumps(document | changes).encode()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a rank file"),
        (b'{"format": "other"}', "not a rank file"),
        (_index({}, version=2), "version"),
        (_index({}, rank=True), "rank"),
        (_index({}, meta=None), "meta"),
        (_index({"a": 1}), "not described"),
        (_index({"a": ["object", [1], 0, CRC]}), "dtype 'object'"),
        (_index({"a": [[], [1], 0, CRC]}), "dtype"),
        (_index({"a": ["float32", [-1], 0, CRC]}), "shape"),
        (_index({"a": ["float32", [1] * 33, 0, 0]}), "shape"),
        (_index({"a": ["float32", [1.5], 0, CRC]}), "shape"),
        (_index({"a": ["float32", [1], "0", CRC]}), "offset"),
        (_index({"a": ["float32", [1], 0, 5]}), "checksum"),
        (_index({"a": ["float32", [1], 0, "-0000005"]}), "checksum"),
        (_index({"a": ["float32", [2**40], 0, CRC]}), "declares 4398046511104 bytes in a file of 100"),
        (_index({"a": ["float32", [2**62, 2**62], 0, CRC]}), "declares"),
        (_index({"a": ["float32", [2], 96, CRC]}), "outside the file"),
        (_index({"a": ["float32", [20], 0, CRC], "b": ["float32", [5], 40, CRC]}), "over another"),
        (_index({"../a": ["float32", [1], 0, CRC]}), "path"),
        (_index({"/".join("abcdefghi"): ["float32", [1], 0, CRC]}), "9 parts"),
        (_index({"a": ["float32", [0, 2**62], 0, CRC]}), "shape"),
        (_index({"a": ["float32", [2**40, 2**40, 0], 0, CRC]}), "shape"),
        (_index({"a": ["complex64", [1] * 32, 0, CRC]}), "shape"),
        (_index({"a": ["int8", [1], 0, CRC], "a/b": ["int8", [1], 8, CRC]}), "is an array and also holds"),
        (_index({"a\ud800": ["int8", [1], 0, CRC]}), "not printable"),
        (_index({}, meta={"x": float("nan")}), "NaN is no number"),
        (_index({}, version="9" * 10**6), "version"),
        (_index({"a": ["x" * 10**6, [1], 0, CRC]}), "dtype"),
        (_index({"a" * 10**6: 1}), "too long"),
        (b'{"a": ' + b"9" * 400_000 + b"}", "not JSON"),
        (b'{"format": 1, "format": 2}', "stands twice"),
        (b"[" + b"[]," * 2**20 + b"[]]", "objects and lists"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "nested too deeply"),
    ],
)
def test_an_index_that_claims_the_impossible_is_refused_before_anything_is_allocated(
    data: bytes, why: str
) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        Index.decode(data, length=100)
    assert len(str(caught.value)) < 500


def test_a_file_of_too_many_arrays_is_refused_before_they_are_laid_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcpipe.checkpoint.layout.MAX_OBJECTS", 8)
    with pytest.raises(ValueError, match="more than the 8 allowed"):
        write_set(tmp_path, 1, [layer_tree("a")])
    with pytest.raises(ValueError, match="4 arrays in 5 folders are more than the 8 allowed"):
        Index.decode(_index({f"a/b/c/d/e/{i}": ["int8", [0], 0, CRC] for i in range(4)}), length=100)


def test_an_index_longer_than_one_can_be_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_set(tmp_path, 1, [layer_tree("a")])
    monkeypatch.setattr("hpcpipe.checkpoint.reader.MAX_INDEX_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"its index of \d+ bytes is longer than one can be"):
        open_set(directory).read_rank(0)


def test_arrays_beyond_all_memory_are_refused_before_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_set(tmp_path, 1, [layer_tree("a")])
    found = open_set(directory)
    monkeypatch.setattr(os, "sysconf", lambda name: 10)
    with pytest.raises(CheckpointError, match="more than this machine has memory for"):
        found.read_paths(lambda path: True, [0])
