"""Names of policies and versions as requests and views write them: `assistant`, `assistant@v12`, `assistant@canary`.

This is the only module that formats and parses them.
"""

import re
from typing import Annotated, NamedTuple

from fastapi import Path

from app.models import Policy, Version

PolicyName = Annotated[str, Path(min_length=1, max_length=128)]
SEPARATOR = "@"
_NUMBER = re.compile(r"v(\d{1,9})")


class ModelReference(NamedTuple):
    """The parts of a model name: `alias` follows the separator, and `number` is set where the alias is `v<number>`."""

    policy: str
    alias: str | None
    number: int | None

    @property
    def names_version(self) -> bool:
        """Whether the request asks for a version and not for what serves."""
        return self.alias is not None


def parse_reference(model: str) -> ModelReference:
    """Example: "assistant@v12" -> ("assistant", "v12", 12); "assistant" -> ("assistant", None, None)."""
    policy, separator, alias = model.partition(SEPARATOR)
    match = _NUMBER.fullmatch(alias)
    return ModelReference(policy, alias if separator else None, int(match[1]) if match else None)


def format_reference(policy: str, number: int) -> str:
    """Example: ("assistant", 12) -> "assistant@v12"."""
    return f"{policy}{SEPARATOR}v{number}"


def version_name(policy: Policy, version: Version) -> str:
    """Example: "assistant@v12"."""
    return format_reference(policy.name, version.number)
