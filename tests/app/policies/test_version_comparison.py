"""Versions are compared by people's votes, over policies too. Expected figures are published or computed by hand."""

import asyncio
import json
from typing import Any

import pytest
from sqlalchemy import select

from app.cli.main import app as cli
from app.models import Policy, Reward, Version, new_id
from app.projects.service import create_policy
from tests.support.cli import run
from tests.support.deployment import Harness
from tests.support.trained_versions import publish
from tests.support.turns import make_turn

COMPARE = "/v1/versions/compare"


async def add_votes(harness: Harness, policy: Policy, version: Version, up: int, down: int) -> None:
    """Create a reply of ten prompt tokens and five output tokens for each vote. Each person votes twice."""
    async with harness.db.write() as session:
        for number in range(up + down):
            id = new_id("chatcmpl")
            session.add(make_turn(policy, version, id, num_prompt_tokens=10, num_output_tokens=5))
            await session.flush()
            value, rater = 1.0 if number < up else -1.0, f"HUMAN/user-{number // 2}"
            session.add(Reward(id=new_id("rew"), turn_id=id, source="default/HUMAN/", rater=rater, value=value))
            rule = {"source": "length", "reward_source": "length", "value": 0.25 if number % 2 else 0.75}
            session.add(Reward(id=new_id("rew"), turn_id=id, **rule))


async def create_other_policy(harness: Harness, name: str) -> tuple[Policy, Version]:
    async with harness.db.write() as session:
        await create_policy(session, (await harness.policy()).project_id, name, harness.settings.model)
    async with harness.db.read() as session:
        policy = (await session.scalars(select(Policy).where(Policy.name == name))).one()
        return policy, (await session.scalars(select(Version).where(Version.policy_id == policy.id))).one()


async def compare(harness: Harness, *versions: str) -> dict[str, Any]:
    response = await harness.api.get(COMPARE, params={"version": versions})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def test_difference_is_newcombes(harness: Harness) -> None:
    shop, base = await harness.policy(), await harness.serving()
    other, other_base = await create_other_policy(harness, "shop-grpo")
    await add_votes(harness, shop, base, 48, 32)
    await add_votes(harness, other, other_base, 56, 14)
    body = await compare(harness, "shop@0", "shop-grpo@v0")
    first, second = body["data"]
    assert (first["name"], first["replies"], first["rated"], first["up"], first["raters"]) == (
        "shop@v0",
        80,
        80,
        48,
        40,
    )
    assert (first["difference"], first["verdict"], first["approval"]) == (None, None, 0.6)
    assert (first["approval_low"], first["approval_high"]) == pytest.approx((0.4904, 0.7004), abs=1e-4)
    assert (second["name"], second["approval"], second["verdict"]) == ("shop-grpo@v0", 0.8, "better")
    difference = second["difference"]  # Newcombe (1998), table II: 56 of 70 less 48 of 80
    assert tuple(difference.values()) == pytest.approx((0.2, 0.0524, 0.3339), abs=6e-5)
    assert (second["prompt_tokens"], second["output_tokens"], second["mean_length"]) == (700, 350, 5.0)
    assert second["rewards"]["length"] == {"count": 70, "mean": 0.5}
    assert second["rewards"]["explicit"] == {"count": 70, "mean": pytest.approx(0.6)}
    assert body["sentences"] == [
        "shop-grpo@v0 is better than shop@v0: the difference in approval is between +5.2 and +33.4 points (95 %)."
    ]


async def test_worse_unclear_and_unrated_versions_are_called_so(harness: Harness) -> None:
    shop, base = await harness.policy(), await harness.serving()
    worse, unclear, silent = [await publish(harness) for _ in range(3)]
    await add_votes(harness, shop, base, 9, 1)
    await add_votes(harness, shop, worse, 3, 7)
    await add_votes(harness, shop, unclear, 8, 2)
    body = await compare(harness, "shop@0", *(f"shop@{version.number}" for version in (worse, unclear, silent)))
    verdicts = [row["verdict"] for row in body["data"]]
    assert verdicts == [None, "worse", "no difference shown", None]
    assert tuple(body["data"][1]["difference"].values()) == pytest.approx((-0.6, -0.8090, -0.1705), abs=6e-5)
    assert body["sentences"][2] == "shop@v3 cannot be compared with shop@v0: there are no votes on shop@v3."


async def test_references_that_name_no_version_are_refused(harness: Harness) -> None:
    for versions, status, message in (
        (("shop@0", "shop"), 400, "'shop' names no version: write shop@v3, shop@stable"),
        (("shop@0", "shop@stable"), 400, "Each version may be named once."),
        (("shop@0", "shop@7"), 404, "Policy 'shop' has no version 'v7'."),
        (("shop@0", "bread@1"), 404, "There is no policy named 'bread'."),
        (("shop@0",), 400, "version"),
    ):
        response = await harness.api.get(COMPARE, params={"version": versions})
        assert response.status_code == status, response.text
        assert message in response.json()["error"]["message"]


async def test_command_compares(cli_harness: Harness) -> None:
    shop, base = await cli_harness.policy(), await cli_harness.serving()
    version = await publish(cli_harness)
    await add_votes(cli_harness, shop, base, 48, 32)
    await add_votes(cli_harness, shop, version, 56, 14)
    result = await asyncio.to_thread(run, cli, ["versions", "--compare", "0", "shop@stable"])
    assert result.exit_code == 0, result.output
    assert "+20.0 (+5.2 to +33.4)" in result.output and "shop@v1 is better than shop@v0" in result.output
    result = await asyncio.to_thread(run, cli, ["versions", "--compare", "1", "v0", "--json"])
    assert json.loads(result.stdout)["data"][1]["verdict"] == "worse"
