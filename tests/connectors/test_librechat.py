"""docs/connect/librechat.md, followed to the letter: its file, its variables, and LibreChat's requests."""

import re
from base64 import b64encode
from typing import Any

import httpx2
import pytest
import yaml  # type: ignore[import-untyped]

from app.core.settings import REPOSITORY, Settings
from app.models import Feedback, Turn
from tests.support.deployment import Harness
from tests.support.langfuse import librechat_score
from tests.support.scripted_engine import ScriptedEngine

PAGE = (REPOSITORY / "docs" / "connect" / "librechat.md").read_text()
REQUEST = {"MESSAGEID": "m-7", "CONVERSATIONID": "conv-1", "PARENTMESSAGEID": "m-6"}


def block(language: str) -> str:
    """Return the page's block in this language, without its indent."""
    [text] = re.findall(rf"^   ```{language}\n(.*?)^   ```$", PAGE, re.DOTALL | re.MULTILINE)
    return "\n".join(line.removeprefix("   ") for line in str(text).splitlines())


def variables(key: str, address: str) -> dict[str, str]:
    """Return the variables of the page, with the key and the address of this deployment."""
    lines = (line.split("=", 1) for line in block("ini").splitlines() if line)
    return {
        name: value.replace("sk-attune-…", key).replace("http://your-attune:8700", address) for name, value in lines
    }


def fill(template: str) -> str:
    """Fill in LibreChat's templates of headers as it does: unknown ones stay."""
    filled = template.replace("{{LIBRECHAT_USER_ID}}", "67a9")
    for name, value in REQUEST.items():
        filled = filled.replace(f"{{{{LIBRECHAT_BODY_{name}}}}}", value)
    return filled


@pytest.fixture
def settings(settings: Settings) -> Settings:
    assert "`ATTUNE_LANGFUSE__INTAKE=true`" in PAGE
    return settings.replace({"langfuse.intake": True})


async def test_page_leads_from_a_thumb_to_a_vote(harness: Harness, scripted: ScriptedEngine) -> None:
    created = await harness.api.post("/v1/keys", json={"name": "librechat", "scopes": ["chat", "feedback"]})
    assert "attune keys create --name librechat --scope chat --scope feedback" in PAGE
    env = variables(created.json()["key"], "http://attune")
    [endpoint] = yaml.safe_load(block("yaml"))["endpoints"]["custom"]
    assert endpoint["apiKey"] == "${ATTUNE_API_KEY}"
    address = endpoint["baseURL"].replace("http://your-attune:8700", "http://attune")
    headers = {name: fill(value) for name, value in endpoint["headers"].items()}
    chat: dict[str, Any] = {
        "model": "shop",
        "user": "67a9",
        "stream": False,
        "messages": [{"role": "user", "content": "When are you open?"}],
    }
    authorization = {"authorization": f"Bearer {env['ATTUNE_API_KEY']}"}
    answer = await harness.api.post(f"{address}/chat/completions", json=chat, headers={**headers, **authorization})
    assert answer.status_code == 200, answer.text
    turn = await harness.get(Turn, answer.json()["id"])
    assert (turn.end_user, turn.conversation_id, turn.exclusion_reason) == ("67a9", "conv-1", None)

    pair = f"{env['LANGFUSE_PUBLIC_KEY']}:{env['LANGFUSE_SECRET_KEY']}"
    basic = {"authorization": "Basic " + b64encode(pair.encode()).decode()}

    async def send(method: str, path: str, **arguments: Any) -> httpx2.Response:
        return await harness.api.request(
            method, f"{env['LANGFUSE_BASE_URL']}/api/public/{path}", headers=basic, **arguments
        )

    score = librechat_score("m-7", "thumbsUp")
    assert (await send("POST", "scores", json=score)).status_code == 200
    [row] = await harness.all(Feedback)
    assert (row.turn_id, row.kind, row.value, row.source_id) == (turn.id, "binary", 1.0, "langfuse:67a9")
    assert (await send("DELETE", f"scores/{score['id']}")).status_code == 202
    view = (await harness.api.get(f"/v1/feedback/{row.id}")).json()
    assert view["withdrawn"] is True
    assert (await send("POST", "otel/v1/traces", content=b"\x0a\x00")).status_code == 200


def test_parameters_that_the_page_drops_are_those_that_exclude_replies() -> None:
    [endpoint] = yaml.safe_load(block("yaml"))["endpoints"]["custom"]
    assert set(endpoint["dropParams"]) == {"top_p", "frequency_penalty", "presence_penalty"}
