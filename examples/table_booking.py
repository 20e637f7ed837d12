"""An example of a simulated user: a guest who wants a table. The assistant must find out for when and for how many.

    attune environments run examples.table_booking:TableBooking --tasks 50 --group 4 --max-reply-tokens 128
    attune environments run examples.table_booking:TableBooking --arguments '{"user_model": "guest@v3"}' --group 4

The guest has a script, or is a model at a fixed version. What counts is the table that is booked in the end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from random import Random

from alignment.environments.protocols import Feedback, Message, Observation, Task
from alignment.environments.tools.function_tool import FunctionTool
from alignment.environments.tools.toolbox import Toolbox
from alignment.environments.users.model_user import ModelUser
from alignment.environments.users.scripted_user import Rule, ScriptedUser
from alignment.environments.users.simulated_user import SimulatedUser
from alignment.environments.users.user_interaction import UserInteraction

INSTRUCTIONS = "You take bookings for a restaurant. Ask for what you need, call book_table once, and confirm it."
DAYS = ("Monday", "Wednesday", "Friday", "Saturday")
NAMES = ("Lovelace", "Hopper", "Turing", "Noether")


class TableBooking(UserInteraction):
    """The reward is 1 if day, number of people and name are right, 2/3 less for each that is not, and -1 without a
    booking.

    Args:
        user_model: The model of the guest at one version, such as `guest@v3`. Without one the guest has a script.
    """

    max_turns = 12

    def __init__(self, user_model: str | None = None) -> None:
        self._user_model = user_model
        self._booking: dict[str, str | int] = {}

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        for number in count():
            random = Random(f"{split} {seed} {number}")
            day, people, name = random.choice(DAYS), random.randint(2, 8), random.choice(NAMES)
            yield Task(f"{split}-{seed}-{number}", {"day": day, "people": people, "name": name})

    def user(self, task: Task) -> SimulatedUser:
        day, people, name = (task.data[key] for key in ("day", "people", "name"))
        if self._user_model is not None:
            persona = f"You are {name}. You want a table on {day} for {people} people. You are in a hurry."
            return ModelUser(persona, self._user_model, name="hurried guest")
        rules = [
            Rule(r"how many|people|party", f"We are {people}."),
            Rule(r"\b(day|when|date)\b", f"On {day}."),
            Rule(r"\bname\b", f"{name}, please."),
        ]
        return ScriptedUser("Hello, I would like to book a table.", rules=rules, otherwise="Can you book it, please?")

    def observe(self, task: Task, first: Message) -> Observation:
        return Observation([{"role": "system", "content": INSTRUCTIONS}, first], toolbox=self._toolbox())

    async def respond(self, messages: Sequence[Message]) -> Feedback:
        """End after a booking: what the assistant says of one, such as "we are fully booked", ends nothing."""
        feedback = await super().respond(messages)
        return replace(feedback, is_done=True, is_truncated=False) if self._booking else feedback

    async def grade(self, task: Task, dialogue: Sequence[Message]) -> float:
        if not self._booking:
            return -1.0
        num_right = sum(self._booking[key] == task.data[key] for key in ("day", "people", "name"))
        return 2 * num_right / 3 - 1

    def _toolbox(self) -> Toolbox:
        async def book_table(day: str, people: int, name: str) -> str:
            """Book a table.

            Args:
                day: The day of the week, such as Monday.
                people: How many people come.
                name: The name of the guest.
            """
            self._booking = {"day": day, "people": people, "name": name}
            return "The table is booked."

        return Toolbox([FunctionTool(book_table)])
