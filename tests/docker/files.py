"""Parsed files of `docker/`."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from app.core.settings import REPOSITORY

FOLDER = REPOSITORY / "docker"
COMPOSE = FOLDER / "compose.yaml"
OVERLAY = FOLDER / "compose.gpu.yaml"
DOCKERFILE = FOLDER / "Dockerfile"


def compose(path: Path = COMPOSE) -> dict[str, Any]:
    """Parse a compose file, with anchors and merges resolved."""
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


def roles() -> dict[str, dict[str, Any]]:
    """Return the services that run one of our images."""
    return {name: service for name, service in compose()["services"].items() if service["image"].startswith("attune")}


@dataclass(frozen=True)
class Step:
    """An instruction of a Dockerfile and its stage."""

    stage: str
    verb: str
    rest: str


def steps() -> list[Step]:
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    instructions, stage = [], ""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip():
            verb, _, rest = line.partition(" ")
            if verb == "FROM":
                stage = rest.split()[-1]
            instructions.append(Step(stage, verb, rest.strip()))
    return instructions
