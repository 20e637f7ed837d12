"""What a person may see and do in the console: what the scopes of the API key that signed in allow on the API, too."""

from collections.abc import Collection
from enum import StrEnum

from app.core.errors import Forbidden
from app.projects.scopes import CONTENT_SCOPE, has_scope


class Permission(StrEnum):
    """Each is the scope that it needs."""

    READ = "viewer"  # figures, versions, releases and the state of learning
    CONTENT = CONTENT_SCOPE  # what people wrote, and who they are: live replies and conversations
    ANNOTATE = "annotator"  # the replies of the annotation queue, and labels for them
    OPERATE = "operator"  # deploy, roll back, canary, pins, raters, pause and resume
    ADMINISTER = "admin"  # the settings


ENTRY = (Permission.READ, Permission.ANNOTATE)  # a key with one of them may sign in
ROLES = ("admin", "operator", "annotator", CONTENT_SCOPE, "viewer")


def find_role(scopes: Collection[str]) -> str:
    """Return the scope that a person is introduced by. Raises Forbidden for a key that may not sign in."""
    if not any(has_scope(scopes, permission) for permission in ENTRY):
        message = (
            "This API key belongs to an application. The console needs a key with the scope 'viewer', 'annotator', "
            "'operator' or 'admin'."
        )
        raise Forbidden(message)
    return next(role for role in ROLES if role in scopes)


def require_permission(scopes: Collection[str], permission: Permission) -> None:
    """Raises Forbidden, which names the scope that is missing."""
    if not has_scope(scopes, permission):
        role = find_role(scopes)
        raise Forbidden(
            f"You are signed in as {role}. This needs a key with the scope '{permission}': sign in with it."
        )
