"""Browser tokens: signed, short-lived permissions to submit certain feedback about one reply. They cannot read.

A token ends with the API key that created it. It is signed with the project's secret. After a rotation the secret
before still verifies the tokens that it has signed, for as long as a token may live.
"""

import re
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jwt
from pydantic import BaseModel, Field, StrictBool, StrictInt, ValidationError
from sqlalchemy import case, exists, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database, now
from app.core.errors import Forbidden, Unauthorized
from app.core.http import StrictModel
from app.core.project_limits import ProjectLimits
from app.feedback.kinds import FeedbackCreate
from app.feedback.schemas import Choice, ChoiceIndex, CompletionId, Name, Source, SourceId
from app.models import ApiKey, AuditAction, Project, SourceKind, new_id, record_audit
from app.projects.service import key_is_active

ISSUER, AUDIENCE, ALGORITHM = "attune", "attune.feedback", "HS256"
MAX_BODY_BYTES = 64 * 1024  # of a request with a browser token
MAX_TOKEN_LENGTH, MAX_HEADER_LENGTH = 8192, 256
CLOCK_LEEWAY_SECONDS = 60  # between the hosts of the API processes
MAX_LIFETIME_SECONDS = 7 * 24 * 3600
Lifetime = Annotated[StrictInt, Field(ge=60, le=MAX_LIFETIME_SECONDS)]
PROJECT_ID = re.compile(r"[A-Za-z0-9_-]{1,48}")
Kind = Literal["binary", "rating", "score", "categorical", "comment", "correction"]


class TokenRequest(StrictModel):
    """The feedback that the token's holder may submit, and the reply that it is about."""

    completion_id: CompletionId
    choice_index: ChoiceIndex = 0
    kinds: list[Kind] = Field(min_length=1, max_length=6)
    names: list[Name] = Field(["default"], min_length=1, max_length=16)
    source_id: SourceId | None = Field(None, description="id of the browser's user; the feedback's source is HUMAN")
    expires_in: Lifetime | None = Field(None, description="in seconds")


class TokenView(BaseModel):
    object: Literal["feedback.token"] = "feedback.token"
    token: str
    expires_at: int = Field(description="seconds since the epoch")
    url: str = Field(description="where to send feedback, with the token as bearer token")


class RotationRequest(StrictModel):
    end_tokens: StrictBool = Field(False, description="end all tokens at once: for a secret that others may know")


class RotationView(BaseModel):
    object: Literal["feedback.token_secret"] = "feedback.token_secret"
    previous_valid_until: float | None = Field(
        description="until when tokens of the secret before are accepted, unless they expire; null: they have ended"
    )


class TokenClaims(BaseModel):
    """The claims of a verified token."""

    project_id: str
    jti: str
    sub: str = Field(description="id of the turn")
    completion_id: str
    choice_index: int
    kinds: list[str]
    names: list[str]
    source_id: str | None = None
    key_id: str | None = Field(None, description="the API key that created it; null in tokens of older releases")
    project_limits: ProjectLimits = Field(ProjectLimits(), description="the project's own, from the database")

    @property
    def key_namespace(self) -> str:
        """The namespace of the idempotency keys of one user about one reply, separate from all other keys."""
        return f"{self.sub}/{self.source_id or ''}"


def create_token(
    project_id: str, key_id: str, secret: str, turn_id: str, request: TokenRequest, lifetime_seconds: float
) -> tuple[str, int]:
    """Return a signed token and its expiry, in seconds since the epoch."""
    now = int(time.time())
    expires_at = now + int(lifetime_seconds)
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": turn_id, "jti": new_id("tok"), "iat": now, "exp": expires_at}
    claims |= {"key_id": key_id, **request.model_dump(exclude={"expires_in"})}
    return jwt.encode(claims, secret, algorithm=ALGORITHM, headers={"kid": project_id}), expires_at


async def rotate_secret(session: AsyncSession, project_id: str, *, actor: str, end_tokens: bool) -> RotationView:
    """Sign new tokens with a new secret. A second rotation ends the tokens of the secret before the previous one."""
    project = await session.get_one(Project, project_id, with_for_update=True, populate_existing=True)
    keeps_previous = project.token_secret is not None and not end_tokens
    project.previous_token_secret = project.token_secret if keeps_previous else None
    project.previous_token_secret_until = now() + MAX_LIFETIME_SECONDS if keeps_previous else None
    project.token_secret = secrets.token_hex(32)
    action = AuditAction.TOKEN_SECRET_ROTATED
    record_audit(session, actor, action, project_id, project_id=project_id, end_tokens=end_tokens)
    await session.flush()
    await session.refresh(project)
    return RotationView(previous_valid_until=project.previous_token_secret_until)


def is_browser_token(bearer: str) -> bool:
    """Return whether the bearer token is a JWT: three parts separated by dots. An API key has no dot."""
    return bearer.count(".") == 2


async def verify_token(db: Database, token: str) -> TokenClaims:
    """Return the claims. Raises Unauthorized, with a specific reason only for a token that this project signed."""
    project_id = _project_id(token)
    is_previous_valid = Project.previous_token_secret_until > now()
    previous_secret = case((is_previous_valid, Project.previous_token_secret))
    query = select(Project.limits, Project.token_secret, previous_secret).where(Project.id == project_id)
    async with db.read() as session:
        limits, *known = (await session.execute(query)).one_or_none() or (None,)
        claims = _verify_signature(token, project_id, [secret for secret in known if secret is not None])
        is_active = exists().where(ApiKey.id == claims.key_id, ApiKey.project_id == project_id, key_is_active())
        if claims.key_id is not None and not await session.scalar(select(is_active)):
            message = "The API key that created this feedback token is revoked or expired."
            raise Unauthorized(message, code="token_revoked")
    return claims.model_copy(update={"project_limits": ProjectLimits.from_row(limits)})


def _verify_signature(token: str, project_id: str, known_secrets: Sequence[str]) -> TokenClaims:
    """Return the claims of a token that was signed with one of the secrets. Raises Unauthorized."""
    for secret in known_secrets:
        try:
            claims = jwt.decode(
                token,
                secret,
                algorithms=[ALGORITHM],
                audience=AUDIENCE,
                issuer=ISSUER,
                leeway=CLOCK_LEEWAY_SECONDS,
                options={"require": ["exp", "sub", "jti", "aud", "iss"]},
            )
            return TokenClaims.model_validate(claims | {"project_id": project_id})
        except jwt.InvalidSignatureError:
            continue
        except jwt.ExpiredSignatureError as error:
            raise Unauthorized("This feedback token has expired.", code="token_expired") from error
        except (jwt.PyJWTError, ValidationError) as error:
            raise _invalid_token() from error
    raise _invalid_token()


def _project_id(token: str) -> str:
    """Return the project that an unverified token names. Nothing long or deeply nested is parsed before the check."""
    if len(token) > MAX_TOKEN_LENGTH or token.index(".") > MAX_HEADER_LENGTH:
        raise _invalid_token()
    try:
        project_id: Any = jwt.get_unverified_header(token).get("kid")
    except jwt.PyJWTError as error:
        raise _invalid_token() from error
    if not isinstance(project_id, str) or not PROJECT_ID.fullmatch(project_id):
        raise _invalid_token()
    return project_id


def _invalid_token() -> Unauthorized:
    return Unauthorized("This feedback token is not valid.", code="invalid_token")


def restrict_to_claims(claims: TokenClaims, request: FeedbackCreate) -> FeedbackCreate:
    """Return the request with the token's user as its source. Raises Forbidden for what the token does not allow."""
    target = request.get_target()
    if not isinstance(target, Choice) or target.completion_id != claims.completion_id:
        raise Forbidden("This feedback token is for another completion.", code="token_scope", param="completion_id")
    if target.choice_index != claims.choice_index:
        message = f"This feedback token is for another choice of this completion: {claims.choice_index}."
        raise Forbidden(message, code="token_scope", param="choice_index")
    for param, value, allowed in (("kind", request.kind, claims.kinds), ("name", request.name, claims.names)):
        if value not in allowed:
            message = f"This feedback token does not allow the {param} '{value}'."
            raise Forbidden(message, code="token_scope", param=param)
    return request.model_copy(update={"source": Source(kind=SourceKind.HUMAN, id=claims.source_id)})
