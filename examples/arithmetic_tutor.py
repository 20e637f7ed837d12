"""An example environment: a tutor of arithmetic who says "try again" until the answer is right, five turns at most.

    attune environments run examples.arithmetic_tutor:ArithmeticTutor --tasks 100 --group 4

Each attempt is an episode; attempts at the same sum are compared with each other.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import count
from random import Random

from alignment.environments.protocols import Feedback, Interaction, Message, Observation, Task

MAX_TURNS = 5
LAST_NUMBER = re.compile(r"-?\d+(?=\D*$)")


class ArithmeticTutor(Interaction):
    """The score is 1 for an answer that is right at once, 0.2 less for each further turn, and -1 for none.

    Args:
        largest: The largest number in a sum.
    """

    def __init__(self, largest: int = 99) -> None:
        self._largest = largest
        self._answer = 0
        self._num_turns = 0
        self._is_solved = False

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yield sums without end. Those of another split are other ones."""
        for number in count():
            random = Random(f"{split} {seed} {number}")
            left, right = random.randint(0, self._largest), random.randint(0, self._largest)
            yield Task(f"{split}-{seed}-{number}", {"question": f"{left} + {right}", "answer": left + right})

    async def start(self, task: Task) -> Observation:
        self._answer = int(str(task.data["answer"]))
        return Observation([{"role": "user", "content": f"What is {task.data['question']}? End with the number."}])

    async def respond(self, messages: Sequence[Message]) -> Feedback:
        self._num_turns += 1
        found = LAST_NUMBER.search(str(messages[-1].get("content")))
        self._is_solved = found is not None and int(found[0]) == self._answer
        text = "That is right." if self._is_solved else "That is not right. Try again."
        return Feedback({"role": "user", "content": text}, is_done=self._is_solved or self._num_turns == MAX_TURNS)

    async def score(self) -> float:
        return 1.0 - 0.2 * (self._num_turns - 1) if self._is_solved else -1.0
