from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcpipe.config import DataConfig, DigitsData, SyntheticData, TextData, UserData
from hpcpipe.datasets import digits
from hpcpipe.datasets.build import build_dataset
from hpcpipe.datasets.protocol import DataDescription, Dataset
from hpcpipe.errors import DataError

CONFIGS: dict[str, DataConfig] = {
    "digits": DigitsData(name="digits", batch=100),
    "text": TextData(name="text", path=__file__, sequence=16, batch=7),
    "synthetic": SyntheticData(name="synthetic", shape=(3, 4), rows=50, eval_data_rows=9, batch=8),
    "tokens": SyntheticData(name="synthetic", shape=(6,), vocab=11, rows=50, eval_data_rows=9, batch=8),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_data_set_keeps_the_protocol(name: str) -> None:
    data = build_dataset(CONFIGS[name], 0)
    assert isinstance(data, Dataset)
    description = data.describe()

    for j in (0, data.minibatches_per_epoch - 1, data.minibatches_per_epoch):
        inputs, targets = data.inputs(j), data.targets(j)
        assert inputs[0].shape == (data.rows(j), *description.input_shape)
        assert targets.shape[0] == data.rows(j)
        assert description.classes is not None
        assert 0 <= int(targets.min()) <= int(targets.max()) < description.classes
    for i in range(data.eval_batches):
        assert data.eval_inputs(i)[0].shape == (data.eval_rows(i), *description.input_shape)
        assert data.eval_targets(i).shape[0] == data.eval_rows(i)


@pytest.mark.parametrize("name", CONFIGS)
def test_minibatches_are_the_same_in_another_object_and_in_any_order(name: str) -> None:
    one, other = build_dataset(CONFIGS[name], 5), build_dataset(CONFIGS[name], 5)
    last = one.minibatches_per_epoch

    expected = [(one.inputs(j)[0], one.targets(j)) for j in (0, 1, last)]

    for j, (inputs, targets) in reversed(list(zip((0, 1, last), expected, strict=True))):
        assert torch.equal(other.targets(j), targets)
        assert torch.equal(other.inputs(j)[0], inputs)


def test_digits_are_those_of_scikit_learn() -> None:
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    expected = sklearn_datasets.load_digits()

    pixels, labels = digits.read_digits()

    assert np.array_equal(pixels, expected.data)
    assert np.array_equal(labels, expected.target)


def test_digits_have_about_zero_mean_and_a_test_set_that_no_seed_moves() -> None:
    one, other = build_dataset(CONFIGS["digits"], 0), build_dataset(CONFIGS["digits"], 1)
    rows = torch.cat([one.inputs(j)[0] for j in range(one.minibatches_per_epoch)])

    assert abs(rows.mean().item()) < 0.02
    assert abs(rows.std().item() - 1) < 0.02
    assert (rows.shape[0], sum(one.eval_rows(i) for i in range(one.eval_batches))) == (1438, 359)
    assert torch.equal(one.eval_inputs(0)[0], other.eval_inputs(0)[0])
    assert not torch.equal(one.targets(0), other.targets(0))


def test_digits_can_be_images() -> None:
    data = build_dataset(DigitsData(name="digits", flat=False, shuffle=False), 0)
    flat = build_dataset(DigitsData(name="digits", shuffle=False), 0)

    assert data.describe().input_shape == (1, 8, 8)
    assert torch.equal(data.inputs(0)[0].flatten(1), flat.inputs(0)[0])


def test_digits_without_scikit_learn_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(DataError, match="install it with: pip install scikit-learn"):
        build_dataset(CONFIGS["digits"], 0)


def text(path: Path, **options: Any) -> Dataset:
    return build_dataset(TextData.model_validate({"name": "text", "path": str(path), **options}), 0)


def test_targets_of_a_text_are_one_byte_further(tmp_path: Path) -> None:
    content = bytes(range(200))
    (tmp_path / "text").write_bytes(content)

    data = text(tmp_path / "text", sequence=10, batch=4, eval_fraction=0.1, shuffle=False)

    assert data.inputs(0)[0].tolist() == [list(range(start, start + 10)) for start in (0, 10, 20, 30)]
    assert data.targets(0).tolist() == [list(range(start + 1, start + 11)) for start in (0, 10, 20, 30)]
    assert data.inputs(0)[0].dtype == torch.int64
    # 180 bytes to train on hold 17 sequences with a byte after each; the last 20 are held out.
    assert (data.minibatches_per_epoch, data.rows(4)) == (5, 1)
    assert data.eval_inputs(0)[0].tolist() == [list(range(180, 190))]
    assert data.describe() == DataDescription(input_shape=(10,), classes=256, tokens=True)


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    for name, content in (
        ("b.txt", b"22"),
        ("a/z.txt", b"11"),
        ("c.md", b"??"),
        (".hidden", b"!!"),
        ("d.txt", b"33"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)

    data = text(tmp_path, pattern="*.txt", sequence=5, eval_fraction=0.01)

    assert bytes(data.inputs(0)[0][0].tolist()) == b"11223"
    assert bytes(data.targets(0)[0].tolist()) == b"12233"


def test_only_the_first_bytes_of_a_text_are_used_if_limited(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(name.encode() * 10)

    data = text(tmp_path, limit=15, sequence=14, eval_fraction=0.01)

    assert bytes(data.targets(0)[0].tolist()) == b"a" * 9 + b"b" * 5


def test_the_default_corpus_is_the_standard_librarys_source() -> None:
    data = build_dataset(TextData(name="text", sequence=1000, batch=1, shuffle=False), 0)

    # 5 % of some 13 MB are held out.
    assert 5_000 < data.minibatches_per_epoch < 20_000
    assert b"__future__" in b"".join(bytes(data.inputs(j)[0][0].tolist()) for j in range(20))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"sequence": 100},
            r"text: 100 bytes, 90 of them to train on, are too short for one sequence of 100 bytes",
        ),
        ({"sequence": 90}, "too short for one sequence of 90 bytes and the byte after it"),
        ({"sequence": 9, "batch": 64, "drop_last": True}, "9 training rows make no minibatch of 64 rows"),
    ],
)
def test_a_text_that_is_too_short_is_one_line(tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    (tmp_path / "text").write_bytes(b"x" * 100)

    with pytest.raises(DataError, match=expected):
        text(tmp_path / "text", eval_fraction=0.1, **options)


def test_a_text_too_short_to_hold_any_out_has_no_evaluation_batch(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"x" * 100)

    assert text(tmp_path / "text", sequence=20, eval_fraction=0.1).eval_batches == 0


def test_a_text_that_is_not_there_or_has_no_files_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.path: .*nowhere: No such file or directory; name a text file"):
        text(tmp_path / "nowhere")
    with pytest.raises(
        DataError, match=r"data.path: .*no file matches '\*.txt'; check data.path and data.pattern"
    ):
        text(tmp_path, pattern="*.txt")


def test_a_text_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * 100)
    data = text(path, sequence=10)
    path.write_bytes(b"x" * 99)

    with pytest.raises(DataError, match="had 100 bytes at the start of the run and now has 99"):
        data.inputs(0)


def test_random_rows_repeat_when_they_would_take_too_much_memory() -> None:
    data = build_dataset(
        SyntheticData(name="synthetic", shape=(2048, 1024), rows=100_000, batch=3, shuffle=False), 0
    )

    assert data.minibatches_per_epoch == 33334
    assert torch.equal(data.inputs(0)[0][0], data.inputs(0)[0][2])


SOURCE = """
import random
import torch

class Rows:
    classes = ["cat", "dog"]
    def __init__(self, count, width=3):
        self.count, self.width = count, width
    def __len__(self):
        return self.count
    def __getitem__(self, place):
        return torch.full((self.width,), float(place)), place % 2

class Augmented(Rows):
    def __getitem__(self, place):
        return torch.rand(2) + random.random(), random.randrange(1000)

class Pairs(Rows):
    def __getitem__(self, place):
        return float(place), [place, place], place

class Ragged(Rows):
    def __getitem__(self, place):
        return torch.zeros(place + 1), 0

class Bare(Rows):
    def __getitem__(self, place):
        return torch.zeros(3)

class Own:
    minibatches_per_epoch = 2
    eval_batches = 0
    def __init__(self, seed, batch): self.seed, self.batch = seed, batch
    def epoch(self, j): return j // 2
    def rows(self, j): return self.batch
    def inputs(self, j): return (torch.full((self.batch, 1), float(self.seed)),)
    def targets(self, j): return torch.zeros(self.batch, 1)
    def eval_rows(self, i): return 0
    def eval_inputs(self, i): return ()
    def eval_targets(self, i): return torch.zeros(0)
    def describe(self): return None

class Partial:
    def inputs(self, j): return ()
    def targets(self, j): return ()

def pair(width): return Rows(10, width), Rows(4, width)
def number(): return 3
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Dataset]]:
    """Builds the data set of a builder in the working directory."""
    (tmp_path / "userdata.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])

    def build(builder: str, *, seed: int = 0, **options: Any) -> Dataset:
        return build_dataset(UserData.model_validate({"name": f"userdata:{builder}", **options}), seed)

    yield build
    sys.modules.pop("userdata", None)


def test_a_map_style_data_set_is_stacked_and_its_end_held_out(user: Callable[..., Dataset]) -> None:
    data = user("Rows", count=10, batch=4, shuffle=False, eval_fraction=0.2)

    assert data.inputs(1)[0].tolist() == [[4.0] * 3, [5.0] * 3, [6.0] * 3, [7.0] * 3]
    assert data.targets(1).tolist() == [0, 1, 0, 1]
    assert data.eval_inputs(0)[0][:, 0].tolist() == [8.0, 9.0]
    assert data.describe() == DataDescription(input_shape=(3,), classes=2)


def test_a_pair_is_training_and_evaluation_data(user: Callable[..., Dataset]) -> None:
    data = user("pair", width=2, batch=4)

    assert (data.minibatches_per_epoch, data.eval_batches) == (3, 1)
    assert data.eval_inputs(0)[0].shape == (4, 2)


def test_rows_may_have_several_inputs(user: Callable[..., Dataset]) -> None:
    data = user("Pairs", count=4, batch=2, shuffle=False)

    first, second = data.inputs(0)

    assert first.tolist() == [0.0, 1.0]
    assert first.dtype == torch.float32
    assert second.tolist() == [[0, 0], [1, 1]]
    assert data.targets(0).tolist() == [0, 1]


def test_random_augmentation_is_a_function_of_seed_epoch_and_minibatch(user: Callable[..., Dataset]) -> None:
    data, other = user("Augmented", count=8, batch=4), user("Augmented", count=8, batch=4)
    other.targets(3)

    for j in range(4):
        assert torch.equal(data.inputs(j)[0], other.inputs(j)[0])
        assert torch.equal(data.targets(j), other.targets(j))
    assert not torch.equal(data.inputs(0)[0], data.inputs(2)[0])
    assert not torch.equal(data.inputs(0)[0], user("Augmented", seed=1, count=8, batch=4).inputs(0)[0])


def test_an_object_with_the_protocol_is_used_as_it_is(user: Callable[..., Dataset]) -> None:
    data = user("Own", seed=7, batch=3)

    assert data.inputs(0)[0].tolist() == [[7.0]] * 3


@pytest.mark.parametrize(
    ("builder", "options", "expected"),
    [
        ("Row", {}, "has no 'Row'; did you mean \"Rows\""),
        ("Rows", {"cuont": 3}, 'data.cuont: no such argument; did you mean "count"'),
        ("Rows", {}, "data.count: userdata:Rows needs it; add count = ... to"),
        ("Rows", {"count": 0}, "0 training rows make no minibatch"),
        ("number", {}, "userdata:number returned int; it must return a map-style data set"),
        ("Partial", {}, "returned a Partial without minibatches_per_epoch, eval_batches"),
        ("Bare", {"count": 8}, "row 0 is a Tensor; each must be (input, ..., target)"),
    ],
)
def test_data_that_cannot_be_used_are_one_line(
    user: Callable[..., Dataset], builder: str, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(DataError) as caught:
        user(builder, **options)

    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_of_different_shapes_are_named(user: Callable[..., Dataset]) -> None:
    with pytest.raises(DataError, match=r"input 0 of one minibatch differ in shape, \[\(1,\), \(2,\)\]"):
        user("Ragged", count=8, batch=2, shuffle=False).inputs(0)
