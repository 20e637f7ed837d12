"""Rehearsals: a version that answers beside what serves, and the turns in which it does.

Revises: 083b4d1f6e54
Old code still runs while this does: what is new may be null. Few turns have one beside them: the index holds no others.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "5a1c7e90b3d2"
down_revision = "083b4d1f6e54"
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql")


def upgrade() -> None:
    op.add_column("policies", sa.Column("rehearsal", JSON, nullable=True))
    op.add_column("versions", sa.Column("rehearsing_since", sa.Float(), nullable=True))
    op.add_column("turns", sa.Column("beside_id", sa.String(length=48), nullable=True))
    op.create_index(
        "ix_turns_beside_id",
        "turns",
        ["beside_id"],
        postgresql_where=sa.text("beside_id IS NOT NULL"),
        sqlite_where=sa.text("beside_id IS NOT NULL"),
        if_not_exists=True,
    )


def downgrade() -> None:
    """Rehearsals are no chats: their turns, and all that hangs on them, do not stay behind as such. A version that is
    at it has been proven, and the code before this publishes it."""
    theirs = "IN (SELECT id FROM turns WHERE origin = 'rehearsal')"
    op.execute(f"DELETE FROM rollouts WHERE id {theirs}")
    for table in ("judgements", "rewards", "samples", "turn_pairs"):
        op.execute(f"DELETE FROM {table} WHERE turn_id {theirs}")
    op.execute("DELETE FROM turns WHERE origin = 'rehearsal'")
    op.execute("UPDATE versions SET state = 'proven' WHERE state IN ('rehearsing', 'rehearsed')")
    op.drop_index("ix_turns_beside_id", "turns")
    op.drop_column("turns", "beside_id")
    op.drop_column("versions", "rehearsing_since")
    op.drop_column("policies", "rehearsal")
