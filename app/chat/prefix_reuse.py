"""Prefix reuse: begin a follow-up's prompt with the recorded tokens of its parent turn, not with a new tokenization."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.chat.conversations import ParentTurn
from app.inference.client import EngineClient
from app.inference.errors import EngineRefused, EngineUnavailable
from app.inference.request import ChatCall

EXACT = "exact"
MAX_CLOSING_TOKENS = 8  # a chat template closes a reply with a few tokens at most


@dataclass(frozen=True)
class PrefixReuse:
    """`prompt_ids` replace the messages (None: the engine renders them); `outcome` is the turn's `prefix_reuse`."""

    prompt_ids: list[int] | None
    outcome: str


async def reuse_parent_tokens(
    client: EngineClient,
    call: ChatCall,
    messages: Sequence[Mapping[str, Any]],
    parent: ParentTurn,
    policy_id: str,
) -> PrefixReuse:
    """Return the prompt ids that begin with the parent's prompt and output ids, or the reason why there are none.

    Usually the template's rendering already begins with these tokens. Where it tokenizes the sampled reply
    differently, the recorded tokens replace that part of the rendering.
    """
    if (reason := _find_obstacle(parent, call, policy_id)) is not None:
        return PrefixReuse(None, reason)
    assert parent.prompt_ids and parent.output_ids and parent.num_messages is not None
    parent_ids = [*parent.prompt_ids, *parent.output_ids]
    try:
        rendered_ids = await client.tokenize(call)
        if rendered_ids[: len(parent_ids)] == parent_ids:
            return PrefixReuse(rendered_ids, EXACT)
        if not parent.may_be_spliced and rendered_ids[: len(parent.prompt_ids)] != parent.prompt_ids:
            return PrefixReuse(None, "the chat template renders the parent's prompt differently now")
        if parent.may_omit_tool_calls:
            return PrefixReuse(None, "the parent turn may hold more tool calls than the client received")
        if parent.stop_strings:
            return PrefixReuse(None, "a stop string ended the parent turn: its tokens hold it, its text does not")
        history_ids = await client.tokenize(call, messages[: parent.num_messages], add_generation_prompt=False)
    except (EngineUnavailable, EngineRefused) as error:
        return PrefixReuse(None, f"the engine did not tokenize the prompt: {error}")
    return _splice(parent_ids, rendered_ids, history_ids)


def _find_obstacle(parent: ParentTurn, call: ChatCall, policy_id: str) -> str | None:
    """Return why the parent's tokens cannot begin this prompt, as far as the record alone tells; else None."""
    if parent.num_messages is None:
        return "the messages do not continue the parent turn"
    if parent.policy_id != policy_id:
        return "the parent turn belongs to another policy"
    if parent.tools != list(call.tools):
        return "the tools have changed since the parent turn"
    if not parent.prompt_ids or not parent.output_ids:
        return "the parent turn has no recorded tokens"
    if parent.finish_reason not in ("stop", "tool_calls"):
        return f"the parent turn ended early: {parent.finish_reason}"
    return None


def _splice(parent_ids: list[int], rendered_ids: list[int], history_ids: list[int]) -> PrefixReuse:
    """Replace the rendered history, up to the end of the parent's reply, by the parent's own tokens.

    Args:
        parent_ids: The parent's prompt and output ids, as recorded.
        rendered_ids: The new prompt as the template renders it.
        history_ids: The messages up to and with the parent's reply, rendered without a generation prompt.
    """
    if rendered_ids[: len(history_ids)] != history_ids:
        return PrefixReuse(None, "the chat template renders a reply differently once another message follows")
    end_of_turn = parent_ids[-1]
    if end_of_turn not in history_ids[-MAX_CLOSING_TOKENS:]:
        return PrefixReuse(None, "the parent turn does not end with the chat template's end-of-turn token")
    end = len(history_ids) - history_ids[::-1].index(end_of_turn)
    return PrefixReuse([*parent_ids, *history_ids[end:], *rendered_ids[len(history_ids) :]], EXACT)
