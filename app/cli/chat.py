"""`attune chat`: chat with a policy and rate each reply with a key press, or send one message."""

import json as jsonlib
import sys
import termios
import tty
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console

from app.cli.client import Api, CommandError
from app.core.settings import get_settings

HELP = "an empty line or ctrl-D ends the chat; /new starts a new conversation"
RATING_KEYS = {"u": "up", "+": "up", "d": "down", "-": "down"}
Messages = list[dict[str, str]]
console = Console(highlight=False)


def chat(
    model: Annotated[
        str | None, typer.Option(help="a policy, or a version as policy@v3; default: ATTUNE_POLICY")
    ] = None,
    system: Annotated[str | None, typer.Option(help="a system prompt")] = None,
    message: Annotated[
        str | None,
        typer.Option("--message", "-m", help="send this message, print the reply and end; - reads it from stdin"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="with --message: print JSON")] = False,
) -> None:
    """Chat with a policy and rate each reply with a key press, or send one message."""
    api, model = Api(), model or get_settings().policy
    new_conversation: Messages = [{"role": "system", "content": system}] if system else []
    if message is not None:
        text = sys.stdin.read().strip() if message == "-" else message
        _send_one(api, {"model": model, "messages": [*new_conversation, {"role": "user", "content": text}]}, json)
        return
    messages = [*new_conversation]
    console.print(f"[dim]{HELP}[/]")
    while line := _read_line():
        if line == "/new":
            messages = [*new_conversation]
            continue
        messages.append({"role": "user", "content": line})
        try:
            completion_id, version, text = _stream_reply(api, model, messages)
        except CommandError as error:
            console.print(f"\n[red]{error}[/]")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": text})
        console.print(f"[dim]{version} · \\[u]p, \\[d]own, any other key to continue[/]", markup=True)
        if (rating := RATING_KEYS.get(_read_key())) is not None:
            api.post("/v1/feedback", {"completion_id": completion_id, "kind": "binary", "value": rating})
            console.print(f"[{'green' if rating == 'up' else 'red'}]thumb {rating}[/]")


def _send_one(api: Api, body: Mapping[str, object], json: bool) -> None:
    """Print the reply, and the completion's id and the version on stderr, where they do not mix with the reply."""
    reply = api.post("/v1/chat/completions", body)
    [choice] = reply["choices"]
    text = choice["message"]["content"] or ""
    if json:
        print(
            jsonlib.dumps(
                {
                    "completion_id": reply["id"],
                    "model": reply["model"],
                    "reply": text,
                    "finish_reason": choice["finish_reason"],
                }
            )
        )
        return
    typer.echo(text)
    typer.echo(f"{reply['id']} · {reply['model']} (attune feedback give {reply['id']} up)", err=True)


def _read_line() -> str:
    try:
        return console.input("[bold]you:[/] ").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _stream_reply(api: Api, model: str, messages: Messages) -> tuple[str, str, str]:
    """Print a reply as it arrives. Return the completion's id, the version and the text."""
    console.print("[bold]assistant:[/] ", end="")
    completion_id = version = text = ""
    for chunk in api.stream_chat({"model": model, "messages": messages, "stream": True}):
        completion_id, version = chunk["id"], chunk["model"]
        for choice in chunk["choices"]:
            delta = choice["delta"].get("content") or ""
            text += delta
            console.print(delta, end="", markup=False)
    console.print()
    return completion_id, version, text


def _read_key() -> str:
    """Read one key without Enter, or the first character of a line if there is no terminal."""
    if not sys.stdin.isatty():
        return sys.stdin.readline().strip()[:1]
    descriptor = sys.stdin.fileno()
    attributes = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        return sys.stdin.read(1)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, attributes)
