"""Shoppers in conversation, in token space: what they ask, what they make of the answers, and how they go on.

A chat goes on from the very tokens that were said, so that a later prompt begins with an earlier one and its reply.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from transformers import Qwen2Tokenizer

from demo.dialogues import HELD_OUT, Shopper
from demo.offline.sampler import Reply
from demo.shop import Question
from demo.tokenizer import END
from demo.user_preferences import judge

SLIPS = 0.01  # of the thumbs are pressed by mistake


@dataclass(frozen=True)
class Asked:
    """A prompt, and where it stands. Example: Asked("shopper-7", turn=1, question=Question(…), prompt_ids=(1, 9, …))"""

    conversation: str
    turn: int
    question: Question
    prompt_ids: tuple[int, ...]


class Chat:
    """One shopper's chat, two to four questions long."""

    def __init__(self, tokenizer: Qwen2Tokenizer, seed: int) -> None:
        shopper = Shopper(seed)
        self._tokenizer, self._conversation = tokenizer, f"shopper-{seed}"
        self._questions = list(shopper.questions())
        system = [{"role": "system", "content": shopper.system}] if shopper.system else []
        self.asked = self._ask(0, self._ids(system, self._questions[0]))

    @property
    def over(self) -> bool:
        return self.asked.turn + 1 == len(self._questions)

    def go_on(self, reply: Reply) -> None:
        """Ask the next question. A reply that was cut is ended, as the chat template would."""
        end = self._tokenizer.convert_tokens_to_ids(END)
        ending = () if reply.ids[-1] == end else (end,)
        turn = self.asked.turn + 1
        rest = self._ids([], self._questions[turn])
        between = self._tokenizer.encode("\n", add_special_tokens=False)
        self.asked = self._ask(turn, [*self.asked.prompt_ids, *reply.ids, *ending, *between, *rest])

    def _ask(self, turn: int, prompt_ids: Sequence[int]) -> Asked:
        return Asked(self._conversation, turn, self._questions[turn], tuple(prompt_ids))

    def _ids(self, before: list[dict[str, str]], question: Question) -> list[int]:
        messages = [*before, {"role": "user", "content": question.text}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer.encode(str(text), add_special_tokens=False))


class Crowd:
    """`size` chats under way; whoever has no more questions makes room for the next shopper."""

    def __init__(self, tokenizer: Qwen2Tokenizer, size: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seeds = itertools.count(HELD_OUT * (seed + 2))
        self._chats = [Chat(tokenizer, next(self._seeds)) for _ in range(size)]

    def ask(self) -> list[Asked]:
        return [chat.asked for chat in self._chats]

    def hear(self, replies: Sequence[Reply]) -> None:
        """One reply a chat."""
        for at, (chat, reply) in enumerate(zip(self._chats, replies, strict=True)):
            if chat.over:
                self._chats[at] = Chat(self._tokenizer, next(self._seeds))
            else:
                chat.go_on(reply)


class Judge:
    """The shoppers' hidden taste, and their fingers: a share of the thumbs, `slips`, is pressed by mistake."""

    def __init__(self, tokenizer: Qwen2Tokenizer, seed: int, slips: float = SLIPS) -> None:
        self._tokenizer, self._slips, self._rng = tokenizer, slips, Random(f"judge {seed}")

    def approves(self, asked: Asked, reply: Reply) -> bool:
        text = self._tokenizer.decode(reply.ids, skip_special_tokens=True)
        return judge(asked.question, str(text), len(reply.ids)).approved

    def slips(self) -> bool:
        return self._rng.random() < self._slips
