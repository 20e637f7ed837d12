"""Samples say in how many quarantined batches they were, so that the assembly reads those that failed alone.

Expand only. The assembly counts the failures of the samples that are there. The creation of the indexes commits (see
`migrations.online`), so a second run after a kill finds the columns.
"""

import sqlalchemy as sa
from alembic import op

from migrations import online

revision = "20261127_0730"
down_revision = "20261127_0720"
branch_labels = None
depends_on = None
IS_UNCOUNTED = (
    "state = 'open' AND CASE WHEN num_returns > 0 AND failures_counted_at <> changed_at THEN 1 ELSE 0 END = 1"
)
INDEXES = (
    ("ix_samples_uncounted_failures", ["policy_id", "turn_id"], IS_UNCOUNTED),
    ("ix_samples_failed", ["policy_id", "num_failures"], "state = 'open' AND num_failures > 0"),
)


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE samples ADD COLUMN IF NOT EXISTS num_failures INTEGER DEFAULT 0 NOT NULL")
        op.execute("ALTER TABLE samples ADD COLUMN IF NOT EXISTS failures_counted_at FLOAT DEFAULT -1 NOT NULL")
    else:
        op.add_column("samples", sa.Column("num_failures", sa.Integer(), nullable=False, server_default="0"))
        op.add_column("samples", sa.Column("failures_counted_at", sa.Float(), nullable=False, server_default="-1"))
    for name, columns, where in INDEXES:
        condition = sa.text(where)
        online.create_index(name, "samples", columns, postgresql_where=condition, sqlite_where=condition)


def downgrade() -> None:
    for name, _, _ in reversed(INDEXES):
        online.drop_index(name, "samples")
    op.drop_column("samples", "failures_counted_at")
    op.drop_column("samples", "num_failures")
