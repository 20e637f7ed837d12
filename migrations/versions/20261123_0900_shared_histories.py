"""Turns refer to an earlier turn for the beginning of their prompts. Turns from before store their whole prompts.

The downgrade stores whole prompts again, before it removes the references. On PostgreSQL it commits each turn; one that
was killed continues when it is run again.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import Connection

from migrations import online

revision = "20261123_0900"
down_revision = "20261123_0800"
branch_labels = None
depends_on = None

BATCH_TURNS = 64  # in memory at a time; one may have a prompt of megabytes
TOKEN_BYTES = 4
JSON = sa.JSON().with_variant(JSONB(), "postgresql")
TURNS = sa.table(
    "turns",
    sa.column("id", sa.String),
    sa.column("deleted_at", sa.Float),
    sa.column("history_id", sa.String),
    sa.column("num_history_messages", sa.Integer),
    sa.column("num_history_tokens", sa.Integer),
    sa.column("messages", JSON),
    sa.column("reply", JSON),
    sa.column("prompt_ids", sa.LargeBinary),
    sa.column("output_ids", sa.LargeBinary),
)


def upgrade() -> None:
    for column in (
        sa.Column("history_id", sa.String(48), nullable=True),
        sa.Column("num_history_messages", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_history_tokens", sa.Integer(), server_default=sa.text("0"), nullable=False),
    ):  # a second run after a kill finds them, because the creation of the index commits
        op.add_column("turns", column, if_not_exists=op.get_bind().dialect.name == "postgresql" or None)
    refers = sa.text("history_id IS NOT NULL")
    online.create_index("ix_turns_history_id", "turns", ["history_id"], postgresql_where=refers, sqlite_where=refers)


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        with op.get_context().autocommit_block():
            store_whole_prompts(op.get_bind())
        op.execute("LOCK TABLE turns")
    store_whole_prompts(op.get_bind())  # on PostgreSQL: of the turns that were written meanwhile
    op.drop_index("ix_turns_history_id", table_name="turns")  # here, because the queries above need it
    for name in ("num_history_tokens", "num_history_messages", "history_id"):
        op.drop_column("turns", name)


def store_whole_prompts(connection: Connection) -> None:
    """Complete the turns whose history stores its own whole prompt, until no turn is left.

    Each pass completes at least the next turn of every chain.
    """
    while complete_turns(connection):
        pass


def complete_turns(connection: Connection) -> int:
    """Complete the turns that can be, in the order of the index. Return their number."""
    # A turn that was erased or completed after it was read is left alone.
    is_same, refers = TURNS.c.id == sa.bindparam("turn_id"), TURNS.c.history_id == sa.bindparam("history")
    no_history: dict[str, Any] = {"history_id": None, "num_history_messages": 0, "num_history_tokens": 0}
    update = sa.update(TURNS).where(is_same, refers, TURNS.c.deleted_at.is_(None)).values(no_history)
    last, num_turns = ("", ""), 0
    while batch := connection.execute(select_batch(*last)).mappings().all():
        connection.execute(update, [complete(row) for row in batch])
        last, num_turns = (batch[-1]["history_id"], batch[-1]["id"]), num_turns + len(batch)
    return num_turns


def select_batch(history_id: str, turn_id: str) -> sa.Select[Any]:
    """Return the query for the next turns after this one whose history refers to no other turn.

    Erased turns stay as they are: a release without histories erased them without their references.
    """
    history = TURNS.alias("history")
    is_whole = sa.or_(history.c.history_id.is_(None), history.c.deleted_at.is_not(None))
    names = ("messages", "reply", "prompt_ids", "output_ids")
    return (
        sa.select(TURNS, *(history.c[name].label(f"history_{name}") for name in names))
        .outerjoin(history, history.c.id == TURNS.c.history_id)
        .where(TURNS.c.history_id.is_not(None), TURNS.c.deleted_at.is_(None), is_whole)
        .where(sa.tuple_(TURNS.c.history_id, TURNS.c.id) > (history_id, turn_id))
        .order_by(TURNS.c.history_id, TURNS.c.id)
        .limit(BATCH_TURNS)
    )


def complete(row: sa.RowMapping) -> dict[str, Any]:
    """Return the turn's whole prompt.

    If its history was erased, its messages lack the beginning. Its tokens are then dropped: nothing may be trained on
    them.
    """
    reply = [row["history_reply"]] if row["history_reply"] else []
    messages = [*(row["history_messages"] or []), *reply][: row["num_history_messages"]]
    num_bytes = row["num_history_tokens"] * TOKEN_BYTES
    token_ids = ((row["history_prompt_ids"] or b"") + (row["history_output_ids"] or b""))[:num_bytes]
    is_known = row["prompt_ids"] is not None and len(token_ids) == num_bytes
    return {
        "turn_id": row["id"],
        "history": row["history_id"],
        "messages": [*messages, *row["messages"]],
        "prompt_ids": token_ids + row["prompt_ids"] if is_known else None,
    }
