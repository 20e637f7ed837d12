"""Projects, as the operator makes them; and the commands for projects and keys."""

import json
from collections.abc import Iterator

import pytest
import typer
from typer.testing import CliRunner

from app.cli.keys import keys, projects
from app.core.settings import get_settings
from app.models import ApiKey, Deployment, Policy, Project, Version, VersionState
from app.projects import service
from tests.app.projects.test_endpoints import bearer
from tests.support.deployment import Harness

run = CliRunner().invoke


async def test_a_new_project_has_a_key_and_a_policy_of_its_own(harness: Harness) -> None:
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
async def test_a_name_that_is_taken_or_unfit_is_refused(harness: Harness, name: str) -> None:
    with pytest.raises(ValueError, match=r"no name|already"):
        async with harness.db.write() as session:
            await service.create_project(session, name, "shop", "some/model")
    assert len(await harness.all(Project)) == len(await harness.all(ApiKey)) == 1


async def test_a_project_that_lost_its_keys_is_given_another(harness: Harness) -> None:
    async with harness.db.write() as session:
        key = await service.rescue(session, "default")
    assert (await harness.api.get("/v1/keys", headers=bearer(key))).status_code == 200
    with pytest.raises(ValueError, match="no project 'nobody'"):
        async with harness.db.write() as session:
            await service.rescue(session, "nobody")


@pytest.fixture
def at(harness: Harness, served: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """The shell of an operator who is also an admin of the project 'default'."""
    host, _, port = served.removeprefix("http://").partition(":")
    values = {"HOST": host, "PORT": port, "API_KEY": harness.key, "POLICY": "shop", "HOME": str(harness.settings.home)}
    for name, value in (values | {"DATABASE_URL": harness.settings.database}).items():
        monkeypatch.setenv(f"ATTUNE_{name}", value)
    get_settings.cache_clear()
    yield harness
    get_settings.cache_clear()


def said(command: typer.Typer, *words: str) -> str:
    result = run(command, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_keys_are_made_listed_and_revoked(at: Harness) -> None:
    key = said(keys, "create", "--scope", "chat", "--name", "till", "--no-train", "--expires-in", "60").strip()
    rows = json.loads(said(keys, "list", "--json"))
    [row] = [row for row in rows if key.startswith(row["prefix"])]
    assert (row["scopes"], row["name"], row["train"]) == (["chat"], "till", False) and len(rows) == 2
    assert "till" in said(keys, "list") and key not in said(keys, "list")
    assert "is revoked" in said(keys, "revoke", row["id"])
    assert json.loads(said(keys, "revoke", row["id"], "--json"))["revoked_at"] is not None
    assert "revoked" in said(keys, "list")
    assert "no key 'key-x'" in run(keys, ["revoke", "key-x"]).output


def test_projects_are_made_and_listed(at: Harness) -> None:
    made = json.loads(said(projects, "create", "bakery", "--json"))
    assert made["key"].startswith("sk-attune-") and made["name"] == "bakery"
    assert [row["name"] for row in json.loads(said(projects, "list", "--json"))] == ["default", "bakery"]
    assert "bakery" in said(projects, "list")
    assert "shown this once" in said(projects, "create", "butcher", "--policy", "meat")
    assert said(projects, "key", "butcher").startswith("sk-attune-")
    taken = run(projects, ["create", "bakery"])
    assert isinstance(taken.exception, ValueError) and "already" in str(taken.exception)
