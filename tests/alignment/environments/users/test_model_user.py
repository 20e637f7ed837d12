"""Users that a model plays: its version is fixed, roles are flipped, and failures are none of the agent's."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from alignment.environments.attempts import Attempt, ChatEndpoint, derive_seed
from alignment.environments.errors import InfrastructureFailure
from alignment.environments.protocols import Message
from alignment.environments.service_http import ServiceHttp
from alignment.environments.users.model_user import GREETING, ModelUser
from alignment.errors import UnavailableEnvironment
from app.models import Turn
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

PERSONA = "You are Ada. You want a table for four."
ELSEWHERE = ChatEndpoint("https://models.example/v1", "sk-1")
DIALOGUE: list[Message] = [
    {"role": "system", "content": "You take bookings."},
    {"role": "user", "content": "A table, please."},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "call-1"}]},
    {"role": "tool", "tool_call_id": "call-1", "content": "4 tables are free"},
    {"role": "assistant", "content": "For how many?"},
]


@pytest.fixture
async def attempt(harness: Harness, live_url: str, scripted: ScriptedEngine) -> AsyncIterator[Attempt]:
    http = ServiceHttp(patience=0.0)
    yield Attempt(7, "ep-1", ChatEndpoint(f"{live_url}/v1", harness.key), http)
    await http.close()


@pytest.mark.parametrize("model", ["assistant", "assistant@stable", "assistant@canary", "gpt-5", "assistant@v"])
def test_model_without_a_fixed_version_is_refused(model: str) -> None:
    with pytest.raises(UnavailableEnvironment, match=r"another user after each release\. Write '[\w-]+@v3'"):
        ModelUser(PERSONA, model)
    with pytest.raises(UnavailableEnvironment):
        ModelUser(PERSONA, model, revision="9216db5")  # the run's own service has releases


def test_models_of_other_services_have_a_date_or_a_revision() -> None:
    assert ModelUser(PERSONA, "gpt-4.1-2025-04-14", endpoint=ELSEWHERE).describe()["user"] == (
        "model gpt-4.1-2025-04-14 at models.example"
    )
    user = ModelUser(PERSONA, "Qwen/Qwen3-32B", name="Ada", revision="9216db5", endpoint=ELSEWHERE)
    assert user.describe()["user"] == "model Qwen/Qwen3-32B 9216db5 at models.example, Ada"
    assert "sk-1" not in repr(user)


def test_record_has_a_digest_of_all_that_makes_the_user() -> None:
    user = ModelUser(PERSONA, "assistant@v3", name="Ada")
    record = user.describe()
    assert record["user"] == "model assistant@v3, Ada" and PERSONA not in str(record)
    others = [
        replace(user, persona="You are Bob."),
        replace(user, model="assistant@v4"),
        replace(user, temperature=1.0),
        replace(user, first="Hello."),
    ]
    assert len({each.describe()["user_sha256"] for each in [user, *others]}) == 5
    assert replace(user).describe() == record


async def test_user_begins_after_a_greeting_that_the_agent_does_not_see(
    attempt: Attempt, scripted: ScriptedEngine
) -> None:
    scripted.reply_text = " A table, please.\n"
    assert await ModelUser(PERSONA, "shop@v0").begin(attempt) == "A table, please."
    system, greeting = scripted.requests[0]["messages"]
    assert system["role"] == "system" and system["content"].startswith(PERSONA)
    assert "write ###STOP###" in system["content"]
    assert greeting == {"role": "user", "content": GREETING}


async def test_first_message_may_be_fixed(attempt: Attempt, scripted: ScriptedEngine) -> None:
    assert await ModelUser(PERSONA, "shop@v0", first="A table, please.").begin(attempt) == "A table, please."
    assert scripted.requests == []


async def test_roles_are_flipped_and_tools_are_hidden(attempt: Attempt, scripted: ScriptedEngine) -> None:
    user = ModelUser(PERSONA, "shop@v0", first="A table, please.")
    await user.begin(attempt)
    scripted.reply_text = "For four."
    assert await user.reply(DIALOGUE) == "For four."
    assert scripted.requests[0]["messages"][2:] == [
        {"role": "assistant", "content": "A table, please."},
        {"role": "user", "content": "For how many?"},
    ]


async def test_each_message_has_its_own_seed(harness: Harness, attempt: Attempt) -> None:
    user = ModelUser(PERSONA, "shop@v0", temperature=0.5, max_tokens=99)
    await user.begin(attempt)
    await user.reply(DIALOGUE)
    turns = await harness.all(Turn)
    assert [turn.sampling["seed"] for turn in turns] == [derive_seed(7, 0), derive_seed(7, 1)]
    assert {(turn.sampling["temperature"], turn.sampling["max_tokens"]) for turn in turns} == {(0.5, 99)}


@pytest.mark.parametrize("text", ["###STOP###", "Thanks, bye! ###STOP###"])
async def test_stop_mark_ends_the_dialogue(attempt: Attempt, scripted: ScriptedEngine, text: str) -> None:
    user = ModelUser(PERSONA, "shop@v0", first="A table, please.")
    await user.begin(attempt)
    scripted.reply_text = text
    assert await user.reply(DIALOGUE) is None
    with pytest.raises(InfrastructureFailure, match="before its first message"):
        await ModelUser(PERSONA, "shop@v0").begin(attempt)


async def test_empty_message_is_a_failure_of_the_user(attempt: Attempt, scripted: ScriptedEngine) -> None:
    scripted.reply_text = ""
    with pytest.raises(InfrastructureFailure, match="the simulated user, shop@v0, has written an empty message"):
        await ModelUser(PERSONA, "shop@v0").begin(attempt)


async def test_engine_that_is_down_is_infrastructure(attempt: Attempt, scripted: ScriptedEngine) -> None:
    scripted.refuse_status = 500
    with pytest.raises(InfrastructureFailure, match="the simulated user, shop@v0: the service is busy"):
        await ModelUser(PERSONA, "shop@v0").begin(attempt)


async def test_version_that_does_not_exist_is_a_mistake_of_the_user_of_attune(attempt: Attempt) -> None:
    with pytest.raises(UnavailableEnvironment, match=r"shop@v9, was refused with 404: .*shop@v9|v9"):
        await ModelUser(PERSONA, "shop@v9").begin(attempt)


async def test_endpoint_of_its_own(attempt: Attempt, scripted: ScriptedEngine) -> None:
    """As in an Environment with a loop of its own."""
    assert attempt.endpoint is not None
    user = ModelUser(PERSONA, "shop", revision="today", endpoint=attempt.endpoint)
    scripted.reply_text = "A table, please."
    assert await user.begin(Attempt(seed=3)) == "A table, please."
    await user.close()
    with pytest.raises(UnavailableEnvironment, match="needs an endpoint outside of a run"):
        await ModelUser(PERSONA, "shop@v0").begin(Attempt())
