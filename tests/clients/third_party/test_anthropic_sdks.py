"""Three generations of the `anthropic` package against the API and a scripted engine.

tests/clients/third_party/test_third_party.py runs them on the real engine.
"""

import json
from typing import Any

import pytest

from app.models import Turn
from tests.clients.third_party.environments import HERE, run_program
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

GENERATIONS = ("anthropic_0", "anthropic_1", "anthropic_2")


@pytest.fixture(params=GENERATIONS)
def report(request: pytest.FixtureRequest, harness: Harness, scripted: ScriptedEngine, live_url: str) -> dict[str, Any]:
    scripted.reply_text = "<think>\nFriday?\n</think>\n\nWe are open from nine to six."
    scripted.tool_call, scripted.answers_results = ("order_status", '{"order_id": "7"}'), True
    done = run_program(request.param, "../shared/anthropic_wire.py", f"{live_url}/v1", harness.key)
    assert done.returncode == 0 and done.stdout, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.slow
@pytest.mark.timeout(1800)  # installing the environment is part of it
async def test_generation_of_the_package(report: dict[str, Any], harness: Harness) -> None:
    reply, streamed = report["reply"], report["streamed"]
    for block in streamed["content"]:
        block.pop("parsed_output", None)  # generation 0 adds it to a stream's message alone
    assert reply["content"] == streamed["content"]
    assert [block["type"] for block in reply["content"]] == ["thinking", "text"]
    assert reply["content"][1]["text"] == "We are open from nine to six."
    assert reply["stop_reason"] == streamed["stop_reason"] == "end_turn" and reply["model"] == "shop@v0"
    assert report["request_id"] == reply["id"].replace("msg_", "req-")
    assert streamed["usage"]["input_tokens"] == report["counted"] > 0 and streamed["usage"]["output_tokens"] > 0
    assert report["headers"]["x-policy-version"] == "shop@v0"
    assert report["event_types"][0] == "message_start" and report["event_types"][-1] == "message_stop"
    [use] = report["called"]["content"]
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "order_status", {"order_id": "7"})
    assert report["called"]["stop_reason"] == "tool_use"
    assert report["models"][0] == "shop" and report["by_bearer"] == "assistant"

    async def turn(id: str) -> Turn:
        found: Turn = await harness.get(Turn, id.replace("msg_", "chatcmpl-"))
        return found

    assert (await turn(reply["id"])).end_user == "ada"
    for earlier, later in ((report["called"]["id"], report["after"]), (streamed["id"], report["continued"])):
        assert ((await turn(later)).parent_id, (await turn(later)).prefix_reuse) == ((await turn(earlier)).id, "exact")
    assert (await harness.messages((await turn(report["after"])).id))[-1]["content"] == "Error: none such"
    expected = {
        "unknown model": ("NotFoundError", "not_found_error", "nobody"),
        "image": ("BadRequestError", "invalid_request_error", "messages.0.content.0"),
        "key": ("AuthenticationError", "authentication_error", "API key"),
        "batches": ("NotFoundError", "not_found_error", "/v1/messages/batches"),
    }
    for name, (cls, kind, text) in expected.items():
        error = report["errors"][name]
        assert (error["class"], error["type"]) == (cls, kind) and text in error["text"], error
        assert error["request_id"].startswith("req-")


def test_pins_are_of_three_generations() -> None:
    pins = [(HERE / name / "requirements.txt").read_text() for name in GENERATIONS]
    versions = [line for text in pins for line in text.splitlines() if line.startswith("anthropic==")]
    assert [version.partition("==")[2].partition(".")[0] for version in versions] == ["0", "1", "2"]
