"""Harness: a small deployment for tests, with shortcuts that create rows."""

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx2
from sqlalchemy import select

from app.chat.histories import read_messages, read_prompt_ids
from app.core.database import Database
from app.core.settings import Settings
from app.models import Deployment, Policy, Turn, TurnState, Version, VersionState, new_id
from tests.support.row_order import creation_order
from tests.support.turns import make_turn


@dataclass
class Harness:
    """A deployment. `api` calls the API in this process; it is missing if the API runs as a process of its own."""

    settings: Settings
    db: Database
    key: str
    _api: httpx2.AsyncClient | None = None

    @property
    def api(self) -> httpx2.AsyncClient:
        assert self._api is not None, "the API of this harness runs in a process of its own"
        return self._api

    @property
    def api_database(self) -> Database:
        """The database of the API, which has connections of its own."""
        return self.api._transport.app.state.services.get(Database)  # type: ignore[attr-defined]

    async def policy(self) -> Policy:
        async with self.db.read() as session:
            return (await session.scalars(select(Policy))).one()

    async def serving(self) -> Version:
        async with self.db.read() as session:
            return (await session.scalars(select(Version).join(Deployment, Deployment.version_id == Version.id))).one()

    async def get(self, model: type[Any], id: Any) -> Any:
        async with self.db.read() as session:
            return await session.get_one(model, id)

    async def all(self, model: type[Any]) -> list[Any]:
        """Return every row of the table in the order of creation."""
        async with self.db.read() as session:
            return list(await session.scalars(select(model).order_by(*creation_order(model))))

    async def messages(self, turn_id: str) -> list[dict[str, Any]]:
        """Return the messages of a turn's prompt."""
        async with self.db.read() as session:
            return (await read_messages(session, [turn_id]))[turn_id]

    async def prompt_ids(self, turn_id: str) -> list[int]:
        async with self.db.read() as session:
            return (await read_prompt_ids(session, [turn_id]))[turn_id]

    async def wait_for_turn(self, seconds: float = 60.0) -> Turn:
        """Wait until the first turn has ended. Return it; it must be the only one."""
        async with asyncio.timeout(seconds):
            while True:
                turns = await self.all(Turn)
                if turns and turns[0].state != TurnState.OPEN:
                    [turn] = turns
                    return turn
                await asyncio.sleep(0.05)

    async def turn(self, version: Version | None = None, **values: Any) -> Turn:
        """Create a finished turn of the serving version; `values` override its columns. By default it is trainable."""
        version = version or await self.serving()
        turn = make_turn(await self.policy(), version, new_id("chatcmpl"), **values)
        async with self.db.write() as session:
            session.add(turn)
        return turn

    async def version(self, state: VersionState = VersionState.TRAINED, **values: Any) -> Version:
        """Create a version whose parent is the head, and make it the head."""
        policy = await self.policy()
        async with self.db.write() as session:
            row = await session.get_one(Policy, policy.id)
            head = await session.get_one(Version, row.head_version_id)
            number = head.number + 1
            name = f"{policy.name}-v{number}"
            version = Version(
                **{
                    "id": new_id("ver"),
                    "policy_id": policy.id,
                    "number": number,
                    "parent_id": head.id,
                    "state": state,
                    "adapter_name": name,
                    "adapter_path": f"/nowhere/{name}",
                    "manifest_sha256": "0" * 64,
                    "timings": {"export": 0.01},
                    **values,
                }
            )
            session.add(version)
            await session.flush()
            row.head_version_id = version.id
        return version

    async def vote(self, turn_id: str, value: str = "up", **fields: Any) -> httpx2.Response:
        """Send binary feedback about a turn."""
        body = {"completion_id": turn_id, "kind": "binary", "value": value, **fields}
        return await self.api.post("/v1/feedback", json=body)
