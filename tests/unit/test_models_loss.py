from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from hpcpipe.config import GptModel, LossConfig, MlpModel, UserModel
from hpcpipe.datasets.protocol import DataDescription
from hpcpipe.errors import ModelError
from hpcpipe.models.loss import make_loss, make_metrics

MLP = MlpModel(name="mlp")
USER = UserModel(name="mypkg.mymodule:build")


def test_cross_entropy_is_torchs_own_to_the_bit() -> None:
    scores, targets = torch.randn(32, 10), torch.randint(10, (32,))

    loss = make_loss(LossConfig())(scores, targets)

    assert torch.equal(loss, functional.cross_entropy(scores, targets))


def test_cross_entropy_of_sequences_is_the_mean_over_all_tokens() -> None:
    scores, targets = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    loss = make_loss(LossConfig())

    expected = functional.cross_entropy(scores.transpose(1, 2), targets)

    torch.testing.assert_close(loss(scores, targets), expected)
    assert loss.count(targets) == 15


def test_parts_weighted_by_their_counts_add_up_to_the_whole() -> None:
    torch.manual_seed(0)
    scores, targets = torch.randn(8, 4), torch.tensor([0, -1, -1, 2, 3, -1, 1, 1])
    loss = make_loss(LossConfig(ignore_index=-1))

    parts = [(loss(scores[a:b], targets[a:b]), loss.count(targets[a:b])) for a, b in ((0, 3), (3, 8))]

    assert [count for _, count in parts] == [1, 4]
    torch.testing.assert_close(sum(value * count for value, count in parts) / 5, loss(scores, targets))


def test_a_part_without_any_target_that_counts_has_loss_and_gradient_zero() -> None:
    scores = torch.randn(3, 4, requires_grad=True)
    loss = make_loss(LossConfig(ignore_index=-1))(scores, torch.full((3,), -1))
    loss.backward()

    assert loss.item() == 0.0
    assert scores.grad is not None
    assert torch.equal(scores.grad, torch.zeros(3, 4))


def test_no_target_is_ignored_unless_the_run_file_says_so() -> None:
    with pytest.raises(IndexError, match="-100"):
        make_loss(LossConfig())(torch.randn(2, 4), torch.tensor([1, -100]))


def test_bfloat16_scores_are_summed_in_float32_and_float64_stays() -> None:
    scores, targets = torch.randn(4, 4, dtype=torch.bfloat16), torch.randint(4, (4,))
    loss = make_loss(LossConfig())

    assert loss(scores, targets).dtype == torch.float32
    assert loss(scores.double(), targets).dtype == torch.float64


def test_several_outputs_need_a_loss_of_their_own() -> None:
    with pytest.raises(ModelError, match="the last layer returns 2 tensors, and cross_entropy needs one"):
        make_loss(LossConfig())((torch.randn(2, 4), torch.randn(2, 4)), torch.tensor([1, 2]))


def test_a_users_loss_may_be_a_function_or_a_module_class() -> None:
    output, targets = torch.randn(4, 2), torch.randn(4, 2)
    for name in ("torch.nn.functional:mse_loss", "torch.nn:MSELoss"):
        loss = make_loss(LossConfig(name=name))

        assert torch.equal(loss(output, targets), functional.mse_loss(output, targets))
        assert loss.count(targets) == 4


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch.nn.functional:mse_los", "has no 'mse_los'; did you mean \"mse_loss\""),
        ("nowhere.at:all", "loss.name: nowhere.at:all: no module 'nowhere'"),
        ("math:pi", "loss.name: math:pi is a float; name a function"),
    ],
)
def test_a_loss_that_cannot_be_used_is_one_line(name: str, expected: str) -> None:
    with pytest.raises(ModelError) as caught:
        make_loss(LossConfig(name=name))

    assert expected in str(caught.value)


def test_a_users_loss_must_be_one_value() -> None:
    with pytest.raises(ModelError, match=r"must be a tensor with one value, the mean, but it is \(4, 2\)"):
        make_loss(LossConfig(name="torch:sub"))(torch.randn(4, 2), torch.randn(4, 2))


def test_metrics_gathered_batch_by_batch_are_those_of_all_rows() -> None:
    scores, targets = torch.randn(11, 5), torch.randint(5, (11,))
    accuracy, perplexity = make_metrics(LossConfig(metrics=("accuracy", "perplexity")), MLP)

    for metric, expected in (
        (accuracy, (scores.argmax(1) == targets).float().mean().item()),
        (perplexity, functional.cross_entropy(scores, targets).exp().item()),
    ):
        parts = [metric.measure(scores[a:b], targets[a:b]) for a, b in ((0, 4), (4, 11))]
        assert metric.result(*map(sum, zip(*parts, strict=True))) == pytest.approx(expected, rel=1e-5)


def test_ignored_targets_count_in_no_metric() -> None:
    scores, targets = torch.eye(4), torch.tensor([0, -1, 2, 0])
    (accuracy,) = make_metrics(LossConfig(ignore_index=-1), MLP)

    assert accuracy.measure(scores, targets) == (2.0, 3.0)


def test_a_metric_of_nothing_is_nan_and_a_hopeless_perplexity_infinite() -> None:
    accuracy, perplexity = make_metrics(LossConfig(metrics=("accuracy", "perplexity")), MLP)

    assert math.isnan(accuracy.result(0.0, 0.0))
    assert math.isnan(perplexity.result(0.0, 0.0))
    assert perplexity.result(1e6, 1.0) == math.inf


def test_a_users_metric_is_weighted_by_rows_and_named_after_its_function() -> None:
    (metric,) = make_metrics(LossConfig(metrics=("torch.nn.functional:l1_loss",)), USER)

    assert metric.name == "l1_loss"
    assert metric.measure(torch.ones(4, 1), torch.zeros(4, 1)) == (4.0, 4.0)


def test_the_model_and_its_data_choose_the_metrics_that_are_left_out() -> None:
    classes = DataDescription(input_shape=(3,), classes=10)
    tokens = DataDescription(input_shape=(3,), classes=10, tokens=True)

    def chosen(*arguments: object) -> list[str]:
        return [metric.name for metric in make_metrics(LossConfig(), *arguments)]  # type: ignore[arg-type]

    assert chosen(MLP) == ["accuracy"]
    assert chosen(GptModel(name="gpt")) == ["perplexity"]
    assert chosen(USER, classes) == ["accuracy"]
    assert chosen(USER, tokens) == ["perplexity"]
    assert chosen(USER, DataDescription(input_shape=(3,))) == []
    assert make_metrics(LossConfig(name="torch.nn:MSELoss"), MLP) == []
