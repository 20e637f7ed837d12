"""Scores of a whole batch: the same bits that the step will find, however the work is dealt out."""

from pathlib import Path

import pytest
import torch

from alignment.config.trainer import LoRAConfig, TrainerConfig
from alignment.data.collate import output_mask
from alignment.data.micro_batches import Scored, plan
from alignment.data.prefix_sharing import Packing
from alignment.models.policy_model import PolicyModel
from alignment.trainer.scoring import score, score_all, score_alone

CPU = torch.device("cpu")
PROMPT = tuple(range(1, 20))
SEQUENCES = [
    *(Scored((*PROMPT, 30 + index, *range(40, 41 + index)), start=len(PROMPT)) for index in range(4)),
    Scored((*PROMPT, 30, 40, 50, 51, 52, 53), start=23, temperature=0.7),  # the conversation goes on
    *(Scored(tuple(range(60 + index, 75 + 2 * index)), start=5) for index in range(5)),
]
MASK_BT = output_mask(SEQUENCES, CPU)


@pytest.fixture(scope="module", params=[1 << 24, 1024], ids=["all logits", "chunks"])
def policy(base_model: Path, request: pytest.FixtureRequest) -> PolicyModel:
    config = TrainerConfig(lora=LoRAConfig(rank=4, alpha=8), device="cpu", logits_chunk=request.param)
    made = PolicyModel(base_model, config, CPU, critic=True)
    generator = torch.Generator().manual_seed(0)
    for hat in ("actor", "critic"):
        fresh = made.fresh(hat, 0).items()
        made.wear({name: one + 0.05 * torch.randn(one.shape, generator=generator) for name, one in fresh}, hat)
    return made


@pytest.mark.parametrize("packing", ["tree", "chain", "off"])
@pytest.mark.parametrize("hat", ["actor", "critic"])
def test_a_step_finds_the_very_bits_that_were_scored_in_its_micro_batches(
    policy: PolicyModel, packing: Packing, hat: str
) -> None:
    groups = plan(SEQUENCES, budget=60, packing=packing)
    before_BT = score_all(policy, SEQUENCES, groups, MASK_BT, hat=hat, packing=packing)
    assert not before_BT.requires_grad
    for group in groups:
        found_BT = score(policy, [SEQUENCES[index] for index in group], MASK_BT[group], hat, packing)
        assert found_BT.requires_grad
        assert torch.equal(found_BT, before_BT[group])


@pytest.mark.parametrize("hat", ["actor", "reference", "critic"])
def test_any_packing_and_any_hat_says_of_each_sequence_what_it_says_of_it_alone(policy: PolicyModel, hat: str) -> None:
    alone_BT = score_all(policy, SEQUENCES, [[i] for i in range(len(SEQUENCES))], MASK_BT, hat=hat, packing="off")
    assert (alone_BT != 0).equal(MASK_BT.bool())
    for packing in ("tree", "chain"):
        groups = plan(SEQUENCES, budget=10_000, packing=packing)
        found_BT = score_all(policy, SEQUENCES, groups, MASK_BT, hat=hat, packing=packing)
        torch.testing.assert_close(found_BT, alone_BT, atol=1e-5, rtol=0)


def test_ranks_that_score_their_shares_have_scored_all(policy: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignment.models.parallel.sum_over_ranks", lambda tensor: tensor)
    whole_BT = score_alone(policy, SEQUENCES, budget=50)
    groups = plan(SEQUENCES, budget=50, num_ranks=3)
    shares = [score_all(policy, SEQUENCES, groups, MASK_BT, rank=rank, num_ranks=3) for rank in range(3)]
    torch.testing.assert_close(sum(shares), whole_BT, atol=1e-5, rtol=0)


def test_an_empty_micro_batch_meets_the_others_and_scores_nothing(policy: PolicyModel) -> None:
    forwards: list[None] = []
    counting = policy.register_forward_hook(lambda *_: forwards.append(None))
    scores_BT = score_all(policy, SEQUENCES, [[], []], MASK_BT)
    counting.remove()
    assert len(forwards) == 2
    assert not scores_BT.any()
