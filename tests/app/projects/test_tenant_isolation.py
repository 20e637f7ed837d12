"""Tenant isolation: on every route, the response for an id of another project equals that for an unknown id.

The first test checks that the table is complete: it reads the routes and their ids from the OpenAPI document.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
from sqlalchemy import select

from app.core.settings import Settings
from app.main import create_app
from app.models import (
    ApiKey,
    Batch,
    Dataset,
    DatasetKind,
    DatasetRow,
    Episode,
    Feedback,
    FeedbackKey,
    Pin,
    PinKind,
    PlannedRun,
    Policy,
    Project,
    RolloutPlan,
    RunAttempt,
    Sample,
    SampleState,
    Turn,
    TurnMetadata,
    Version,
    WebhookDelivery,
    WebhookEndpoint,
)
from app.projects import service
from tests.support.deployment import Harness

VOTE = {"kind": "binary", "value": True}
HELLO = [{"role": "user", "content": "hi"}]
OWN = "<own>"  # a completion of the caller
ID = "<id>"


@dataclass(frozen=True)
class Probe:
    """A place of a route that takes an id. `kind` names the field of `OtherProject` that holds such an id."""

    route: str
    place: str
    kind: str
    query: dict[str, Any] = field(default_factory=dict)
    body: dict[str, Any] | None = None

    def __str__(self) -> str:
        return f"{self.route} {self.place}"


def path(route: str, name: str, kind: str, body: dict[str, Any] | None = None) -> Probe:
    return Probe(route, f"path {name}", kind, body=body)


def query(route: str, name: str, kind: str, **others: str) -> Probe:
    return Probe(route, f"query {name}", kind, query={name: ID, **others})


def body(route: str, name: str, kind: str, content: dict[str, Any]) -> Probe:
    return Probe(route, f"body {name}", kind, body=content)


EPISODE = "/v1/episodes/{episode_id}"
RUNS = "/v1/environments/runs"
RUN = f"{RUNS}/{{run}}"
ATTEMPT = f"{RUN}/attempts/{{attempt_id}}"
OWN_RUN, OTHER_RUN, ATTEMPT_ID = "run-1111111111", "run-7777777777", f"att-{'7' * 32}"
ATTEMPT_BODIES: dict[str, dict[str, Any]] = {
    "start": {"fence": 1, "task": "t"},
    "finish": {"fence": 1},
    "release": {"fence": 1},
}
OF_OWN = {"model": "shop"}
COMPLETION = "/v1/chat/completions/{completion_id}"
POLICY = "/v1/policies/{name}"
PLANS = f"{POLICY}/rollouts/plans"
PINS = f"{POLICY}/pins"
PIN = {"kind": "user", "subject": "bob", "version": 0}
EVENT = {"event": "training.halted", "body": "{}", "due_at": 0.0}
LEASE = {"lease_owner": "other", "lease_until": 1e12, "fence": 1}
VERBS = ("pause", "resume", "cancel")
WEBHOOK = "/v1/webhooks/{webhook_id}"
OWN_WEBHOOK, OTHER_WEBHOOK, DELIVERY = f"whk-{'1' * 32}", f"whk-{'7' * 32}", f"msg-{'7' * 32}"
PROBES = [
    body("POST /v1/chat/completions", "model", "policy", {"model": ID, "messages": HELLO}),
    body("POST /v1/chat/completions", "model (a version)", "version", {"model": ID, "messages": HELLO}),
    query("GET /v1/chat/completions", "model", "policy"),
    query("GET /v1/chat/completions", "after", "completion"),
    query("GET /v1/chat/completions", "metadata[order]", "order"),
    path(f"GET {COMPLETION}", "completion_id", "completion"),
    path(f"POST {COMPLETION}", "completion_id", "completion", {"metadata": {"a": "b"}}),
    path(f"DELETE {COMPLETION}", "completion_id", "completion"),
    path(f"GET {COMPLETION}/messages", "completion_id", "completion"),
    Probe(f"GET {COMPLETION}/messages", "query after", "message", query={"after": ID}),
    path("GET /v1/models/{name}", "name", "policy"),
    path("GET /v1/models/{name}", "name (a version)", "version"),
    body("POST /v1/messages", "model", "policy", {"model": ID, "messages": HELLO, "max_tokens": 9}),
    body("POST /v1/messages", "model (a version)", "version", {"model": ID, "messages": HELLO, "max_tokens": 9}),
    body("POST /v1/messages/count_tokens", "model", "policy", {"model": ID, "messages": HELLO}),
    body("POST /v1/responses", "model", "policy", {"model": ID, "input": "hi"}),
    body(
        "POST /v1/responses",
        "previous_response_id",
        "response",
        {"model": "shop", "input": "hi", "previous_response_id": ID},
    ),
    path("GET /v1/responses/{response_id}", "response_id", "response"),
    body("POST /v1/episodes", "policy", "policy", {"policy": ID}),
    query("GET /v1/episodes", "policy", "policy"),
    query("GET /v1/episodes", "after", "episode"),
    path(f"GET {EPISODE}", "episode_id", "episode"),
    path(f"DELETE {EPISODE}", "episode_id", "episode"),
    path(f"POST {EPISODE}/end", "episode_id", "episode", {}),
    path(f"POST {EPISODE}/chat/completions", "episode_id", "episode", {"messages": HELLO, **OF_OWN}),
    path(f"POST {EPISODE}/responses", "episode_id", "episode", {"input": "hi", **OF_OWN}),
    path(f"GET {EPISODE}/models", "episode_id", "episode"),
    body(f"POST {RUNS}", "policy", "policy", {"policy": ID, "name": "mine", "num_tasks": 1}),
    query(f"GET {RUNS}", "after", "run"),
    path(f"GET {RUN}", "run", "run"),
    path(f"POST {RUN}/cancel", "run", "run"),
    path(f"GET {RUN}/attempts", "run", "run"),
    query(f"GET {RUN}/attempts", "after", "attempt"),
    path(f"POST {RUN}/claim", "run", "run", {"owner": "one"}),
    path(f"POST {RUN}/renew", "run", "run", {"leases": []}),
    body(f"POST {RUN}/renew", "leases", "attempt", {"leases": [{"id": ID, "fence": 1}]}),
    *(path(f"POST {ATTEMPT}/{verb}", "run", "run", content) for verb, content in ATTEMPT_BODIES.items()),
    *(path(f"POST {ATTEMPT}/{verb}", "attempt_id", "attempt", content) for verb, content in ATTEMPT_BODIES.items()),
    body("POST /v1/feedback", "completion_id", "completion", {"completion_id": ID, **VOTE}),
    body("POST /v1/feedback", "request_id", "request", {"request_id": ID, **VOTE}),
    body(
        "POST /v1/feedback",
        "target (a turn)",
        "conversation",
        {"target": {"conversation_id": ID, "turn": 1}, **VOTE},
    ),
    body("POST /v1/feedback", "target", "completion", {"target": {"completion_id": ID}, **VOTE}),
    body("POST /v1/feedback", "target (a conversation)", "conversation", {"target": {"conversation_id": ID}, **VOTE}),
    body("POST /v1/feedback", "target (an episode)", "episode", {"target": {"episode_id": ID}, **VOTE}),
    body("POST /v1/feedback", "target (metadata)", "order", {"target": {"metadata": {"order": ID}}, **VOTE}),
    body("POST /v1/feedback", "value", "completion", {"kind": "comparison", "value": [OWN, ID]}),
    body("POST /v1/feedback/batch", "items", "completion", {"items": [{"completion_id": ID, **VOTE}]}),
    body("POST /v1/feedback/tokens", "completion_id", "completion", {"completion_id": ID, "kinds": ["binary"]}),
    query("GET /v1/feedback", "completion_id", "completion"),
    query("GET /v1/feedback", "conversation_id", "conversation"),
    query("GET /v1/feedback", "episode_id", "episode"),
    query("GET /v1/feedback", "after", "feedback", completion_id=OWN),
    query("DELETE /v1/feedback", "key", "sender_key"),
    path("GET /v1/feedback/{feedback_id}", "feedback_id", "feedback"),
    path("DELETE /v1/feedback/{feedback_id}", "feedback_id", "feedback"),
    path(f"GET {POLICY}", "name", "policy"),
    path(f"PATCH {POLICY}", "name", "policy", {"settings": {"trainer": {"batch_size": 8}}}),
    *(path(f"POST {POLICY}/{verb}", "name", "policy", {}) for verb in ("pause", "resume", "archive", "unarchive")),
    path(f"DELETE {POLICY}", "name", "policy"),
    path(f"GET {POLICY}/versions", "name", "policy"),
    path(f"GET {POLICY}/rollback", "name", "policy"),
    path(f"POST {POLICY}/rollback", "name", "policy", {}),
    path(f"POST {POLICY}/versions/prune", "name", "policy", {"keep": 1}),
    path(f"GET {POLICY}/deployment", "name", "policy"),
    path(f"POST {POLICY}/deploy", "name", "policy", {"version": 0}),
    path(f"POST {POLICY}/canary/promote", "name", "policy", {}),
    path(f"POST {POLICY}/canary/abort", "name", "policy", {}),
    path(f"POST {POLICY}/shadow/promote", "name", "policy", {}),
    path(f"POST {POLICY}/shadow/abort", "name", "policy", {}),
    path(f"PUT {POLICY}/delivery", "name", "policy", {}),
    path(f"GET {POLICY}/training", "name", "policy"),
    path(f"GET {POLICY}/votes", "name", "policy"),
    query("GET /v1/turns", "policy", "policy"),
    query("GET /v1/turns", "user", "subject"),
    query("GET /v1/turns", "conversation_id", "conversation"),
    query("GET /v1/turns", "episode_id", "episode"),
    query("GET /v1/turns", "after", "completion"),
    query("GET /v1/conversations", "policy", "policy"),
    query("GET /v1/conversations", "user", "subject"),
    query("GET /v1/conversations", "after", "completion"),
    query("GET /v1/feedback/search", "policy", "policy"),
    query("GET /v1/feedback/search", "after", "feedback"),
    path("GET /v1/turns/{id}/story", "id", "completion"),
    path("GET /v1/turns/{id}/story", "id (of a request)", "request"),
    Probe("GET /v1/versions/compare", "query version", "version", query={"version": [ID, ID]}),
    path(f"POST {POLICY}/training/pause", "name", "policy", {}),
    path(f"POST {POLICY}/training/resume", "name", "policy", {}),
    path(f"POST {POLICY}/training/trigger", "name", "policy", {}),
    path(f"GET {POLICY}/updates", "name", "policy"),
    Probe(f"GET {POLICY}/updates", "query after", "batch", query={"after": ID}),
    path(f"GET {POLICY}/rewards", "name", "policy"),
    path(f"PUT {POLICY}/rewards", "name", "policy", {"sources": [{"type": "explicit"}]}),
    path(f"DELETE {POLICY}/rewards", "name", "policy"),
    path(f"GET {POLICY}/reward-models", "name", "policy"),
    path(f"POST {POLICY}/reward-models", "name", "policy", {}),
    path(f"POST {POLICY}/reward-models/{{number}}/serve", "name", "policy", {}),
    path(f"POST {POLICY}/reward-models/{{number}}/disable", "name", "policy", {}),
    path(f"GET {POLICY}/rollouts", "name", "policy"),
    path(f"PUT {POLICY}/rollouts", "name", "policy", {"group_sampling": {"extra_replies": 1}}),
    path(f"DELETE {POLICY}/rollouts", "name", "policy"),
    path(f"GET {PLANS}", "name", "policy"),
    query(f"GET {PLANS}", "after", "plan"),
    path(f"POST {PLANS}", "name", "policy", {"dataset": "bread", "verifier": {"type": "number"}}),
    path(f"GET {PLANS}/{{plan_id}}", "name", "policy"),
    path(f"GET {PLANS}/{{plan_id}}", "plan_id", "plan"),
    *(path(f"POST {PLANS}/{{plan_id}}/{verb}", "name", "policy", {}) for verb in VERBS),
    *(path(f"POST {PLANS}/{{plan_id}}/{verb}", "plan_id", "plan", {}) for verb in VERBS),
    path(f"PUT {PINS}", "name", "policy", PIN),
    body(f"PUT {PINS}", "subject (a key)", "key", {**PIN, "kind": "key", "subject": ID}),
    path(f"GET {PINS}", "name", "policy"),
    path(f"DELETE {PINS}/{{pin_id}}", "name", "policy"),
    path(f"DELETE {PINS}/{{pin_id}}", "pin_id", "pin"),
    path(f"GET {POLICY}/versions/{{number}}/lineage", "name", "policy"),
    path("GET /v1/feedback/{feedback_id}/lineage", "feedback_id", "feedback"),
    path(f"GET {COMPLETION}/lineage", "completion_id", "completion"),
    path("GET /v1/subjects/{id}", "id", "subject"),
    path("GET /v1/subjects/{id}/export", "id", "subject"),
    path("DELETE /v1/subjects/{id}", "id", "subject"),
    query("GET /v1/quarantine", "after", "completion"),
    query("GET /v1/keys", "after", "key"),
    path("GET /v1/keys/{key_id}", "key_id", "key"),
    path("DELETE /v1/keys/{key_id}", "key_id", "key"),
    query("GET /v1/exports/turns", "policy", "policy"),
    query("GET /v1/exports/preferences", "policy", "policy"),
    query("GET /v1/datasets", "after", "dataset"),
    path("GET /v1/datasets/{id}", "id", "dataset"),
    path("GET /v1/datasets/{id}/rows", "id", "dataset"),
    path("DELETE /v1/datasets/{id}", "id", "dataset"),
    path(f"GET {WEBHOOK}", "webhook_id", "webhook"),
    path(f"PATCH {WEBHOOK}", "webhook_id", "webhook", {"description": "mine"}),
    path(f"DELETE {WEBHOOK}", "webhook_id", "webhook"),
    path(f"POST {WEBHOOK}/rotate-secret", "webhook_id", "webhook"),
    path(f"GET {WEBHOOK}/deliveries", "webhook_id", "webhook"),
    Probe(f"GET {WEBHOOK}/deliveries", "query after", "delivery", query={"after": ID}),
    path(f"POST {WEBHOOK}/deliveries/{{delivery_id}}/redeliver", "webhook_id", "webhook"),
    path(f"POST {WEBHOOK}/deliveries/{{delivery_id}}/redeliver", "delivery_id", "delivery"),
]
WITHOUT_IDS = {
    "POST /v1/console/links",
    "POST /v1/feedback/tokens/rotate-secret",
    "GET /v1/audit",
    "GET /v1/audit/verify",
    "GET /v1/models",
    "GET /v1/policies",
    "POST /v1/policies",
    "GET /v1/raters",
    "PUT /v1/raters/{rater}",  # a name that the caller chooses: the row is created if there is none
    "GET /v1/events/stream",
    "GET /v1/retention",
    "PUT /v1/retention",
    "GET /v1/retention/preview",
    "POST /v1/retention/run",
    "GET /v1/status",
    "GET /v1/project",
    "PATCH /v1/project",
    "POST /v1/keys",
    "POST /v1/datasets",
    "GET /v1/webhooks",
    "POST /v1/webhooks",
    "GET /livez",
    "GET /readyz",
    "GET /metrics",
}
# Parameters and fields that name no stored object, or that the caller chooses. A tenant's version numbers, row numbers
# and dataset names mean nothing outside of it.
MESSAGES = ("POST /v1/messages", "POST /v1/messages/count_tokens")
HARMLESS = {
    "archived",
    *(
        "limit",
        "order",
        "choice_index",
        "sent_at",
        "source_id",
        "since",
        "until",
        "trainable",
        "with_feedback",
        "version",
        "kind",
    ),
    *("number", "action", "actor", "state", "route", "origin", "judged", "vote", "excluded", "from_version"),
    *(("GET /v1/episodes", name) for name in ("task", "group")),
    *(("POST /v1/episodes", "trace_id"), ("GET /v1/turns", "trace_id")),  # of the caller's own episodes and turns
    # Their handlers are those of the routes without an episode, where they are probed.
    (f"POST {EPISODE}/chat/completions", "model"),
    *((f"POST {EPISODE}/responses", name) for name in ("model", "previous_response_id")),
    *(("GET /v1/raters", "standing"), ("GET /v1/raters", "after")),  # a position in a list
    ("PUT /v1/raters/{rater}", "rater"),
    *(("GET /v1/audit", "subject"), ("GET /v1/audit", "after")),  # of the caller's own entries
    ("GET /v1/audit/verify", "known_hash"),  # of the caller's own entries
    (f"GET {POLICY}/versions/{{number}}/lineage", "after"),  # a position in a list; no object is looked up by it
    ("GET /v1/datasets/{id}/rows", "after"),
    (f"GET {POLICY}/versions", "before"),  # a version's number
    (f"GET {PINS}", "after"),
    ("POST /v1/datasets", "name"),
    *((route, name) for route in MESSAGES for name in ("user_profile_id", "workspace_id")),  # hints, which are ignored
    *(("GET /v1/feedback/search", name) for name in ("name", "source_kind", "direction")),
}
METHODS = ("get", "post", "put", "patch", "delete")


def operations() -> dict[str, dict[str, Any]]:
    paths = create_app(Settings()).openapi()["paths"]
    return {
        f"{method.upper()} {path}": operation
        for path, item in paths.items()
        for method, operation in item.items()
        if method in METHODS
    }


def id_places(operation: dict[str, Any]) -> set[str]:
    """Return where ids go: all parameters of path and query, and the body's fields with the name of an id."""
    places = {f"{one['in']} {one['name']}" for one in operation.get("parameters", []) if one["in"] in ("path", "query")}
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    for schema in (content, *content.get("oneOf", []), *content.get("anyOf", [])):
        names = schema.get("properties", {})
        places |= {f"body {name}" for name in names if name.endswith("_id") or name in ("model", "target", "items")}
    return places


def test_every_route_and_id_is_in_the_table() -> None:
    listed = {(probe.route, probe.place.partition(" (")[0]) for probe in PROBES}
    known = {probe.route for probe in PROBES} | WITHOUT_IDS
    missing = []
    for route, operation in operations().items():
        if route not in known:
            missing.append(
                f"{route}: add a Probe for each of {sorted(id_places(operation))}, or list it in WITHOUT_IDS"
            )
            continue
        for place in sorted(id_places(operation)):
            name = place.partition(" ")[2]
            if (route, place) not in listed and name not in HARMLESS and (route, name) not in HARMLESS:
                missing.append(f"{route}: add a Probe for '{place}', or say in HARMLESS why none is needed")
    assert not missing, "tests/app/projects/test_tenant_isolation.py does not know:\n" + "\n".join(missing)


def test_table_lists_existing_routes_only() -> None:
    assert ({probe.route for probe in PROBES} | WITHOUT_IDS) - set(operations()) == set()


@dataclass(frozen=True)
class OtherProject:
    """The objects of another project. The harness's own project is the one that requests them."""

    auth: dict[str, str]
    own_completion: str  # a completion of the harness's own project
    policy: str
    version: str
    completion: str
    response: str
    request: str
    message: str
    conversation: str
    order: str
    feedback: str
    sender_key: str
    key: str
    dataset: str
    subject: str
    batch: str
    plan: str
    pin: str
    webhook: str
    delivery: str
    episode: str
    run: str
    attempt: str


@pytest.fixture
async def other(harness: Harness) -> AsyncIterator[OtherProject]:
    """Create a turn with feedback in the harness's project, and move both to another project."""
    own_completion, turn = await harness.turn(), await harness.turn(conversation_id="conversation-0123456789")
    feedback_id = (await harness.vote(turn.id)).json()["id"]
    async with harness.db.write() as session:
        project, secret = await service.create_project(session, "bakery", "bread", "some/model")
        policy = (await session.scalars(select(Policy).where(Policy.project_id == project.id))).one()
        version = (await session.scalars(select(Version).where(Version.policy_id == policy.id))).one()
        moved_turn = await session.get_one(Turn, turn.id)
        moved_turn.project_id, moved_turn.policy_id, moved_turn.version_id = project.id, policy.id, version.id
        moved_turn.end_user, moved_turn.episode_id = "person-0123456789", f"ep-{'7' * 32}"
        values = {"policy_id": policy.id, "version_id": version.id, "reward": 1.0, "state": SampleState.QUARANTINED}
        session.add(Sample(turn_id=turn.id, rater="HUMAN/user-0123456789", **values))
        session.add(Batch(id=f"bat-{'7' * 32}", policy_id=policy.id, parent_id=version.id, num_samples=2))
        feedback = (await session.scalars(select(Feedback).where(Feedback.id == feedback_id))).one()
        feedback.project_id = project.id
        session.add(FeedbackKey(project_id=project.id, key="vote-0123456789", feedback_id=feedback_id, revision=1))
        session.add(TurnMetadata(turn_id=turn.id, key="order", value="order-0123456789", project_id=project.id))
        session.add(dataset(project))
        await session.flush()
        session.add(DatasetRow(dataset_id=dataset(project).id, row_number=0, content={"messages": HELLO}))
        session.add(plan(policy))
        session.add(pin(version, project))
        session.add(episode(policy))
        own_policy = (await session.scalars(select(Policy).where(Policy.name == "shop"))).one()
        session.add_all([planned_run(OWN_RUN, own_policy), planned_run(OTHER_RUN, policy)])
        await session.flush()
        session.add(RunAttempt(id=ATTEMPT_ID, run_id=OTHER_RUN, task_index=0, attempt_index=0, **LEASE))
        session.add(webhook(OWN_WEBHOOK, own_completion.project_id))
        session.add(webhook(OTHER_WEBHOOK, project.id))
        await session.flush()
        session.add(WebhookDelivery(id=DELIVERY, endpoint_id=OTHER_WEBHOOK, audit_seq=1, **EVENT))
        key = (await session.scalars(select(ApiKey).where(ApiKey.project_id == project.id))).one()
    yield OtherProject(
        auth={"authorization": f"Bearer {secret}"},
        own_completion=own_completion.id,
        policy="bread",
        version="bread@v0",
        completion=turn.id,
        response=turn.id.replace("chatcmpl-", "resp_"),
        request=turn.id.replace("chatcmpl-", "req-"),
        message=f"{turn.id}-0",
        conversation="conversation-0123456789",
        order="order-0123456789",
        feedback=feedback_id,
        sender_key="vote-0123456789",
        key=key.id,
        dataset=dataset(project).id,
        subject="person-0123456789",
        batch=f"bat-{'7' * 32}",
        plan=f"plan-{'7' * 32}",
        pin=f"pin-{'7' * 32}",
        webhook=OTHER_WEBHOOK,
        delivery=DELIVERY,
        episode=f"ep-{'7' * 32}",
        run=OTHER_RUN,
        attempt=ATTEMPT_ID,
    )


def planned_run(name: str, policy: Policy) -> PlannedRun:
    same = {"project_id": policy.project_id, "policy_id": policy.id, "plan": {"policy": policy.name}}
    return PlannedRun(id=name, name=name, num_tasks=1, num_added=1, **same)


def webhook(id: str, project_id: str) -> WebhookEndpoint:
    return WebhookEndpoint(
        id=id, project_id=project_id, url="https://hooks.example", events=["training.halted"], secret="whsec_AAAA"
    )


def dataset(project: Project) -> Dataset:
    kind = DatasetKind.PROMPTS
    return Dataset(id=f"ds-{'7' * 32}", project_id=project.id, name="bread", kind=kind, num_rows=1, sha256="0" * 64)


def plan(policy: Policy) -> RolloutPlan:
    return RolloutPlan(
        id=f"plan-{'7' * 32}",
        project_id=policy.project_id,
        policy_id=policy.id,
        dataset_id=f"ds-{'7' * 32}",
        dataset="bread",
        n=2,
        passes=1,
        verifier={"type": "number"},
        temperature=1.0,
        max_tokens=16,
        num_prompts=1,
    )


def episode(policy: Policy) -> Episode:
    return Episode(
        id=f"ep-{'7' * 32}",
        project_id=policy.project_id,
        policy_id=policy.id,
        key_id="key",
        key_sha256="0" * 64,
        idle_seconds=1e6,
        deadline_at=1e12,
        fingerprint="",
    )


def pin(version: Version, project: Project) -> Pin:
    same = {"policy_id": version.policy_id, "version_id": version.id, "actor": "test"}
    return Pin(id=f"pin-{'7' * 32}", project_id=project.id, kind=PinKind.USER, subject="user-0123456789", **same)


def make_unknown_id(id: str) -> str:
    """Return an unknown id of the same form. Example: "bread@v0" -> "bzzzz@v0"."""
    name, at, version = id.partition("@")
    length = 1 if at or len(name) < 10 else len(name) - 8
    return name[:length] + "z" * (len(name) - length) + at + version


def fill(template: Any, id: str, own: str) -> Any:
    return json.loads(json.dumps(template).replace(ID, id).replace(OWN, own))


async def ask(harness: Harness, probe: Probe, id: str, own: str, auth: dict[str, str] | None = None) -> httpx2.Response:
    method, _, route = probe.route.partition(" ")
    place, _, name = probe.place.partition(" (")[0].partition(" ")
    route = route.replace(f"{{{name}}}", id) if place == "path" else route.replace("{completion_id}", own)
    route = route.replace("{name}", "bread" if auth else "shop").replace(
        "{number}", "1" if "reward-models" in route else "0"
    )
    route = route.replace("{webhook_id}", OTHER_WEBHOOK if auth else OWN_WEBHOOK).replace("{delivery_id}", DELIVERY)
    route = route.replace("{run}", OTHER_RUN if auth else OWN_RUN).replace("{attempt_id}", ATTEMPT_ID)
    params, content = fill(probe.query, id, own), fill(probe.body, id, own)
    return await harness.api.request(method, route, params=params, json=content, headers=auth)


def visible_parts(answer: httpx2.Response, id: str) -> tuple[int, dict[str, str], bytes]:
    """Return what a client sees of a response, with the id that it sent and the request's own masked."""
    of_request = ("x-request-id", "request-id", "x-ratelimit")
    own = {name: value for name, value in answer.headers.items() if not name.startswith(of_request)}
    content = answer.content.replace(answer.headers["x-request-id"].encode(), b"REQUEST")
    return answer.status_code, own, content.replace(id.partition("@")[0].encode(), b"ID")


@pytest.mark.parametrize("probe", PROBES, ids=str)
async def test_id_of_another_project_is_like_an_unknown_id(harness: Harness, other: OtherProject, probe: Probe) -> None:
    foreign: str = getattr(other, probe.kind)
    unknown = make_unknown_id(foreign)
    foreign_view = visible_parts(await ask(harness, probe, foreign, other.own_completion), foreign)
    unknown_view = visible_parts(await ask(harness, probe, unknown, other.own_completion), unknown)
    assert foreign_view == unknown_view
    assert foreign_view[0] in (200, 400 if probe.place.endswith("previous_response_id") else 404)  # as OpenAI answers
    # The owner gets another response: the object exists, and the other project has not changed it
    owner_unknown = visible_parts(await ask(harness, probe, unknown, other.completion, other.auth), unknown)
    owner_foreign = visible_parts(await ask(harness, probe, foreign, other.completion, other.auth), foreign)
    assert owner_foreign != owner_unknown
