"""The trainer's heartbeat: a quarter of the lease before each beat, the first one too."""

import pytest
from sqlalchemy.exc import OperationalError

from app.core.settings import Settings
from app.models import Batch
from workers.queue.heartbeat import Heartbeat


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_one_beat_that_fails_leaves_time_for_two_more(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Stop:
        def wait(self, seconds: float) -> bool:
            happened.append(f"{seconds / settings.lease_seconds}")
            return len(happened) > 5

    async def beat(*given: object) -> None:
        happened.append("beat")
        if happened.count("beat") == 1:
            raise OperationalError("UPDATE", {}, Exception("no word"))

    heart = Heartbeat(settings, Batch, {"bat-1": 1})
    monkeypatch.setattr(heart, "_stop", Stop())
    monkeypatch.setattr(heart, "_beat", beat)
    heart._run()
    assert happened == ["0.25", "beat", "0.25", "beat", "0.25", "beat", "0.25"]
