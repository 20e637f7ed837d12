"""Indexes for the lists of turns and feedback: of a person in order of time, and of a project's feedback."""

import sqlalchemy as sa

from migrations import online

revision = "20261125_0300"
down_revision = "20261125_0200"
branch_labels = None
depends_on = None
INDEXES = (  # name, table, columns, condition
    ("ix_turns_of_end_user", "turns", ["project_id", "end_user", "created_at"], "end_user IS NOT NULL"),
    ("ix_feedback_of_source", "feedback", ["project_id", "source_id", "seq"], "source_id IS NOT NULL"),
    ("ix_feedback_of_project", "feedback", ["project_id", "seq"], None),
)
REPLACED = (  # the beginnings of those above
    ("ix_turns_project_id_end_user", "turns", ["project_id", "end_user"], "end_user IS NOT NULL"),
    ("ix_feedback_project_id_source_id", "feedback", ["project_id", "source_id"], "source_id IS NOT NULL"),
)


def upgrade() -> None:
    for name, table, columns, where in INDEXES:
        _create(name, table, columns, where)
    for name, table, _, _ in REPLACED:
        online.drop_index(name, table)


def downgrade() -> None:
    for name, table, columns, where in REPLACED:
        _create(name, table, columns, where)
    for name, table, _, _ in INDEXES:
        online.drop_index(name, table)


def _create(name: str, table: str, columns: list[str], where: str | None) -> None:
    condition = None if where is None else sa.text(where)
    online.create_index(name, table, columns, postgresql_where=condition, sqlite_where=condition)
