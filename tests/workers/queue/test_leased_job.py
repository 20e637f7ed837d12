"""Leased jobs: the trainer's heartbeat waits a quarter of the lease before each renewal, the first one included."""

import pytest
from sqlalchemy.exc import OperationalError

from app.core.settings import Settings
from app.models import Batch
from workers.queue.leased_job import Heartbeat


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_failed_renewal_leaves_time_for_two_more(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Stop:
        def wait(self, seconds: float) -> bool:
            events.append(f"{seconds / settings.workers.lease_seconds}")
            return len(events) > 5

    async def renew(*args: object) -> None:
        events.append("renew")
        if events.count("renew") == 1:
            raise OperationalError("UPDATE", {}, Exception("no answer"))

    heartbeat = Heartbeat(settings, Batch, {"bat-1": 1})
    monkeypatch.setattr(heartbeat, "_stop", Stop())
    monkeypatch.setattr(heartbeat, "_renew", renew)
    heartbeat._run()
    assert events == ["0.25", "renew", "0.25", "renew", "0.25", "renew", "0.25"]
