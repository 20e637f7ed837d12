"""Batches say which of their rewards were automated; samples name the batch that has learned from theirs.

Expand only. In the batches of before no reward counts as automated, so nothing in them is learned from again.
"""

import sqlalchemy as sa
from alembic import op

revision = "20261125_0740"
down_revision = "20261125_0710"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batch_turns", sa.Column("automated", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("samples", sa.Column("automated_batch_id", sa.String(48), nullable=True))
    is_set = sa.text("automated_batch_id IS NOT NULL")
    op.create_index(
        "ix_samples_automated_batch_id",
        "samples",
        ["automated_batch_id"],
        postgresql_where=is_set,
        sqlite_where=is_set,
    )


def downgrade() -> None:
    op.drop_index("ix_samples_automated_batch_id", table_name="samples")
    op.drop_column("samples", "automated_batch_id")
    with op.batch_alter_table("batch_turns") as table:
        table.drop_column("automated")
