"""The sampling of episodes that are to be learned from: the policy's own distribution, whatever a request asks for.

Stock agents send temperature 0 or `top_p`. The engine's log-probs are then not the probabilities that the tokens were
sampled with, and such replies are not trained on. An episode that was created with `sampling: "policy"` replaces these
parameters; what else a request asks for (`n`, `seed`, `stop`, limits, tools, formats) holds as it is.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from app.inference.request import Sampling

HEADER = "x-attune-sampling"
RECORD_KEY = "overridden_sampling"  # in a turn's `request_params`: the values that the request asked for
POLICY_SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,  # all tokens
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": None,
}


@dataclass(frozen=True)
class Override:
    """The parameters of a request that were replaced, with the values that it asked for. Empty: none was."""

    requested: dict[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """What the client is told. Example: {"x-attune-sampling": "overridden; temperature=1; top_p=1"}."""
        if not self.requested:
            return {}
        used = [f"{name}={_render(POLICY_SAMPLING[name])}" for name in self.requested]
        return {HEADER: "; ".join(["overridden", *used])}

    @property
    def recorded_params(self) -> dict[str, Any]:
        """What the turn's `request_params` record."""
        return {RECORD_KEY: self.requested} if self.requested else {}


NO_OVERRIDE = Override()


def override_sampling(sampling: Sampling) -> tuple[Sampling, Override]:
    """Return the policy's sampling with the other parameters of the request, and what it replaces."""
    requested = {name: getattr(sampling, name) for name in POLICY_SAMPLING}
    replaced = {name: value for name, value in requested.items() if value != POLICY_SAMPLING[name]}
    return replace(sampling, **{name: POLICY_SAMPLING[name] for name in replaced}), Override(replaced)


def _render(value: Any) -> str:
    return "none" if value is None else f"{value:g}"
