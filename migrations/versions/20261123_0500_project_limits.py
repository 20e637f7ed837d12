"""Limits of projects, browser tokens with a quota and two secrets, and the scope for feedback of programs.

Keys that have the scope `feedback` get `feedback:programs`: until now the one scope allowed both, and the programs that
use these keys must go on working. The indexes of waiting work begin with the project, so that projects take turns.
"""

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from migrations.online import create_index, drop_index

revision = "20261123_0500"
down_revision = "20261123_0400"
branch_labels = None
depends_on = None

OLD, NEW = "feedback", "feedback:programs"
JSON = sa.JSON().with_variant(JSONB(), "postgresql")
WAITING: dict[str, Any] = {"postgresql_where": sa.text("NOT processed"), "sqlite_where": sa.text("processed = 0")}
OPEN: dict[str, Any] = dict.fromkeys(("postgresql_where", "sqlite_where"), sa.text("state = 'open'"))


def upgrade() -> None:
    """Replace the indexes of waiting work, then add columns and tables and grant the new scope in one transaction."""
    create_index("ix_feedback_project_id_seq", "feedback", ["project_id", "seq"], **WAITING)
    create_index("ix_turns_project_id_finished_at", "turns", ["project_id", "finished_at"], **WAITING)
    create_index("ix_judgements_policy_id_due_at", "judgements", ["policy_id", "due_at"], **OPEN)
    drop_index("ix_feedback_processed", "feedback")
    drop_index("ix_turns_finished_at", "turns")
    op.add_column("projects", sa.Column("previous_token_secret", sa.String(64), nullable=True))
    op.add_column("projects", sa.Column("previous_token_secret_until", sa.Float(), nullable=True))
    op.add_column("projects", sa.Column("limits", JSON, nullable=True))
    op.add_column("feedback", sa.Column("token_id", sa.String(48), nullable=True))
    op.add_column("datasets", sa.Column("num_bytes", sa.BigInteger(), nullable=True))
    op.create_table(
        "project_usage",
        sa.Column("project_id", sa.String(48), nullable=False),
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_project_usage_project_id_projects"),
        sa.PrimaryKeyConstraint("project_id", "day", name="pk_project_usage"),
    )
    replace_scopes(lambda scopes: [*scopes, NEW] if OLD in scopes and NEW not in scopes else scopes)


def downgrade() -> None:
    """Undo all of it."""
    create_index("ix_feedback_processed", "feedback", ["seq"], **WAITING)
    create_index("ix_turns_finished_at", "turns", ["finished_at"], **WAITING)
    drop_index("ix_judgements_policy_id_due_at", "judgements")
    drop_index("ix_turns_project_id_finished_at", "turns")
    drop_index("ix_feedback_project_id_seq", "feedback")
    replace_scopes(lambda scopes: [scope for scope in scopes if scope != NEW])
    op.drop_table("project_usage")
    op.drop_column("datasets", "num_bytes")
    op.drop_column("feedback", "token_id")
    op.drop_column("projects", "limits")
    op.drop_column("projects", "previous_token_secret_until")
    op.drop_column("projects", "previous_token_secret")


def replace_scopes(change: Callable[[list[str]], list[str]]) -> None:
    """Change the scopes of all keys. There are few of them: each was made by an admin."""
    keys = sa.table("api_keys", sa.column("id", sa.String), sa.column("scopes", JSON))
    connection = op.get_bind()
    for id, scopes in connection.execute(sa.select(keys.c.id, keys.c.scopes)).all():
        if isinstance(scopes, list) and (changed := change(scopes)) != scopes:
            connection.execute(sa.update(keys).where(keys.c.id == id).values(scopes=changed))
