"""The record of the last parity check of a base model: `parity.json` in `home`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from app.core.settings import Settings


@dataclass(frozen=True)
class ParityRecord:
    """The largest |engine - trainer| log-prob in nats without and with a random adapter, and why training is refused.

    `has_engine_failed`: the engine did not load the adapter, or ended at it.
    """

    reason: str | None
    base: float
    adapter: float
    has_engine_failed: bool = False


def _path(settings: Settings) -> Path:
    return settings.home / "parity.json"


def write_parity(settings: Settings, record: ParityRecord) -> None:
    _path(settings).write_text(json.dumps(asdict(record)))


def read_parity(settings: Settings) -> ParityRecord | None:
    """Return the record of the last check, or None before the first one."""
    try:
        return ParityRecord(**json.loads(_path(settings).read_text()))
    except FileNotFoundError:
        return None
