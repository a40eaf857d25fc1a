"""Layers that let autograd save something made of their weights: found, named, then refused or let through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpipe.engine.passes import Passes
from hpcpipe.errors import ModelError
from tests.oracle.cases import ROWS, case
from tests.oracle.nets import DERIVED
from tests.oracle.replay import replay
from tests.oracle.runs import assert_same, configured, failure_of, run_alone
from tests.unit.engine_cases import seeded, stage_of, store_of, two_sided


class Padded(nn.Module):
    """A table with a row of zeros put before it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([torch.zeros(1, 6), self.table])


class Assembled(nn.Module):
    """Two blocks written into a matrix of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(3, 3))
        self.two = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.zeros(6, 6)
        whole[:3, :3] = self.one
        whole[3:, 3:] = self.two
        return x @ whole


class DropConnect(nn.Module):
    """Dropout of weights instead of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ functional.dropout(self.weight, 0.5)


class Places(nn.Module):
    """A table of places, added in place to by what comes in: an activation, if ever there was one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        out = self.table(torch.arange(4))
        out += x
        return torch.tanh(out) * out.exp()


FOUND = {
    "instancenorm": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True)),
    "padding": Padded,
    "assembly": Assembled,
    "dropconnect": DropConnect,
}


def first_forward(layer: nn.Module, *, keep_derived: bool) -> Passes:
    stage = stage_of(nn.Linear(6, 6), layer)
    passes = Passes(stage, keep_derived=keep_derived)
    x = torch.randn(4, 6, requires_grad=True)
    passes.forward(0, 0, (x,), store_of(stage).versions[0], substitute=True, head=None)
    return passes


@pytest.mark.parametrize("name", FOUND)
def test_what_is_made_of_weights_alone_is_found_and_named(name: str) -> None:
    with pytest.raises(
        ModelError, match=r"layer 'layer1' keeps a tensor computed from its weights alone \(aten\."
    ):
        first_forward(seeded(FOUND[name]), keep_derived=False)


def test_the_remedies_are_named() -> None:
    with pytest.raises(ModelError, match=r'pipeline\.policy = "stash".*pipeline\.derived = "keep_forward"'):
        first_forward(seeded(Padded), keep_derived=False)


def test_a_layer_that_is_let_through_leaves_a_notice() -> None:
    notice, *_ = first_forward(seeded(DropConnect), keep_derived=True).notices
    assert "layer 'layer1'" in notice
    assert "the forward's values" in notice


@pytest.mark.parametrize(
    "layer", [Places, lambda: nn.GRU(6, 6), lambda: nn.RNN(6, 6)], ids=["places", "gru", "rnn"]
)
def test_activations_are_not_taken_for_weights(layer: type[nn.Module]) -> None:
    assert first_forward(seeded(layer), keep_derived=False).notices == []


class KeepsAside(torch.autograd.Function):
    """A product that keeps its weight where no hook sees it, or where hooks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, save: bool) -> Tensor:
        ctx.save_for_backward(x, weight) if save else ctx.save_for_backward(x)
        ctx.weight = None if save else weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, *saved = ctx.saved_tensors
        weight = saved[0] if saved else ctx.weight
        return gradient @ weight.t(), x.t() @ gradient, None


class Custom(nn.Module):
    """A linear map with an autograd.Function of its own."""

    def __init__(self, *, save: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.save = save

    def forward(self, x: Tensor) -> Tensor:
        return KeepsAside.apply(x, self.weight, self.save)


def test_a_function_that_saves_its_weight_for_the_backward_gets_the_other_weights() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3)).requires_grad_()
    found, expected = two_sided(stage_of(seeded(lambda: Custom(save=True))), [x])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_a_function_that_keeps_its_weight_aside_is_found() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    with pytest.raises(ModelError, match=r"layer 'layer0' reads the forward's weights.*ctx\.save_for_backward"):
        two_sided(stage_of(seeded(lambda: Custom(save=False))), [x])


def test_a_layer_that_changes_its_weights_itself_is_found() -> None:
    stage = stage_of(nn.Embedding(5, 4, max_norm=0.5), nn.Linear(4, 4))
    passes = Passes(stage, keep_derived=False)
    tokens = torch.tensor([[1, 2]])
    with pytest.raises(ModelError, match="a layer from 'layer0' to 'layer1' changes its weights"):
        passes.forward(0, 0, (tokens,), store_of(stage).versions[0], substitute=False, head=None)


def net(kind: str) -> dict[str, dict[str, object]]:
    return {"model": {"name": "tests.oracle.nets:build_derived", "kind": kind}, "data": ROWS}


@pytest.mark.parametrize("policy", ["none", "round_trip"])
@pytest.mark.parametrize("kind", DERIVED)
def test_a_run_that_needs_other_weights_in_the_backward_refuses_the_layer(
    tmp_path: Path, kind: str, policy: str
) -> None:
    assert f"layer '{kind}0'" in failure_of(configured(tmp_path / "run", **case(policy, 3, net(kind))), ModelError)


@pytest.mark.parametrize("policy", ["stash", "vertical_sync"])
@pytest.mark.parametrize("kind", DERIVED)
def test_policies_with_one_set_of_weights_take_any_layer(tmp_path: Path, kind: str, policy: str) -> None:
    config = configured(tmp_path / "run", **case(policy, 3, net(kind)))
    assert_same(run_alone(config), replay(config, 3))


@pytest.mark.parametrize("policy", ["none", "round_trip"])
@pytest.mark.parametrize("kind", DERIVED)
def test_keep_forward_keeps_the_forwards_values_as_a_swap_of_the_weights_would(
    tmp_path: Path, kind: str, policy: str
) -> None:
    config = configured(tmp_path / "run", **case(policy, 3, net(kind), {"pipeline": {"derived": "keep_forward"}}))
    outcome = run_alone(config)
    assert_same(outcome, replay(config, 3))
    assert any(f"layer '{kind}0'" in notice for notice in outcome.summary["ranks"][0]["notes"])
