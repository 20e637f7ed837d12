"""Another policy answers a share of a policy's requests: who is assigned to it, what the reply says, who learns."""

import asyncio

import httpx2
import pytest

from app.deployments.traffic import Branch, find_branch
from app.models import Audit, AuditAction, Engine, Sample, Turn
from tests.app.deployments.test_version_router import HELLO, set_pin
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine
from workers.curate import curate

POLICIES = "/v1/policies"
USERS = [f"user-{number}" for number in range(4000)]


def assign(*branches: Branch) -> dict[str, str]:
    """Return the policy that answers, by user."""
    found = {user: find_branch("shop", branches, user) for user in USERS}
    return {user: branch.policy_id if branch else "shop" for user, branch in found.items()}


def test_shares_are_met_and_a_growing_share_keeps_its_users() -> None:
    first, second = Branch("a", "a", 0.2), Branch("b", "b", 0.3)
    before = assign(first, second)
    for policy, share in (("a", 0.2), ("b", 0.3), ("shop", 0.5)):
        assert list(before.values()).count(policy) / len(USERS) == pytest.approx(share, abs=0.03)
    after = assign(Branch("a", "a", 0.4), second)
    assert list(after.values()).count("a") / len(USERS) == pytest.approx(0.4, abs=0.03)
    assert {after[user] for user in USERS if before[user] == "a"} == {"a"}
    assert set(assign(Branch("a", "a", 1.0)).values()) == {"a"}


def test_conversation_stays_with_the_policy_that_answered_it() -> None:
    branch = Branch("a", "a", 0.5)
    for user in USERS[:20]:
        assert find_branch("shop", [branch], user, "shop") is None
        assert find_branch("shop", [branch], user, "a") is branch
        assert find_branch("shop", [branch], user, "other") == find_branch("shop", [branch], user)


async def create(harness: Harness, name: str, share: float, source: str = "shop") -> httpx2.Response:
    body = {"name": name, "traffic": {"from": source, "share": share}}
    response = await harness.api.post(POLICIES, json=body)
    await asyncio.sleep(2 * harness.settings.server.route_cache_seconds)
    return response


async def ask(harness: Harness, *history: str, model: str = "shop", user: str = "ada") -> httpx2.Response:
    roles = ("user", "assistant")
    earlier = [{"role": roles[index % 2], "content": text} for index, text in enumerate(history)]
    body = {"model": model, "messages": [*earlier, *HELLO], "user": user}
    response = await harness.api.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response


async def test_reply_names_the_policy_that_answered_and_teaches_it(harness: Harness, scripted: ScriptedEngine) -> None:
    view = (await create(harness, "support", 1.0)).json()
    assert view["traffic"] == {"from": "shop", "share": 1.0}
    response = await ask(harness)
    assert response.json()["model"] == response.headers["x-policy-version"] == "support@v0"
    turn = await harness.get(Turn, response.json()["id"])
    assert (turn.policy_id, turn.route_reason, turn.exclusion_reason) == (view["id"], "stable", None)
    assert (await harness.vote(turn.id)).status_code == 201
    await curate(harness.db, harness.settings)
    [sample] = await harness.all(Sample)
    assert sample.policy_id == view["id"]
    assert (await ask(harness, model="shop@stable")).json()["model"] == "shop@v0", "a version that is named"


async def test_conversation_is_sticky_when_the_share_ends(harness: Harness, scripted: ScriptedEngine) -> None:
    await create(harness, "support", 1.0)
    first = (await ask(harness)).json()
    await harness.api.patch(f"{POLICIES}/support", json={"traffic": {"from": "shop", "share": 0.001}})
    await asyncio.sleep(2 * harness.settings.server.route_cache_seconds)
    history = (HELLO[0]["content"], first["choices"][0]["message"]["content"])
    assert (await ask(harness, *history)).json()["model"] == "support@v0"
    assert (await ask(harness, user="bob")).json()["model"] == "shop@v0"
    await harness.api.patch(f"{POLICIES}/support", json={"traffic": None})
    assert (await ask(harness, *history)).json()["model"] == "shop@v0"


async def test_policy_itself_answers_the_pinned_and_where_the_other_cannot(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    serving = await harness.serving()
    await set_pin(harness, serving, user="ada")
    await create(harness, "support", 1.0)
    assert (await ask(harness)).json()["model"] == "shop@v0"
    assert (await ask(harness, user="bob")).json()["model"] == "support@v0"
    for verb, model in (("pause", "shop@v0"), ("resume", "support@v0"), ("archive", "shop@v0")):
        await harness.api.post(f"{POLICIES}/support/{verb}", json={})
        assert (await ask(harness, user="bob")).json()["model"] == model, verb
    await harness.api.post(f"{POLICIES}/support/unarchive", json={})
    async with harness.db.write() as session:  # its canary is on no engine, as after a restart
        (await session.get_one(Engine, "engine-0")).loaded = []
    assert (await ask(harness, user="bob")).json()["model"] == "support@v0"


async def test_shares_add_up_to_at_most_one_within_a_project(harness: Harness) -> None:
    assert (await create(harness, "a", 0.7)).status_code == 201
    refused = (await create(harness, "b", 0.4)).json()["error"]
    assert refused["param"] == "traffic.share" and "at most 0.3 is left" in refused["message"]
    assert (await create(harness, "b", 0.3)).status_code == 201
    assert (await create(harness, "c", 0.1, source="nobody")).status_code == 404
    own = await harness.api.patch(f"{POLICIES}/a", json={"traffic": {"from": "a", "share": 0.1}})
    assert own.json()["error"]["param"] == "traffic.from"
    assert (await create(harness, "c", 0.5, source="a")).status_code == 201
    refused = (await harness.api.post(f"{POLICIES}/a/archive", json={})).json()["error"]
    assert refused["code"] == "policy_in_use" and refused["message"].startswith("c would lose traffic")
    entries = [entry for entry in await harness.all(Audit) if entry.action == AuditAction.POLICY_UPDATED]
    assert entries[0].details == {"traffic": {"from": "shop", "share": 0.7}}
