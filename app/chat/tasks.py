"""Background tasks of chat front ends: titles, tags, follow-up suggestions. They look like chats and are none.

A client names a task by the header `x-attune-task` or by `metadata.task`, with any name. The prompts that Open WebUI
and LibreChat send by default are recognized without a name, by their whole shape: a message that quotes one is a chat.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote

from app.chat.schemas import ChatRequest

TASK_HEADER = "x-attune-task"
TASK_KEY = "task"  # in the request's metadata, and in the turn's `request_params`
MAX_NAME_CHARS = 64
TITLE = "title_generation"
# Open WebUI's, by the first key of the JSON object that its prompt asks for.
NAME_BY_KEY = {
    "title": TITLE,
    "tags": "tags_generation",
    "follow_ups": "follow_up_generation",
    "queries": "query_generation",
    "prompt": "image_prompt_generation",
}
OUTPUT_KEY = re.compile(r'JSON format:\s*\{\s*"(\w+)"\s*:')


class Shape(NamedTuple):
    """What the text of a prompt begins with, contains after that, and ends with."""

    task: str
    beginning: str
    middle: str
    end: str


OPEN_WEBUI_SHAPES = (
    Shape("autocomplete_generation", "### Task:\nYou are an autocompletion system.", "\n<text>", "#### Output:"),
    Shape(
        "emoji_generation",
        "Your task is to reflect the speaker's likely facial expression through a fitting emoji.",
        "\n\nMessage: ```",
        "```",
    ),
)
# Nothing follows the conversation that they quote, so that no end shows a question about such a prompt. LibreChat
# streams its chats and does not stream its titles.
UNSTREAMED_SHAPES = (
    Shape(
        TITLE,
        "Analyze this conversation and provide:\n1. The detected language of the conversation\n2. A concise title in "
        "the detected language (5 words or less, no punctuation or quotation)\n\nUser: ",
        "\nAI:",
        "",
    ),
    Shape(
        TITLE,
        "Provide a concise, 5-word-or-less title for the conversation, using title case conventions. "
        "Only return the title itself.\n\nConversation:\nUser: ",
        "\nAI:",
        "",
    ),
)


def find_task(request: ChatRequest, headers: Mapping[str, str]) -> str | None:
    """Return the name of the task that the request is, or None for a chat."""
    names = (request.metadata.get(TASK_KEY, ""), unquote(headers.get(TASK_HEADER, "")))
    named = next(filter(None, map(_clean_name, names)), None)
    return named or _recognize(request)


def exclusion_reason(task: str) -> str:
    """Return why a turn is not trained on that is this task. Example: "task: title_generation"."""
    return f"task: {task}"


def _clean_name(value: str) -> str | None:
    """Return a name as it is recorded. A template such as `{{TASK}}`, which the client did not fill in, is none."""
    name = "".join(char if char.isprintable() else " " for char in value).strip()
    return None if "{{" in name else name[:MAX_NAME_CHARS] or None


def _recognize(request: ChatRequest) -> str | None:
    """Return the task whose prompt is the only message after those of the system."""
    *others, last = request.messages
    if last.role != "user" or any(message.role not in ("system", "developer") for message in others):
        return None
    text = last.text.strip()
    shapes = OPEN_WEBUI_SHAPES if request.stream else (*OPEN_WEBUI_SHAPES, *UNSTREAMED_SHAPES)
    for shape in shapes:
        rest = text[len(shape.beginning) :] if text.startswith(shape.beginning) else ""
        if shape.middle in rest and rest.endswith(shape.end):
            return shape.task
    return _recognize_open_webui(text)


def _recognize_open_webui(text: str) -> str | None:
    """Return the task of a prompt with Open WebUI's sections: the task, its output as JSON, the chat history."""
    if not text.startswith("### Task:\n") or not text.endswith("\n</chat_history>"):
        return None
    instructions, history, _ = text.partition("\n### Chat History:\n<chat_history>\n")
    _, _, output = instructions.partition("\n### Output:\n")
    key = OUTPUT_KEY.search(output) if history else None
    return NAME_BY_KEY.get(key[1]) if key is not None else None
