"""Episodes: their sampling, trace and group; turns have the trace and the span of their request. Expand only.

The creation of the indexes commits (see `migrations.online`), so a second run after a kill finds the columns.
"""

import sqlalchemy as sa
from alembic import op

from migrations import online

revision = "20261126_1000"
down_revision = "20261126_0900"
branch_labels = None
depends_on = None

COLUMNS = (
    ("episodes", "sampling", sa.String(16), "VARCHAR(16)"),
    ("episodes", "trace_id", sa.String(32), "VARCHAR(32)"),
    ("episodes", "group_id", sa.String(255), "VARCHAR(255)"),
    ("episodes", "group_size", sa.Integer(), "INTEGER"),
    ("turns", "trace_id", sa.String(32), "VARCHAR(32)"),
    ("turns", "span_id", sa.String(16), "VARCHAR(16)"),
)
INDEXES = (
    ("ix_episodes_trace_id", "episodes", ["project_id", "trace_id"], "trace_id IS NOT NULL"),
    ("ix_episodes_group_id", "episodes", ["project_id", "group_id"], "group_id IS NOT NULL"),
    ("ix_turns_trace_id", "turns", ["project_id", "trace_id", "created_at"], "trace_id IS NOT NULL"),
)


def upgrade() -> None:
    is_postgresql = op.get_bind().dialect.name == "postgresql"
    for table, name, kind, postgresql_kind in COLUMNS:
        if is_postgresql:
            op.execute(f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {name} {postgresql_kind}")
        else:
            op.add_column(table, sa.Column(name, kind, nullable=True))
    for name, table, columns, condition in INDEXES:
        where = sa.text(condition)
        online.create_index(name, table, columns, postgresql_where=where, sqlite_where=where)


def downgrade() -> None:
    for name, table, _, _ in reversed(INDEXES):
        online.drop_index(name, table)
    for table, name, _, _ in reversed(COLUMNS):
        op.drop_column(table, name)
