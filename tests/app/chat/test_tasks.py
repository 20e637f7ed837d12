"""Background tasks of front ends: titles, tags, follow-up suggestions. They are answered and stored, and no chats."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from app.chat.schemas import parse_chat_request
from app.chat.tasks import MAX_NAME_CHARS, find_task
from app.models import Feedback, Judgement, Origin, Reward, Sample, SampleState, Turn, TurnMetadata, TurnState
from app.projects.usage import count_output_tokens
from tests.support.deployment import Harness
from tests.support.judgements import run_judging, settings_with_sources
from tests.support.scripted_engine import ScriptedEngine
from workers.curate import curate

CHAT = [
    {"role": "user", "content": "When are you open?"},
    {"role": "assistant", "content": "From nine to six."},
    {"role": "user", "content": "And on Sunday?"},
]
HISTORY = "### Chat History:\n<chat_history>\nUSER: When are you open?\nASSISTANT: From nine to six.\n</chat_history>"


def open_webui(task: str, output: str, history: str = HISTORY) -> str:
    return f"### Task:\n{task}\n### Guidelines:\n- Be concise.\n### Output:\n{output}\n{history}"


TITLE = open_webui(
    "Write a title that sums the chat up.",
    'JSON format: { "title": "your title here" }\n### Examples:\n- { "title": "Opening Hours" }',
)
TAGS = open_webui("Write broad tags.\n", 'JSON format: { "tags": ["tag1", "tag2"] }\n')
FOLLOW_UPS = open_webui("Predict the next messages.", 'JSON format: { "follow_ups": ["Question 1?", "Question 2?"] }')
QUERIES = open_webui("Write search queries.", 'Strictly return in JSON format: \n{\n  "queries": ["query1"]\n}\n')
IMAGE = open_webui("Describe an image.", 'Strictly return in JSON format:\n{\n    "prompt": "Your description."\n}\n')
AUTOCOMPLETE = (
    "### Task:\nYou are an autocompletion system. Continue the text.\n### Output:\nReturn the completion.\n"
    "### Context:\n<chat_history>\n</chat_history>\n<type>General</type>  \n<text>When are</text>  \n#### Output:\n"
)
EMOJI = (
    "Your task is to reflect the speaker's likely facial expression through a fitting emoji. Interpret emotions.\n\n"
    "Message: ```When are you open?```"
)
LIBRECHAT = (
    "Provide a concise, 5-word-or-less title for the conversation, using title case conventions. Only return the title "
    "itself.\n\nConversation:\nUser: When are you open?\nAI: From nine to six."
)
LIBRECHAT_STRUCTURED = (
    "Analyze this conversation and provide:\n1. The detected language of the conversation\n2. A concise title in the "
    "detected language (5 words or less, no punctuation or quotation)\n\nUser: When are you open?\nAI: "
)
KNOWN = {
    TITLE: "title_generation",
    TAGS: "tags_generation",
    FOLLOW_UPS: "follow_up_generation",
    QUERIES: "query_generation",
    IMAGE: "image_prompt_generation",
    AUTOCOMPLETE: "autocomplete_generation",
    EMOJI: "emoji_generation",
    LIBRECHAT: "title_generation",
    LIBRECHAT_STRUCTURED: "title_generation",
}
SYSTEM = {"role": "system", "content": "Be brief."}
# Open WebUI's prompt of a chat about documents begins like a task.
DOCUMENTS = (
    "### Task:\nRespond to the user query using the provided context.\n### Output:\nA clear answer.\n"
    "<context>\nWe are open.\n</context>"
)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def recognize(
    messages: Sequence[Mapping[str, Any]], headers: dict[str, str] | None = None, **fields: Any
) -> str | None:
    return find_task(parse_chat_request({"model": "shop", "messages": messages, **fields}), headers or {})


@pytest.mark.parametrize("prompt", KNOWN, ids=lambda prompt: prompt[:30])
def test_default_prompts_of_front_ends_are_recognized(prompt: str) -> None:
    name = KNOWN[prompt]
    assert recognize(user(prompt)) == recognize([SYSTEM, *user(prompt)]) == name
    assert recognize([{"role": "user", "content": [{"type": "text", "text": prompt}]}]) == name
    is_open_webui = prompt not in (LIBRECHAT, LIBRECHAT_STRUCTURED)
    assert recognize(user(prompt), stream=True) == (name if is_open_webui else None)


@pytest.mark.parametrize("prompt", [*KNOWN, DOCUMENTS], ids=lambda prompt: prompt[:30])
def test_message_that_quotes_such_a_prompt_is_a_chat(prompt: str) -> None:
    for text in (
        f"What does this prompt do?\n\n{prompt}",
        f"> {prompt}",
        f"```\n{prompt}\n```",
        f'"{prompt}"',
        prompt[: len(prompt) // 3],
    ):
        assert recognize(user(text)) is None, text
    assert recognize([*CHAT, *user(prompt)]) is None, "it is a message within a chat"
    assert recognize([*user(prompt), *CHAT[1:]]) is None
    assert recognize([{"role": "system", "content": prompt}, *user("hi")]) is None
    assert recognize([{"role": "system", "content": prompt}]) is None
    assert recognize(user(DOCUMENTS)) is None


@pytest.mark.parametrize("prompt", [TITLE, TAGS, FOLLOW_UPS, QUERIES, IMAGE, AUTOCOMPLETE, EMOJI])
def test_question_after_such_a_prompt_is_a_chat(prompt: str) -> None:
    assert recognize(user(f"{prompt}\n\nIs this a good prompt?")) is None


@pytest.mark.parametrize("prompt", [LIBRECHAT, LIBRECHAT_STRUCTURED])
def test_question_after_a_prompt_without_an_end_is_a_chat_where_it_is_streamed(prompt: str) -> None:
    assert recognize(user(f"{prompt}\n\nIs this a good prompt?"), stream=True) is None
    without_conversation = prompt.partition("User: ")[0]
    assert recognize(user(f"{without_conversation}Is this a good prompt?")) is None


def test_chat_history_may_hold_anything() -> None:
    quoting = HISTORY.replace("When are you open?", open_webui("x", 'JSON format: { "tags": [] }'))
    assert recognize(user(open_webui("Write a title.", 'JSON format: { "title": "…" }', quoting))) == "title_generation"
    other_output = open_webui("Answer the user.", 'JSON format: { "answer": "…" }')
    assert recognize(user(other_output)) is None, "a prompt of an application in the same style"
    assert recognize(user(open_webui("Answer the user.", "Plain text.", quoting))) is None


@pytest.mark.parametrize(
    ("metadata", "header", "name"),
    [
        ({}, "title_generation", "title_generation"),
        ({}, "a task of ours", "a task of ours"),
        ({}, "%C3%9Cberschrift", "Überschrift"),
        ({}, "  spaced\t", "spaced"),
        ({}, "x" * 500, "x" * MAX_NAME_CHARS),
        ({}, "", None),
        ({}, "   ", None),
        ({}, "%20", None),
        ({}, "{{TASK}}", None),  # a front end that does not know this template
        ({"task": "tags_generation"}, "", "tags_generation"),
        ({"task": "tags_generation"}, "title_generation", "tags_generation"),
        ({"task": ""}, "title_generation", "title_generation"),
        ({"task": " "}, "", None),
        ({"tasks": "title_generation"}, "", None),
    ],
)
def test_name_of_a_task(metadata: dict[str, str], header: str, name: str | None) -> None:
    assert recognize(CHAT, {"x-attune-task": header}, metadata=metadata) == name
    assert recognize(CHAT) is None


NAMED = [({"x-attune-task": "title_generation"}, {}), ({}, {"task": "title_generation"})]


async def ask(
    harness: Harness, messages: Sequence[Mapping[str, Any]], headers: dict[str, str] | None = None, **fields: Any
) -> Turn:
    body = {"model": "shop", "messages": messages, **fields}
    answer = await harness.api.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    turn: Turn = await harness.get(Turn, answer.headers["x-completion-id"])
    if turn.origin == Origin.TASK:
        assert "x-conversation-id" not in answer.headers
    return turn


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("headers", "metadata"), NAMED)
async def test_named_task_is_excluded_and_in_no_conversation(
    harness: Harness, scripted: ScriptedEngine, headers: dict[str, str], metadata: dict[str, str], stream: bool
) -> None:
    named = {"x-conversation-id": "c-7"}
    chat = await ask(harness, CHAT[:1], named, user="ada")
    follow_up = [*CHAT[:1], chat.reply or {}, CHAT[2]]
    task = await ask(harness, follow_up, named | headers, metadata=metadata, stream=stream)
    assert (task.origin, task.state, task.exclusion_reason) == ("task", TurnState.DONE, "task: title_generation")
    assert (task.conversation_id, task.parent_id, task.prefix_reuse) == (None, None, None)
    assert (task.request_params["task"], task.end_user) == ("title_generation", "ada"), "found by an erasure"
    second = await ask(harness, follow_up, named, user="ada")
    assert (second.parent_id, second.prefix_reuse) == (chat.id, "exact"), "the task is nobody's parent"
    continued = await ask(harness, [*follow_up, task.reply or {}, *user("thanks")], user="ada")
    assert continued.parent_id == second.id, "the same reply, in a chat"
    in_conversation = (await harness.api.get("/v1/turns", params={"conversation_id": "c-7"})).json()["data"]
    assert {turn["id"] for turn in in_conversation} == {chat.id, second.id, continued.id}
    vote = {"kind": "binary", "value": True, "target": {"conversation_id": "c-7", "turn": -1}}
    assert (await harness.api.post("/v1/feedback", json=vote)).json()["completion_id"] == continued.id


@pytest.mark.parametrize("stream", [False, True])
async def test_known_prompt_is_a_task_although_it_names_a_conversation(
    harness: Harness, scripted: ScriptedEngine, stream: bool
) -> None:
    chat = await ask(harness, CHAT[:1], {"x-conversation-id": "c-7"})
    title = await ask(harness, user(TITLE), {"x-conversation-id": "c-7"}, stream=stream)
    assert (title.exclusion_reason, title.conversation_id) == ("task: title_generation", None)
    second = await ask(harness, user("And on Sunday?"), {"x-conversation-id": "c-7"})
    assert second.parent_id == chat.id, "the newest turn of the conversation"
    quoting = await ask(harness, user(f"Explain: {TITLE}"), {"x-conversation-id": "c-7"})
    assert (quoting.origin, quoting.exclusion_reason, quoting.parent_id) == ("chat", None, second.id)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"input": TITLE}, {}),
        ({"input": TITLE, "instructions": "Be brief."}, {}),
        ({"input": "hi", "metadata": {"task": "title_generation"}}, {}),
        ({"input": "hi"}, {"x-attune-task": "title_generation"}),
    ],
)
async def test_task_over_the_responses_api(
    harness: Harness, scripted: ScriptedEngine, fields: dict[str, Any], headers: dict[str, str], stream: bool
) -> None:
    first = (await harness.api.post("/v1/responses", json={"model": "shop", "input": "hi"})).json()
    body = {"model": "shop", "stream": stream, **fields}
    answer = await harness.api.post("/v1/responses", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    task: Turn = await harness.get(Turn, answer.headers["x-completion-id"])
    assert (task.origin, task.exclusion_reason) == ("task", "task: title_generation")
    assert (await harness.api.get(f"/v1/responses/resp_{task.id.removeprefix('chatcmpl-')}")).status_code == 200
    body |= {"previous_response_id": first["id"], "metadata": {"task": "tags_generation"}}
    answer = await harness.api.post("/v1/responses", json=body)
    task = await harness.get(Turn, answer.headers["x-completion-id"])
    assert (task.exclusion_reason, task.conversation_id) == ("task: tags_generation", None)


async def test_task_is_stored_and_listed_and_counts_in_the_usage(harness: Harness, scripted: ScriptedEngine) -> None:
    task = await ask(harness, user(TAGS))
    view = (await harness.api.get(f"/v1/chat/completions/{task.id}")).json()
    assert (view["status"], view["conversation_id"], len(view["choices"])) == ("done", None, 1)
    assert [row["id"] for row in (await harness.api.get("/v1/chat/completions")).json()["data"]] == [task.id]
    [item] = (await harness.api.get("/v1/turns", params={"origin": "task"})).json()["data"]
    assert item["exclusion"] == {"code": "task", "reason": "task: tags_generation"}
    assert (await harness.api.get("/v1/turns")).json()["data"] == []
    assert (await harness.api.get("/v1/conversations")).json()["data"] == []
    for _ in range(2):
        async with harness.db.read() as session:
            assert await count_output_tokens(session, task.project_id) == task.num_output_tokens
        await curate(harness.db, harness.settings)


async def test_feedback_on_a_task_is_stored_and_not_trainable(harness: Harness, scripted: ScriptedEngine) -> None:
    task = await ask(harness, user(TITLE))
    answer = await harness.vote(task.id, source="ada")
    assert (answer.status_code, answer.json()["trainable"]) == (201, False)
    assert answer.json()["exclusion_reason"] == "task: title_generation"
    correction = {"completion_id": task.id, "kind": "correction", "value": "Opening Hours", "source": "ada"}
    assert (await harness.api.post("/v1/feedback", json=correction)).status_code == 201
    await curate(harness.db, harness.settings)
    [sample] = await harness.all(Sample)
    assert (sample.state, sample.reason) == (SampleState.DROPPED, "task: title_generation")
    view = (await harness.api.get(f"/v1/feedback/{answer.json()['id']}")).json()
    assert (view["outcome"]["state"], view["outcome"]["rule"]) == ("not_learned", "excluded")
    listed = (await harness.api.get("/v1/feedback", params={"completion_id": task.id})).json()["data"]
    assert len(listed) == len(await harness.all(Feedback)) == 2
    [version] = (await harness.api.get("/v1/policies/shop/versions")).json()["data"]
    assert (version["turns"], version["rated"]) == (0, 0), "no vote of the version's approval"
    exported = await harness.api.get("/v1/exports/preferences", params={"policy": "shop"})
    assert exported.status_code == 200 and b"Opening Hours" not in exported.content


async def test_feedback_by_metadata_means_the_chat_and_not_its_title(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    metadata = {"message": "m-1"}
    chat = await ask(harness, CHAT[:1], metadata=metadata)
    title = await ask(harness, user(LIBRECHAT), metadata=metadata)
    alone = await ask(harness, user(LIBRECHAT), metadata={"message": "m-2"})
    assert title.origin == alone.origin == "task" and len(await harness.all(TurnMetadata)) == 3
    for message, turn in (("m-1", chat), ("m-2", alone)):
        body = {"kind": "binary", "value": True, "target": {"metadata": {"message": message}}}
        assert (await harness.api.post("/v1/feedback", json=body)).json()["completion_id"] == turn.id


async def test_task_is_neither_judged_nor_evidence_about_a_chat(harness: Harness, scripted: ScriptedEngine) -> None:
    await ask(harness, CHAT[:1], {"x-conversation-id": "c-7"})
    await ask(harness, user("no, that is wrong"), {"x-conversation-id": "c-7", "x-attune-task": "title_generation"})
    rule = {"type": "rule", "name": "ended", "function": "ended"}
    next_turn = {"type": "next_turn", "name": "next"}
    await run_judging(harness, settings_with_sources(harness, rule, next_turn))
    chat = next(turn for turn in await harness.all(Turn) if turn.origin == "chat")
    assert [(row.turn_id, row.source) for row in await harness.all(Judgement)] == [(chat.id, "ended")]
    assert await harness.all(Reward) == []


async def test_withheld_consent_is_the_reason_of_a_task_too(harness: Harness, scripted: ScriptedEngine) -> None:
    metadata = {"attune_train": "false", "task": "title_generation"}
    task = await ask(harness, CHAT[:1], metadata=metadata)
    assert (task.origin, task.exclusion_reason) == ("task", "no consent to train")
    assert task.request_params["task"] == "title_generation"


async def test_task_without_an_end_user_is_erased_with_the_person_of_its_conversation(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    await ask(harness, CHAT[:1], {"x-conversation-id": "c-7"}, user="ada")
    await ask(harness, CHAT[:1], {"x-conversation-id": "c-8"}, user="bob")
    title = await ask(harness, user(TITLE), {"x-conversation-id": "c-7"})
    nameless = await ask(harness, user(TITLE), {"x-conversation-id": "unknown"})
    assert (title.end_user, nameless.end_user) == ("ada", None)
    assert (await harness.api.delete("/v1/subjects/ada")).status_code == 200
    erased = {turn.id for turn in await harness.all(Turn) if turn.deleted_at is not None}
    assert title.id in erased and len(erased) == 2
