"""Who speaks: a caller with an API key, or a browser with a token."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from app.core.rate_limits import RateLimiter
from app.core.services import services_of
from app.feedback import browser_tokens
from app.feedback.browser_tokens import TokenClaims
from app.projects.auth import BEARER, DatabaseDep, bearer, identify


@dataclass(frozen=True)
class Author:
    project_id: str
    leave: TokenClaims | None = None  # of a browser: what it may say


async def feedback_author(request: Request, db: DatabaseDep, _: Any = BEARER) -> AsyncIterator[Author]:
    """Each token has limits of its own, so that one page cannot use up what the others have."""
    limits = services_of(request).get(RateLimiter)
    presented = bearer(request)
    if browser_tokens.looks_like_one(presented):
        leave = await browser_tokens.verify(db, presented)
        author, slot = Author(leave.project_id, leave), limits.slot(leave.jti, None, None)
    else:
        caller = await identify(request, db, "feedback")
        author = Author(caller.project_id)
        slot = limits.slot(caller.key_id, caller.requests_per_minute, caller.max_concurrency)
    async with slot as headers:
        request.state.headers = headers
        yield author


FeedbackAuthor = Annotated[Author, Depends(feedback_author)]
