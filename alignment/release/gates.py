"""Gates: checks that a new version must pass before it serves users. Typed settings and comparisons."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, model_validator

from alignment import extensions
from alignment.config.frozen_model import Frozen
from alignment.signals.verifiers import VerifierConfig
from alignment.tolerance import exceeds

ENTRY_POINTS = "attune.gates"
GateName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$", description="the name of the gate in results")]


class MetricGate(Frozen):
    """A metric of the update must be within bounds. A metric that is missing fails.

    Example: {"type": "metric", "name": "entropy", "metric": "actor/entropy", "at_least": 0.1}
    """

    type: Literal["metric"] = "metric"
    name: GateName
    metric: str = Field(min_length=1, max_length=200, description="as in docs/metrics.md")
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _check_bounds(self) -> "MetricGate":
        if self.at_least is None and self.at_most is None:
            raise ValueError("set at_least, at_most, or both")
        return self

    def rejection_reason(self, metrics: Mapping[str, object]) -> str | None:
        value = metrics.get(self.metric)
        if not isinstance(value, int | float) or value != value:
            return f"{self.metric} was not measured"
        if self.at_least is not None and value < self.at_least:
            return f"{self.metric} is {value:.4g}, below {self.at_least:g}"
        if self.at_most is not None and value > self.at_most:
            return f"{self.metric} is {value:.4g}, above {self.at_most:g}"
        return None


class FunctionGate(Frozen):
    """A function of your own: `module:function`, or an entry point of the group attune.gates.

    It is called with a Candidate, in a thread, and returns None or the reason for rejecting the version.
    """

    type: Literal["function"] = "function"
    name: GateName
    function: str = Field(min_length=1, max_length=200)
    timeout_seconds: float = Field(60.0, gt=0, le=3600)


class PromptsGate(Frozen):
    """Held-out prompts of a dataset, answered by the candidate and, for relative bounds, by the serving version.

    The verifier decides whether a reply is right.

    Example: {"type": "prompts", "name": "safety", "dataset": "red-team", "verifier": {"type": "regex", "pattern":
    "^(?!.*forbidden)"}, "at_least": 0.99}
    """

    type: Literal["prompts"] = "prompts"
    name: GateName
    dataset: str = Field(min_length=1, max_length=63, description="a dataset of prompts in the policy's project")
    verifier: VerifierConfig
    at_least: float | None = Field(None, ge=0, le=1, description="smallest share of right replies")
    max_drop: float | None = Field(
        None, ge=0, le=1, description="by how much the share may be below the serving version's"
    )
    max_length_ratio: float | None = Field(
        None, gt=1, description="largest ratio of mean reply lengths to the serving version, in either direction"
    )
    max_prompts: int = Field(64, ge=1, le=4096, description="the number of prompts, from the start of the dataset")
    max_tokens: int = Field(128, ge=1, le=8192)
    temperature: float = Field(0.0, ge=0, le=2)
    timeout_seconds: float = Field(60.0, gt=0, le=3600, description="for one reply")

    @model_validator(mode="after")
    def _check_bounds(self) -> "PromptsGate":
        if self.at_least is None and not self.compares:
            raise ValueError("set at_least, max_drop or max_length_ratio")
        return self

    @property
    def compares(self) -> bool:
        return self.max_drop is not None or self.max_length_ratio is not None

    def rejection_reason(self, candidate: "PromptScores", serving: "PromptScores | None") -> str | None:
        if candidate.share is None:
            return "the verifier scored no reply"
        result = f"{candidate.share:.1%} of {candidate.judged} replies are right"
        if self.at_least is not None and exceeds(self.at_least, candidate.share):
            return f"{result}, less than {self.at_least:.1%}"
        if serving is None or serving.share is None:
            return None
        if self.max_drop is not None and exceeds(serving.share, candidate.share, self.max_drop):
            return f"{result}, against {serving.share:.1%} of the serving version"
        if self.max_length_ratio is None or not serving.mean_length:
            return None
        ratio = candidate.mean_length / serving.mean_length
        if not 1 / self.max_length_ratio <= ratio <= self.max_length_ratio:
            return f"replies have {ratio:.2f} times the length of the serving version's"
        return None


Gate = Annotated[MetricGate | FunctionGate | PromptsGate, Field(discriminator="type")]


@dataclass(frozen=True)
class PromptScores:
    """The results of one version on a gate's prompts. `mean_length` is in tokens."""

    right: int
    judged: int
    mean_length: float

    @property
    def share(self) -> float | None:
        return self.right / self.judged if self.judged else None


@dataclass(frozen=True)
class Candidate:
    """The facts of a version that a gate's function gets. They include no text of users."""

    policy: str
    number: int
    parent: int | None
    base_model: str
    adapter_path: str
    metrics: Mapping[str, object] = field(default_factory=dict)


def load_gate(name: str) -> Callable[[Candidate], str | None]:
    """Load a gate's function. Raises UnknownExtension. The import of a module may raise any exception."""
    return extensions.load_function(name, ENTRY_POINTS, (), noun="gate")
