"""An example of sub-agents: a planner splits a sum of products, workers calculate the parts, the planner adds them up.

    export ATTUNE_URL=http://127.0.0.1:8700 ATTUNE_API_KEY=sk-attune-…
    python -m examples.planner_and_workers --policy assistant --tasks 20 --group 4

Each attempt is an episode, and attempts at the same sum are a group. Two headers say who chats: `x-attune-agent` is the
role, and `x-conversation-id` tells the workers of an attempt apart. The outcome of the episode is whether the sum is
right. A worker's reply also has a score of its own, since it can be right where the planner is not; parts that the sum
does not have get none, lest a plan of many easy parts pay. With the settings `episode_credit` "return" and
`baseline_per_agent` each agent is compared with its like (docs/episodes.md).
"""

import argparse
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any, NamedTuple
from uuid import uuid4

from attune_client import Attune, Episode
from attune_client.episodes import EpisodeFields
from openai import OpenAI
from openai.types.chat import ChatCompletion

PLAN = "Split this sum into its products. Write each of them on a line of its own, and nothing else: {question}"
PART = "Calculate {part}. End with the number."
MERGE = "These are the parts:\n{parts}\nAdd them up. End with the number."
PRODUCT = re.compile(r"\b(\d{1,4})[ \t]*(?:[*x×·]|\\times|\\cdot)[ \t]*(\d{1,4})\b")
NUMBER = re.compile(r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
MAX_PARTS = 4
SOURCE: Any = {"kind": "CODE", "id": "planner-and-workers"}


class Part(NamedTuple):
    """What a worker was to calculate, and its reply."""

    left: int
    right: int
    reply: ChatCompletion

    @property
    def is_right(self) -> bool:
        return last_number(self.reply) == self.left * self.right


class Team:
    """The agents of one attempt. Chats with the episode's key belong to the episode."""

    def __init__(self, episode: Episode, client: OpenAI) -> None:
        self._episode = episode
        self._client = client

    def solve(self, question: str) -> tuple[int | None, list[Part]]:
        """Return the planner's answer, and the parts that it had calculated."""
        messages = [{"role": "user", "content": PLAN.format(question=question)}]
        plan = self._chat("planner", "planner", messages)
        products = list(dict.fromkeys(PRODUCT.findall(text_of(plan))))[:MAX_PARTS]
        with ThreadPoolExecutor(MAX_PARTS) as pool:
            parts = list(pool.map(self._calculate, range(len(products)), products))
        results = "\n".join(f"{part.left} * {part.right}: {text_of(part.reply)}" for part in parts)
        messages += [
            {"role": "assistant", "content": text_of(plan)},
            {"role": "user", "content": MERGE.format(parts=results)},
        ]
        return last_number(self._chat("planner", "planner", messages)), parts

    def _calculate(self, number: int, factors: tuple[str, str]) -> Part:
        left, right = map(int, factors)
        messages = [{"role": "user", "content": PART.format(part=f"{left} * {right}")}]
        return Part(left, right, self._chat("worker", f"worker-{number}", messages))

    def _chat(self, agent: str, conversation: str, messages: Sequence[Any]) -> ChatCompletion:
        headers = {"x-attune-agent": agent, "x-conversation-id": f"{self._episode.id}/{conversation}"}
        return self._client.chat.completions.create(
            model=self._episode.policy, messages=list(messages), max_completion_tokens=200, extra_headers=headers
        )


def text_of(reply: ChatCompletion) -> str:
    return reply.choices[0].message.content or ""


def last_number(reply: ChatCompletion) -> int | None:
    """Return the last number of the reply, such as 1234 for "1,234.0", or None if it is no integer."""
    found = NUMBER.findall(text_of(reply))
    number = float(found[-1].replace(",", "")) if found else math.nan  # infinite, if it has hundreds of digits
    return int(number) if number.is_integer() else None


def play(attune: Attune, policy: str, seed: int, group: dict[str, Any]) -> None:
    """Play one attempt, and report how it went."""
    random = Random(seed)
    products = [(random.randint(2, 20), random.randint(2, 20)) for _ in range(2)]
    question = " + ".join(f"{left} * {right}" for left, right in products)
    options: EpisodeFields = {"task": question, "group": group, "sampling": "policy", "service_tier": "flex"}
    with attune.episode(policy, **options) as episode:
        with OpenAI(**episode.openai()) as client:
            answer, parts = Team(episode, client).solve(question)
        for part in parts:
            if (part.left, part.right) in products:
                attune.feedback.score(part.reply.id, 0.5 if part.is_right else -0.5, name="part", source=SOURCE)
        outcome = 1.0 if answer == sum(left * right for left, right in products) else -1.0
        episode.end(outcome)
    num_right = sum(part.is_right for part in parts)
    print(f"{question}: {answer}, {num_right} of {len(parts)} parts are right, outcome {outcome:g}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.planner_and_workers", description=__doc__)
    parser.add_argument("--policy", default="assistant")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--group", type=int, default=4, help="attempts at each task, which are compared: 2 or more")
    args = parser.parse_args()
    run = uuid4().hex[:12]
    with Attune() as attune:
        for seed in range(args.tasks):
            group = {"id": f"{run}/{seed}", "size": args.group}
            for _ in range(args.group):
                play(attune, args.policy, seed, group)


if __name__ == "__main__":
    main()
