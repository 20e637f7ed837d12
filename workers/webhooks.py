"""Send webhooks: open deliveries → signed requests, at least once, with the pauses of Standard Webhooks between them.

While an endpoint fails, one delivery at a time is tried, after growing pauses, so that a receiver that hangs costs the
queue little. A delivery is recorded after the receiver has answered: if this process dies in between, the same
delivery is sent again with the same webhook-id, by which the receiver recognizes it.
"""

import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress

import httpx2
from sqlalchemy import and_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database, database_time
from app.core.encryption import SecretUnreadable, read_cipher
from app.core.settings import Settings
from app.models import WebhookDelivery, WebhookDeliveryState, WebhookEndpoint
from app.ops import webhooks
from app.ops.webhook_events import may_be_tried
from app.ops.webhook_signature import signature_headers
from workers.judging.http_client import GUARDED, open_client, time_limit
from workers.queue.leased_job import (
    AttemptFailed,
    JobFailed,
    JobPostponed,
    JobSkipped,
    LeasedJob,
    claim_row,
    finish_row,
    is_due,
    run_jobs,
)

# Seconds after the first, second, … attempt: 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 14 h, 20 h, 24 h.
RETRY_DELAYS = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
MAX_ENDPOINT_DELAY = 1800.0  # after which an endpoint that fails is tried with the next delivery
DISABLE_SECONDS = 3 * 86_400.0  # an endpoint that has failed for so long is disabled
TIMEOUT_SECONDS = 15.0
POLL_SECONDS = 1.0
MAX_RUNNING = 16
MAX_RUNNING_PER_ENDPOINT = 4
WORKER = "webhook"  # the actor in audit entries
DISABLED = "the webhook is disabled"
GONE = 410


class WebhookJob(LeasedJob[WebhookDelivery, int]):
    """One attempt at one delivery. The result is the status of the answer."""

    def __init__(self, db: Database, settings: Settings, row: WebhookDelivery, http: httpx2.AsyncClient) -> None:
        super().__init__(db, settings, [row])
        self.row, self._http = row, http
        self._status: int | None = None

    @property
    def max_attempts(self) -> int:
        return len(RETRY_DELAYS) + 1

    def retry_delay(self, attempt: int) -> float:
        return RETRY_DELAYS[attempt - 1]

    def retry_values(self, row: WebhookDelivery) -> dict[str, object]:
        return {"status_code": self._status}

    async def execute(self) -> int:
        async with self.db.read() as session:
            endpoint = await session.get(WebhookEndpoint, self.row.endpoint_id)
            moment = await database_time(session)
        if endpoint is None or endpoint.disabled_at is not None:
            raise JobSkipped(DISABLED)
        if endpoint.retry_at is not None and endpoint.retry_at > moment:  # it has failed since this was claimed
            raise JobPostponed(endpoint.retry_at - moment)
        try:
            return await self._post(endpoint, moment)
        except JobFailed as error:  # its address is not public now; that may change
            failure = str(error)
        except AttemptFailed as error:
            failure = str(error)
        await self._record_failure(failure)
        raise AttemptFailed(failure)

    async def _post(self, endpoint: WebhookEndpoint, moment: float) -> int:
        """Send the delivery. Raises AttemptFailed unless the answer's status is 2xx."""
        secrets = self._signing_secrets(endpoint, moment)
        body = self.row.body
        headers = signature_headers(secrets, self.row.id, int(time.time()), body)
        headers |= {"content-type": "application/json", "user-agent": "attune-webhooks"}
        request = self._http.stream(
            "POST", endpoint.url, headers=headers, content=body.encode(), extensions={GUARDED: True}
        )
        self._http.cookies.clear()
        try:
            async with time_limit(TIMEOUT_SECONDS), request as response:
                self._status = response.status_code  # what else it answers is not read
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            raise AttemptFailed(f"it does not answer ({type(error).__name__})") from error
        if not 200 <= self._status < 300:
            raise AttemptFailed(f"it answered {self._status}")
        return self._status

    def _signing_secrets(self, endpoint: WebhookEndpoint, moment: float) -> list[str]:
        """Return the secret, and the one before while it signs, too. Raises AttemptFailed."""
        cipher = read_cipher(self.settings)
        try:
            secrets = [cipher.decrypt(endpoint.secret)]
        except SecretUnreadable as error:
            raise AttemptFailed(f"its signing secret cannot be read: {error}; rotate the secret") from error
        if endpoint.previous_secret is not None and (endpoint.previous_secret_until or 0.0) > moment:
            with suppress(SecretUnreadable):  # the new one signs alone
                secrets.append(cipher.decrypt(endpoint.previous_secret))
        return secrets

    async def _record_failure(self, failure: str) -> None:
        """Let the endpoint rest; disable it when it is gone or has failed for days."""
        async with self.db.write() as session:
            endpoint = await session.get(WebhookEndpoint, self.row.endpoint_id, with_for_update=True)
            if endpoint is None or endpoint.disabled_at is not None:
                return
            moment = await database_time(session)
            if endpoint.retry_at is None or endpoint.retry_at <= moment:  # deliveries that fail together count once
                delay = RETRY_DELAYS[min(endpoint.failures, len(RETRY_DELAYS) - 1)]
                endpoint.failures += 1
                endpoint.retry_at = moment + min(delay, MAX_ENDPOINT_DELAY)
            endpoint.failing_since = moment if endpoint.failing_since is None else endpoint.failing_since
            if self._status == GONE:
                webhooks.disable_endpoint(session, endpoint, actor=WORKER, reason="it answered 410: it is gone")
            elif moment - endpoint.failing_since > DISABLE_SECONDS:
                reason = f"every attempt of {DISABLE_SECONDS / 86_400:g} days failed, the last one because {failure}"
                webhooks.disable_endpoint(session, endpoint, actor=WORKER, reason=reason)

    async def record(self, session: AsyncSession, row: WebhookDelivery, result: int) -> None:
        endpoint = await session.get(WebhookEndpoint, row.endpoint_id, with_for_update=True)
        if endpoint is not None and endpoint.failures:
            webhooks.forget_failures(endpoint)
        await finish_row(session, row, WebhookDeliveryState.DONE, status_code=result)

    async def close(self, session: AsyncSession, row: WebhookDelivery, state: str, reason: str) -> None:
        await finish_row(session, row, state, reason, status_code=self._status)


async def claim_deliveries(
    db: Database, settings: Settings, owner: str, running: Counter[str]
) -> list[WebhookDelivery]:
    """Claim due deliveries up to the limits, one only of an endpoint that fails. `running` counts by endpoint."""
    claimed: list[WebhookDelivery] = []
    running = running.copy()
    async with db.write() as session:
        while (capacity := MAX_RUNNING - running.total()) > 0:
            due = await _read_due(session, capacity, running)
            for row, failures in due:
                limit = 1 if failures else MAX_RUNNING_PER_ENDPOINT
                if running[row.endpoint_id] < limit and await claim_row(session, row, owner, settings):
                    running[row.endpoint_id] += 1
                    claimed.append(row)
            if len(due) < capacity:
                break
    return claimed


async def _read_due(session: AsyncSession, limit: int, running: Counter[str]) -> list[tuple[WebhookDelivery, int]]:
    full = [id for id, count in running.items() if count >= MAX_RUNNING_PER_ENDPOINT]
    is_being_tried = and_(WebhookEndpoint.failures > 0, WebhookEndpoint.id.in_(list(running)))
    query = (
        select(WebhookDelivery, WebhookEndpoint.failures)
        .join(WebhookEndpoint, WebhookEndpoint.id == WebhookDelivery.endpoint_id)
        .where(is_due(WebhookDelivery), may_be_tried(), WebhookDelivery.endpoint_id.not_in(full), ~is_being_tried)
        .order_by(WebhookDelivery.due_at, WebhookDelivery.id)
        .limit(limit)
        .with_for_update(of=WebhookDelivery, skip_locked=True)
    )
    return [(row, failures) for row, failures in await session.execute(query)]


async def send_webhooks(db: Database, settings: Settings, owner: str) -> int:
    """Send all due deliveries. Returns the number of deliveries that reached a final state."""
    async with open_client(settings) as http:

        async def claim_jobs(running: Collection[WebhookJob]) -> list[WebhookJob]:
            counts = Counter(job.row.endpoint_id for job in running)
            return [WebhookJob(db, settings, row, http) for row in await claim_deliveries(db, settings, owner, counts)]

        return await run_jobs(db, "webhook", claim_jobs, poll_seconds=POLL_SECONDS)
