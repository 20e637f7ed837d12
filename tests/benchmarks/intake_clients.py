"""Senders that are programs: the Python client's offline queue, `attune import votes`, Open WebUI's function."""

import asyncio
import csv
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from attune_client import Attune, FeedbackQueue

from tests.benchmarks.deployment import Deployment
from tests.benchmarks.intake_routes import Route, body_by_key, completion_id, is_expected, message_id, to_key
from tests.benchmarks.intake_votes import Change, Traffic, TrafficOptions, to_person
from tests.support.open_webui import OpenWebUI, load_plugin

FLUSH_SECONDS = 3600.0
NUM_EXPORTS = 5
COLUMNS = ("completion_id", "kind", "value", "source", "key", "sent_at")
NEAR_EVENTS = 20  # events of Open WebUI that are under way at a time
LOST = 0.01  # of its events
CLICKS_PER_SECOND = 5  # Open WebUI's times are in seconds: some changes have the same one


@dataclass(frozen=True)
class OfflineQueue:
    """The queue of `attune-client`, which delivers from a file in the background."""

    name = "Python client's queue"
    options = TrafficOptions()

    async def send(self, target: Deployment, traffic: Traffic) -> int:
        return await asyncio.to_thread(self._send, target, traffic)

    def _send(self, target: Deployment, traffic: Traffic) -> int:
        with (
            TemporaryDirectory() as folder,
            Attune(target.url, target.key) as client,
            client.queue(Path(folder) / "votes.db") as queue,
        ):
            for change in traffic.arrivals:
                self._store(queue, change)
            queue.flush(FLUSH_SECONDS)
            wrong = [one for one in queue.refused() if not is_expected(one.status)]
        if wrong:
            raise ValueError(f"refused: {wrong[0]}")
        return len(traffic.arrivals)

    def _store(self, queue: FeedbackQueue, change: Change) -> None:
        if change.value is None:
            queue.withdraw_key(to_key(change), sent_at=change.sent_at)
        else:
            queue.submit(body_by_key(change))


@dataclass(frozen=True)
class FileImport:
    """`attune import votes`: exports of one project, and at the end the first one again. Files have no withdrawals."""

    name = "`attune import votes`, CSV"
    options = TrafficOptions(withdrawals=False)

    async def send(self, target: Deployment, traffic: Traffic) -> int:
        size = -(-len(traffic.arrivals) // NUM_EXPORTS)
        exports = [traffic.arrivals[start : start + size] for start in range(0, len(traffic.arrivals), size)]
        with TemporaryDirectory() as folder:
            return sum([await self._import(target, Path(folder), export) for export in [*exports, exports[0]]])

    async def _import(self, target: Deployment, folder: Path, changes: Sequence[Change]) -> int:
        """Import a file of these changes, and again until the command ends well."""
        file = folder / "votes.csv"
        with file.open("w", newline="") as lines:
            writer = csv.writer(lines)
            writer.writerow(COLUMNS)
            writer.writerows(_to_line(change) for change in changes)
        environment = {**os.environ, "ATTUNE_URL": target.url, "ATTUNE_API_KEY": target.key}
        command = [sys.executable, "-m", "app.cli.main", "import", "votes", str(file), "--json"]
        num_sent = 0
        while True:
            done = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, text=True)
            num_sent += len(changes)
            if done.returncode == 0:
                return num_sent
            if done.stdout and (problems := json.loads(done.stdout)["problems"]):
                raise ValueError(f"not taken: {problems[0]}")
            await asyncio.sleep(1.0)


def _to_line(change: Change) -> tuple[str, ...]:
    kind = "comment" if isinstance(change.value, str) else "binary"
    value = change.value if isinstance(change.value, str) else "up" if change.value else "down"
    person = to_person(change.vote)
    return completion_id(change.vote), kind, value, person, to_key(change), f"{change.sent_at:.3f}"


@dataclass(frozen=True)
class OpenWebUIFunction:
    """The function of connectors/openwebui, with a table of rows in place of Open WebUI.

    Rows change in order; the events of the changes come late, in another order, twice, or never.
    """

    name = "Open WebUI's function"
    options = TrafficOptions(in_order=True, repeats_late=False)

    async def send(self, target: Deployment, traffic: Traffic) -> int:
        rng, open_webui = random.Random(0), OpenWebUI(seconds_per_change=0)
        deleted: set[int] = set()
        waiting: list[dict[str, Any]] = []
        with TemporaryDirectory() as folder, load_plugin(open_webui, Path(folder)) as plugin:
            function = plugin.Event()
            function.valves = function.Valves(url=f"{target.url}/v1", api_key=target.key)
            for number, change in enumerate(traffic.arrivals):
                open_webui.clock += number % CLICKS_PER_SECOND == 0
                waiting.append(_change_row(open_webui, change, deleted))
                if len(waiting) > NEAR_EVENTS:
                    event = waiting.pop(rng.randrange(len(waiting)))
                    if rng.random() > LOST:
                        await function.event(event)
            for event in waiting:
                await function.event(event)
            while not await _is_synchronized(function):
                await asyncio.sleep(1.0)
        return len(traffic.arrivals)


def _change_row(open_webui: OpenWebUI, change: Change, deleted: set[int]) -> dict[str, Any]:
    """Change, create or delete the row of a vote, and return the event. A vote that comes again is another row."""
    id = f"f-{change.vote}" + ("-again" if change.vote in deleted else "")
    if change.value is None:
        deleted.add(change.vote)
        return open_webui.delete(f"f-{change.vote}")
    message, user = message_id(change.vote), to_person(change.vote)
    if isinstance(change.value, str):
        return open_webui.vote(id, message, None, user=user, comment=change.value)
    return open_webui.vote(id, message, 1 if change.value else -1, user=user)


async def _is_synchronized(function: Any) -> bool:
    """Compare all rows, as the function does every few minutes; return whether the service has all of them."""
    try:
        return await function.synchronize() == 0
    except httpx.HTTPError:
        return False


CLIENTS: tuple[Route, ...] = (OfflineQueue(), FileImport(), OpenWebUIFunction())
