"""Continuity: a follow-up's prompt begins with the very tokens of the turn before, not with a new spelling of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.chat.conversations import Parent
from app.inference.client import EngineClient
from app.inference.errors import EngineRefused, EngineUnavailable
from app.inference.request import ChatCall

EXACT = "exact"
TAIL = 8  # a template closes a reply with a few tokens at most


@dataclass(frozen=True)
class Continued:
    """`prompt_ids` to send in place of the messages (None: let the engine render them), and what is to be noted."""

    prompt_ids: list[int] | None
    note: str


async def go_on(
    client: EngineClient, call: ChatCall, messages: Sequence[Mapping[str, Any]], parent: Parent, policy_id: str
) -> Continued:
    """Mostly the template's rendering has the old tokens as its beginning. Where a sampled reply would be spelled
    with other tokens, the reply's own are put in their place."""
    if (reason := _unfit(parent, call, policy_id)) is not None:
        return Continued(None, reason)
    assert parent.prompt_ids and parent.output_ids and parent.num_messages is not None
    before = [*parent.prompt_ids, *parent.output_ids]
    try:
        rendered = await client.tokenize(call)
        if rendered[: len(before)] == before:
            return Continued(rendered, EXACT)
        if not parent.spliced and rendered[: len(parent.prompt_ids)] != parent.prompt_ids:
            return Continued(None, "the template renders the earlier prompt differently now")
        if parent.cut:
            return Continued(None, "the turn before may have called more tools than were sent on")
        if parent.stops:
            return Continued(None, "a stop string ended the turn before: its tokens hold it, its text does not")
        past = await client.tokenize(call, messages[: parent.num_messages], open_reply=False)
    except (EngineUnavailable, EngineRefused) as error:
        return Continued(None, f"the engine did not tokenise: {error}")
    return _spliced(before, rendered, past)


def _unfit(parent: Parent, call: ChatCall, policy_id: str) -> str | None:
    if parent.num_messages is None:
        return "the messages do not go on from the turn before"
    if parent.policy_id != policy_id:
        return "the turn before was another policy's"
    if parent.tools != list(call.tools):
        return "the tools are others now"
    if not parent.prompt_ids or not parent.output_ids:
        return "the turn before has no tokens on record"
    if parent.finish_reason not in ("stop", "tool_calls"):
        return f"the turn before ended early: {parent.finish_reason}"
    return None


def _spliced(before: list[int], rendered: list[int], past: list[int]) -> Continued:
    if rendered[: len(past)] != past:
        return Continued(None, "the template renders a reply differently once another message follows")
    closing = before[-1]
    if closing not in past[-TAIL:]:
        return Continued(None, "the turn before was not closed with the template's own end of turn")
    end = len(past) - past[::-1].index(closing)
    return Continued([*before, *past[end:], *rendered[len(past) :]], EXACT)
