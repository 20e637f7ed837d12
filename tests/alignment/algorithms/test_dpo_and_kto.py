"""DPO, online DPO and KTO, worked out by hand."""

import math

import pytest
import torch

from alignment.algorithms.base import prepare_step
from alignment.algorithms.dpo_and_kto import DPO, KTO, OnlineDPO
from alignment.config.algorithm import CorrectionConfig, CorrectionMode
from alignment.config.preference_algorithms import DPOConfig, KTOConfig, OnlineDPOConfig
from alignment.errors import ForeignSamples, NothingToCompare, NoVariance
from alignment.types import Sample
from tests.support.worked_batches import gradient, make_train_data, reduce_loss, reply


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


def test_pairs_of_a_group() -> None:
    dpo = DPO(DPOConfig())
    assert dpo.pairs(RANKED) == [(1, 0), (2, 0), (1, 2)]
    assert dpo.select(RANKED) == [0, 1, 2]
    assert OnlineDPO(OnlineDPOConfig()).pairs(RANKED) == [(1, 0)]


def test_batch_without_pairs_is_rejected() -> None:
    with pytest.raises(NothingToCompare):
        DPO(DPOConfig()).select(RANKED[3:])


def test_the_turns_of_a_group_of_episodes_are_no_pairs_but_those_with_the_same_prompt() -> None:
    """Samples of groups of episodes may be left from another algorithm."""
    samples = [
        reply(1.0, 1, "task", episode="a"),
        reply(1.0, 1, "task", episode="a", prompt_ids=(1, 5, 2)),
        reply(-1.0, 1, "task", episode="b"),
        reply(-0.5, 1, "task", episode="c"),
    ]
    assert DPO(DPOConfig()).pairs(samples) == [(0, 2), (0, 3), (3, 2)]
    assert OnlineDPO(OnlineDPOConfig()).pairs([*samples, reply(0.0, 1, "task", prompt_ids=(1, 5, 2))]) == [
        (0, 2),
        (1, 4),
    ]
    with pytest.raises(NothingToCompare):
        DPO(DPOConfig()).select(samples[1:3])


def test_dpo_by_hand() -> None:
    dpo, data = DPO(DPOConfig(beta=0.5)), make_train_data([reply(1.0, 2, "a"), reply(-1.0, 1, "a")])
    logprobs_BT = torch.tensor([[-0.8, -0.9], [-1.4, 0.0]])
    # log-ratios to the base: 0.3 and −0.4, so d = 0.7; −log σ(0.35), slope −½ · σ(−0.35)
    metrics = reduce_loss(dpo, data, logprobs_BT)[1]
    assert metrics["loss"] == pytest.approx(-math.log(sigmoid(0.35)))
    assert metrics["rewards/margins"] == pytest.approx(0.35)
    assert metrics["rewards/accuracies"] == 1.0
    slope = 0.5 * sigmoid(-0.35)
    torch.testing.assert_close(gradient(dpo, data, logprobs_BT), torch.tensor([[-slope, -slope], [slope, 0.0]]))


def test_micro_batches_of_pairs_add_up() -> None:
    dpo, data = (
        DPO(DPOConfig()),
        make_train_data([reply(1.0, 1, "a"), reply(0.0, 1, "a"), reply(0.0, 1, "b"), reply(2.0, 1, "b")]),
    )
    logprobs_BT = torch.tensor([[-0.5], [-1.0], [-0.2], [-1.7]])
    all_metrics = reduce_loss(dpo, data, logprobs_BT)[1]
    assert reduce_loss(dpo, data, logprobs_BT, rows_per_micro_batch=2)[1] == pytest.approx(all_metrics)


def test_kto_by_hand() -> None:
    old_logprobs_BT = torch.tensor([[-0.6, -1.0], [-1.0, 0.0], [-1.0, 0.0]])
    data = make_train_data([reply(1.0, 2), reply(-1.0, 1), reply(-1.0, 1)], old_logprobs_BT=old_logprobs_BT)
    kto = KTO(KTOConfig(beta=0.5))
    prepare_step(kto, 0, data)
    # z₀ = mean(0.4, 0, 0); weights 3/2 ÷ 1 and 3/2 ÷ 2
    metrics, z = reduce_loss(kto, data)[1], 0.4 / 3
    losses = [1.5 * (1 - sigmoid(0.5 * (0.4 - z))), 0.75 * (1 - sigmoid(0.5 * z)), 0.75 * (1 - sigmoid(0.5 * z))]
    assert metrics["loss"] == pytest.approx(sum(losses) / 3)
    slope_B = gradient(kto, data)[:, 0]
    assert slope_B[0] < 0 < slope_B[1]


def test_kto_weighs_replies_by_the_size_of_their_rewards_and_by_their_weights() -> None:
    """A score of 0.001 had the gradient of a thumb."""
    data = make_train_data([reply(1.0, 1), reply(-1.0, 1), reply(0.5, 1, weight=0.2), reply(-0.001, 1, weight=0.2)])
    kto = KTO(KTOConfig(beta=0.5))
    prepare_step(kto, 0, data)
    # weights 1, 1, 0.2, 0.2 over their mean 0.6; both classes have a weight of 4/2 in all
    desirable, undesirable = 2 / ((1 + 0.5 * 0.2) / 0.6), 2 / ((1 + 0.001 * 0.2) / 0.6)
    metrics = kto.get_metrics()
    assert metrics["kto/desirable_weight"] == pytest.approx(desirable)
    assert metrics["kto/undesirable_weight"] == pytest.approx(undesirable)
    slope = 0.5 / 4 / 4 / 0.6  # β·σ'(0) over four replies
    expected = [-slope * desirable, slope * undesirable, -0.1 * slope * desirable, 0.0002 * slope * undesirable]
    torch.testing.assert_close(gradient(kto, data)[:, 0], torch.tensor(expected))


@pytest.mark.parametrize("mode", ["truncate", "off"])
def test_kto_weighs_old_replies_by_their_importance(mode: CorrectionMode) -> None:
    """A disliked reply that the policy hardly gives any more was pushed away as hard as one that it gives."""
    old_logprobs_BT = torch.tensor([[-0.5], [-4.0], [-1.0]])  # the version that sampled them gave −1 to each
    data = make_train_data([reply(1.0, 1), reply(-1.0, 1), reply(-1.0, 1)], old_logprobs_BT=old_logprobs_BT)
    kto = KTO(KTOConfig(beta=0.5, correction=CorrectionConfig(level="sequence", mode=mode, high=1.0)))
    prepare_step(kto, 0, data)
    importance = [1.0, math.exp(-3.0), 1.0] if mode == "truncate" else [1.0, 1.0, 1.0]
    log_ratios = [0.5, -3.0, 0.0]  # to the base model, which gave −1 too
    z = max(0.0, sum(w * r for w, r in zip(importance, log_ratios, strict=True)) / sum(importance))
    assert kto.get_metrics()["kl"] == pytest.approx(z)

    def slope(x: float) -> float:
        return 0.5 * sigmoid(x) * (1 - sigmoid(x)) / 3  # β·σ'(x) over three replies

    expected = [
        -1.5 * slope(0.5 * (0.5 - z)),
        0.75 * importance[1] * slope(0.5 * (z + 3.0)),
        0.75 * slope(0.5 * z),
    ]
    torch.testing.assert_close(gradient(kto, data)[:, 0], torch.tensor(expected))


def test_kto_without_a_reply_that_the_policy_can_have_given_learns_nothing() -> None:
    old_logprobs_BT = torch.full((2, 1), -9.0)
    data = make_train_data([reply(1.0, 1), reply(-1.0, 1)], old_logprobs_BT=old_logprobs_BT)
    kto = KTO(KTOConfig(correction=CorrectionConfig(level="sequence", mode="mask", low=0.5, high=2.0)))
    with pytest.raises(ForeignSamples, match="rejects every reply"):
        prepare_step(kto, 0, data)


def test_kto_needs_both_classes() -> None:
    with pytest.raises(NoVariance):
        KTO(KTOConfig()).select([reply(1.0), reply(1.0)])


def test_kto_skips_zero_rewards() -> None:
    assert KTO(KTOConfig()).select([reply(0.0), reply(1.0), reply(-0.5)]) == [1, 2]


def test_unsupported_label_smoothing_is_rejected() -> None:
    with pytest.raises(ValueError, match="ipo"):
        DPOConfig(kind="ipo", label_smoothing=0.1)


def test_near_ties_make_no_pair() -> None:
    rewards = (0.5, 0.48, 0.3)
    samples = [
        Sample(f"turn-{index}", (1,), (2,), (-0.5,), reward, 0, group="g") for index, reward in enumerate(rewards)
    ]
    assert sorted(DPO(DPOConfig()).pairs(samples)) == [(0, 2), (1, 2)]
    assert sorted(DPO(DPOConfig(min_margin=0.0)).pairs(samples)) == [(0, 1), (0, 2), (1, 2)]
    assert OnlineDPO(OnlineDPOConfig()).pairs(samples) == [(0, 2)]
    with pytest.raises(NothingToCompare, match=r"0\.05"):
        DPO(DPOConfig()).select(samples[:2])
