"""Forward and backward on different weights, against an explicit swap of the weights between the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpipe.engine.passes import Passes
from tests.oracle.nets import Convolution, Fork, InPlace, Residual, Through, Tied
from tests.unit.engine_cases import other_weights, seeded, stage_of, store_of, two_sided


class First(nn.Module):
    """The first of what a module returns."""

    def __init__(self, module: nn.Module, repeat: int = 1) -> None:
        super().__init__()
        self.module = module
        self.repeat = repeat

    def forward(self, x: Tensor) -> Tensor:
        return self.module(*([x] * self.repeat))[0]


class Twice(nn.Module):
    """One layer used twice, a bare parameter, and a weight that is transposed, sliced and viewed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(torch.tanh(self.linear(x)))
        x = x @ self.linear.weight.t()[:, :4]
        return x * self.scale[2:10:2] + functional.linear(x, self.scale.view(3, 4)).sum(dim=1, keepdim=True)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 5), (4, 6)),
    "linear without bias": (lambda: nn.Linear(6, 5, bias=False), (4, 6)),
    "bilinear": (lambda: Pair(nn.Bilinear(6, 6, 3)), (4, 6)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), (2, 3, 7)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, padding=1), (2, 3, 6, 6)),
    "conv2d with stride, dilation, groups": (
        lambda: nn.Conv2d(4, 6, 3, stride=2, dilation=2, groups=2),
        (2, 4, 9, 9),
    ),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), (2, 3, 4, 4)),
    "lstm": (lambda: First(nn.LSTM(5, 6, num_layers=2, batch_first=True)), (3, 4, 5)),
    "bidirectional lstm": (lambda: First(nn.LSTM(5, 6, bidirectional=True)), (3, 4, 5)),
    "gru": (lambda: First(nn.GRU(5, 6, num_layers=2, dropout=0.2)), (3, 4, 5)),
    "rnn": (lambda: First(nn.RNN(5, 6)), (3, 4, 5)),
    "multihead attention": (lambda: First(nn.MultiheadAttention(8, 2, batch_first=True), 3), (3, 5, 8)),
    "transformer encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        (3, 5, 8),
    ),
    "batchnorm": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 5)),
    "layernorm": (lambda: nn.LayerNorm(6), (4, 6)),
    "groupnorm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5)),
    "rmsnorm": (lambda: nn.RMSNorm(6), (4, 6)),
    "prelu": (lambda: nn.PReLU(6), (4, 6)),
    "conv, batchnorm, relu in place, dropout": (lambda: Convolution(3, 4, 1, 0.3), (4, 3, 5, 5)),
    "residual added in place": (lambda: Residual(3), (4, 3, 5, 5)),
    "relu in place first": (lambda: InPlace(6), (4, 6)),
    "tied within": (lambda: Tied(6), (4, 6)),
    "one weight in several forms": (Twice, (4, 6)),
    "several outputs": (lambda: Fork(8, 6), (4, 8)),
}


class Pair(nn.Module):
    """A module of two inputs given the same one twice."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x, torch.tanh(x))


def assert_equal(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert torch.equal(ours, theirs)
            assert ours.abs().sum() > 0


@pytest.mark.parametrize("name", MODULES)
def test_gradients_equal_an_explicit_swap_of_the_weights(name: str) -> None:
    build, shape = MODULES[name]
    inputs = torch.randn(*shape, generator=torch.Generator().manual_seed(7)).requires_grad_()

    found, expected = two_sided(stage_of(seeded(build)), [inputs])

    assert_equal(found, expected)


@pytest.mark.parametrize("sparse_use", [True, False])
def test_an_embedding_of_integers_equals_an_explicit_swap(sparse_use: bool) -> None:
    tokens = torch.tensor([[1, 2, 2, 5], [0, 0, 1, 1]]) if sparse_use else torch.arange(12).view(2, 6)
    embed = seeded(lambda: nn.Sequential(nn.Embedding(12, 6, padding_idx=0), nn.Linear(6, 4)))

    found, expected = two_sided(stage_of(embed), [tokens])

    assert found[0] is None
    assert_equal(found[1:], expected[1:])


def test_several_inputs_of_several_dtypes_equal_an_explicit_swap() -> None:
    stage = stage_of(seeded(lambda: Through(6)))
    random = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(4, 6, generator=random).requires_grad_(),
        torch.randn(4, 6, generator=random) > 0,
        torch.arange(6).expand(4, -1),
        torch.randn(4, 1, generator=random),
        torch.randn(3, 4, generator=random).requires_grad_(),
    ]

    found, expected = two_sided(stage, inputs)

    assert [gradient is None for gradient in found[:5]] == [False, True, True, True, False]
    assert_equal(found, expected)


def test_frozen_parameters_keep_their_values_in_both_passes() -> None:
    frozen = nn.Linear(6, 6).requires_grad_(False)
    stage = stage_of(seeded(lambda: nn.Sequential(nn.Linear(6, 6), frozen, nn.Linear(6, 4))))
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(7)).requires_grad_()

    found, expected = two_sided(stage, [inputs])

    assert len(found) == 5
    assert_equal(found, expected)


def test_empty_tensors_saved_by_a_stage_without_parameters_stay_what_they_are() -> None:
    class Picks(nn.Module):
        def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
            return x * 2, x.index_select(1, index) * x[:, :0]

    stage = stage_of(Picks())
    store = store_of(stage)
    passes = Passes(stage, keep_derived=False)
    x = torch.randn(3, 4, requires_grad=True)

    done = passes.forward(
        0, 0, (x, torch.zeros(0, dtype=torch.int64)), store.versions[0], substitute=True, head=None
    )
    of_inputs, of_weights = passes.backward(done, other_weights(store), [torch.ones(3, 4), torch.ones(3, 0)])

    assert of_weights == ()
    assert of_inputs[0] is not None
    assert torch.equal(of_inputs[0], torch.full((3, 4), 2.0))


@pytest.mark.parametrize("substitute", [False, True])
def test_a_saved_tensor_that_is_changed_in_place_raises(substitute: bool) -> None:
    class Careless(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.exp(x)
            y.add_(1.0)
            return y

    stage = stage_of(nn.Linear(4, 4), Careless())
    store = store_of(stage)
    passes = Passes(stage, keep_derived=False)
    done = passes.forward(0, 0, (torch.randn(2, 4),), store.versions[0], substitute=substitute, head=None)

    with pytest.raises(RuntimeError, match=r"in place|inplace"):
        passes.backward(done, other_weights(store) if substitute else store.versions[0], [torch.ones(2, 4)])


def test_a_received_leaf_is_left_as_it_was_by_a_layer_that_works_in_place() -> None:
    stage = stage_of(nn.ReLU(inplace=True), nn.Linear(4, 4))
    store = store_of(stage)
    passes = Passes(stage, keep_derived=False)
    received = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))

    for _ in range(3):
        leaf = received.clone().requires_grad_()
        done = passes.forward(0, 0, (leaf,), store.versions[0], substitute=False, head=None)
        (gradient,), _ = passes.backward(done, store.versions[0], [torch.ones(3, 4)])
        assert torch.equal(leaf, received)
        assert gradient is not None
        assert torch.equal(gradient == 0, received <= 0)


def test_backward_on_one_set_of_weights_equals_backward_on_the_other_where_they_are_equal() -> None:
    stage = stage_of(seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))))
    store = store_of(stage)
    same = other_weights(store)
    same.flat.copy_(store.versions[0].flat)
    passes = Passes(stage, keep_derived=False)
    x = torch.randn(4, 6, requires_grad=True)

    results = []
    for weights, substitute in ((same, True), (store.versions[0], False)):
        done = passes.forward(1, 0, (x,), store.versions[0], substitute=substitute, head=None)
        of_inputs, of_weights = passes.backward(done, weights, [torch.ones(4, 3)])
        results.append([*of_inputs, *of_weights])

    assert_equal(*results)
