"""Samples say by how much the rewards of their group differ, so that the assembly does not compare all groups.

Expand only. The assembly compares the samples that are there, where the algorithm learns from groups. The creation of
the indexes commits (see `migrations.online`), so a second run after a kill finds the columns.
"""

import sqlalchemy as sa
from alembic import op

from migrations import online

revision = "20261127_0740"
down_revision = "20261127_0730"
branch_labels = None
depends_on = None
IS_OPEN = "state = 'open'"
INDEXES = (
    (
        "ix_samples_uncompared",
        ["policy_id", "turn_id"],
        f"{IS_OPEN} AND CASE WHEN compared_at <> changed_at THEN 1 ELSE 0 END = 1",
    ),
    ("ix_samples_contrast", ["policy_id", "group_contrast", "turn_id"], f"{IS_OPEN} AND group_contrast > 0"),
    ("ix_samples_rewards_of_groups", ["policy_id", "group_id", "episode_reward", "reward"], IS_OPEN),
)


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE samples ADD COLUMN IF NOT EXISTS group_contrast FLOAT DEFAULT 0 NOT NULL")
        op.execute("ALTER TABLE samples ADD COLUMN IF NOT EXISTS compared_at FLOAT DEFAULT -1 NOT NULL")
    else:
        op.add_column("samples", sa.Column("group_contrast", sa.Float(), nullable=False, server_default="0"))
        op.add_column("samples", sa.Column("compared_at", sa.Float(), nullable=False, server_default="-1"))
    for name, columns, where in INDEXES:
        condition = sa.text(where)
        online.create_index(name, "samples", columns, postgresql_where=condition, sqlite_where=condition)


def downgrade() -> None:
    for name, _, _ in reversed(INDEXES):
        online.drop_index(name, "samples")
    op.drop_column("samples", "compared_at")
    op.drop_column("samples", "group_contrast")
