"""Chainlit: a data layer that sends thumbs and comments, around another one or alone.

@cl.data_layer
def data_layer():
    return FeedbackLayer(SQLAlchemyDataLayer(…))  # or FeedbackLayer() without persistence

reply = await client.chat.create(cl.chat_context.to_openai(), metadata=reply_metadata())
"""

import asyncio
from abc import update_abstractmethods
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

try:
    from chainlit import PersistedUser, User
    from chainlit.context import context
    from chainlit.data import BaseDataLayer
    from chainlit.session import ws_sessions_id
    from chainlit.types import Feedback, PageInfo, PaginatedResponse
except ImportError as error:
    raise ImportError("attune_client.chainlit needs Chainlit: pip install chainlit") from error

from attune_client.client import Attune
from attune_client.votes import Receiver, receiver_of, send_vote, source_id

RUN = "chainlit_run"


def reply_metadata() -> dict[str, str]:
    """Return metadata for a chat in `on_message`. A vote names this run, also in Slack, Discord and Teams."""
    return {RUN: context.current_run.id}


class FeedbackLayer(BaseDataLayer):  # type: ignore[misc]
    """Sends votes; all else goes to `inner`, or nowhere. `client` is Attune, its feedback or its queue."""

    def __init__(self, inner: BaseDataLayer | None = None, client: Receiver | None = None) -> None:
        self.inner, self.receiver = inner, receiver_of(client or Attune())

    async def upsert_feedback(self, feedback: Feedback) -> str:
        """Send a vote on a reply, or its change. Return its id."""
        stored_id = await self.inner.upsert_feedback(feedback) if self.inner else None
        id = str(stored_id or feedback.id or feedback.forId)
        fields = {"key": f"chainlit:{id}", "source": source_id("chainlit", _person(feedback))}
        fields |= {"comment": feedback.comment} if feedback.comment else {}
        target = {"metadata": {RUN: feedback.forId}}
        await asyncio.to_thread(send_vote, self.receiver, target, bool(feedback.value), **fields)
        return id

    async def delete_feedback(self, feedback_id: str) -> bool:
        """Take a vote back."""
        await asyncio.to_thread(send_vote, self.receiver, None, None, key=f"chainlit:{feedback_id}")
        return await self.inner.delete_feedback(feedback_id) if self.inner else True


def _person(feedback: Feedback) -> str:
    """Return who logged in to the conversation of the reply; without a login, the conversation.

    The page names the conversation, so it counts as a person only where it is open; else each reply has one voter.
    """
    sessions = [session for session in ws_sessions_id.values() if session.thread_id == feedback.threadId]
    users = [str(session.user.identifier) for session in sessions if session.user]
    return next(iter(users), feedback.threadId if sessions else feedback.forId)


def _delegate(name: str) -> Callable[..., Awaitable[Any]]:
    async def method(self: FeedbackLayer, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return await getattr(self.inner, name)(*args, **kwargs)
        if name in ALONE:
            return ALONE[name](*args, **kwargs)
        return await getattr(BaseDataLayer, name)(self, *args, **kwargs)

    return method


def _create_user(user: User) -> PersistedUser:
    return PersistedUser(
        user.identifier, datetime.now(UTC).isoformat(), user.identifier, user.display_name, user.metadata
    )


ALONE: dict[str, Callable[..., Any]] = {  # without persistence, what Chainlit needs an answer to
    "create_user": _create_user,
    "get_favorite_steps": lambda user_id: [],
    "list_threads": lambda pagination, filters: PaginatedResponse(PageInfo(False, None, None), []),
}
for _name in set(vars(BaseDataLayer)) - set(vars(FeedbackLayer)):
    if not _name.startswith("_"):
        setattr(FeedbackLayer, _name, _delegate(_name))
update_abstractmethods(FeedbackLayer)
