"""Indexes for erasure and for raters: a person's turns, and what a source has said; and two that SQLite did not use.

An upgrade is one transaction, so whatever reads or writes these two tables waits until all of it is through. Where
that is too long, build them before (`CREATE INDEX CONCURRENTLY`, under these names and with these conditions): what is
there already is left as it is.
"""

import sqlalchemy as sa
from alembic import op

revision = "f72a3c9e5d43"
down_revision = "e61f2b8d4c32"
branch_labels = None
depends_on = None

INDEXES = (
    ("ix_turns_project_id_end_user", "turns", ["project_id", "end_user"], "end_user IS NOT NULL"),
    ("ix_feedback_project_id_source_id", "feedback", ["project_id", "source_id"], "source_id IS NOT NULL"),
)
# SQLite takes a partial index only for the very words of its condition, and SQLAlchemy says `curated = 0` there.
TO_DO = (("ix_turns_finished_at", "turns", ["finished_at"]), ("ix_feedback_curated", "feedback", ["seq"]))


def upgrade() -> None:
    _reword("curated = 0")
    for name, table, columns, where in INDEXES:
        op.create_index(
            name,
            table,
            columns,
            postgresql_where=sa.text(where),
            sqlite_where=sa.text(where),
            if_not_exists=True,
        )


def downgrade() -> None:
    _reword("NOT curated")
    for name, table, _, _ in INDEXES:
        op.drop_index(name, table, if_exists=True)


def _reword(where: str) -> None:
    if op.get_bind().dialect.name == "sqlite":
        for name, table, columns in TO_DO:
            op.drop_index(name, table)
            op.create_index(name, table, columns, sqlite_where=sa.text(where))
