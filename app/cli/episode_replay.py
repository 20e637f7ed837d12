"""`attune episodes replay`: what a version replies now to each prompt of a recorded episode."""

import json as jsonlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated
from urllib.parse import quote

import typer

from app.cli.client import Api, CommandError, drop_unset
from app.cli.options import Json
from app.cli.output import Column, Renderable, Row, make_table, print_object

TASK = "replay"  # a background task: such a reply is stored, never trained on, and in no conversation
PARAMETERS = ("tools", "tool_choice", "response_format")
COLUMNS = (
    Column("step", "step", right=True),
    Column("agent", "agent"),
    Column("recorded", "recorded_version"),
    Column("its reply", "recorded"),
    Column("replayed", "version"),
    Column("its reply", lambda row: "the same" if row["is_same"] else row["reply"]),
)


@dataclass(frozen=True)
class ReplayedTurn:
    """A turn of an episode beside the reply to the same messages and tools now. Replies are text, calls included."""

    step: int
    agent: str | None
    completion_id: str
    recorded_version: str
    recorded: str
    version: str
    reply: str
    is_same: bool


def replay_episode(
    id: Annotated[str, typer.Argument(help="ep-…")],
    model: Annotated[
        str | None,
        typer.Option(help="a policy, or a version as policy@v3; default: what the episode's policy serves"),
    ] = None,
    step: Annotated[list[int] | None, typer.Option(help="this step alone; may be repeated; default: all")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: the likeliest reply")] = 0.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="of a reply; default: the service's limit")] = None,
    json: Json = False,
) -> None:
    """Send the recorded prompts of an episode to a version, and show its replies beside those that were recorded.

    No tool is called, and each prompt is the recorded one, whatever the replies before it are now. The replies are
    recorded as a background task: they are never trained on, and change neither the episode nor its conversations.
    """
    api = Api()
    episode = api.get(f"/v1/episodes/{quote(id, safe='')}")
    nodes = [node for node in episode["turns"] if not step or node["step"] in step]
    if not nodes:
        steps = f"with the steps {', '.join(map(str, step))}" if step else "whose replies are stored"
        raise CommandError(f"{id} has no chats {steps}; `attune episodes show {id}` lists them")
    options = drop_unset(model=model or episode["policy"], temperature=temperature, max_tokens=max_tokens)
    turns = [_replay(api, node, options) for node in nodes]
    print_object([asdict(turn) for turn in turns], json, lambda rows: _render(id, rows))


def _replay(api: Api, node: Row, options: Row) -> ReplayedTurn:
    turn = api.get(f"/v1/turns/{quote(node['id'], safe='')}/story")
    if not turn["messages"]:
        raise CommandError(f"step {node['step']} has no messages any more: its content was erased")
    stored = api.get(f"/v1/chat/completions/{quote(turn['completion_id'], safe='')}")
    parameters = {name: stored[name] for name in PARAMETERS if stored[name] is not None}
    body = {"messages": turn["messages"], **parameters, **options, "metadata": {"task": TASK}}
    reply = api.post("/v1/chat/completions", body)
    recorded, now = (_format_message(message) for message in (turn["reply"], reply["choices"][0]["message"]))
    return ReplayedTurn(
        step=node["step"],
        agent=node["agent"],
        completion_id=turn["completion_id"],
        recorded_version=turn["version"],
        recorded=recorded,
        version=reply["model"],
        reply=now,
        is_same=recorded == now,
    )


def _format_message(message: Row | None) -> str:
    """Example: 'I look it up. search({"query": "tea"})'; "(no reply)" without a message"""
    if message is None:
        return "(no reply)"
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    parts = [message.get("content") or "", *(f"{call['name']}({_compact(call['arguments'])})" for call in calls)]
    return " ".join(part for part in parts if part)


def _compact(arguments: str) -> str:
    """Write equal arguments equally, whatever spaces and order of keys a model chose."""
    try:
        return jsonlib.dumps(jsonlib.loads(arguments), ensure_ascii=False, sort_keys=True)
    except ValueError:
        return arguments


def _render(id: str, rows: Sequence[Row]) -> Iterator[Renderable]:
    yield make_table(id, COLUMNS, rows)
    num_same = sum(row["is_same"] for row in rows)
    yield f"{num_same} of {len(rows)} replies are the same"
