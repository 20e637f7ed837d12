"""Votes of connectors that are about no reply of ours, counted by connector and reason. Expand only."""

import sqlalchemy as sa
from alembic import op

revision = "20261126_0900"
down_revision = "20261126_0600"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "unmatched_votes",
        sa.Column("project_id", sa.String(48), sa.ForeignKey("projects.id"), nullable=False),
        sa.Column("connector", sa.String(32), nullable=False),
        sa.Column("reason", sa.String(32), nullable=False),
        sa.Column("num_votes", sa.BigInteger(), nullable=False),
        sa.Column("last_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("project_id", "connector", "reason", name="pk_unmatched_votes"),
        if_not_exists=True,
    )


def downgrade() -> None:
    op.drop_table("unmatched_votes")
