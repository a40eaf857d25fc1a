from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hpcpipe.config import IdxData
from hpcpipe.datasets import idx
from hpcpipe.datasets.build import build_dataset
from hpcpipe.datasets.protocol import DataDescription, Dataset
from hpcpipe.errors import DataError

TRAIN, TEST = 10, 4


def encoded(values: NDArray[np.uint8]) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes()


def images(count: int) -> NDArray[np.uint8]:
    return np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)


@pytest.fixture(params=["", ".gz"], ids=["plain", "gzipped"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    for part, count in (("train", TRAIN), ("t10k", TEST)):
        labels = np.arange(count, dtype=np.uint8) % 3
        for name, values in ((f"{part}-images-idx3-ubyte", images(count)), (f"{part}-labels-idx1-ubyte", labels)):
            content = encoded(values)
            (tmp_path / f"{name}{request.param}").write_bytes(gzip.compress(content) if request.param else content)
    return tmp_path


def load(path: Path, **options: Any) -> Dataset:
    return build_dataset(IdxData.model_validate({"name": "idx", "path": str(path), **options}), 0)


def test_images_are_normalised_by_the_training_images(folder: Path) -> None:
    data = load(folder, batch=TRAIN, shuffle=False)
    pixels = images(TRAIN) / 255.0

    rows, held = data.inputs(0)[0], data.eval_inputs(0)[0]

    assert data.describe() == DataDescription(input_shape=(1, 28, 28), classes=3)
    expected = torch.from_numpy((pixels - pixels.mean()) / pixels.std()).float()
    torch.testing.assert_close(rows[:, 0], expected)
    expected = torch.from_numpy((images(TEST) / 255.0 - pixels.mean()) / pixels.std()).float()
    torch.testing.assert_close(held[:, 0], expected)
    assert data.targets(0).tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert data.targets(0).dtype == torch.int64


def test_padding_is_black_and_counts_in_the_mean(folder: Path) -> None:
    rows = load(folder, batch=TRAIN, size=32).inputs(0)[0]

    assert rows.shape == (TRAIN, 1, 32, 32)
    border = rows.clone()
    border[:, :, 2:30, 2:30] = rows[0, 0, 0, 0]
    assert torch.equal(border, torch.full_like(border, rows[0, 0, 0, 0].item()))
    assert abs(rows.mean().item()) < 1e-5
    assert abs(rows.std(correction=0).item() - 1) < 1e-5


def test_grey_images_are_repeated_in_every_channel(folder: Path) -> None:
    data = load(folder, channels=3)
    rows = data.inputs(0)[0]

    assert data.describe().input_shape == (3, 28, 28)
    assert torch.equal(rows[:, 0], rows[:, 2])


def test_only_the_first_images_are_used_if_limited(folder: Path) -> None:
    data = load(folder, limit=5, eval_limit=3, batch=4, shuffle=False)

    assert (data.minibatches_per_epoch, data.rows(1), data.eval_rows(0)) == (2, 1, 3)
    pixels = images(TRAIN)[:5] / 255.0
    torch.testing.assert_close(
        data.inputs(1)[0][0, 0], torch.from_numpy((pixels[4] - pixels.mean()) / pixels.std()).float()
    )


def test_labels_are_read_without_the_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    original = idx.read_idx
    monkeypatch.setattr(idx, "read_idx", lambda path: (read.append(path.name), original(path))[1])

    data = load(folder)
    data.targets(0)
    data.eval_targets(0)

    assert all("labels" in name for name in read)


def test_a_missing_folder_is_one_line_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"data.path: .*nowhere: no such folder; set data.path to a folder"):
        load(tmp_path / "nowhere")
    monkeypatch.setattr(idx, "DEBIAN_FOLDER", tmp_path / "absent")
    with pytest.raises(DataError, match=r"install the Debian package dataset-fashion-mnist, or set data.path"):
        build_dataset(IdxData(name="idx"), 0)


def test_a_missing_file_is_named(folder: Path) -> None:
    next(folder.glob("t10k-labels*")).unlink()

    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte: no such file, plain or .gz"):
        load(folder)


def damage(folder: Path, part: str, content: bytes) -> None:
    (path,) = folder.glob(f"{part}*")
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize(
    ("part", "content", "expected"),
    [
        ("train-labels", b"no idx file", "is no IDX file of bytes"),
        ("train-labels", b"", "is no IDX file of bytes"),
        ("train-labels", bytes([0, 0, 13, 1, 0, 0, 0, 0]), "is no IDX file of bytes"),
        ("train-labels", bytes([0, 0, 8, 1, 0]), "ends within its header"),
        ("train-labels", encoded(np.zeros(10, np.uint8))[:-1], "holds 9 bytes of data, but its header says 10"),
        ("train-labels", encoded(np.zeros(9, np.uint8)), "has 10 images, .* 9 labels"),
        ("train-labels", encoded(np.zeros((10, 1), np.uint8)), "have 3 and 2 dimensions, not 3 and 1"),
        (
            "t10k-images",
            encoded(np.zeros((4, 8, 8), np.uint8)),
            r"training images are \(28, 28\), test images \(8, 8\)",
        ),
    ],
)
def test_a_damaged_or_unfitting_file_is_one_line(folder: Path, part: str, content: bytes, expected: str) -> None:
    damage(folder, part, content)

    with pytest.raises(DataError, match=expected) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_images_cut_short_are_noticed_when_they_are_read(folder: Path) -> None:
    damage(folder, "train-images", encoded(images(TRAIN))[:-1])
    data = load(folder)

    with pytest.raises(DataError, match="its header says 7840; fetch it again"):
        data.inputs(0)


def test_a_truncated_gzip_file_is_one_line(folder: Path) -> None:
    (path,) = folder.glob("train-labels*")
    path.write_bytes(path.read_bytes()[:-9])

    with pytest.raises(DataError, match="fetch it again"):
        load(folder)


def test_a_header_that_promises_the_impossible_gets_no_memory(tmp_path: Path) -> None:
    header = b"\0\0\x08\x03" + b"\xff" * 12
    for name, content in (("x", header + b"few"), ("x.gz", gzip.compress(header + b"few"))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"holds 3 bytes of data, but its header says {(2**32 - 1) ** 3}"):
            idx.read_idx(tmp_path / name)
    (tmp_path / "x").write_bytes(b"\0\0\x08\xff" + bytes(4 * 255))
    with pytest.raises(DataError, match="has 255 dimensions"):
        idx.read_idx(tmp_path / "x")


def test_what_unpacks_to_more_than_its_header_says_is_not_unpacked_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\x05" + bytes(50 << 20)))
    with pytest.raises(DataError, match="holds more than 5 bytes of data, but its header says 5"):
        idx.read_idx(tmp_path / "x.gz")


def test_a_size_that_the_images_do_not_fit_in_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"data.size: is 20, but the images are 28 by 28"):
        load(folder, size=20)
