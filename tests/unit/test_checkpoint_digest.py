from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.checkpoint.digest import Digest, digest
from hpcpipe.checkpoint.sets import open_set
from tests.unit.checkpoint_samples import layer_tree, write_set

_LAYERS = [f"l{i}" for i in range(5)]


def _digest_of_split(owners: list[int], step: int = 7) -> Digest:
    """Digest of the same five layers spread over ranks, with in-flight material that only such a plan has."""
    with tempfile.TemporaryDirectory() as root:
        ranks = sorted(set(owners))
        trees = []
        for number, rank in enumerate(ranks):
            tree = layer_tree([layer for layer, owner in zip(_LAYERS, owners, strict=True) if owner == rank])
            tree[f"stages/{number}/inflight/8/inputs/0"] = np.full(3, number)
            tree[f"layers/{_LAYERS[0]}/buffers_next/running_mean"] = np.full(3, number)
            trees.append(tree)
        return digest(open_set(write_set(Path(root), step, trees, {"ranks": len(ranks)})))


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=5, max_size=5))
def test_the_digest_does_not_depend_on_how_layers_are_spread(owners: list[int]) -> None:
    assert _digest_of_split(owners) == _digest_of_split([0] * 5)


def test_the_digest_of_a_tensor_is_the_sha256_of_its_bytes(tmp_path: Path) -> None:
    tree = layer_tree(["a"])
    found = digest(open_set(write_set(tmp_path, 1, [tree])))
    assert found.tensors == {path: hashlib.sha256(array.tobytes()).hexdigest() for path, array in tree.items()}
    assert list(found.tensors) == sorted(found.tensors)


@pytest.mark.parametrize("path", sorted(layer_tree(["a"])))
def test_one_bit_of_any_weight_buffer_or_optimizer_state_changes_the_digest(tmp_path: Path, path: str) -> None:
    tree = layer_tree(["a"])
    before = digest(open_set(write_set(tmp_path, 1, [tree])))
    changed = tree[path].copy()
    changed.reshape(-1).view(np.uint8)[0] ^= 1
    after = digest(open_set(write_set(tmp_path / "b", 1, [tree | {path: changed}])))
    assert {p for p in tree if before.tensors[p] != after.tensors[p]} == {path}
    assert before.overall != after.overall


def test_step_shape_and_dtype_count_even_where_the_bytes_are_equal(tmp_path: Path) -> None:
    path = "layers/a/parameters/w"
    variants = [
        (1, np.zeros((2, 4), np.float32)),
        (2, np.zeros((2, 4), np.float32)),
        (1, np.zeros((4, 2), np.float32)),
        (1, np.zeros((2, 4), np.int32)),
    ]
    overall = {
        digest(open_set(write_set(tmp_path / str(i), step, [{path: array}]))).overall
        for i, (step, array) in enumerate(variants)
    }
    assert len(overall) == len(variants)
