"""POST and PATCH /v1/policies: another policy over the same base model, with settings of its own."""

from app.models import Audit, AuditAction, Deployment, Policy, Version
from tests.support.deployment import Harness
from tests.support.settings import change_in_place

GRPO = {"algorithm": "grpo", "trainer": {"batch_size": 16, "max_batch_size": 16}, "rewards": {"discount": 0.25}}
POLICIES = "/v1/policies"


async def test_policy_is_created_with_its_own_settings(harness: Harness) -> None:
    change_in_place(harness.settings, {"max_batch_size": 16})
    response = await harness.api.post(POLICIES, json={"name": "support", "settings": GRPO, "reason": "a trial"})
    assert response.status_code == 201, response.text
    view = response.json()
    assert (view["name"], view["serving"], view["head"]) == ("support", "support@v0", "support@v0")
    assert view["own"] == ["algorithm.type", "rewards.discount", "trainer.batch_size", "trainer.max_batch_size"]
    assert view["settings"]["algorithm"]["type"] == "grpo" and view["settings"]["trainer"]["batch_size"] == 16
    assert "lora" not in view["settings"]["trainer"] and "optim" in view["settings"]["trainer"]
    assert (await harness.api.get(f"{POLICIES}/support")).json() == view
    [entry] = [entry for entry in await harness.all(Audit) if entry.action == AuditAction.POLICY_CREATED]
    assert (entry.subject, entry.reason, entry.details) == ("support", "a trial", {"settings": view["own"]})
    models = (await harness.api.get("/v1/models")).json()["data"]
    assert "support" in {model["id"] for model in models}
    [policy] = [policy for policy in await harness.all(Policy) if policy.name == "support"]
    deployment = await harness.get(Deployment, policy.id)
    assert (await harness.get(Version, deployment.version_id)).adapter_name is None


async def test_settings_are_changed_value_by_value(harness: Harness) -> None:
    await harness.api.post(POLICIES, json={"name": "support", "settings": {"algorithm": {"type": "kto", "beta": 0.3}}})
    change = {"algorithm": {"beta": None}, "trainer": {"optim": {"lr": 1e-3}}, "release": {"canary": {"share": 0.1}}}
    view = (await harness.api.patch(f"{POLICIES}/support", json={"settings": change})).json()
    assert view["own"] == ["algorithm.type", "release.canary.share", "trainer.optim.lr"]
    assert view["settings"]["release"]["canary"]["share"] == 0.1
    assert (await harness.api.get(f"{POLICIES}/support/deployment")).json()["canary_config"]["share"] == 0.1
    [entry] = [entry for entry in await harness.all(Audit) if entry.action == AuditAction.POLICY_UPDATED]
    assert entry.details == {"settings": ["algorithm.beta", "release.canary.share", "trainer.optim.lr"]}
    refused = await harness.api.patch(f"{POLICIES}/support", json={"settings": {"trainer": {"lora": {"r": 4}}}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "trainer.lora.r")
    assert (await harness.api.get(f"{POLICIES}/support")).json() == view


async def test_names_are_unique_and_the_number_is_limited(harness: Harness) -> None:
    created = await harness.api.post(POLICIES, json={"name": harness.settings.policy})
    assert (created.status_code, created.json()["error"]["code"]) == (409, "policy_exists")
    change_in_place(harness.settings, {"limits__project__policies": 2})
    assert (await harness.api.post(POLICIES, json={"name": "second"})).status_code == 201
    refused = await harness.api.post(POLICIES, json={"name": "third"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "project_limit")


async def test_full_weights_allow_one_policy(harness: Harness) -> None:
    change_in_place(harness.settings, {"adaptation": "full"})
    refused = await harness.api.post(POLICIES, json={"name": "second"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "full_weights")
