"""`attune chat`: talk to the service and judge each reply with a key press."""

import sys
import termios
import tty
from typing import Any

from rich.console import Console

from app.cli.client import Api, Refused

HELP = "empty line or ctrl-D leaves; /new starts a new conversation"
THUMBS = {"u": "up", "+": "up", "d": "down", "-": "down"}


def talk(api: Api, model: str, system: str | None) -> None:
    console = Console(highlight=False)
    console.print(f"[dim]{HELP}[/]")
    messages: list[dict[str, Any]] = _opening(system)
    while said := _ask(console):
        if said == "/new":
            messages = _opening(system)
            continue
        messages.append({"role": "user", "content": said})
        try:
            completion_id, label, text = _reply(console, api, model, messages)
        except Refused as refusal:
            console.print(f"\n[red]{refusal}[/]")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": text})
        console.print(f"[dim]{label} · \\[u]p, \\[d]own, any other key to go on[/]", markup=True)
        if (thumb := THUMBS.get(_key())) is not None:
            api.post("/v1/feedback", {"completion_id": completion_id, "kind": "binary", "value": thumb})
            console.print(f"[green]thumb {thumb}[/]" if thumb == "up" else f"[red]thumb {thumb}[/]")


def _opening(system: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}] if system else []


def _ask(console: Console) -> str:
    try:
        return console.input("[bold]you:[/] ").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _reply(console: Console, api: Api, model: str, messages: list[dict[str, Any]]) -> tuple[str, str, str]:
    console.print("[bold]it:[/] ", end="")
    completion_id = label = text = ""
    for chunk in api.stream({"model": model, "messages": messages, "stream": True}):
        completion_id, label = chunk["id"], chunk["model"]
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") or ""
            text += piece
            console.print(piece, end="", markup=False)
    console.print()
    return completion_id, label, text


def _key() -> str:
    """One key, without Enter; a line where there is no terminal."""
    if not sys.stdin.isatty():
        return sys.stdin.readline().strip()[:1]
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        return sys.stdin.read(1)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
