"""DPO, online DPO and KTO, worked out by hand."""

import math

import pytest
import torch

from alignment.algorithms import MicroBatch
from alignment.algorithms.dpo import DPO
from alignment.algorithms.kto import KTO
from alignment.algorithms.online_dpo import OnlineDPO
from alignment.config.algorithm import DPOConfig, KTOConfig, OnlineDPOConfig
from alignment.errors import NothingToCompare, NoVariance
from tests.support.worked_batches import gradient, lay, reply, whole


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


RANKED = [
    reply(0.0, 1, "a"),
    reply(2.0, 1, "a"),
    reply(1.0, 1, "a"),
    reply(1.0, 1, "b"),
    reply(1.0, 1, "b"),
    reply(5.0),
]


def test_pairs_are_all_that_differ_within_a_group_the_better_first() -> None:
    dpo = DPO(DPOConfig())
    assert dpo.pairs(RANKED) == [(1, 0), (2, 0), (1, 2)]
    assert dpo.select(RANKED) == [0, 1, 2]
    assert OnlineDPO(OnlineDPOConfig()).pairs(RANKED) == [(1, 0)]


def test_a_batch_without_a_pair_is_refused() -> None:
    with pytest.raises(NothingToCompare):
        DPO(DPOConfig()).select(RANKED[3:])


def test_dpo_by_hand() -> None:
    dpo, data = DPO(DPOConfig(beta=0.5)), lay([reply(1.0, 2, "a"), reply(-1.0, 1, "a")])
    now_BT = torch.tensor([[-0.8, -0.9], [-1.4, 0.0]])
    # gained on the base: 0.3 and −0.4, so d = 0.7; −log σ(0.35), slope −½ · σ(−0.35)
    told = dpo.compute_loss(whole(data, now_BT))
    assert told["loss"].item() == pytest.approx(-math.log(sigmoid(0.35)))
    assert told["rewards/margins"].item() == pytest.approx(0.35)
    assert told["rewards/accuracies"].item() == 1.0
    slope = 0.5 * sigmoid(-0.35)
    torch.testing.assert_close(gradient(dpo, data, now_BT), torch.tensor([[-slope, -slope], [slope, 0.0]]))


def test_the_pairs_of_the_parts_of_a_minibatch_add_up() -> None:
    dpo, data = DPO(DPOConfig()), lay([reply(1.0, 1, "a"), reply(0.0, 1, "a"), reply(0.0, 1, "b"), reply(2.0, 1, "b")])
    now_BT = torch.tensor([[-0.5], [-1.0], [-0.2], [-1.7]])
    parts = [MicroBatch(data, rows, now_BT[list(rows)], 4, 4, (0, 1, 2, 3)) for rows in ((0, 1), (2, 3))]
    together = dpo.compute_loss(whole(data, now_BT))
    apart = [dpo.compute_loss(part) for part in parts]
    for name, value in together.items():
        assert value.item() == pytest.approx(sum(part[name].item() for part in apart)), name


def test_kto_by_hand() -> None:
    parent_BT = torch.tensor([[-0.6, -1.0], [-1.0, 0.0], [-1.0, 0.0]])
    data = lay([reply(1.0, 2), reply(-1.0, 1), reply(-1.0, 1)], parent_BT=parent_BT)
    kto = KTO(KTOConfig(beta=0.5))
    kto.before_train_step(0, data)
    # z₀ = mean(0.4, 0, 0); weights 3/2 ÷ 1 and 3/2 ÷ 2
    told, z = kto.compute_loss(whole(data)), 0.4 / 3
    losses = [1.5 * (1 - sigmoid(0.5 * (0.4 - z))), 0.75 * (1 - sigmoid(0.5 * z)), 0.75 * (1 - sigmoid(0.5 * z))]
    assert told["loss"].item() == pytest.approx(sum(losses) / 3)
    slope_B = gradient(kto, data)[:, 0]
    assert slope_B[0] < 0 < slope_B[1]


def test_kto_needs_thumbs_of_both_kinds() -> None:
    with pytest.raises(NoVariance):
        KTO(KTOConfig()).select([reply(1.0), reply(1.0)])


def test_a_reward_of_zero_is_no_thumb() -> None:
    assert KTO(KTOConfig()).select([reply(0.0), reply(1.0), reply(-0.5)]) == [1, 2]


def test_smoothing_is_refused_where_it_is_not_defined() -> None:
    with pytest.raises(ValueError, match="ipo"):
        DPOConfig(kind="ipo", label_smoothing=0.1)
