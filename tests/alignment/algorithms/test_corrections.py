"""DPO on corrected texts, worked by hand: only the tokens that differ count, and the reference is the old policy."""

import math

import pytest
import torch

from alignment.algorithms.corrections import DIFFERS, CorrectionPairs
from alignment.config.preference_algorithms import CorrectionPairsConfig
from alignment.types import TrainData
from tests.support.worked_batches import gradient, make_train_data, reduce_loss, reply

BETA = 0.5


def worked_batch() -> TrainData:
    """Two pairs (corrected text, reply) of three tokens; of the first one only the second tokens differ."""
    old_BT = torch.tensor([[-1.0, -3.0, -1.0], [-1.0, -1.0, -1.0], [-2.0, -2.0, -2.0], [-1.0, -1.0, -1.0]])
    data = make_train_data([reply(0.0, length=3) for _ in range(4)], old_logprobs_BT=old_BT)
    data.extra[DIFFERS] = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    return data


def algorithm() -> CorrectionPairs:
    return CorrectionPairs(CorrectionPairsConfig(beta=BETA))


def test_before_the_first_step_the_loss_is_that_of_a_coin() -> None:
    loss, metrics = reduce_loss(algorithm(), worked_batch())
    assert float(loss) == pytest.approx(math.log(2)) and metrics["rewards/margins"] == 0


def test_the_gradient_is_zero_outside_of_the_spans_and_equal_and_opposite_within() -> None:
    # Mean over two pairs of −log σ(β(chosen − rejected)): the derivative at margin 0 is −β/2 and β/2, halved.
    each = BETA / 4
    expected = [[0.0, -each, 0.0], [0.0, each, 0.0], [-each] * 3, [each] * 3]
    assert gradient(algorithm(), worked_batch()).tolist() == expected


def test_the_loss_compares_with_the_old_policy() -> None:
    data = worked_batch()
    assert data.old_logprobs_BT is not None
    new_BT = data.old_logprobs_BT.clone()
    new_BT[0, 1] += 2.0  # chosen: 2 nats more likely
    new_BT[1] -= 1.0  # rejected: each token 1 nat less likely, of which one counts
    loss, metrics = reduce_loss(algorithm(), data, new_BT)
    margin = BETA * (2.0 + 1.0)
    assert float(loss) == pytest.approx((math.log(1 + math.exp(-margin)) + math.log(2)) / 2)
    assert metrics["rewards/chosen"] == pytest.approx(BETA * 2.0 / 2)
    assert metrics["rewards/rejected"] == pytest.approx(-BETA * 1.0 / 2)


def test_a_pair_counts_by_its_weight() -> None:
    data = worked_batch()
    data.weights_B = torch.tensor([1.5, 1.5, 0.5, 0.5])
    gradient_BT = gradient(algorithm(), data)
    assert float(gradient_BT[0, 1]) == pytest.approx(-1.5 * BETA / 4)
    assert float(gradient_BT[2, 1]) == pytest.approx(-0.5 * BETA / 4)
