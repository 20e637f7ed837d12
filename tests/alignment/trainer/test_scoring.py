"""Scores of a batch equal those of the training step, for any distribution over ranks."""

from pathlib import Path

import pytest
import torch

from alignment.config.trainer import LoRAConfig, Packing, TrainerConfig
from alignment.data.collate import output_mask
from alignment.data.micro_batches import ScoredSequence, make_micro_batches
from alignment.models.base_model import ModelRole
from alignment.models.policy_model import PolicyModel
from alignment.trainer.scoring import score_micro_batch, score_micro_batches, score_sequences

CPU = torch.device("cpu")
PROMPT = tuple(range(1, 20))
SEQUENCES = [
    *(ScoredSequence((*PROMPT, 30 + index, *range(40, 41 + index)), start=len(PROMPT)) for index in range(4)),
    ScoredSequence((*PROMPT, 30, 40, 50, 51, 52, 53), start=23, temperature=0.7),  # a later turn of the conversation
    *(ScoredSequence(tuple(range(60 + index, 75 + 2 * index)), start=5) for index in range(5)),
]
MASK_BT = output_mask(SEQUENCES, CPU)


@pytest.fixture(scope="module", params=[1 << 24, 1024], ids=["all logits", "chunks"])
def policy(base_model: Path, request: pytest.FixtureRequest) -> PolicyModel:
    config = TrainerConfig(lora=LoRAConfig(r=4, alpha=8), device="cpu", logits_chunk=request.param)
    policy = PolicyModel(base_model, config, CPU, critic=True)
    generator = torch.Generator().manual_seed(0)
    for role in ("actor", "critic"):
        initial = policy.initial_tensors(role, 0).items()
        policy.load_adapter(
            {name: one + 0.05 * torch.randn(one.shape, generator=generator) for name, one in initial}, role
        )
    return policy


@pytest.mark.parametrize("packing", ["tree", "chain", "off"])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_scores_equal_those_of_the_training_step_bit_for_bit(
    policy: PolicyModel, packing: Packing, role: ModelRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "packing", packing)
    micro_batches = make_micro_batches(SEQUENCES, max_tokens=60, packing=packing)
    before_BT = score_micro_batches(policy, SEQUENCES, micro_batches, MASK_BT, role)
    assert not before_BT.requires_grad
    for indices in micro_batches:
        scores_BT = score_micro_batch(policy, [SEQUENCES[index] for index in indices], MASK_BT[indices], role)
        assert scores_BT.requires_grad
        assert torch.equal(scores_BT, before_BT[indices])


@pytest.mark.parametrize("role", ["actor", "reference", "critic"])
def test_scores_do_not_depend_on_packing(policy: PolicyModel, role: ModelRole, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "packing", "off")
    separate_BT = score_micro_batches(policy, SEQUENCES, [[i] for i in range(len(SEQUENCES))], MASK_BT, role)
    assert (separate_BT != 0).equal(MASK_BT.bool())
    for packing in ("tree", "chain"):
        monkeypatch.setattr(policy, "packing", packing)
        micro_batches = make_micro_batches(SEQUENCES, max_tokens=10_000, packing=packing)
        scores_BT = score_micro_batches(policy, SEQUENCES, micro_batches, MASK_BT, role)
        torch.testing.assert_close(scores_BT, separate_BT, atol=1e-5, rtol=0)


def test_rank_shares_add_up_to_all_scores(policy: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignment.models.parallel.sum_over_ranks", lambda tensor: tensor)
    all_scores_BT = score_sequences(policy, SEQUENCES, max_tokens=50)
    micro_batches = make_micro_batches(SEQUENCES, max_tokens=50, num_ranks=3)
    monkeypatch.setattr("alignment.models.parallel.num_ranks", lambda: 3)
    shares = []
    for rank in range(3):
        monkeypatch.setattr("alignment.models.parallel.rank", lambda rank=rank: rank)
        shares.append(score_micro_batches(policy, SEQUENCES, micro_batches, MASK_BT))
    torch.testing.assert_close(sum(shares), all_scores_BT, atol=1e-5, rtol=0)


def test_empty_micro_batch_runs_a_forward_and_scores_nothing(policy: PolicyModel) -> None:
    forwards: list[None] = []
    counting = policy.register_forward_hook(lambda *_: forwards.append(None))
    scores_BT = score_micro_batches(policy, SEQUENCES, [[], []], MASK_BT)
    counting.remove()
    assert len(forwards) == 2
    assert not scores_BT.any()
