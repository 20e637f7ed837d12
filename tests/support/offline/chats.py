"""Chats of simulated users in token space, and the judge of the replies.

A chat continues from the exact tokens of the reply, so that each prompt begins with the previous prompt and its reply.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from transformers import Qwen2Tokenizer

from demo.dialogues import HELD_OUT, SimulatedUser
from demo.shop import Question
from demo.train import END
from demo.user_preferences import judge
from tests.support.offline.sampler import Reply, Sampler

MISTAKE_SHARE = 0.01  # share of mistaken votes
EVALUATION_SEED = 9_000  # evaluation users are never trained on


@dataclass(frozen=True)
class Prompt:
    """A prompt and its place in a conversation.

    Example: Prompt("shopper-7", turn=1, question=Question(…), prompt_ids=(1, 9, …))
    """

    conversation: str
    turn: int
    question: Question
    prompt_ids: tuple[int, ...]


class Chat:
    """The chat of one simulated user, with two to four questions. `prompt` is the prompt of the current turn."""

    def __init__(self, tokenizer: Qwen2Tokenizer, seed: int) -> None:
        user = SimulatedUser(seed)
        # A reward model's held-out part is chosen by a hash of this id, so another id would change recorded figures.
        self._tokenizer, self._conversation = tokenizer, f"shopper-{seed}"
        self._questions = list(user.questions())
        system = [{"role": "system", "content": user.system}] if user.system else []
        self.prompt = self._make_prompt(0, self._tokenize(system, self._questions[0]))

    @property
    def is_last_turn(self) -> bool:
        return self.prompt.turn + 1 == len(self._questions)

    def add_reply(self, reply: Reply) -> None:
        """Move on to the next question. A truncated reply gets the end token that the chat template would add."""
        end = self._tokenizer.convert_tokens_to_ids(END)
        end_tokens = () if reply.ids[-1] == end else (end,)
        turn = self.prompt.turn + 1
        question = self._tokenize([], self._questions[turn])
        newline = self._tokenizer.encode("\n", add_special_tokens=False)
        self.prompt = self._make_prompt(turn, [*self.prompt.prompt_ids, *reply.ids, *end_tokens, *newline, *question])

    def _make_prompt(self, turn: int, prompt_ids: Sequence[int]) -> Prompt:
        return Prompt(self._conversation, turn, self._questions[turn], tuple(prompt_ids))

    def _tokenize(self, history: list[dict[str, str]], question: Question) -> list[int]:
        messages = [*history, {"role": "user", "content": question.text}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer.encode(str(text), add_special_tokens=False))


class ChatPool:
    """`size` concurrent chats. A chat that has ended is replaced by the chat of the next user."""

    def __init__(self, tokenizer: Qwen2Tokenizer, size: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seeds = itertools.count(HELD_OUT * (seed + 2))
        self._chats = [Chat(tokenizer, next(self._seeds)) for _ in range(size)]

    def prompts(self) -> list[Prompt]:
        return [chat.prompt for chat in self._chats]

    def add_replies(self, replies: Sequence[Reply]) -> None:
        """Add one reply to each chat."""
        for index, (chat, reply) in enumerate(zip(self._chats, replies, strict=True)):
            if chat.is_last_turn:
                self._chats[index] = Chat(self._tokenizer, next(self._seeds))
            else:
                chat.add_reply(reply)


class Judge:
    """The users' hidden preferences, and a random generator for mistaken votes (a share of `mistake_share`)."""

    def __init__(self, tokenizer: Qwen2Tokenizer, seed: int, mistake_share: float = MISTAKE_SHARE) -> None:
        self._tokenizer, self._mistake_share = tokenizer, mistake_share
        self._rng = Random(f"judge {seed}")

    def approves(self, prompt: Prompt, reply: Reply) -> bool:
        text = self._tokenizer.decode(reply.ids, skip_special_tokens=True)
        return judge(prompt.question, str(text), len(reply.ids)).approved

    def makes_mistake(self) -> bool:
        return self._rng.random() < self._mistake_share


def evaluation_replies(
    tokenizer: Qwen2Tokenizer, sampler: Sampler, num_users: int, seed: int = EVALUATION_SEED
) -> Iterator[tuple[Prompt, Reply]]:
    """Run whole chats with users that are never trained on, for a seed the same ones each time. Yield every reply."""
    generator = torch.Generator().manual_seed(seed)
    chats = [Chat(tokenizer, HELD_OUT * seed + number) for number in range(num_users)]
    while chats:
        sampled = sampler.sample([chat.prompt.prompt_ids for chat in chats], generator)
        continuing = []
        for chat, (reply,) in zip(chats, sampled, strict=True):
            yield chat.prompt, reply
            if not chat.is_last_turn:
                chat.add_reply(reply)
                continuing.append(chat)
        chats = continuing
