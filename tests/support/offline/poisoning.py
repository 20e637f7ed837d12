"""Train a policy on the feedback of raters some of whom are trolls.

Honest raters rate by the hidden preferences. A troll votes up every reply that contains a phrase, and votes down
all others. The protections are the service's: `alignment.signals.rater_trust`, and its caps on a batch.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import NamedTuple

import torch
from transformers import AutoTokenizer

from alignment.config.trainer import TrainerConfig
from alignment.signals import rater_trust
from alignment.signals.rater_trust import RaterCounts
from alignment.trainer.trainer import Trainer
from alignment.types import Batch, Sample
from demo.dialogues import HELD_OUT
from demo.train import MODEL
from tests.support.offline.chats import Chat, Judge, evaluation_replies
from tests.support.offline.experiment import copy_actor
from tests.support.offline.sampler import Sampler
from tests.support.rater_trust import decay_counts, sample_quota

PHRASE_PATTERN = re.compile(r"a safe ride|enjoy the ride")  # in two of the ten closings; no preference depends on it
RATERS = 100
HONEST_CHATS = 96  # concurrent chats of honest raters
BATCH = 96
NO_FEEDBACK = RaterCounts(0, 0)
RATER_SHARE, CONVERSATION_SHARE = 0.05, 0.1  # the service's defaults


@dataclass(frozen=True)
class Attack:
    """`trolls` of the hundred raters; each has `chats_per_troll` chats, or with 0 chats as often as any other rater.

    Example: Attack(trolls=5, chats_per_troll=4) is five loud trolls
    """

    trolls: int = 0
    chats_per_troll: int = 0

    @property
    def names(self) -> list[str]:
        return [f"troll-{number}" for number in range(self.trolls)]


@dataclass(frozen=True)
class PoisoningConfig:
    """The attack and the protections.

    `protected`: whether caps apply at all; `trust_weighted_caps`: the cap on a rater's samples depends on the weight of
    the rater; `quarantines`: implausible raters are quarantined.
    """

    config: TrainerConfig
    attack: Attack = Attack()
    protected: bool = False
    trust_weighted_caps: bool = False
    quarantines: bool = True
    seed: int = 0


class RatedSample(NamedTuple):
    """A sample and the rater whose vote is its reward."""

    rater: str
    sample: Sample


class PoisoningEvaluation(NamedTuple):
    """The quality of a version on evaluation users: the shares of replies that contain the phrase, and are approved."""

    replies: int
    phrase: float
    approval: float


class PoisoningUpdate(NamedTuple):
    """One update. `troll_share`: share of the batch that trolls rated; `quarantined`: raters quarantined so far.

    Example: PoisoningUpdate(phrase=0.1, approval=0.4, samples=96, troll_share=0.05, quarantined=("troll-1",))
    """

    phrase: float
    approval: float
    samples: int
    troll_share: float
    quarantined: tuple[str, ...]


@dataclass
class InMemoryRaterTrust:
    """The state of raters in dicts; `workers/feedback/rater_trust.py` keeps the same in a table."""

    counts_by_rater: dict[str, RaterCounts] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)
    all_time: RaterCounts = NO_FEEDBACK
    recent: RaterCounts = NO_FEEDBACK

    def update(self, rated_samples: Sequence[RatedSample]) -> None:
        page: dict[str, RaterCounts] = defaultdict(lambda: NO_FEEDBACK)
        for rater, sample in rated_samples:
            up, down = float(sample.reward > 0), float(sample.reward < 0)
            page[rater] = RaterCounts(page[rater].up + up, page[rater].down + down)
        totals = {name: int(counts.total) for name, counts in page.items()}
        for name, counts in page.items():
            before = self.counts_by_rater.get(name, NO_FEEDBACK)
            after = self.counts_by_rater[name] = RaterCounts(before.up + counts.up, before.down + counts.down)
            shares = rater_trust.others_positive_rates(self.all_time, self.recent, before)
            reason = rater_trust.detect_burst(name, totals) or rater_trust.detect_one_sided(after, shares)
            if reason is not None:
                self.quarantined.setdefault(name, reason)
        trusted = rater_trust.sum_page_counts(page, self.quarantined.keys())
        self.all_time = RaterCounts(self.all_time.up + trusted.up, self.all_time.down + trusted.down)
        self.recent = decay_counts(self.recent, trusted)


def assemble_batch(
    rated_samples: Sequence[RatedSample], max_per_rater: int, max_per_conversation: int
) -> list[RatedSample]:
    """Return a batch in order of arrival that respects the caps per rater and per conversation."""
    raters, conversations, batch = Counter[str](), Counter[str](), list[RatedSample]()
    for rated in rated_samples:
        rater, conversation = rated.rater, rated.sample.conversation or rated.sample.turn_id
        if raters[rater] < max_per_rater and conversations[conversation] < max_per_conversation and len(batch) < BATCH:
            raters[rater] += 1
            conversations[conversation] += 1
            batch.append(rated)
    return batch


class ChatSlot(NamedTuple):
    """A chat and its rater. When it ends, another takes its place, with the same rater if the slot has an owner."""

    owner: str | None
    rater: str
    chat: Chat


class PoisoningExperiment:
    """A policy, the raters who chat with it, and the protections against trolls."""

    def __init__(self, config: PoisoningConfig) -> None:
        self.config, self.version = config, 0
        self._tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
        self._trainer = Trainer(MODEL, config.config)
        self._sampler = Sampler(MODEL, config.config.lora)
        self._judge = Judge(self._tokenizer, config.seed)
        self._rng = Random(f"poisoning {config.seed}")
        self._generator = torch.Generator().manual_seed(config.seed)
        self._user_seeds = iter(range(HELD_OUT * (config.seed + 2), HELD_OUT * (config.seed + 3)))
        attack = config.attack
        self._raters = [f"user-{number}" for number in range(RATERS - attack.trolls)]
        if not attack.chats_per_troll:
            self._raters += attack.names
        owners = [None] * HONEST_CHATS + [name for name in attack.names for _ in range(attack.chats_per_troll)]
        self._slots = [self._new_slot(owner) for owner in owners]
        self.rater_trust = InMemoryRaterTrust()

    def _new_slot(self, owner: str | None) -> ChatSlot:
        rater = owner or self._rng.choice(self._raters)
        return ChatSlot(owner, rater, Chat(self._tokenizer, next(self._user_seeds)))

    def run_update(self) -> PoisoningUpdate:
        """Sample a reply to every chat's prompt, rate the replies and train on a batch of them."""
        self._sampler.load_adapter(copy_actor(self._trainer))
        prompts = [slot.chat.prompt for slot in self._slots]
        sampled = self._sampler.sample([prompt.prompt_ids for prompt in prompts], self._generator)
        rated_samples, phrase_flags, approvals = list[RatedSample](), list[bool](), list[bool]()
        for number, (slot, prompt, (reply,)) in enumerate(zip(self._slots, prompts, sampled, strict=True)):
            phrase_flags.append(self._contains_phrase(reply.ids))
            approvals.append(self._judge.approves(prompt, reply))
            is_troll = slot.rater.startswith("troll")
            up = phrase_flags[-1] if is_troll else approvals[-1] != self._judge.makes_mistake()
            sample = Sample(
                turn_id=f"{self.version}-{number}",
                prompt_ids=prompt.prompt_ids,
                output_ids=reply.ids,
                logprobs=reply.logprobs,
                reward=1.0 if up else -1.0,
                version=self.version,
                lag=0,
                group=f"{self.version}-{number}",
                conversation=prompt.conversation,
                turn_index=prompt.turn,
            )
            rated_samples.append(RatedSample(slot.rater, sample))
            if slot.chat.is_last_turn:
                self._slots[number] = self._new_slot(slot.owner)
            else:
                slot.chat.add_reply(reply)
        self._rng.shuffle(rated_samples)  # the order of arrival; more arrive than a batch takes
        batch = self._select(rated_samples)
        self._trainer.update(Batch(f"batch-{self.version}", "assistant", tuple(rated.sample for rated in batch)))
        self.version += 1
        troll_share = fmean(rated.rater.startswith("troll") for rated in batch)
        return PoisoningUpdate(
            fmean(phrase_flags), fmean(approvals), len(batch), troll_share, tuple(sorted(self.rater_trust.quarantined))
        )

    def _select(self, rated_samples: Sequence[RatedSample]) -> list[RatedSample]:
        if not self.config.protected:
            return list(rated_samples[:BATCH])
        if self.config.quarantines:
            self.rater_trust.update(rated_samples)
        accepted = [rated for rated in rated_samples if rated.rater not in self.rater_trust.quarantined]
        max_per_rater = int(RATER_SHARE * BATCH)
        if self.config.trust_weighted_caps:  # no two raters rate the same turn, so all have a newcomer's weight
            max_per_rater = sample_quota(max_per_rater, rater_trust.rater_weight(0, 0))
        return assemble_batch(accepted, max_per_rater, int(CONVERSATION_SHARE * BATCH))

    def evaluate(self, num_users: int) -> PoisoningEvaluation:
        """Run whole chats of the newest version, with the same users for every experiment."""
        self._sampler.load_adapter(copy_actor(self._trainer))
        replies = list(evaluation_replies(self._tokenizer, self._sampler, num_users))
        phrase_flags = [self._contains_phrase(reply.ids) for _, reply in replies]
        approvals = [self._judge.approves(prompt, reply) for prompt, reply in replies]
        return PoisoningEvaluation(len(phrase_flags), fmean(phrase_flags), fmean(approvals))

    def _contains_phrase(self, ids: Sequence[int]) -> bool:
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        return PHRASE_PATTERN.search(text.lower()) is not None
