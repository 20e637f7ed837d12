"""Samples say which episode is the attempt that they are compared as, and its reward. Expand only."""

import sqlalchemy as sa
from alembic import op

revision = "20261126_1500"
down_revision = "20261126_1430"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("samples", sa.Column("episode_id", sa.String(48), nullable=True))
    op.add_column("samples", sa.Column("episode_reward", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("samples", "episode_reward")
    op.drop_column("samples", "episode_id")
