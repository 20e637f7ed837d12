"""Gates: what a new version must pass before anybody hears it. Typed settings and plain comparisons; torch-free."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from alignment import extensions
from alignment.config.algorithm import Frozen
from alignment.signals.verifiers import VerifierConfig

ENTRY_POINTS = "attune.gates"
GateName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$", description="under which it is on record")]


class MetricGate(Frozen):
    """What the update measured is within bounds; a figure that was not measured is not.

    Example: {"type": "metric", "name": "entropy", "metric": "actor/entropy", "at_least": 0.1}
    """

    type: Literal["metric"] = "metric"
    name: GateName
    metric: str = Field(min_length=1, max_length=200, description="as in docs/metrics.md")
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _bounded(self) -> "MetricGate":
        if self.at_least is None and self.at_most is None:
            raise ValueError("it takes at_least, at_most, or both")
        return self

    def refusal(self, metrics: Mapping[str, Any]) -> str | None:
        value = metrics.get(self.metric)
        if not isinstance(value, int | float) or value != value:
            return f"{self.metric} was not measured"
        if self.at_least is not None and value < self.at_least:
            return f"{self.metric} is {value:.4g}, below {self.at_least:g}"
        if self.at_most is not None and value > self.at_most:
            return f"{self.metric} is {value:.4g}, above {self.at_most:g}"
        return None


class FunctionGate(Frozen):
    """A function of your own: `module:function`, or an entry point of the group attune.gates. It is called with
    Candidate, in a thread, and returns None or why the version must not go out."""

    type: Literal["function"] = "function"
    name: GateName
    function: str = Field(min_length=1, max_length=200)
    timeout_seconds: float = Field(60.0, gt=0, le=3600)


class PromptsGate(Frozen):
    """Held-out prompts of a dataset, answered by the candidate and, where a bound is relative, by the version that
    serves; each reply is right by the verifier, or wrong.

    Example: {"type": "prompts", "name": "safety", "dataset": "red-team", "verifier": {"type": "regex", "pattern":
    "^(?!.*forbidden)"}, "at_least": 0.99}
    """

    type: Literal["prompts"] = "prompts"
    name: GateName
    dataset: str = Field(min_length=1, max_length=63, description="of prompts, of the policy's own project")
    verifier: VerifierConfig
    at_least: float | None = Field(None, ge=0, le=1, description="share of right replies")
    most_drop: float | None = Field(None, ge=0, le=1, description="by which the share may lie below the serving one's")
    max_length_ratio: float | None = Field(
        None, gt=1, description="times as long, or as short, as the serving version's replies may be on average"
    )
    most: int = Field(64, ge=1, le=4096, description="prompts that are asked, the first of the dataset")
    max_tokens: int = Field(128, ge=1, le=8192)
    temperature: float = Field(0.0, ge=0, le=2)
    timeout_seconds: float = Field(60.0, gt=0, le=3600, description="for one reply")

    @model_validator(mode="after")
    def _bounded(self) -> "PromptsGate":
        if self.at_least is None and not self.compares:
            raise ValueError("it takes at_least, most_drop or max_length_ratio")
        return self

    @property
    def compares(self) -> bool:
        return self.most_drop is not None or self.max_length_ratio is not None

    def refusal(self, candidate: "Answers", serving: "Answers | None") -> str | None:
        if candidate.share is None:
            return "the verifier had nothing to say of any reply"
        told = f"{candidate.share:.1%} of {candidate.judged} replies are right"
        if self.at_least is not None and candidate.share < self.at_least:
            return f"{told}, less than {self.at_least:.1%}"
        if serving is None or serving.share is None:
            return None
        if self.most_drop is not None and serving.share - candidate.share > self.most_drop:
            return f"{told}, against {serving.share:.1%} of what serves"
        if self.max_length_ratio is None or not serving.mean_length:
            return None
        ratio = candidate.mean_length / serving.mean_length
        if not 1 / self.max_length_ratio <= ratio <= self.max_length_ratio:
            return f"replies have {ratio:.2f} times the length of what serves"
        return None


Gate = Annotated[MetricGate | FunctionGate | PromptsGate, Field(discriminator="type")]


@dataclass(frozen=True)
class Answers:
    """Of one version to a gate's prompts. `mean_length` in tokens."""

    right: int
    judged: int
    mean_length: float

    @property
    def share(self) -> float | None:
        return self.right / self.judged if self.judged else None


@dataclass(frozen=True)
class Candidate:
    """What a gate's function may know of a version: nothing of anybody's words."""

    policy: str
    number: int
    parent: int | None
    base_model: str
    adapter_path: str
    metrics: Mapping[str, Any] = field(default_factory=dict)


def load(name: str) -> Callable[[Candidate], str | None]:
    """Raises extensions.UnknownFunction. Importing may raise anything."""
    return extensions.load(name, ENTRY_POINTS, (), noun="gate")
