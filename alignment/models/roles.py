"""Model roles: what a forward pass of the shared base model acts as.

actor       the policy that is trained
reference   the base model without any adapter
critic      returns a value for every token instead of a log-prob
anchor      a frozen copy of the policy that serves
reward      returns one score for a reply instead of log-probs
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

ModelRole = Literal["actor", "reference", "critic", "anchor", "reward"]


@dataclass
class ActiveRole:
    """The role of the current forward pass. All LoRA layers of one base model share one instance."""

    role: ModelRole = "actor"

    @contextmanager
    def acting_as(self, role: ModelRole) -> Iterator[None]:
        """Set the role within a `with` block, and restore the previous one afterwards."""
        previous, self.role = self.role, role
        try:
            yield
        finally:
            self.role = previous
