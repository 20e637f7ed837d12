"""A crowd with trolls in it: raters who come back, a few of whom push a phrase, and what learns from all of them.

The shoppers judge by their hidden taste. A troll thumbs up whatever holds the phrase, and down everything else. What
keeps the trolls back are the service's own rules: `alignment.signals.rater_trust`, and its caps on a batch.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer

from alignment.config.trainer import TrainerConfig
from alignment.signals import rater_trust
from alignment.signals.rater_trust import Tally
from alignment.trainer.trainer import Trainer
from alignment.types import Batch, Sample
from demo.dialogues import HELD_OUT
from demo.offline.chats import Chat, Judge
from demo.offline.experiment import EXAMINERS
from demo.offline.sampler import Sampler
from demo.train import MODEL

PHRASE = re.compile(r"a safe ride|enjoy the ride")  # two of the ten closings; a matter of no taste
RATERS = 100
HONEST_SEATS = 96  # chats of honest shoppers under way
BATCH = 96
NOTHING = Tally(0, 0)
RATER_SHARE, CONVERSATION_SHARE = 0.05, 0.1  # the service's defaults


@dataclass(frozen=True)
class Attack:
    """`trolls` of the hundred raters; each has `seats` chats of their own, or none and comes as often as others do.

    Example: Attack(trolls=5, seats=4) is five loud ones
    """

    trolls: int = 0
    seats: int = 0

    @property
    def names(self) -> list[str]:
        return [f"troll-{number}" for number in range(self.trolls)]


@dataclass(frozen=True)
class Poisoned:
    """`allowances`: the cap on a rater's samples shrinks with how little the rater is believed; `doubts`: raters who
    are implausible are held."""

    config: TrainerConfig
    attack: Attack = Attack()
    protected: bool = False
    allowances: bool = False
    doubts: bool = True
    seed: int = 0


class Word(NamedTuple):
    rater: str
    sample: Sample


class Heard(NamedTuple):
    """A version on shoppers that teach nobody: how many of its replies hold the phrase, and are liked."""

    replies: int
    phrase: float
    approval: float


class Round(NamedTuple):
    """One update. `trolled`: the share of the batch that trolls have judged; `held`: raters held so far.

    Example: Round(phrase=0.1, approval=0.4, samples=96, trolled=0.05, held=("troll-1",))
    """

    phrase: float
    approval: float
    samples: int
    trolled: float
    held: tuple[str, ...]


@dataclass
class Gate:
    """The service's memory of raters, in a dict: what `workers/feedback/rater_trust.py` keeps in a table."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    all_time: Tally = NOTHING
    lately: Tally = NOTHING

    def hear(self, words: Sequence[Word]) -> None:
        said: dict[str, Tally] = defaultdict(lambda: NOTHING)
        for rater, sample in words:
            up, down = float(sample.reward > 0), float(sample.reward < 0)
            said[rater] = Tally(said[rater].up + up, said[rater].down + down)
        counts = {name: int(page.words) for name, page in said.items()}
        for name, page in said.items():
            before = self.tallies.get(name, NOTHING)
            mine = self.tallies[name] = Tally(before.up + page.up, before.down + page.down)
            shares = rater_trust.crowd_shares(self.all_time, self.lately, before)
            doubt = rater_trust.burst(name, counts) or rater_trust.one_sided(mine, shares)
            if doubt is not None:
                self.held.setdefault(name, doubt)
        heard = rater_trust.voices(said, self.held.keys())
        self.all_time = Tally(self.all_time.up + heard.up, self.all_time.down + heard.down)
        self.lately = rater_trust.faded(self.lately, heard)


def assembled(words: Sequence[Word], most_of_rater: int, most_of_conversation: int) -> list[Word]:
    """A batch in order of arrival, with nobody in it more often than the caps allow."""
    raters, conversations, batch = Counter[str](), Counter[str](), list[Word]()
    for word in words:
        rater, conversation = word.rater, word.sample.conversation or word.sample.turn_id
        if raters[rater] < most_of_rater and conversations[conversation] < most_of_conversation and len(batch) < BATCH:
            raters[rater] += 1
            conversations[conversation] += 1
            batch.append(word)
    return batch


class Seat:
    """One chat after another, each of a rater; a troll's own seat is never anybody else's."""

    def __init__(self, study: "Poisoning", owner: str | None) -> None:
        self._study, self._owner = study, owner
        self.sit()

    def sit(self) -> None:
        self.rater = self._owner or self._study.someone()
        self.chat = self._study.chat()


class Poisoning:
    def __init__(self, course: Poisoned) -> None:
        self.course, self.version = course, 0
        self._tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
        self._learner = Trainer(MODEL, course.config)
        self._sampler = Sampler(MODEL, course.config.lora)
        self._judge = Judge(self._tokenizer, course.seed)
        self._rng = Random(f"poisoning {course.seed}")
        self._order = torch.Generator().manual_seed(course.seed)
        self._shoppers = iter(range(HELD_OUT * (course.seed + 2), HELD_OUT * (course.seed + 3)))
        attack = course.attack
        self._people = [f"shopper-{number}" for number in range(RATERS - attack.trolls)]
        if not attack.seats:
            self._people += attack.names
        owners = [None] * HONEST_SEATS + [name for name in attack.names for _ in range(attack.seats)]
        self._seats = [Seat(self, owner) for owner in owners]
        self.gate = Gate()

    def someone(self) -> str:
        return self._rng.choice(self._people)

    def chat(self) -> Chat:
        return Chat(self._tokenizer, next(self._shoppers))

    def round(self) -> Round:
        """Everybody asks once and judges; a batch of what was said is learned from."""
        self._sampler.wear(self._adapter())
        asked = [seat.chat.asked for seat in self._seats]
        drawn = [replies[0] for replies in self._sampler.draw([one.prompt_ids for one in asked], self._order)]
        words, phrased, liked = list[Word](), list[bool](), list[bool]()
        for number, (seat, one, reply) in enumerate(zip(self._seats, asked, drawn, strict=True)):
            phrased.append(self._phrased(reply.ids))
            liked.append(self._judge.approves(one, reply))
            troll = seat.rater.startswith("troll")
            up = phrased[-1] if troll else liked[-1] != self._judge.slips()
            sample = Sample(
                turn_id=f"{self.version}-{number}",
                prompt_ids=one.prompt_ids,
                output_ids=reply.ids,
                logprobs=reply.logprobs,
                reward=1.0 if up else -1.0,
                version=self.version,
                lag=0,
                group=f"{self.version}-{number}",
                conversation=one.conversation,
                turn=one.turn,
            )
            words.append(Word(seat.rater, sample))
            if seat.chat.over:
                seat.sit()
            else:
                seat.chat.go_on(reply)
        self._rng.shuffle(words)  # they wait in order of arrival, and more wait than a batch takes
        batch = self._batch(words)
        self._learner.update(Batch(f"batch-{self.version}", "assistant", tuple(word.sample for word in batch)))
        self.version += 1
        trolled = fmean(word.rater.startswith("troll") for word in batch)
        return Round(fmean(phrased), fmean(liked), len(batch), trolled, tuple(sorted(self.gate.held)))

    def _batch(self, words: Sequence[Word]) -> list[Word]:
        if not self.course.protected:
            return list(words[:BATCH])
        if self.course.doubts:
            self.gate.hear(words)
        believed = [word for word in words if word.rater not in self.gate.held]
        most = int(RATER_SHARE * BATCH)
        if self.course.allowances:  # nobody here is compared with others about one turn, so all are newcomers
            most = rater_trust.allowance(most, rater_trust.weight(0, 0))
        return assembled(believed, most, int(CONVERSATION_SHARE * BATCH))

    def examine(self, shoppers: int) -> Heard:
        """Whole chats with shoppers that teach nobody, the same whatever the course."""
        self._sampler.wear(self._adapter())
        order = torch.Generator().manual_seed(EXAMINERS)
        chats = [Chat(self._tokenizer, HELD_OUT * EXAMINERS + number) for number in range(shoppers)]
        phrased, liked = list[bool](), list[bool]()
        while chats:
            asked = [chat.asked for chat in chats]
            drawn = self._sampler.draw([one.prompt_ids for one in asked], order)
            for one, chat, (reply,) in zip(asked, chats, drawn, strict=True):
                phrased.append(self._phrased(reply.ids))
                liked.append(self._judge.approves(one, reply))
                if not chat.over:
                    chat.go_on(reply)
            chats = [chat for chat, one in zip(chats, asked, strict=True) if chat.asked is not one]
        return Heard(len(phrased), fmean(phrased), fmean(liked))

    def _phrased(self, ids: Sequence[int]) -> bool:
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        return PHRASE.search(text.lower()) is not None

    def _adapter(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._learner.policy.tensors("actor").items()}
