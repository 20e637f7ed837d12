"""Every route that changes or exports data writes an audit entry, or is listed here with the reason why not."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import update

from app.feedback.token_counts import record_counts
from app.models import Audit, AuditAction, RewardModelState, TokenCount, VersionState, WebhookDelivery
from app.raters.names import hash_name
from tests.app.projects.test_tenant_isolation import PINS, PLANS, POLICY, operations
from tests.app.training.test_reward_model_endpoints import LEARNED_REWARDS
from tests.support.deployment import Harness
from tests.support.human_feedback import create_reward_model
from tests.support.parquet_files import import_file, to_parquet
from tests.support.rollout_rows import create_prompt_set
from tests.support.trained_versions import publish

Params = dict[str, str]
APPLICATION = "an application's own traffic: what it stores is the record"
NOT_AUDITED = {
    "POST /v1/chat/completions": APPLICATION,
    "POST /v1/chat/completions/{completion_id}": "sets metadata of a completion, which keeps its content",
    "POST /v1/responses": APPLICATION,
    "POST /v1/messages": APPLICATION,
    "POST /v1/messages/count_tokens": "changes nothing",
    "POST /v1/episodes": APPLICATION,
    "POST /v1/episodes/{episode_id}/chat/completions": APPLICATION,
    "POST /v1/episodes/{episode_id}/responses": APPLICATION,
    "POST /v1/episodes/{episode_id}/end": APPLICATION,
    "POST /v1/environments/runs": APPLICATION,
    "POST /v1/environments/runs/{run}/cancel": APPLICATION,
    "POST /v1/environments/runs/{run}/claim": APPLICATION,
    "POST /v1/environments/runs/{run}/renew": APPLICATION,
    "POST /v1/environments/runs/{run}/attempts/{attempt_id}/start": APPLICATION,
    "POST /v1/environments/runs/{run}/attempts/{attempt_id}/finish": APPLICATION,
    "POST /v1/environments/runs/{run}/attempts/{attempt_id}/release": APPLICATION,
    "POST /v1/feedback": APPLICATION,
    "POST /v1/feedback/batch": APPLICATION,
}
PROMPTS = to_parquet({"prompt": ["Open?"]})
PLAN = {"dataset": "sums", "verifier": {"type": "number"}}
PIN = {"kind": "user", "subject": "bob", "version": 0}
SAMPLING = {"group_sampling": {"extra_replies": 1}}
WEBHOOK = {"url": "https://hooks.example"}
WEBHOOK_PATH = "/v1/webhooks/{webhook_id}"


async def nothing(harness: Harness) -> Params:
    return {}


async def call(harness: Harness, method: str, path: str, body: Any = None) -> Any:
    answer = await harness.api.request(method, path, json=body)
    assert answer.status_code < 300, answer.text
    return answer.json()


def request(method: str, path: str, body: Any = None) -> Callable[[Harness], Awaitable[Params]]:
    """Return a preparation: the request, which returns the id in the response under all names of ids."""

    async def prepare(harness: Harness) -> Params:
        id = str((await call(harness, method, path, body)).get("id"))
        return dict.fromkeys(("key_id", "pin_id"), id)

    return prepare


def another_policy(*states: str) -> Callable[[Harness], Awaitable[Params]]:
    """Create a policy, and bring it into these states in turn."""

    async def prepare(harness: Harness) -> Params:
        assert (await harness.api.post("/v1/policies", json={"name": "other"})).status_code == 201
        for state in states:
            assert (await harness.api.post(f"/v1/policies/other/{state}", json={})).status_code == 200
        return {"name": "other"}

    return prepare


async def two_versions(harness: Harness) -> Params:
    await publish(harness)
    await publish(harness)
    return {}


async def canary(harness: Harness) -> Params:
    await two_versions(harness)
    await call(harness, "POST", "/v1/policies/shop/deploy", {"version": 1, "share": 0.1})
    return {}


async def shadow(harness: Harness) -> Params:
    await harness.version(VersionState.SHADOW, shadow_since=1.0)
    return {}


def reward_model(state: RewardModelState) -> Callable[[Harness], Awaitable[Params]]:
    async def prepare(harness: Harness) -> Params:
        await create_reward_model(harness, state)
        return {"number": "1"}

    return prepare


async def prompt_set(harness: Harness) -> Params:
    return {"id": (await create_prompt_set(harness, ("1+1", "2"))).id}


async def plan(harness: Harness) -> Params:
    await prompt_set(harness)
    return {"plan_id": (await call(harness, "POST", "/v1/policies/shop/rollouts/plans", PLAN))["id"]}


async def paused_plan(harness: Harness) -> Params:
    params = await plan(harness)
    await call(harness, "POST", f"/v1/policies/shop/rollouts/plans/{params['plan_id']}/pause", {})
    return params


async def episode(harness: Harness) -> Params:
    return {"episode_id": str((await call(harness, "POST", "/v1/episodes", {"policy": "shop"}))["id"])}


async def turn(harness: Harness) -> Params:
    return {"completion_id": (await harness.turn(end_user="bob")).id, "id": "bob"}


async def webhook(harness: Harness) -> Params:
    return {"webhook_id": (await call(harness, "POST", "/v1/webhooks", WEBHOOK))["id"]}


async def webhook_delivery(harness: Harness) -> Params:
    params = await webhook(harness)
    async with harness.db.write() as session:
        values = {"audit_seq": 1, "event": "training.halted", "body": "{}", "due_at": 0.0}
        session.add(WebhookDelivery(id="msg-1", endpoint_id=params["webhook_id"], **values))
    return params | {"delivery_id": "msg-1"}


async def vote(harness: Harness) -> Params:
    return {"feedback_id": (await harness.vote((await harness.turn()).id)).json()["id"]}


async def keyed_vote(harness: Harness) -> Params:
    body = {"completion_id": (await harness.turn()).id, "kind": "binary", "value": True, "key": "f-1"}
    await call(harness, "POST", "/v1/feedback", body)
    return {}


async def expired_turn(harness: Harness) -> Params:
    await harness.turn(created_at=1.0, processed=True)
    return {}


async def old_version(harness: Harness) -> Params:
    for _ in range(harness.settings.release.keep_versions + 2):  # the ancestors of what serves are kept
        await publish(harness)
    return {}


@dataclass(frozen=True)
class Act:
    """A request, with `body` as JSON or as bytes. `prepare` creates what it needs and returns the path's parameters."""

    action: AuditAction
    body: Any = None
    prepare: Callable[[Harness], Awaitable[Params]] = nothing
    query: str = ""


A = AuditAction
OVERRIDE = {"sources": [{"type": "explicit"}]}
AUDITED = {
    "POST /v1/keys": Act(A.KEY_CREATED, {}),
    "DELETE /v1/keys/{key_id}": Act(A.KEY_REVOKED, None, request("POST", "/v1/keys", {})),
    "POST /v1/console/links": Act(A.CONSOLE_LINK_CREATED, {}),
    "PATCH /v1/project": Act(A.PROJECT_CONSENT_CHANGED, {"train": False}),
    "POST /v1/datasets": Act(A.DATASET_IMPORTED, PROMPTS, query="?name=prompts&kind=prompts"),
    "DELETE /v1/datasets/{id}": Act(A.DATASET_DELETED, None, prompt_set),
    "GET /v1/exports/turns": Act(A.TURNS_EXPORTED),
    "GET /v1/exports/preferences": Act(A.PREFERENCES_EXPORTED),
    "GET /v1/subjects/{id}/export": Act(A.SUBJECT_EXPORTED, None, turn),
    "DELETE /v1/subjects/{id}": Act(A.SUBJECT_ERASED, None, turn),
    "PUT /v1/raters/{rater}": Act(A.RATER_BLOCKED, {"standing": "blocked"}),
    "POST /v1/policies": Act(A.POLICY_CREATED, {"name": "other"}),
    f"PATCH {POLICY}": Act(A.POLICY_UPDATED, {"settings": {"trainer": {"kl_alarms": 4}}}),
    f"POST {POLICY}/pause": Act(A.POLICY_PAUSED, {}),
    f"POST {POLICY}/resume": Act(A.POLICY_ACTIVE, {}, another_policy("pause")),
    f"POST {POLICY}/archive": Act(A.POLICY_ARCHIVED, {}, another_policy()),
    f"POST {POLICY}/unarchive": Act(A.POLICY_ACTIVE, {}, another_policy("archive")),
    f"DELETE {POLICY}": Act(A.POLICY_DELETED, None, another_policy("archive")),
    f"POST {POLICY}/deploy": Act(A.DEPLOYMENT_DEPLOYED, {"version": 1}, two_versions),
    f"POST {POLICY}/rollback": Act(A.DEPLOYMENT_ROLLED_BACK, {}, two_versions),
    f"POST {POLICY}/canary/promote": Act(A.DEPLOYMENT_DEPLOYED, {}, canary),
    f"POST {POLICY}/canary/abort": Act(A.CANARY_ENDED, {}, canary),
    f"POST {POLICY}/shadow/promote": Act(A.SHADOW_PASSED, {}, shadow),
    f"POST {POLICY}/shadow/abort": Act(A.VERSION_REJECTED, {}, shadow),
    "PUT /v1/retention": Act(A.RETENTION_UPDATED, {"turns": 30}),
    "POST /v1/retention/run": Act(A.RETENTION_APPLIED, {}, expired_turn),
    f"POST {POLICY}/versions/prune": Act(A.VERSION_PRUNED, {"keep": 1}, old_version),
    f"PUT {POLICY}/delivery": Act(A.DELIVERY_UPDATED, {"conversations": "sticky"}),
    f"PUT {PINS}": Act(A.PIN_SET, PIN),
    f"DELETE {PINS}/{{pin_id}}": Act(A.PIN_REMOVED, None, request("PUT", "/v1/policies/shop/pins", PIN)),
    f"POST {POLICY}/training/pause": Act(A.TRAINING_HALTED, {}),
    f"POST {POLICY}/training/resume": Act(
        A.TRAINING_ASYNCHRONOUS, {}, request("POST", "/v1/policies/shop/training/pause", {})
    ),
    f"POST {POLICY}/training/trigger": Act(A.TRAINING_TRIGGERED, {}),
    f"PUT {POLICY}/rewards": Act(A.REWARDS_UPDATED, OVERRIDE),
    f"DELETE {POLICY}/rewards": Act(A.REWARDS_RESET, None, request("PUT", "/v1/policies/shop/rewards", OVERRIDE)),
    f"POST {POLICY}/reward-models": Act(
        A.REWARD_MODEL_FIT_REQUESTED, {}, request("PUT", "/v1/policies/shop/rewards", LEARNED_REWARDS)
    ),
    f"POST {POLICY}/reward-models/{{number}}/serve": Act(
        A.REWARD_MODEL_SERVING, {}, reward_model(RewardModelState.TRAINED)
    ),
    f"POST {POLICY}/reward-models/{{number}}/disable": Act(
        A.REWARD_MODEL_DISABLED, {}, reward_model(RewardModelState.SERVING)
    ),
    f"PUT {POLICY}/rollouts": Act(A.ROLLOUTS_UPDATED, SAMPLING),
    f"DELETE {POLICY}/rollouts": Act(A.ROLLOUTS_RESET, None, request("PUT", "/v1/policies/shop/rollouts", SAMPLING)),
    f"POST {PLANS}": Act(A.ROLLOUT_PLAN_CREATED, PLAN, prompt_set),
    f"POST {PLANS}/{{plan_id}}/pause": Act(A.ROLLOUT_PLAN_PAUSED, {}, plan),
    f"POST {PLANS}/{{plan_id}}/resume": Act(A.ROLLOUT_PLAN_RUNNING, {}, paused_plan),
    f"POST {PLANS}/{{plan_id}}/cancel": Act(A.ROLLOUT_PLAN_CANCELLED, {}, plan),
    "POST /v1/webhooks": Act(A.WEBHOOK_CREATED, WEBHOOK),
    f"PATCH {WEBHOOK_PATH}": Act(A.WEBHOOK_UPDATED, {"description": "ops"}, webhook),
    f"DELETE {WEBHOOK_PATH}": Act(A.WEBHOOK_DELETED, None, webhook),
    f"POST {WEBHOOK_PATH}/rotate-secret": Act(A.WEBHOOK_SECRET_ROTATED, None, webhook),
    f"POST {WEBHOOK_PATH}/deliveries/{{delivery_id}}/redeliver": Act(A.WEBHOOK_REDELIVERED, None, webhook_delivery),
}
# Acts of keys with the scope chat or feedback, in app/chat and app/feedback.
AUDITED_ACTS_OF_APPLICATIONS = {
    "DELETE /v1/chat/completions/{completion_id}": Act(A.COMPLETION_DELETED, None, turn),
    "DELETE /v1/episodes/{episode_id}": Act(A.EPISODE_DELETED, None, episode),
    "DELETE /v1/feedback/{feedback_id}": Act(A.FEEDBACK_WITHDRAWN, None, vote),
    "DELETE /v1/feedback": Act(A.FEEDBACK_WITHDRAWN, None, keyed_vote, "?key=f-1"),
    "POST /v1/feedback/tokens/rotate-secret": Act(A.TOKEN_SECRET_ROTATED, {}),
    "POST /v1/feedback/tokens": Act(A.TOKEN_CREATED, {"completion_id": "<completion>", "kinds": ["binary"]}, turn),
}


def test_every_change_and_export_is_in_a_table() -> None:
    acts = {route for route in operations() if not route.startswith("GET ") or "/export" in route}
    assert acts == AUDITED.keys() | AUDITED_ACTS_OF_APPLICATIONS.keys() | NOT_AUDITED.keys()


def test_actions_are_in_order() -> None:
    assert [str(action) for action in A] == sorted(A)


async def new_entries(harness: Harness, route: str, act: Act) -> list[tuple[str, str]]:
    """Return (actor, action) of the entries that a successful request adds."""
    params = {"name": "shop", "rater": "HUMAN/bob", **await act.prepare(harness)}
    method, _, path = route.partition(" ")
    for name, value in params.items():
        path = path.replace(f"{{{name}}}", value)
    body = act.body
    if isinstance(body, dict) and body.get("completion_id"):
        body = {**body, "completion_id": params["completion_id"]}
    before = {row.seq for row in await harness.all(Audit)}
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = await harness.api.request(method, path + act.query, **content)
    assert answer.status_code < 300, answer.text
    async with harness.db.write() as session:  # the minute ends, whose tokens are one entry
        await session.execute(update(TokenCount).values(minute=0))
    await record_counts(harness.db)
    return [(row.actor, row.action) for row in await harness.all(Audit) if row.seq not in before]


@pytest.mark.parametrize("route, act", AUDITED.items(), ids=AUDITED)
async def test_act_of_an_admin_is_audited(harness: Harness, route: str, act: Act) -> None:
    assert (harness.key[:16], act.action) in await new_entries(harness, route, act)


@pytest.mark.parametrize("route, act", AUDITED_ACTS_OF_APPLICATIONS.items(), ids=AUDITED_ACTS_OF_APPLICATIONS)
async def test_act_of_an_application_is_audited(harness: Harness, route: str, act: Act) -> None:
    assert (harness.key[:16], act.action) in await new_entries(harness, route, act)


async def entries_of(harness: Harness, *actions: AuditAction) -> list[tuple[str, dict[str, Any]]]:
    return [(row.subject, row.details) for row in await harness.all(Audit) if row.action in actions]


async def test_export_names_its_filter(harness: Harness) -> None:
    answer = await harness.api.get("/v1/exports/turns", params={"policy": "shop", "version": 0, "since": 5})
    assert answer.status_code == 200
    assert await entries_of(harness, A.TURNS_EXPORTED) == [("shop", {"version": 0, "since": 5.0})]


async def test_export_of_a_subject_names_its_hash(harness: Harness) -> None:
    await turn(harness)
    assert (await harness.api.get("/v1/subjects/bob/export")).status_code == 200
    name = hash_name((await harness.policy()).project_id, "bob")
    assert await entries_of(harness, A.SUBJECT_EXPORTED) == [(name, {})]


async def test_request_without_effect_adds_no_entry(harness: Harness) -> None:
    for status in (201, 200):
        assert (await import_file(harness, PROMPTS, kind="prompts")).status_code == status
    assert (await import_file(harness, b"no parquet", name="other")).status_code == 400
    assert (await harness.api.delete("/v1/datasets/ds-unknown")).status_code == 404
    assert (await harness.api.get("/v1/subjects/nobody/export")).status_code == 404
    assert (await harness.api.get("/v1/exports/turns", params={"policy": "other"})).status_code == 404
    actions = (A.DATASET_IMPORTED, A.DATASET_DELETED, A.SUBJECT_EXPORTED, A.TURNS_EXPORTED)
    [(subject, details)] = await entries_of(harness, *actions)
    assert subject.startswith("ds-") and details == {"name": "imported", "kind": "prompts", "rows": 1}
