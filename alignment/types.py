"""Samples and batches: turns in token space, as they travel from the assembler to the trainer."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from alignment.errors import MisalignedSample, NoVariance


@dataclass(frozen=True)
class Sample:
    """One turn, exactly as the engine saw and said it, and what it was worth.

    Example: Sample(turn_id="chatcmpl-7", prompt_ids=(1, 5), output_ids=(9, 2), logprobs=(-0.1, -1.3),
                    reward=1.0, version=3, temperature=0.7)
    """

    turn_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the behaviour policy, at `temperature`, one per output token
    reward: float
    version: int  # the n of `{policy}-v{n}` that spoke; 0 is the base model
    temperature: float = 1.0
    lag: int = 0  # versions between the one that spoke and the one that is taught
    group: str | None = None  # replies to one prompt, which may be compared
    conversation: str | None = None
    turn: int = 0  # its place in the conversation

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise MisalignedSample(f"Turn {self.turn_id} has no prompt tokens.")
        if not self.output_ids:
            raise MisalignedSample(f"Turn {self.turn_id} has no output tokens.")
        if len(self.logprobs) != len(self.output_ids):
            raise MisalignedSample(
                f"Turn {self.turn_id} has {len(self.output_ids)} tokens but {len(self.logprobs)} log-probs."
            )
        if not all(math.isfinite(logprob) for logprob in self.logprobs):
            raise MisalignedSample(f"Turn {self.turn_id} has a log-prob that is not finite.")
        if not math.isfinite(self.reward):
            raise MisalignedSample(f"Turn {self.turn_id} has a reward that is not finite.")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise MisalignedSample(f"Turn {self.turn_id} was sampled at temperature {self.temperature}.")

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True)
class Batch:
    """A frozen set of samples for one update of one policy."""

    id: str
    policy: str
    samples: tuple[Sample, ...]

    def to_bytes(self) -> bytes:
        """JSON: floats are written so that they read back bit for bit."""
        return json.dumps(asdict(self), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        fields = json.loads(raw)
        return cls(fields["id"], fields["policy"], tuple(_sample(sample) for sample in fields["samples"]))


def _sample(fields: dict[str, Any]) -> Sample:
    lists = {name: tuple(fields[name]) for name in ("prompt_ids", "output_ids", "logprobs")}
    return Sample(**(fields | lists))


def check_variance(rewards: Sequence[float]) -> None:
    """Refuse rewards that prefer nothing: none, one, or all the same."""
    if len(rewards) < 2:
        raise NoVariance(f"A batch of {len(rewards)} has nothing to compare with.")
    if min(rewards) == max(rewards):
        raise NoVariance(f"All {len(rewards)} rewards are {rewards[0]}, so no reply is better than another.")
