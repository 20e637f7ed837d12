"""Tokens for browsers: a signed leave to say certain things about one reply, until it runs out. They read nothing."""

import re
import secrets
import time
from typing import Annotated, Any, Literal

import jwt
from pydantic import BaseModel, Field, StrictInt, ValidationError
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database
from app.core.errors import Forbidden, Unauthorized
from app.feedback.kinds import FeedbackCreate
from app.feedback.repository import Found
from app.feedback.schemas import Choice, ChoiceIndex, CompletionId, Name, Source, SourceId, Strict
from app.models import Project, new_id

ISSUER, AUDIENCE, ALGORITHM = "attune", "attune.feedback", "HS256"
LONGEST, LONGEST_HEADER = 8192, 256
WEEK = 7 * 24 * 3600
PROJECT_ID = re.compile(r"[A-Za-z0-9_-]{1,48}")
Kind = Literal["binary", "rating", "score", "categorical", "comment", "correction"]


class TokenRequest(Strict):
    """What the holder of the token may say, and about which reply."""

    completion_id: CompletionId
    choice_index: ChoiceIndex = 0
    kinds: list[Kind] = Field(min_length=1, max_length=6)
    names: list[Name] = Field(["default"], min_length=1, max_length=16)
    source_id: SourceId | None = Field(None, description="who is at the browser; the feedback's source is HUMAN")
    expires_in: Annotated[StrictInt, Field(ge=60, le=WEEK)] | None = Field(None, description="in seconds")


class TokenView(BaseModel):
    object: Literal["feedback.token"] = "feedback.token"
    token: str
    expires_at: int = Field(description="seconds since the epoch")
    url: str = Field(description="where to send feedback, with the token as bearer")


class TokenClaims(BaseModel):
    """The claims of a token that was found to be good."""

    project_id: str
    jti: str
    sub: str = Field(description="the turn")
    completion_id: str
    choice_index: int
    kinds: list[str]
    names: list[str]
    source_id: str | None = None

    @property
    def space(self) -> str:
        """Keys of one person's browser about one reply: they neither meet the backend's keys nor another's."""
        return f"{self.sub}/{self.source_id or ''}"


def mint(project_id: str, secret: str, turn: Found, request: TokenRequest, seconds: float) -> tuple[str, int]:
    """The token and when it runs out."""
    now = int(time.time())
    expires_at = now + int(seconds)
    claims = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": turn.id,
        "jti": new_id("tok"),
        "iat": now,
        "exp": expires_at,
        "completion_id": turn.completion_id,
        "choice_index": turn.choice_index,
        "kinds": request.kinds,
        "names": request.names,
        "source_id": request.source_id,
    }
    return jwt.encode(claims, secret, algorithm=ALGORITHM, headers={"kid": project_id}), expires_at


async def secret_of(session: AsyncSession, project_id: str) -> str:
    """The project's, made at its first use: of several who come first, one wins and all read the winner's."""
    asked = select(Project.token_secret).where(Project.id == project_id)
    if known := await session.scalar(asked):
        return known
    await session.execute(
        update(Project)
        .where(Project.id == project_id, Project.token_secret.is_(None))
        .values(token_secret=secrets.token_hex(32))
        .execution_options(synchronize_session=False)
    )
    made = await session.scalar(asked)
    assert made is not None, f"project {project_id} is not there"
    return made


def looks_like_one(bearer: str) -> bool:
    """Three parts with dots between; an API key has none."""
    return bearer.count(".") == 2


async def verify(db: Database, token: str) -> TokenClaims:
    """Raises Unauthorized: why a token is no good is told only of one that we did sign."""
    project_id = _project(token)
    async with db.read() as session:
        secret = await session.scalar(select(Project.token_secret).where(Project.id == project_id))
    if secret is None:
        raise _bad()
    try:
        claims = jwt.decode(
            token,
            secret,
            algorithms=[ALGORITHM],
            audience=AUDIENCE,
            issuer=ISSUER,
            options={"require": ["exp", "sub", "jti", "aud", "iss"]},
        )
        return TokenClaims(
            project_id=project_id, **{key: claims[key] for key in claims.keys() & TokenClaims.model_fields.keys()}
        )
    except jwt.ExpiredSignatureError as error:
        raise Unauthorized("This feedback token has expired.", code="token_expired") from error
    except (jwt.PyJWTError, ValidationError) as error:
        raise _bad() from error


def _project(token: str) -> str:
    """Whose the token says it is. Nothing in it is believed yet, so nothing long or deep is even parsed."""
    if len(token) > LONGEST or token.index(".") > LONGEST_HEADER:
        raise _bad()
    try:
        project_id: Any = jwt.get_unverified_header(token).get("kid")
    except jwt.PyJWTError as error:
        raise _bad() from error
    if not isinstance(project_id, str) or not PROJECT_ID.fullmatch(project_id):
        raise _bad()
    return project_id


def _bad() -> Unauthorized:
    return Unauthorized("This feedback token is not valid.", code="invalid_token")


def within(leave: TokenClaims, said: FeedbackCreate) -> FeedbackCreate:
    """What was said, as by the person the token is for. Raises Forbidden for anything that the token does not allow."""
    about = said.about()
    if about != Choice(completion_id=leave.completion_id, choice_index=leave.choice_index):
        raise Forbidden("This feedback token is for another completion.", code="token_scope", param="completion_id")
    if said.kind not in leave.kinds:
        raise Forbidden(f"This feedback token does not allow the kind '{said.kind}'.", code="token_scope", param="kind")
    if said.name not in leave.names:
        raise Forbidden(f"This feedback token does not allow the name '{said.name}'.", code="token_scope", param="name")
    return said.model_copy(update={"source": Source(kind="HUMAN", id=leave.source_id)})
