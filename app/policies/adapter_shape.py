"""The shape of the adapters of an installation: `adapter_spec.json`, which its first start writes.

An engine is launched for one rank and set of modules, and an update continues its parent's adapter.
"""

import json
from typing import NamedTuple

from alignment.artifacts.specs import ADAPTER_CONFIG
from app.core.settings import Settings

ADAPTER_SPEC = "adapter_spec.json"


class AdapterShape(NamedTuple):
    """Rank, alpha and target modules, and all modules that could be targets; None where that is not known."""

    r: int
    alpha: int
    target_modules: list[str]
    available_modules: list[str] | None

    def __str__(self) -> str:
        return f"r = {self.r}, alpha = {self.alpha}, target_modules = {self.target_modules}"


def require_adapter_shape(settings: Settings) -> None:
    """Raise ValueError if the adapters of this `home` have another shape than `trainer.lora`."""
    stored, lora = _stored_shape(settings), settings.trainer.lora
    if stored is None:
        return
    modules = stored.available_modules if lora.target_modules is None else sorted(lora.target_modules)
    configured = stored._replace(r=lora.r, alpha=lora.alpha, target_modules=modules or stored.target_modules)
    if configured != stored:
        raise ValueError(
            f"trainer.lora has {configured}, but the adapters of {settings.home} have {stored}. Set these values, or "
            "another `home`"
        )


def _stored_shape(settings: Settings) -> AdapterShape | None:
    if (file := settings.home / ADAPTER_SPEC).exists():
        fields = json.loads(file.read_text())
        available = sorted(fields["available_modules"])
        return AdapterShape(fields["rank"], fields["alpha"], sorted(fields["target_modules"]), available)
    for file in settings.versions_dir.glob(f"*/{ADAPTER_CONFIG}"):  # of an installation from before the file was there
        fields = json.loads(file.read_text())
        return AdapterShape(fields["r"], fields["lora_alpha"], sorted(fields["target_modules"]), None)
    return None
