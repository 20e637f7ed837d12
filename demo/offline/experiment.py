"""One policy, taught by a crowd: ask, draw, judge, learn; and examined by shoppers who teach nobody."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from alignment.config.trainer import TrainerConfig
from alignment.errors import NothingToCompare, NoVariance
from alignment.trainer.probe import Probe
from alignment.trainer.recompute_logprobs import recompute_logprobs
from alignment.trainer.trainer import Trainer
from alignment.types import Batch, Sample
from demo.dialogues import HELD_OUT
from demo.offline.chats import SLIPS, Asked, Chat, Crowd, Judge
from demo.offline.sampler import Reply, Sampler

EXAMINERS = 9_000  # the shoppers that examine teach nobody


@dataclass(frozen=True)
class Course:
    """How a policy is taught. `lag`: by how many updates the version that speaks is behind the one that learns;
    `slips`: the share of the thumbs that is pressed by mistake."""

    config: TrainerConfig
    candidates: int = 1
    feedback: Literal["thumbs", "comparisons"] = "thumbs"
    replies: int = 96
    lag: int = 0
    seed: int = 0
    slips: float = SLIPS


@dataclass(frozen=True)
class Round:
    """One update: the version that spoke and how it was liked, the version that came out; seconds of processor time.

    Example: Round(speaker=3, approval=0.62, mean_length=48.1, samples=96, version=4, refused=None,
                   seconds_drawing=2.4, seconds_learning=3.9, metrics={"actor/ppo_kl": 0.001})
    """

    speaker: int
    approval: float
    mean_length: float
    samples: int
    version: int
    refused: str | None
    seconds_drawing: float
    seconds_learning: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Examination:
    """A version heard on other shoppers. kl: k3(version, base model) a token, on the replies of the version."""

    replies: int
    approval: float
    mean_length: float
    kl: float


class Study:
    def __init__(self, base_model: Path, course: Course) -> None:
        self.course, self.version = course, 0
        self._base_model = base_model
        self._tokenizer = AutoTokenizer.from_pretrained(base_model, local_files_only=True)
        self._learner = Trainer(base_model, course.config)
        self._sampler = Sampler(base_model, course.config.lora)
        self._crowd = Crowd(self._tokenizer, course.replies // course.candidates, course.seed)
        self._judge = Judge(self._tokenizer, course.seed, course.slips)
        self._order = torch.Generator().manual_seed(course.seed)
        self._adapters = deque([self._adapter()], maxlen=course.lag + 1)  # the oldest of them speaks

    def round(self) -> Round:
        """Let the crowd ask once and judge, and learn from that."""
        began = time.process_time()
        speaker = self.version - len(self._adapters) + 1
        self._sampler.wear(self._adapters[0])
        asked = self._crowd.ask()
        drawn = self._sampler.draw([each.prompt_ids for each in asked], self._order, count=self.course.candidates)
        self._crowd.hear([replies[0] for replies in drawn])
        heard = time.process_time()
        liked = [[self._judge.approves(a, reply) for reply in replies] for a, replies in zip(asked, drawn, strict=True)]
        samples = [
            sample
            for a, replies, marks in zip(asked, drawn, liked, strict=True)
            for sample in self._judged(a, replies, marks, speaker)
        ]
        refused, metrics = None, {}
        try:
            metrics = self._learner.update(Batch(f"batch-{self.version}", "assistant", tuple(samples))).metrics
        except (NoVariance, NothingToCompare) as error:
            refused = str(error)
        self.version += 1
        self._adapters.append(self._adapter())
        learned = time.process_time()
        return Round(
            speaker,
            fmean(mark for marks in liked for mark in marks),
            fmean(len(reply.ids) for replies in drawn for reply in replies),
            len(samples),
            self.version,
            refused,
            heard - began,
            learned - heard,
            metrics,
        )

    def examine(self, shoppers: int = 128) -> Examination:
        """Whole chats of the version as it stands, with the same shoppers whatever the course."""
        self._sampler.wear(self._adapters[-1])
        order = torch.Generator().manual_seed(EXAMINERS)
        chats = [Chat(self._tokenizer, HELD_OUT * EXAMINERS + number) for number in range(shoppers)]
        samples: list[Sample] = []
        approved: list[bool] = []
        while chats:
            asked = [chat.asked for chat in chats]
            drawn = self._sampler.draw([each.prompt_ids for each in asked], order)
            for each, chat, (reply,) in zip(asked, chats, drawn, strict=True):
                samples.append(_sample(each, reply, 0.0, self.version))
                approved.append(self._judge.approves(each, reply))
                if not chat.over:
                    chat.go_on(reply)
            chats = [chat for chat, each in zip(chats, asked, strict=True) if chat.asked is not each]
        base = recompute_logprobs(self._base_model, None, samples)
        gaps_N = np.concatenate([again - sample.logprobs for again, sample in zip(base, samples, strict=True)])
        length = fmean(len(sample.output_ids) for sample in samples)
        return Examination(len(samples), fmean(approved), length, float((np.expm1(gaps_N) - gaps_N).mean()))

    def go_on_from(self, directory: Path) -> None:
        """From a version that was exported, with its optimizer and its baseline."""
        self._learner.restore(directory)
        self._adapters.extend([self._adapter()] * (self.course.lag + 1))

    def probe(self) -> Probe:
        return self._learner.probe()

    def export(self, directory: Path) -> str:
        """The version as it stands, to be served and to be gone on from. Returns the hash of its manifest."""
        return self._learner.export(directory, {"course": self.course.seed, "version": self.version}).manifest_sha256

    def _judged(self, asked: Asked, replies: Sequence[Reply], liked: Sequence[bool], speaker: int) -> list[Sample]:
        """A thumb for each reply, or one comparison of two; nothing where both are as good."""
        if self.course.feedback == "comparisons":
            if len(set(liked)) == 1:
                return []
            slip = self._judge.slips()
            liked = [mark != slip for mark in liked]
        else:
            liked = [mark != self._judge.slips() for mark in liked]
        return [
            _sample(asked, reply, 1.0 if mark else -1.0, speaker, self.version - speaker, number)
            for number, (reply, mark) in enumerate(zip(replies, liked, strict=True))
        ]

    def _adapter(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._learner.policy.tensors("actor").items()}


def _sample(asked: Asked, reply: Reply, reward: float, version: int, lag: int = 0, candidate: int = 0) -> Sample:
    prompt = f"{asked.conversation}-{asked.turn}"
    return Sample(
        turn_id=f"{prompt}-{candidate}",
        prompt_ids=asked.prompt_ids,
        output_ids=reply.ids,
        logprobs=reply.logprobs,
        reward=reward,
        version=version,
        lag=lag,
        group=prompt,
        conversation=asked.conversation,
        turn=asked.turn,
    )
