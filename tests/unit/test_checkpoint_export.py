from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from hpcpipe.checkpoint.export import export
from hpcpipe.checkpoint.sets import open_set
from hpcpipe.errors import CheckpointError
from tests.unit.checkpoint_samples import DTYPES, Array, random_array, write_set


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))])
        self.head = nn.Linear(8, 3).to(torch.bfloat16)


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = _Model()
    for buffer in model.buffers():
        buffer.add_(3)
    return model


def _trees(model: nn.Module) -> tuple[list[dict[str, Array]], list[str]]:
    """One tree a layer, as three ranks would store them; with optimizer state that an export leaves out."""
    trees: list[dict[str, Array]] = []
    bf16 = []
    for name in ("embed", "blocks.0", "head"):
        layer = model.get_submodule(name)
        tree: dict[str, Array] = {f"layers/{name}/optimizer/momentum_buffer/weight": np.ones(3, np.float32)}
        for kind, tensors in (("parameters", layer.named_parameters()), ("buffers", layer.named_buffers())):
            for key, tensor in tensors:
                path = f"layers/{name}/{kind}/{key}"
                tensor = tensor.detach()
                if tensor.dtype == torch.bfloat16:
                    bf16.append(path)
                    tensor = tensor.view(torch.uint16)
                tree[path] = tensor.numpy()
        trees.append(tree)
    return trees, bf16


def test_plain_torch_loads_the_export_into_the_model_bit_for_bit(tmp_path: Path) -> None:
    model = _model()
    trees, bf16 = _trees(model)
    assert export(open_set(write_set(tmp_path, 9, trees, {}, bf16)), tmp_path / "m.safetensors") == 10

    state = load_file(tmp_path / "m.safetensors")
    assert state["head.weight"].dtype == torch.bfloat16
    fresh = _model()
    for tensor in fresh.state_dict().values():
        tensor.zero_()
    fresh.load_state_dict(state, strict=True)
    for key, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[key], tensor)
    with safe_open(tmp_path / "m.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt", "step": "9"}


def test_every_dtype_that_safetensors_has_is_exported_as_itself(tmp_path: Path) -> None:
    shapes = [(), (3,), (0, 2), (2, 3)]
    tree = {
        f"layers/{dtype}/parameters/{i}": random_array(shape, dtype, i)
        for dtype in DTYPES
        if dtype != "complex128"
        for i, shape in enumerate(shapes)
    }
    export(open_set(write_set(tmp_path, 1, [tree])), tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", framework="np") as file:
        assert len(file.keys()) == len(tree)
        for path, array in tree.items():
            _, layer, _, name = path.split("/")
            found = file.get_tensor(f"{layer}.{name}")
            assert found.dtype == array.dtype
            assert found.shape == array.shape
            assert found.tobytes() == array.tobytes()


def test_what_cannot_be_exported_is_said_before_a_file_appears(tmp_path: Path) -> None:
    wide = write_set(tmp_path, 1, [{"layers/a/parameters/w": np.zeros(2, np.complex128)}])
    twice = write_set(
        tmp_path, 2, [{"layers/a/parameters/b.w": np.zeros(2), "layers/a.b/parameters/w": np.zeros(2)}]
    )
    for directory, why in ((wide, "complex128, which safetensors cannot hold"), (twice, "two tensors .* 'a.b.w'")):
        with pytest.raises(CheckpointError, match=why):
            export(open_set(directory), tmp_path / "m.safetensors")
    assert not list(tmp_path.glob("m.safetensors*"))


def test_a_damaged_set_leaves_the_older_export_alone(tmp_path: Path) -> None:
    directory = write_set(tmp_path, 1, [{"layers/a/parameters/w": np.ones(2)}])
    output = tmp_path / "m.safetensors"
    export(open_set(directory), output)
    before = output.read_bytes()
    data = bytearray((directory / "rank-00000.h5").read_bytes())
    data[40] ^= 1
    (directory / "rank-00000.h5").write_bytes(data)
    with pytest.raises(CheckpointError):
        export(open_set(directory), output)
    assert output.read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))
