"""Who asks for a page, and what a form sends: the dependencies of every handler of the console.

Each POST needs the session's own token in the form, and must come from the console's own pages.
"""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar
from urllib.parse import parse_qsl

from fastapi import Depends, Request
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from app.console import cookies, sessions
from app.console.roles import Permission, find_role, require_permission
from app.console.sessions import SignedIn
from app.core.database import Database
from app.core.errors import BadRequest, Forbidden, NotFound
from app.core.http import parse_body, read_body, settings_of
from app.core.settings import Settings
from app.models import Policy
from app.policies import repository
from app.policies.context import PolicyContext
from app.projects.auth import Caller, DatabaseDep, admin_slot
from app.projects.scopes import has_scope

M = TypeVar("M", bound=BaseModel)
MAX_FORM_BYTES = 512 * 1024
MAX_FIELDS = 100
CSRF_FIELD = "csrf"
EXPIRED_FORM = "This form belongs to another session. Load the page again and repeat what you did."


class SignInRequired(Exception):
    """Nobody is signed in: the browser is sent to the sign-in page."""


@dataclass(frozen=True)
class Visit:
    """A request of a person who is signed in."""

    request: Request
    db: Database
    signed_in: SignedIn
    role: str

    @property
    def caller(self) -> Caller:
        return self.signed_in.caller

    @property
    def settings(self) -> Settings:
        return settings_of(self.request)

    def may(self, permission: str) -> bool:
        """Whether the person has a permission, for templates that show an act or leave it out. Example: "operate"."""
        return has_scope(self.caller.scopes, Permission[permission.upper()])

    def context(self, policy: str) -> PolicyContext:
        """Return the policy as the HTTP API's handlers get it, for a page that changes it under its lock."""
        return PolicyContext(policy, self.request, self.caller, self.db)

    async def list_policies(self, session: AsyncSession) -> list[Policy]:
        return await repository.list_policies(session, self.caller.project_id)

    async def choose_policy(self, name: str | None) -> tuple[Policy, list[str]]:
        """Return the policy with this name, and the names of all; without a name the deployment's own, or the first.

        Raises NotFound.
        """
        async with self.db.read() as session:
            policies = {policy.name: policy for policy in await self.list_policies(session)}
        if not policies:
            raise NotFound("This project has no policy.", code="no_policy")
        if name is not None and name not in policies:
            raise NotFound(f"This project has no policy '{name}'; it has {', '.join(policies)}.", param="policy")
        default = self.settings.policy if self.settings.policy in policies else next(iter(policies))
        return policies[name or default], list(policies)


async def visit(request: Request, db: DatabaseDep) -> AsyncIterator[Visit]:
    """Return who asks. Raises SignInRequired, and Forbidden for a form that is not of this session.

    Pages count for the limits of the project's requests as those of its admins do.
    """
    token = request.cookies.get(cookies.cookie_name(request))
    signed_in = None if token is None else await sessions.find(db, token)
    if signed_in is None:
        raise SignInRequired
    if request.method not in ("GET", "HEAD"):
        cookies.require_same_origin(request)
        sent = (await read_form(request)).pop(CSRF_FIELD, "")
        if not secrets.compare_digest(sent.encode(), signed_in.csrf_token.encode()):
            raise Forbidden(EXPIRED_FORM, code="csrf")
    async with admin_slot(request, signed_in.caller):
        yield Visit(request, db, signed_in, find_role(signed_in.caller.scopes))


def require(permission: Permission) -> Callable[..., Awaitable[Visit]]:
    """Return a dependency that gives the visit. Raises Forbidden for a person without the permission."""

    async def permitted(visit: Annotated[Visit, Depends(visit)]) -> Visit:
        require_permission(visit.caller.scopes, permission)
        return visit

    return permitted


Reader = Annotated[Visit, Depends(require(Permission.READ))]
ContentReader = Annotated[Visit, Depends(require(Permission.CONTENT))]
Annotator = Annotated[Visit, Depends(require(Permission.ANNOTATE))]
Operator = Annotated[Visit, Depends(require(Permission.OPERATE))]
Admin = Annotated[Visit, Depends(require(Permission.ADMINISTER))]


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form, read once. Raises BadRequest and TooLarge."""
    if not hasattr(request.state, "form"):
        body = await read_body(request, MAX_FORM_BYTES)
        try:
            text = body.decode()
            request.state.form = dict(parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS))
        except ValueError as error:
            raise BadRequest("This is not a form that the console sends.", code="invalid_form") from error
    form: dict[str, str] = request.state.form
    if any("\x00" in value for value in form.values()):
        raise BadRequest("A NUL character cannot be stored.", code="invalid_form")
    return form


def form_body(model: type[M]) -> object:
    """Return a dependency that gives the form as a `model`. Fields that were left empty are left out."""

    async def parse(request: Request, visit: Annotated[Visit, Depends(visit)]) -> M:
        form = await read_form(request)
        return parse_body(model, {name: value.replace("\r\n", "\n") for name, value in form.items() if value.strip()})

    return Depends(parse)
