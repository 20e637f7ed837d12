"""Losses and metrics are normalised over the minibatch, however it is split, and never by the algorithm."""

import pytest
import torch
from torch import Tensor

from alignment.algorithms import LossOutput, Metric, MicroBatch, RLAlgorithm
from alignment.config.algorithm import UpdateConfig
from alignment.config.policy_gradient_algorithms import Aggregation
from alignment.functional import aggregate
from alignment.types import CriticMicroBatch, Regularizer
from tests.support.worked_batches import make_train_data, reduce_loss, reply

SAMPLES = [reply(1.0, 3), reply(-1.0, 1), reply(0.5, 2), reply(2.0, 4), reply(0.0, 1)]
LOSS_BT = torch.arange(20.0).reshape(5, 4).square()


class ConstantLoss(RLAlgorithm):
    """Returns the values of LOSS_BT as losses of its tokens or replies."""

    per_reply = False

    def compute_loss(self, inputs: MicroBatch) -> LossOutput:
        loss_BT = inputs.rows(LOSS_BT)
        regularizers = {"actor/kl_loss": Regularizer(0.5, loss_BT + 1)}
        pair = Metric(loss_BT.sum(), 10.0)
        metrics: dict[str, Tensor | Metric] = {"tokens": loss_BT, "replies": loss_BT[:, 0], "pair": pair}
        return LossOutput(loss_BT.amax(-1) if self.per_reply else loss_BT, metrics, regularizers, coef=2.0)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize(
    "aggregation",
    ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"],
)
def test_the_split_into_micro_batches_changes_no_loss_and_no_metric(rows: int, aggregation: Aggregation) -> None:
    algorithm, data = ConstantLoss(UpdateConfig()), make_train_data(SAMPLES)
    algorithm.aggregation, algorithm.horizon = aggregation, 16
    metrics = reduce_loss(algorithm, data, rows_per_micro_batch=rows)[1]
    mask_BT = data.response_mask_BT
    expected, regularizer = (
        aggregate(loss_BT, mask_BT, aggregation, horizon=16).item() for loss_BT in (LOSS_BT, LOSS_BT + 1)
    )
    assert metrics == pytest.approx(
        {
            "loss": 2 * expected + 0.5 * regularizer,
            "actor/pg_loss": expected,
            "actor/kl_loss": regularizer,
            "tokens": float((LOSS_BT * mask_BT).sum() / mask_BT.sum()),
            "replies": float(LOSS_BT[:, 0].mean()),
            "pair": float(LOSS_BT.sum()) / 10 / (5 / rows).__ceil__(),
        }
    )


@pytest.mark.parametrize("rows", [1, 3])
def test_loss_per_reply_is_averaged_over_replies(rows: int) -> None:
    algorithm = ConstantLoss(UpdateConfig())
    algorithm.per_reply = True
    metrics = reduce_loss(algorithm, make_train_data(SAMPLES), rows_per_micro_batch=rows)[1]
    assert metrics["actor/pg_loss"] == pytest.approx(float(LOSS_BT.amax(-1).mean()))


WEIGHTED = [reply(1.0, 2, weight=0.9), reply(-1.0, 1, weight=0.3), reply(0.5, 1, weight=0.3)]
WEIGHTS_B = torch.tensor([1.8, 0.6, 0.6])  # their mean is 1


@pytest.mark.parametrize("rows", [1, 3])
def test_weights_multiply_the_loss_but_neither_counts_nor_regularizers(rows: int) -> None:
    losses_BT = torch.tensor([[1.0, 2.0], [3.0, 9.0], [4.0, 9.0]])  # the 9s are padding

    class Constant(RLAlgorithm):
        def compute_loss(self, inputs: MicroBatch) -> LossOutput:
            regularizers = {"actor/kl_loss": Regularizer(0.5, inputs.rows(losses_BT))}
            return LossOutput(inputs.rows(losses_BT), regularizers=regularizers)

    metrics = reduce_loss(Constant(UpdateConfig()), make_train_data(WEIGHTED), rows_per_micro_batch=rows)[1]
    # (1.8 · (1 + 2) + 0.6 · 3 + 0.6 · 4) / 4 tokens, and 10 / 4 without weights
    assert metrics["actor/pg_loss"] == pytest.approx(9.6 / 4)
    assert metrics["actor/kl_loss"] == pytest.approx(2.5)
    assert metrics["loss"] == pytest.approx(2.4 + 0.5 * 2.5)


def test_weights_of_replies_and_of_pairs() -> None:
    class PerReply(RLAlgorithm):
        def compute_loss(self, inputs: MicroBatch) -> LossOutput:
            return LossOutput(inputs.rows(torch.tensor([1.0, 2.0, 4.0])))

    class PerPair(PerReply):
        def coupled_samples(self, samples: object) -> list[tuple[int, ...]]:
            return [(0, 1), (1, 2)]

        def compute_loss(self, inputs: MicroBatch) -> LossOutput:
            return LossOutput(torch.tensor([1.0, 2.0])[: len(inputs.coupled_rows)], unit="coupled_set")

    data = make_train_data(WEIGHTED)
    assert data.weights_B is not None and data.weights_B.tolist() == pytest.approx(WEIGHTS_B.tolist())
    assert reduce_loss(PerReply(UpdateConfig()), data)[1]["loss"] == pytest.approx((1.8 + 1.2 + 2.4) / 3)
    # a pair is as certain as its less certain reply
    assert reduce_loss(PerPair(UpdateConfig()), data)[1]["loss"] == pytest.approx(0.6 * (1 + 2) / 2)


def test_equal_weights_change_nothing() -> None:
    """Weights are relative: votes of new raters alone are learned from like votes of trusted ones."""
    for weight in (0.4, 1.0):
        data = make_train_data([reply(1.0, weight=weight), reply(-1.0, weight=weight)])
        assert data.weights_B is None


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (LossOutput(LOSS_BT.mean()), r"a loss of shape \[\] is not one per sequence, \[5\]: return losses that are"),
        (LossOutput(LOSS_BT[:, :1]), r"a loss of shape \[5, 1\] is not one per token, \[5, 4\]"),
        (LossOutput(LOSS_BT[:2, 0]), r"a loss of shape \[2\] is not one per sequence, \[5\]"),
        (LossOutput(LOSS_BT[:, 0], unit="coupled_set"), r"a loss of shape \[5\] is not one per coupled set, \[0\]"),
        (LossOutput(LOSS_BT, {"mean": LOSS_BT.mean()}), r"metric mean of shape \[\].*return a Metric\(sum, count\)"),
    ],
)
def test_what_an_algorithm_has_reduced_itself_is_refused(output: LossOutput, message: str) -> None:
    class Reduced(RLAlgorithm):
        def compute_loss(self, inputs: MicroBatch) -> LossOutput:
            return output

    with pytest.raises(ValueError, match=message):
        reduce_loss(Reduced(UpdateConfig()), make_train_data(SAMPLES))


def test_metric_of_nothing_is_left_out() -> None:
    class Positive(RLAlgorithm):
        def compute_loss(self, inputs: MicroBatch) -> LossOutput:
            return LossOutput(inputs.rows(LOSS_BT), {"none": torch.empty(0), "some": inputs.rewards_B})

    metrics = reduce_loss(Positive(UpdateConfig()), make_train_data(SAMPLES))[1]
    assert "none" not in metrics and metrics["some"] == pytest.approx(0.5)


def test_a_tensor_that_was_not_asked_for_names_its_flag() -> None:
    data = make_train_data(SAMPLES)
    data.ref_logprobs_BT = data.old_logprobs_BT = None
    zeros_BT = torch.zeros(5, 4)
    inputs: MicroBatch | CriticMicroBatch = MicroBatch(data, (0, 1, 2, 3, 4), (), zeros_BT)
    for name, flag in (
        ("ref_logprobs_BT", "needs_reference = True"),
        ("old_logprobs_BT", "needs_old_logprobs = True"),
        ("old_values_BT", "needs_critic = True"),
        ("entropy_BT", "needs_entropy = True"),
        ("advantages_BT", "compute_advantages"),
    ):
        with pytest.raises(ValueError, match=flag):
            getattr(inputs, name)
    assert not hasattr(inputs, "values_BT") and not hasattr(CriticMicroBatch(data, (0,), (), zeros_BT), "logprobs_BT")


def test_advantages_must_fit_the_batch() -> None:
    from alignment.algorithms.base import prepare_step

    class Advantages(RLAlgorithm):
        def __init__(self, advantages: Tensor) -> None:
            super().__init__(UpdateConfig())
            self.advantages = advantages

        def compute_advantages(self, batch: object) -> Tensor:
            return self.advantages

    data = make_train_data(SAMPLES)
    for advantages in (torch.ones(5), torch.ones(5, 1), torch.ones(5, 4)):
        prepare_step(Advantages(advantages), 0, data)
        assert data.advantages_BT is not None and torch.equal(data.advantages_BT, data.response_mask_BT)
    with pytest.raises(ValueError, match=r"compute_advantages returned \[4\]: one value per token is \[5, 4\]"):
        prepare_step(Advantages(torch.ones(4)), 0, data)
