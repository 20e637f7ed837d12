"""Errors of the database: what their text may say, and what they mean for the caller."""

from sqlalchemy.engine import ExceptionContext

MAX_STATEMENT_CHARS = 200
DATA_EXCEPTION = "22"  # class of SQLSTATE: its messages quote the value
LOCK_NOT_AVAILABLE = "55P03"
READ_ONLY = "25006"  # of a server that was demoted, or whose provider stops writes
OUTDATED_PLAN = ("0A000", "cached plan must not change result type")


def sqlstate(error: BaseException) -> str:
    """Return the SQLSTATE of PostgreSQL's error, or "" for another error."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) or ""


def hide_values(context: ExceptionContext) -> None:
    """Shorten an error of a statement, which is logged: no values of rows or parameters, and the statement's beginning.

    PostgreSQL names them in its details, and where it cannot read a value, in the message. The details stay in `diag`.
    """
    if context.statement is None:
        return  # of a connection: all lines are needed, and name no rows
    original, error = context.original_exception, context.sqlalchemy_exception
    original.args = tuple(_shorten(part, original) if isinstance(part, str) else part for part in original.args)
    if error is not None:
        error.args = tuple(_shorten(part, original) if isinstance(part, str) else part for part in error.args)
        statement = error.statement or ""
        if len(statement) > MAX_STATEMENT_CHARS:
            error.statement = f"{statement[:MAX_STATEMENT_CHARS]}… ({len(statement)} characters)"


def close_unusable(context: ExceptionContext) -> None:
    """Close the connections that answer and are of no use any more: the next ones are made anew.

    Those whose prepared statements a migration has outdated, and those to a server that has become read-only.
    """
    error = context.original_exception
    state, (outdated, message) = getattr(error, "sqlstate", None), OUTDATED_PLAN
    if state == READ_ONLY or (state == outdated and message in str(error)):
        context.is_disconnect = True


def _shorten(message: str, original: BaseException) -> str:
    """Return the first line, of a data exception without the value."""
    line = message.partition("\n")[0]
    if (getattr(original, "sqlstate", None) or "").startswith(DATA_EXCEPTION):
        return line.partition(': "')[0]
    return line
