"""Section of the release: what happens between a trained version and its users."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from alignment.config.frozen_model import Frozen
from alignment.release.canary import CanaryConfig
from alignment.release.gates import Gate
from alignment.release.shadow import ShadowConfig


def false_to_none(value: object) -> object:
    """TOML has no null."""
    return None if value is False else value


class ReleaseSettings(Frozen):
    """How a trained version reaches users."""

    canary: Annotated[CanaryConfig | None, BeforeValidator(false_to_none)] = Field(
        None, description="canary of new versions, e.g. share = 0.05; deployed to everybody at once when unset or false"
    )
    shadow: Annotated[ShadowConfig | None, BeforeValidator(false_to_none)] = Field(
        None,
        description="shadow deployment of new versions before the canary, e.g. share = 0.2; none when unset or false",
    )
    gates: tuple[Gate, ...] = Field(
        (), description="checks that a version must pass before it serves; see docs/versions.md"
    )
    keep_versions: int = Field(4, ge=0, description="versions kept loaded besides the serving and the previous one")
    probe_tolerance: float | None = Field(
        None,
        gt=0,
        description="largest difference of log-probs with which a delivery is verified; depends on `dtype` when unset",
    )
