"""reasoning-gym: questions from generators, with one answer each. Runs in the interpreter that has `reasoning_gym`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

import reasoning_gym
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

CORRECT = 1.0


class Entry(TypedDict):
    question: str
    answer: str
    metadata: Mapping[str, object]


class Questions:
    """The questions of one generator."""

    def __init__(self, name: str, arguments: dict[str, object]) -> None:
        self._name = name
        self._pays_partly = bool(arguments.pop("partial_credit", False))
        prompt = arguments.pop("system_prompt", None)
        self._system_prompt = SYSTEM_PROMPTS.get(str(prompt), str(prompt)) if prompt else None
        self._arguments = arguments
        self._new_dataset(0)
        self._entries: dict[str, tuple[reasoning_gym.core.ProceduralDataset, Entry]] = {}

    def reset(self, episode: str, task: dict[str, object]) -> dict[str, object]:
        """Ask the task's question, which its seed decides."""
        dataset = self._new_dataset(int(str(task["seed"])))
        entry: Entry = dataset[0]
        self._entries[episode] = (dataset, entry)
        system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        return {"messages": [*system, {"role": "user", "content": entry["question"]}]}

    def step(self, episode: str, reply: dict[str, object]) -> dict[str, object]:
        """Score the answer: the text in the last <answer>, or else all of the reply."""
        dataset, entry = self._entries[episode]
        text = str(reply.get("content") or "")
        tagged = extract_answer(text)
        score = float(dataset.score_answer(answer=text.strip() if tagged is None else tagged, entry=entry))
        reward = score if self._pays_partly else (1.0 if score >= CORRECT else -1.0)
        return {"reward": max(-1.0, min(1.0, reward)), "terminated": True, "info": {"score": score}}

    def close(self, episode: str) -> None:
        """Forget the question."""
        self._entries.pop(episode, None)

    def _new_dataset(self, seed: int) -> reasoning_gym.core.ProceduralDataset:
        return reasoning_gym.create_dataset(self._name, seed=seed, size=1, **self._arguments)


def open_environment(name: str, arguments: dict[str, object]) -> Questions:
    """Return the questions of a generator, such as chain_sum."""
    return Questions(name, arguments)
