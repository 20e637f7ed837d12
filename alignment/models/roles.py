"""One trunk, many hats: whose words a forward computes.

actor       the policy that learns
reference   the base model, as if nothing had been learned
critic      a value for every token instead of a log-prob
anchor      the policy that serves, held still
reward      one score for a reply instead of log-probs: what people would make of it
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

ModelRole = Literal["actor", "reference", "critic", "anchor", "reward"]


@dataclass
class ActiveRole:
    """The hat that acts at the moment. All adapters of a trunk look at the same one."""

    hat: ModelRole = "actor"

    @contextmanager
    def wearing(self, hat: ModelRole) -> Iterator[None]:
        before, self.hat = self.hat, hat
        try:
            yield
        finally:
            self.hat = before
