"""Third-party clients on the real engine, each in an environment of its own; the table is in docs/clients.md.

A client's program (`<client>/program.py`) runs once. Each test checks one thing that it reported against the database.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.models import Turn, to_completion_id
from tests.clients.conftest import CONSTRAINED, Record, Running
from tests.clients.third_party.environments import HERE, REPOSITORY, run_program

CLIENTS = {  # name -> folder and program
    "openai": ("openai", "program.py"),
    "openai-responses": ("openai", "program_responses.py"),
    "langchain": ("langchain", "program.py"),
    "langgraph": ("langgraph", "program.py"),
    "agents-chat": ("agents_sdk", "program.py"),
    "agents-responses": ("agents_sdk", "program_responses.py"),
    "pydantic-ai": ("pydantic_ai", "program.py"),
    "litellm": ("litellm", "program.py"),
    "litellm-responses": ("litellm", "program_responses.py"),
    "instructor": ("instructor", "program.py"),
    "llama-index": ("llama_index", "program.py"),
    "dspy": ("dspy", "program.py"),
    "smolagents": ("smolagents", "program.py"),
    "haystack": ("haystack", "program.py"),
    "autogen": ("autogen", "program.py"),
    "crewai": ("crewai", "program.py"),
    "js-openai": ("js_openai", "program.mjs"),
    "js-ai": ("js_ai", "program.mjs"),
    "lm-eval": ("lm_eval", "program.py"),
    "inspect-ai": ("inspect_ai", "program.py"),
    "anthropic-0": ("anthropic_0", "program.py"),
    "anthropic-1": ("anthropic_1", "program.py"),
    "anthropic-2": ("anthropic_2", "program.py"),
}
CAPABILITIES = ("chat", "stream", "tools", "structured", "multi_turn", "feedback")
MISSING = {  # docs/clients.md has the reasons
    ("inspect-ai", "stream"),
    *(("lm-eval", name) for name in ("stream", "tools", "structured", "multi_turn")),
}
BY_METADATA = {  # what these clients report has no id
    *(("agents-chat", name) for name in CAPABILITIES),
    *(("autogen", name) for name in CAPABILITIES),
    *(("crewai", name) for name in CAPABILITIES),
    *(("haystack", name) for name in CAPABILITIES),
    ("dspy", "stream"),
    ("instructor", "stream"),
    ("llama-index", "structured"),
    ("lm-eval", "chat"),
    ("smolagents", "stream"),
}
CELLS = [
    pytest.param(client, capability, id=f"{client}-{capability}")
    for client in CLIENTS
    for capability in CAPABILITIES
    if (client, capability) not in MISSING
]
PINS = ("requirements.txt", "package.json")
Report = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def report_of(attune: Running) -> Callable[[str], Report]:
    """Return a function that runs a client's program, once, and returns its report."""
    reports: dict[str, Report] = {}

    def run(client: str) -> Report:
        if client not in reports:
            done = run_program(*CLIENTS[client], attune.base_url, attune.key)
            assert done.returncode == 0 and done.stdout, done.stderr[-4000:]
            reports[client] = json.loads(done.stdout.splitlines()[-1])
        return reports[client]

    return run


def find_turn(client: str, capability: str, result: dict[str, Any], attune: Running, record: Record) -> Turn:
    """Return the turn that the client's id names, or the metadata that it sent."""
    assert "error" not in result, result["error"]
    assert (result["id"] is None) == ((client, capability) in BY_METADATA)
    if result["id"] is not None:
        id = result["id"]
    else:
        query = {f"metadata[{name}]": value for name, value in result["metadata"].items()}
        headers = {"authorization": f"Bearer {attune.key}"}
        url = f"{attune.base_url}/chat/completions"
        [completion] = httpx2.get(url, params=query, headers=headers, trust_env=False).json()["data"]
        id = completion["id"]
    reason = CONSTRAINED if capability in ("tools", "structured") or "value" in result else None
    return record.turn(to_completion_id(id), exclusion_reason=reason)


@pytest.mark.slow
@pytest.mark.timeout(2400)  # installing the environment is part of it
@pytest.mark.parametrize(("client", "capability"), CELLS)
def test_client(
    client: str, capability: str, report_of: Callable[[str], Report], attune: Running, record: Record
) -> None:
    results = report_of(client)
    if capability == "feedback":
        for name, result in results.items():
            if "feedback" in result:
                turn = find_turn(client, name, result, attune, record)
                assert [(row.id, row.source_id) for row in record.feedback(turn.id)] == [(result["feedback"], "ada")]
        missing = {name for name in ("chat", "stream") if (client, name) in MISSING}
        assert {name for name, result in results.items() if "feedback" in result} >= {"chat", "stream"} - missing
        return
    turn = find_turn(client, capability, results[capability], attune, record)
    assert turn.reply is not None
    CHECKS[capability](results[capability], turn, record)


def check_text(result: dict[str, Any], turn: Turn, record: Record) -> None:
    assert turn.reply is not None
    if "value" in result:  # the client parses the stream
        assert json.loads(turn.reply["content"] or "") == result["value"]
    else:
        assert result["text"].strip() == (turn.reply["content"] or "").strip() != ""


def check_stream(result: dict[str, Any], turn: Turn, record: Record) -> None:
    check_text(result, turn, record)
    assert result["pieces"] >= 4, "the reply came in pieces"


def check_tool(result: dict[str, Any], turn: Turn, record: Record) -> None:
    arguments = result["tool"]["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert turn.reply is not None
    [call] = turn.reply["tool_calls"]
    assert result["tool"]["name"] == call["function"]["name"] == "order_status"
    assert arguments == json.loads(call["function"]["arguments"]) and arguments.keys() == {"order_id"}


def check_value(result: dict[str, Any], turn: Turn, record: Record) -> None:
    assert turn.reply is not None
    assert result["value"] == json.loads(turn.reply["content"] or "")
    assert result["value"]["day"] in ("Friday", "Saturday") and isinstance(result["value"]["open"], bool)


def check_conversation(result: dict[str, Any], turn: Turn, record: Record) -> None:
    """The second turn is recognized as a continuation of the first."""
    check_text(result, turn, record)
    assert turn.parent_id is not None
    with Session(record.connection) as session:
        parent = session.scalars(select(Turn).where(Turn.id == turn.parent_id)).one()
    assert parent.reply is not None and (parent.reply["content"] or "").strip() == result["first_text"].strip()


CHECKS: dict[str, Callable[[dict[str, Any], Turn, Record], None]] = {
    "chat": check_text,
    "stream": check_stream,
    "tools": check_tool,
    "structured": check_value,
    "multi_turn": check_conversation,
}


def test_table_of_the_docs_is_complete() -> None:
    """Each cell of the table in docs/clients.md names its test, or is a dash with a reason."""
    text = (REPOSITORY / "docs" / "clients.md").read_text().partition("## Third-party clients")[2]
    tests = re.findall(r"`([\w-]+-(?:chat|stream|tools|structured|multi_turn|feedback))`", text)
    assert sorted(set(tests) - CLIENTS.keys()) == sorted(str(cell.id) for cell in CELLS)
    lines = text.partition("| recipe of |")[0].splitlines()
    rows = {line.split("|")[1].strip(" `"): line for line in lines if line.startswith("| `")}
    for client, capability in MISSING:
        cell = rows[client].split("|")[3 + CAPABILITIES.index(capability)].strip()
        assert cell.startswith("– ") and len(cell) > 10, (client, capability)
    for client, (folder, _) in CLIENTS.items():
        name, version = rows[client].split("|")[2].split(",")[0].split()
        pins = "".join(path.read_text() for path in (HERE / folder).glob("[rp]*") if path.name in PINS)
        assert f"\n{name}=={version}\n" in f"\n{pins}" or f'"{name}": "{version}"' in pins, client


def test_recipes_of_the_docs_are_in_the_programs() -> None:
    """docs/clients.md has a recipe for each client, and each piece of its code is in the client's program."""
    text = (REPOSITORY / "docs" / "clients.md").read_text()
    rows = [line.split("|") for line in text.partition("| recipe of |")[2].partition("\n\n")[0].splitlines()[2:]]
    recipes = {client: re.findall("`([^`]+)`", row[2]) for row in rows for client in re.findall("`([^`]+)`", row[1])}
    assert recipes.keys() == CLIENTS.keys()
    for client, (folder, program) in CLIENTS.items():
        shared = (path for path in (HERE / folder).glob("*.py") if not path.name.startswith("program"))
        code = "".join(path.read_text() for path in (HERE / folder / program, *shared))
        assert recipes[client] and [piece for piece in recipes[client] if piece not in code] == [], client
