"""Rewards that are equal but for rounding are ties, wherever rewards are compared."""

from statistics import fmean

import pytest
import torch

from alignment.algorithms import RLAlgorithm
from alignment.algorithms.base import prepare_step
from alignment.algorithms.dpo_and_kto import DPO, KTO, OnlineDPO
from alignment.algorithms.group_relative import DAPO, GRPO, RLOO, DrGRPO, ReinforcePlusPlus
from alignment.algorithms.ppo import PPO
from alignment.config.policy_gradient_algorithms import (
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    PPOConfig,
    ReinforcePlusPlusConfig,
    RLOOConfig,
)
from alignment.config.preference_algorithms import DPOConfig, KTOConfig, OnlineDPOConfig
from alignment.errors import NothingToCompare, NoVariance
from alignment.functional import auc, group_advantage
from alignment.release.gates import PromptScores, PromptsGate
from alignment.signals.agreement import Agreement
from alignment.signals.combine_rewards import Signal, is_contradicted, preference_pairs
from alignment.signals.rater_trust import RaterSignal, count_agreement
from alignment.tolerance import TOLERANCE, exceeds, is_tie, sign, snap_to_zero
from alignment.types import check_variance
from tests.support.worked_batches import make_train_data, reply

GRADE = 0.2
MEAN = (0.1 + 0.2 + 0.3) / 3  # 0.20000000000000004
ROUNDED_ZERO = 0.1 + 0.2 - 0.3  # 5.6e-17
EQUAL = [reply(GRADE, 2, "a"), reply(MEAN, 1, "a")]
GROUP_ALGORITHMS: list[RLAlgorithm] = [
    GRPO(GRPOConfig()),
    DrGRPO(DrGRPOConfig()),
    RLOO(RLOOConfig()),
    ReinforcePlusPlus(ReinforcePlusPlusConfig(baseline="group")),
]


def test_values_of_this_test_are_not_the_same_floats() -> None:
    assert MEAN > GRADE and ROUNDED_ZERO > 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], True),
        ([0.5], True),
        ([GRADE, MEAN], True),
        ([0.7, fmean([0.6, 0.7, 0.8])], True),
        ([float(torch.tensor(0.7)), 0.7], True),  # float32 against float64
        ([ROUNDED_ZERO, -ROUNDED_ZERO, 0.0], True),
        ([0.2, 0.20001], False),
        ([-1.0, 1.0, 1.0], False),
    ],
)
def test_is_tie(values: list[float], expected: bool) -> None:
    assert is_tie(values) is expected


def test_margin_that_is_met_but_for_rounding_is_not_exceeded() -> None:
    assert 0.55 - 0.5 > 0.05 and not exceeds(0.55, 0.5, 0.05)
    assert exceeds(0.56, 0.5, 0.05)


@pytest.mark.parametrize(("value", "expected"), [(ROUNDED_ZERO, 0), (-ROUNDED_ZERO, 0), (0.01, 1), (-0.01, -1)])
def test_sign(value: float, expected: int) -> None:
    assert sign(value) == expected
    assert snap_to_zero(value) == (value if expected else 0.0)


@pytest.mark.parametrize("algorithm", [DPO(DPOConfig(min_margin=0)), OnlineDPO(OnlineDPOConfig(min_margin=0))])
def test_equal_rewards_form_no_pair(algorithm: DPO) -> None:
    assert algorithm.pairs(EQUAL) == []
    with pytest.raises(NothingToCompare):
        algorithm.select(EQUAL)


def test_pair_at_the_margin_is_no_pair() -> None:
    assert DPO(DPOConfig(min_margin=0.05)).pairs([reply(0.55, 1, "a"), reply(0.5, 1, "a")]) == []


@pytest.mark.parametrize("algorithm", [DAPO(DAPOConfig())])
def test_group_of_equal_rewards_is_skipped(algorithm: DAPO) -> None:
    with pytest.raises(NothingToCompare):
        algorithm.select(EQUAL)
    assert algorithm.select([*EQUAL, reply(1.0, 1, "b"), reply(-1.0, 1, "b")]) == [2, 3]


@pytest.mark.parametrize("algorithm", GROUP_ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
def test_group_of_equal_rewards_has_no_advantage(algorithm: RLAlgorithm) -> None:
    data = make_train_data(EQUAL)
    data.rewards_B = data.rewards_B + torch.tensor([0.0, 1e-7])  # the rounding of float32
    with pytest.raises(NoVariance):
        prepare_step(algorithm, 0, data)


def test_tie_within_a_group_keeps_the_rest_of_the_group() -> None:
    rewards_B = torch.tensor([1.0, -1.0, -1.0 + 2e-7])
    expected_B = group_advantage(torch.tensor([1.0, -1.0, -1.0]), torch.tensor([0, 0, 0]))
    torch.testing.assert_close(group_advantage(rewards_B, torch.tensor([0, 0, 0])), expected_B)


@pytest.mark.parametrize("algorithm", [PPO(PPOConfig()), ReinforcePlusPlus(ReinforcePlusPlusConfig())])
def test_batch_of_equal_rewards_is_rejected(algorithm: RLAlgorithm) -> None:
    with pytest.raises(NoVariance):
        algorithm.select(EQUAL)
    with pytest.raises(NoVariance):
        check_variance([GRADE, MEAN])


def test_kto_does_not_learn_from_a_reward_that_is_zero_but_for_rounding() -> None:
    samples = [reply(1.0), reply(ROUNDED_ZERO), reply(-ROUNDED_ZERO), reply(-1.0)]
    assert KTO(KTOConfig()).select(samples) == [0, 3]


def test_preference_pairs_of_equal_values() -> None:
    assert preference_pairs({"a": GRADE, "b": MEAN}) == []
    assert preference_pairs({"a": GRADE, "b": MEAN, "c": 0.0}) == [("b", "c"), ("a", "c")]


def test_score_that_is_zero_but_for_rounding_contradicts_nobody() -> None:
    score, vote = Signal("learned", -ROUNDED_ZERO), Signal("explicit", 1.0, person=True)
    assert not is_contradicted(score, [score, vote])


def test_agreement_counts_rounding_as_no_opinion() -> None:
    counts = Agreement.count([(ROUNDED_ZERO, 1.0), (1.0, ROUNDED_ZERO)], [ROUNDED_ZERO])
    assert (counts.ups, counts.ups_right, counts.pairs, counts.pairs_right) == (1, 0, 1, 0)


def test_raters_do_not_disagree_by_rounding() -> None:
    assert count_agreement([RaterSignal("a", -ROUNDED_ZERO), RaterSignal("b", 1.0)]) == {}


def test_auc_counts_equal_scores_half() -> None:
    assert auc(torch.tensor([GRADE, MEAN], dtype=torch.float64), torch.tensor([False, True])) == 0.5
    scores_N = torch.tensor([0.1, 0.3, 0.3 + TOLERANCE / 10, 0.5], dtype=torch.float64)
    assert auc(scores_N, torch.tensor([False, True, False, True])) == 0.875


def test_gate_allows_a_drop_of_exactly_its_maximum() -> None:
    gate = PromptsGate.model_validate(
        {"name": "sums", "dataset": "sums", "verifier": {"type": "number"}, "max_drop": 0.1}
    )
    assert gate.rejection_reason(PromptScores(7, 10, 5.0), PromptScores(8, 10, 5.0)) is None
    assert gate.rejection_reason(PromptScores(6, 10, 5.0), PromptScores(8, 10, 5.0)) is not None
