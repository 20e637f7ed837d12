"""Episodes whose end curation has processed. Expand only.

Episodes that have ended before count as processed: no sample has waited for them.
"""

import sqlalchemy as sa
from alembic import op

from migrations import online

revision = "20261126_1100"
down_revision = "20261126_1000"
branch_labels = None
depends_on = None

INDEX = "ix_episodes_unprocessed"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE episodes ADD COLUMN IF NOT EXISTS processed BOOLEAN DEFAULT false NOT NULL")
    else:
        op.add_column("episodes", sa.Column("processed", sa.Boolean(), server_default=sa.false(), nullable=False))
    online.backfill("episodes", "processed = true", "state = 'ended' AND NOT processed")
    online.create_index(
        INDEX,
        "episodes",
        ["ended_at", "id"],
        postgresql_where=sa.text("state = 'ended' AND NOT processed"),
        sqlite_where=sa.text("state = 'ended' AND processed = 0"),
    )


def downgrade() -> None:
    online.drop_index(INDEX, "episodes")
    op.drop_column("episodes", "processed")
