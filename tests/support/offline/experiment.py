"""Train one policy on the feedback of simulated users, and evaluate it on other users."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from alignment.config.trainer import TrainerConfig
from alignment.errors import NothingToCompare, NoVariance
from alignment.trainer.scoring import Probe, recompute_logprobs
from alignment.trainer.trainer import Trainer
from alignment.types import Batch, CorrectedReply, Sample
from tests.support.offline.chats import EVALUATION_SEED, MISTAKE_SHARE, ChatPool, Judge, Prompt, evaluation_replies
from tests.support.offline.sampler import Reply, Sampler

UNRATED_SEED = 4_000  # chats without votes are others than those with votes


@dataclass(frozen=True)
class ExperimentConfig:
    """How a policy is trained.

    `feedback`: a vote on each reply, or one comparison of two replies; `lag`: how many updates the version that samples
    is behind the one that trains; `mistake_share`: share of mistaken votes; `min_samples`: an update waits for so many
    samples, since two equally good replies are not compared.
    """

    config: TrainerConfig
    replies_per_prompt: int = 1
    feedback: Literal["binary", "comparisons"] = "binary"
    replies_per_update: int = 96
    lag: int = 0
    seed: int = 0
    mistake_share: float = MISTAKE_SHARE
    min_samples: int = 0


@dataclass(frozen=True)
class UpdateResult:
    """One update: the version that sampled the replies, their approval, and the new version. Seconds are CPU time.

    Example: UpdateResult(behavior_version=3, approval=0.62, mean_length=48.1, samples=96, version=4, refused=None,
                          sampling_seconds=2.4, training_seconds=3.9, metrics={"actor/ppo_kl": 0.001})
    """

    behavior_version: int
    approval: float
    mean_length: float
    samples: int
    version: int
    refused: str | None
    sampling_seconds: float
    training_seconds: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class RatedReplies:
    """The votes on the replies that one version gave to the chats' prompts, and the approval without mistaken votes."""

    version: int
    samples: list[Sample]
    approval: float
    mean_length: float


@dataclass(frozen=True)
class EvaluationResult:
    """The quality of a version on other users. `kl`: k3(version, base model) per token, on replies of the version."""

    replies: int
    approval: float
    mean_length: float
    kl: float


class Experiment:
    """A policy, the chats it answers, and the judge that rates its replies."""

    def __init__(self, base_model: Path, config: ExperimentConfig) -> None:
        self.config, self.version = config, 0
        self._base_model = base_model
        self._tokenizer = AutoTokenizer.from_pretrained(base_model, local_files_only=True)
        self.trainer = Trainer(base_model, config.config)
        self._sampler = Sampler(base_model, config.config.lora)
        self._chats = ChatPool(self._tokenizer, config.replies_per_update // config.replies_per_prompt, config.seed)
        self._judge = Judge(self._tokenizer, config.seed, config.mistake_share)
        self._generator = torch.Generator().manual_seed(config.seed)
        self._unrated_chats: ChatPool | None = None
        self._adapters = deque([copy_actor(self.trainer)], maxlen=config.lag + 1)  # the oldest one samples

    def run_update(self, held_out: int = 0) -> UpdateResult:
        """Sample a reply to every chat's prompt, rate the replies and train on them.

        The KL of the update is measured on `held_out` other replies of the newest version, without any on the batch.
        """
        started = time.process_time()
        rated = self.collect_votes()
        samples = list(rated.samples)
        while len(samples) < self.config.min_samples:
            samples += self.collect_votes().samples
        unrated = self.collect_unrated(held_out) if held_out else ()
        sampled_at = time.process_time()
        metrics, refused = self.train(samples, unrated)
        return UpdateResult(
            rated.version,
            rated.approval,
            rated.mean_length,
            len(samples),
            self.version,
            refused,
            sampled_at - started,
            time.process_time() - sampled_at,
            metrics,
        )

    def text(self, reply: Reply) -> str:
        return str(self._tokenizer.decode(reply.ids, skip_special_tokens=True))

    def collect_votes(self) -> RatedReplies:
        """Sample a reply to every chat's prompt, and rate the replies."""
        version = self.version - len(self._adapters) + 1
        self._sampler.load_adapter(self._adapters[0])
        prompts = self._chats.prompts()
        sampled = self._sampler.sample(
            [prompt.prompt_ids for prompt in prompts], self._generator, count=self.config.replies_per_prompt
        )
        self._chats.add_replies([replies[0] for replies in sampled])
        approvals = [
            [self._judge.approves(prompt, reply) for reply in replies]
            for prompt, replies in zip(prompts, sampled, strict=True)
        ]
        samples = [
            sample
            for prompt, replies, flags in zip(prompts, sampled, approvals, strict=True)
            for sample in self._make_samples(prompt, replies, flags, version)
        ]
        lengths = [len(reply.ids) for replies in sampled for reply in replies]
        return RatedReplies(version, samples, fmean(flag for flags in approvals for flag in flags), fmean(lengths))

    def collect_unrated(self, count: int) -> list[Sample]:
        """Return so many replies of the newest version in other chats, whose users do not vote. Their reward is 0."""
        if self._unrated_chats is None:
            self._unrated_chats = ChatPool(self._tokenizer, count, self.config.seed + UNRATED_SEED)
        self._sampler.load_adapter(self._adapters[-1])
        samples: list[Sample] = []
        while len(samples) < count:
            prompts = self._unrated_chats.prompts()
            replies = [reply for (reply,) in self._sampler.sample([p.prompt_ids for p in prompts], self._generator)]
            self._unrated_chats.add_replies(replies)
            samples += [_make_sample(p, reply, 0.0, self.version) for p, reply in zip(prompts, replies, strict=True)]
        return samples[:count]

    def train(
        self, samples: Sequence[Sample], held_out: Sequence[Sample] = (), *, corrected: Sequence[CorrectedReply] = ()
    ) -> tuple[dict[str, float], str | None]:
        """Make one update, and return its metrics and, if the batch was refused, why. The version counts either way.

        The KL of the update is measured on the `held_out` replies, if they are enough.
        """

        def age(sample: Sample) -> Sample:
            return replace(sample, lag=self.version - sample.version)

        aged = tuple(age(sample) for sample in samples)
        aged_pairs = tuple(replace(one, sample=age(one.sample)) for one in corrected)
        refused, metrics = None, {}
        try:
            batch = Batch(f"batch-{self.version}", "assistant", aged, tuple(held_out), aged_pairs)
            metrics = self.trainer.update(batch).metrics
        except (NoVariance, NothingToCompare) as error:
            refused = str(error)
        self.version += 1
        self._adapters.append(copy_actor(self.trainer))
        return metrics, refused

    def evaluate(self, num_users: int = 128) -> EvaluationResult:
        """Run whole chats of the newest version, with the same users for every experiment."""
        self._sampler.load_adapter(self._adapters[-1])
        replies = list(evaluation_replies(self._tokenizer, self._sampler, num_users))
        approvals = [self._judge.approves(prompt, reply) for prompt, reply in replies]
        samples = [_make_sample(prompt, reply, 0.0, self.version) for prompt, reply in replies]
        base_logprobs = recompute_logprobs(self._base_model, None, samples)
        log_ratios_N = np.concatenate(
            [base - sample.logprobs for base, sample in zip(base_logprobs, samples, strict=True)]
        )
        length = fmean(len(sample.output_ids) for sample in samples)
        return EvaluationResult(
            len(samples), fmean(approvals), length, float((np.expm1(log_ratios_N) - log_ratios_N).mean())
        )

    def evaluate_newest(self, num_users: int) -> tuple[float, int]:
        """Return the approval of the newest version by the users of `evaluate`, and the number of replies."""
        return self.evaluate_adapter(self._adapters[-1], num_users, EVALUATION_SEED)

    def evaluate_adapter(self, adapter: Mapping[str, Tensor], num_users: int, seed: int) -> tuple[float, int]:
        """Return the approval of an adapter's replies by the users of `seed`, and the number of replies."""
        self._sampler.load_adapter(adapter)
        replies = list(evaluation_replies(self._tokenizer, self._sampler, num_users, seed))
        return fmean(self._judge.approves(prompt, reply) for prompt, reply in replies), len(replies)

    def restore(self, directory: Path) -> None:
        """Continue from an exported version, with its optimizer state and its baseline."""
        self.trainer.restore(directory)
        self._adapters.extend([copy_actor(self.trainer)] * (self.config.lag + 1))

    def probe(self) -> Probe:
        return self.trainer.probe()

    def export(self, directory: Path) -> str:
        """Export the newest version, to serve it or to continue from it. Return the hash of its manifest."""
        return self.trainer.export(directory, {"course": self.config.seed, "version": self.version}).manifest_sha256

    def _make_samples(
        self, prompt: Prompt, replies: Sequence[Reply], approvals: Sequence[bool], behavior_version: int
    ) -> list[Sample]:
        """Return samples with a vote on each reply, or with one comparison; none if both replies are equally good."""
        if self.config.feedback == "comparisons":
            if len(set(approvals)) == 1:
                return []
            mistake = self._judge.makes_mistake()
            approvals = [approved != mistake for approved in approvals]
        else:
            approvals = [approved != self._judge.makes_mistake() for approved in approvals]
        return [
            _make_sample(prompt, reply, 1.0 if approved else -1.0, behavior_version, number)
            for number, (reply, approved) in enumerate(zip(replies, approvals, strict=True))
        ]


def copy_actor(trainer: Trainer) -> dict[str, Tensor]:
    """Return a copy of the actor's adapter."""
    return {name: tensor.detach().clone() for name, tensor in trainer.policy.role_parameters("actor").items()}


def _make_sample(prompt: Prompt, reply: Reply, reward: float, version: int, number: int = 0) -> Sample:
    group = f"{prompt.conversation}-{prompt.turn}"
    return Sample(
        turn_id=f"{group}-{number}",
        prompt_ids=prompt.prompt_ids,
        output_ids=reply.ids,
        logprobs=reply.logprobs,
        reward=reward,
        version=version,
        group=group,
        conversation=prompt.conversation,
        turn_index=prompt.turn,
    )
