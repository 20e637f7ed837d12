"""Users that a model plays: its version is fixed, roles are flipped, and failures are none of the agent's."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import orjson
import pytest

from alignment.environments.attempts import Attempt, ChatEndpoint, derive_seed
from alignment.environments.errors import InfrastructureFailure, ServiceRefusal
from alignment.environments.protocols import Message
from alignment.environments.service_http import ServiceAnswer, ServiceHttp, ServiceTransport
from alignment.environments.users.model_user import GREETING, RULES, ModelUser
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


class OtherService(ServiceTransport):
    """A service that answers each chat with the text, or refuses it with the status."""

    def __init__(self, text: str = "For four.", status: int = 200, finish_reason: str = "stop") -> None:
        self.text, self.status, self.finish_reason = text, status, finish_reason
        self.bodies: list[dict[str, Any]] = []

    async def request(self, method: str, url: str, key: str, body: Any = None, *args: Any, **rest: Any) -> Any:
        self.bodies.append(body)
        if self.status >= 400:
            raise ServiceRefusal(self.status, None, "'temperature' is not supported")
        choice = {"message": {"role": "assistant", "content": self.text}, "finish_reason": self.finish_reason}
        return ServiceAnswer(orjson.dumps({"id": "chat-1", "choices": [choice]}), is_created=False)

    async def close(self) -> None: ...

    @property
    def roles(self) -> list[str]:
        return [message["role"] for message in self.bodies[-1]["messages"]]

    @property
    def contents(self) -> list[str]:
        return [message["content"] for message in self.bodies[-1]["messages"]]

    def user(self, **settings: Any) -> ModelUser:
        return ModelUser(PERSONA, "m-2025-04-14", endpoint=replace(ELSEWHERE, http=self), **settings)


def message(role: str, text: str | None) -> Message:
    return {"role": role, "content": text}


REFUSED = [
    "assistant",
    "assistant@stable",
    "assistant@canary",
    "gpt-5",
    "assistant@v",
    "support-20250101",
    "m-2025-04-14",
]


@pytest.mark.parametrize("model", REFUSED)
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


@pytest.mark.parametrize(
    ("reply", "seen"), [("", "(no answer)"), (None, "(no answer)"), (" \n", "(no answer)"), ("Hello.", "Hello.")]
)
async def test_empty_reply_of_the_agent_is_seen_as_no_answer(reply: str | None, seen: str) -> None:
    """Services refuse a chat that ends with the model's own message."""
    service = OtherService()
    assert await service.user().reply([message("user", "A table, please."), message("assistant", reply)]) == "For four."
    assert service.roles == ["system", "user", "assistant", "user"] and service.contents[-1] == seen


async def test_roles_of_the_users_chat_alternate() -> None:
    """Templates of chats refuse two messages of one role in a row."""
    service = OtherService()
    call: Message = {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "call-1"}]}
    result: Message = {"role": "tool", "tool_call_id": "call-1", "content": "4 tables are free"}
    welcome, first = message("assistant", "Welcome!"), message("user", "A table, please.")
    await service.user().reply([welcome, first, call, result, message("assistant", "For how many?")])
    assert service.roles == ["system", "user", "assistant", "user"]
    assert service.contents[1:] == [f"{GREETING}\n\nWelcome!", "A table, please.", "I look.\n\nFor how many?"]


@pytest.mark.parametrize("status", [400, 422])
async def test_refusal_of_the_first_message_ends_the_run(status: int) -> None:
    user = OtherService(status=status).user()
    with pytest.raises(UnavailableEnvironment, match=rf"refused with {status}: 'temperature' is not supported"):
        await user.begin(Attempt())
    with pytest.raises(InfrastructureFailure, match="'temperature' is not supported"):
        await user.reply(DIALOGUE)  # the agent's reply may be to blame


async def test_temperature_may_be_left_out() -> None:
    service = OtherService()
    await service.user(temperature=None).begin(Attempt())
    await service.user().begin(Attempt())
    assert [body.get("temperature", "none") for body in service.bodies] == ["none", 0.0]


@pytest.mark.parametrize("text", ["I want a table for", ""])
async def test_message_that_is_cut_is_not_sent(text: str) -> None:
    service = OtherService(text, finish_reason="length")
    with pytest.raises(InfrastructureFailure, match="was cut at max_tokens, 7: set more"):
        await service.user(max_tokens=7).begin(Attempt())
    service.text = "Bye. ###STOP###"
    assert await service.user().reply(DIALOGUE) is None


@pytest.mark.parametrize(
    ("rules", "end"),
    [
        (RULES, "write ###STOP### and nothing else."),
        ('Write {"a": {1}}, then {stop_mark}.', 'Write {"a": {1}}, then ###STOP###.'),
        ("Say ###STOP### at the end.", "\nSay ###STOP### at the end."),
        ("Be {brief}.", "Be {brief}.\nTo end the dialogue, write ###STOP### and nothing else."),
    ],
)
async def test_rules_may_have_braces_and_always_say_how_to_stop(rules: str, end: str) -> None:
    service = OtherService()
    await service.user(rules=rules).begin(Attempt())
    assert service.contents[0].endswith(end) and service.contents[0].count("###STOP###") == 1


async def test_client_of_the_runs_endpoint_is_used() -> None:
    """It has the certificates that the run trusts."""
    service = OtherService()
    attempt = Attempt(endpoint=ChatEndpoint("https://attune.internal/v1", "sk-1", service))
    assert await ModelUser(PERSONA, "shop@v0").begin(attempt) == "For four."
    assert len(service.bodies) == 1
