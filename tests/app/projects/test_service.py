"""The projects service, and the commands for projects and keys."""

import json
from collections.abc import Iterator

import pytest
import typer
from typer.testing import CliRunner

from app.cli.projects import keys, projects
from app.core.settings import get_settings
from app.models import ApiKey, Deployment, Policy, Project, Version, VersionState
from app.projects import service
from tests.app.projects.test_endpoints import bearer
from tests.support.deployment import Harness

run = CliRunner().invoke


async def test_new_project_has_its_own_key_and_policy(harness: Harness) -> None:
    async with harness.db.write() as session:
        project, key = await service.create_project(session, "bakery", "shop", "some/model")
    policies = (await harness.api.get("/v1/policies", headers=bearer(key))).json()["data"]
    assert [(row["name"], row["serving"], row["base_model"]) for row in policies] == [("shop", "shop@v0", "some/model")]
    [policy] = [row for row in await harness.all(Policy) if row.project_id == project.id]
    [base] = [row for row in await harness.all(Version) if row.policy_id == policy.id]
    assert (base.number, base.state, policy.head_version_id) == (0, VersionState.LIVE, base.id)
    assert base.id in [row.version_id for row in await harness.all(Deployment)]
    assert (await harness.api.get("/v1/project", headers=bearer(key))).json()["id"] == project.id


@pytest.mark.parametrize("name", ["default", "No Name", "", "x" * 64, "-x"])
async def test_taken_or_invalid_name_is_refused(harness: Harness, name: str) -> None:
    with pytest.raises(ValueError, match=r"not a valid name|already"):
        async with harness.db.write() as session:
            await service.create_project(session, name, "shop", "some/model")
    assert len(await harness.all(Project)) == len(await harness.all(ApiKey)) == 1


async def test_project_without_keys_gets_a_new_admin_key(harness: Harness) -> None:
    async with harness.db.write() as session:
        key = await service.create_admin_key(session, "default")
    assert (await harness.api.get("/v1/keys", headers=bearer(key))).status_code == 200
    with pytest.raises(ValueError, match="no project 'nobody'"):
        async with harness.db.write() as session:
            await service.create_admin_key(session, "nobody")


@pytest.fixture
def operator(harness: Harness, live_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """A shell environment of the operator with an admin key of the project 'default'."""
    host, _, port = live_url.removeprefix("http://").partition(":")
    values = {"SERVER__HOST": host, "SERVER__PORT": port, "API_KEY": harness.key, "POLICY": "shop"}
    values |= {"HOME": str(harness.settings.home)}
    for name, value in (values | {"DATABASE__URL": harness.settings.database_url}).items():
        monkeypatch.setenv(f"ATTUNE_{name}", value)
    get_settings.cache_clear()
    yield harness
    get_settings.cache_clear()


def run_output(command: typer.Typer, *arguments: str) -> str:
    result = run(command, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_keys_are_created_listed_and_revoked(operator: Harness) -> None:
    key = run_output(keys, "create", "--scope", "chat", "--name", "till", "--no-train", "--expires-in", "60").strip()
    rows = json.loads(run_output(keys, "list", "--json"))
    [row] = [row for row in rows if key.startswith(row["prefix"])]
    assert (row["scopes"], row["name"], row["train"]) == (["chat"], "till", False) and len(rows) == 2
    assert "till" in run_output(keys, "list") and key not in run_output(keys, "list")
    assert "is revoked" in run_output(keys, "revoke", row["id"])
    assert json.loads(run_output(keys, "revoke", row["id"], "--json"))["revoked_at"] is not None
    assert "revoked" in run_output(keys, "list")
    assert "no key 'key-x'" in run(keys, ["revoke", "key-x"]).output


def test_projects_are_created_and_listed(operator: Harness) -> None:
    created = json.loads(run_output(projects, "create", "bakery", "--json"))
    assert created["key"].startswith("sk-attune-") and created["name"] == "bakery"
    assert [row["name"] for row in json.loads(run_output(projects, "list", "--json"))] == ["default", "bakery"]
    assert "bakery" in run_output(projects, "list")
    assert "shown this once" in run_output(projects, "create", "butcher", "--policy", "meat")
    assert run_output(projects, "key", "butcher").startswith("sk-attune-")
    duplicate = run(projects, ["create", "bakery"])
    assert isinstance(duplicate.exception, ValueError) and "already" in str(duplicate.exception)
