"""Updates that wait for a test, so that a signal always arrives while one is in progress.

The real trainer is held by a policy loss, which it imports as one of another package.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from alignment.algorithms import TokenLoss, TokenLossInputs, register_policy_loss
from app.core.settings import Settings
from tests.support.processes import PATIENCE_SECONDS, until

BEGUN, RELEASED, OPEN = "begun-", "released-", "open"


class HoldParams(BaseModel):
    folder: str


@register_policy_loss("held", HoldParams)
def held_loss(inputs: TokenLossInputs, params: HoldParams) -> TokenLoss:
    """Return the plain policy gradient, after the test has released this process."""
    folder, pid = Path(params.folder), os.getpid()
    (folder / f"{BEGUN}{pid}").touch()
    while not ((folder / f"{RELEASED}{pid}").exists() or (folder / OPEN).exists()):
        time.sleep(0.02)
    return TokenLoss(-inputs.advantages_BT * inputs.ratio_BT)


@dataclass(frozen=True)
class UpdateHold:
    """Holds every update of the trainers with these settings, each in its first loss."""

    folder: Path

    def settings(self, settings: Settings) -> Settings:
        loss = {"type": "ppo", "loss": f"{__name__}:{held_loss.__name__}", "loss_params": {"folder": str(self.folder)}}
        return settings.replace({"algorithm": loss})

    async def wait(self, num_ranks: int = 1) -> set[int]:
        """Wait until this many processes that were not released are in an update, and return their process ids."""

        async def have_begun() -> bool:
            return len(self._pids(BEGUN) - self._pids(RELEASED)) >= num_ranks

        await until(have_begun, PATIENCE_SECONDS, f"an update has begun on {num_ranks} rank(s)")
        return self._pids(BEGUN) - self._pids(RELEASED)

    def release(self, pids: set[int]) -> None:
        """Let the updates of these processes go on, also where one of them has ended."""
        for pid in pids:
            (self.folder / f"{RELEASED}{pid}").touch()

    def open(self) -> None:
        """Hold no update any more."""
        (self.folder / OPEN).touch()

    def _pids(self, prefix: str) -> set[int]:
        return {int(path.name.removeprefix(prefix)) for path in self.folder.glob(f"{prefix}*")}
