"""The client of Attune: feedback that counts once, an offline queue, chats, and webhooks.

    client = Attune()                                      # ATTUNE_URL and ATTUNE_API_KEY name the service
    reply = client.chat.create("When are you open?")
    client.feedback.up(reply, source="user-7")

`attune_client.langchain` has ChatAttune for LangChain and LangGraph, `attune_client.agents` feedback on runs of agents.
"""

from attune_client.client import AsyncAttune, Attune
from attune_client.episodes import AsyncEpisode, Episode
from attune_client.errors import (
    APIError,
    AttuneError,
    BadRequest,
    Conflict,
    ConnectionFailed,
    Forbidden,
    NotDelivered,
    NotFound,
    QueueFull,
    RateLimited,
    ServerError,
    TimedOut,
    TooLarge,
    Unauthorized,
    Unprocessable,
    WebhookVerificationFailed,
)
from attune_client.feedback import FeedbackKinds, build
from attune_client.openai_wrapper import wrap
from attune_client.queue import FeedbackQueue, RefusedFeedback
from attune_client.replies import completion_id
from attune_client.types import BatchResult, FeedbackBody, FeedbackRecord, Source, WebhookEvent
from attune_client.webhooks import verify as verify_webhook

__all__ = [
    "APIError",
    "AsyncAttune",
    "AsyncEpisode",
    "Attune",
    "AttuneError",
    "BadRequest",
    "BatchResult",
    "Conflict",
    "ConnectionFailed",
    "Episode",
    "FeedbackBody",
    "FeedbackKinds",
    "FeedbackQueue",
    "FeedbackRecord",
    "Forbidden",
    "NotDelivered",
    "NotFound",
    "QueueFull",
    "RateLimited",
    "RefusedFeedback",
    "ServerError",
    "Source",
    "TimedOut",
    "TooLarge",
    "Unauthorized",
    "Unprocessable",
    "WebhookEvent",
    "WebhookVerificationFailed",
    "build",
    "completion_id",
    "verify_webhook",
    "wrap",
]
