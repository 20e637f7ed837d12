"""Score sequences: log-probs of a batch's outputs (for the critic: values), of the probe, and of recorded replies.

The probe is a set of fixed texts whose log-probs identify a version and show that an engine has loaded it correctly.
Tensor suffixes: B sequences, T scored tokens of a sequence, padded on the right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from alignment.artifacts.specs import ADAPTER
from alignment.config.trainer import LoRAConfig, TrainerConfig
from alignment.data.collate import output_mask
from alignment.data.corrections import TextTokenizer
from alignment.data.micro_batches import ScoredSequence, make_micro_batches, make_model_inputs
from alignment.models import lora as model_lora
from alignment.models import parallel
from alignment.models.base_model import ModelRole, pick_device
from alignment.models.policy_model import PolicyModel
from alignment.types import Sample

PROBE_TEXTS = (
    "Hello! How can I help you today?",
    "What does it cost, and when will it be ready?",
    "The order was sent on Tuesday and should be with you by Friday.",
    "Thank you, that was very helpful. Goodbye!",
    "I am sorry, but I cannot find anything about that.",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10",
    "Yes, of course! We are open from nine to six, and on Saturdays until two.",
    "No. Please write to our support team instead.",
    "Here are three ways to do it: first, open the settings; second, choose your account; third, save the changes.",
    "That is a great question, and I am glad that you asked it.",
    "I understand that this is annoying. Let me see what I can do for you.",
    "In short: it depends on the size, the colour and the date.",
)
# In bfloat16 rounding moves log-probs as much as an update does, so more tokens must tell two versions apart.
MORE_PROBE_TEXTS = (
    "Good morning. My parcel has not arrived, and nobody answers the telephone.",
    "You can return it within thirty days, in its box, with the receipt.",
    "First heat the oven, then mix flour, eggs and sugar, and bake it for half an hour.",
    "The meeting has been moved to Thursday at ten; please bring your notes.",
    "It rained all night, and in the morning the river had risen by a metre.",
    "Could you tell me where the nearest station is, and which train I should take?",
    "Your password was changed. If that was not you, write to us at once.",
    "We do not sell that any more, but there is a newer one that does the same.",
    "She opened the letter, read it twice, and put it back on the table.",
    "That is not what I asked for. Can I speak to somebody else, please?",
    "The price includes breakfast and the use of the garden, but no parking.",
    "I would choose the second one: it is lighter, cheaper and easier to clean.",
)
MAX_TOKENS = 64


@dataclass(frozen=True)
class Probe:
    """The token ids of each text, and the log-prob at temperature 1, in nats, of each token but the first.

    Example: Probe(ids=((5, 9, 2),), logprobs=((-0.7, -2.1),))
    """

    ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]


def score_micro_batch(
    policy: PolicyModel, sequences: Sequence[ScoredSequence], mask_BT: Tensor, role: ModelRole = "actor"
) -> Tensor:
    """Return the role's log-probs (nats) or values of the scored tokens of one micro-batch, 0 in the padding.

    → [B, T] float32, with a gradient if enabled.
    """
    scores_N = policy(make_model_inputs(sequences, mask_BT.device, policy.packing), role)
    return torch.zeros_like(mask_BT).index_put(mask_BT.nonzero(as_tuple=True), scores_N)


def score_with_entropy(
    policy: PolicyModel, sequences: Sequence[ScoredSequence], mask_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the actor's log-probs, and the entropy of each token's distribution, in nats.  → [B, T] each"""
    inputs = make_model_inputs(sequences, mask_BT.device, policy.packing)
    place, zeros_BT = mask_BT.nonzero(as_tuple=True), torch.zeros_like(mask_BT)
    logprobs_N, entropy_N = policy(inputs, with_entropy=True)
    return zeros_BT.index_put(place, logprobs_N), zeros_BT.index_put(place, entropy_N)


@torch.no_grad()
def score_micro_batches(
    policy: PolicyModel,
    sequences: Sequence[ScoredSequence],
    micro_batches: Sequence[Sequence[int]],
    mask_BT: Tensor,
    role: ModelRole = "actor",
) -> Tensor:
    """Return the scores of all sequences in the given micro-batches, without a gradient.  → [B, T] float32

    All ranks must call it with the same arguments, and each gets the same result. A score depends, in its last bits, on
    what it is computed together with: in the micro-batches of the next optimizer step the scores equal those of that
    step bit for bit.
    """
    scores_BT = torch.zeros_like(mask_BT)
    for micro_batch in micro_batches[parallel.rank() :: parallel.num_ranks()]:
        present = list(micro_batch) or [0]  # a rank with an empty micro-batch still takes part in the forward pass
        micro_batch_BT = score_micro_batch(policy, [sequences[index] for index in present], mask_BT[present], role)
        if micro_batch:
            scores_BT[present] = micro_batch_BT
    return parallel.sum_over_ranks(scores_BT)


def score_sequences(
    policy: PolicyModel, sequences: Sequence[ScoredSequence], *, max_tokens: int, role: ModelRole = "actor"
) -> Tensor:
    """Return the scores of sequences outside of an update, in micro-batches of up to `max_tokens` tokens.  → [B, T]

    All ranks must call it with the same arguments, and each gets the same result.
    """
    micro_batches = make_micro_batches(sequences, max_tokens, parallel.num_ranks(), packing=policy.packing)
    return score_micro_batches(policy, sequences, micro_batches, output_mask(sequences, policy.device), role)


def load_tokenizer(base_model: Path) -> TextTokenizer:
    tokenizer: TextTokenizer = AutoTokenizer.from_pretrained(base_model, local_files_only=True)
    return tokenizer


def probe_ids(tokenizer: TextTokenizer, dtype: str) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of the probe texts for weights of this type; texts of fewer than two tokens are skipped."""
    texts = PROBE_TEXTS if dtype == "float32" else PROBE_TEXTS + MORE_PROBE_TEXTS
    encoded = (tokenizer.encode(text, add_special_tokens=False)[:MAX_TOKENS] for text in texts)
    return tuple(tuple(ids) for ids in encoded if len(ids) > 1)


def recompute_logprobs(
    base_model: Path, version: Path | None, samples: Sequence[Sample], *, dtype: str = "float32", device: str = "auto"
) -> list[npt.NDArray[np.float32]]:
    """Return one log-prob per output token of every sample under a version, in nats, at the sample's temperature.

    `version` is the directory of an adapter or of full weights; None is the base model.
    """
    adapter = version if version is not None and (version / ADAPTER).exists() else None
    lora = model_lora.read_config(adapter) if adapter else LoRAConfig()
    config = TrainerConfig.model_validate({"lora": lora, "dtype": dtype, "device": device})
    model = version if version and not adapter else base_model  # a version of full weights is a model of its own
    policy = PolicyModel(model, config, pick_device(device))  # an untrained adapter changes nothing
    if adapter:
        policy.load_adapter(load_file(adapter / ADAPTER))
    sequences = [ScoredSequence.from_sample(sample) for sample in samples]
    logprobs_BT = score_sequences(policy, sequences, max_tokens=config.micro_batch_tokens)
    rows = zip(logprobs_BT.cpu().numpy(), samples, strict=True)
    return [row[: len(sample.output_ids)] for row, sample in rows]
