"""Samples of turns that are rewarded by returns have the reward of the turn itself beside. Expand only."""

import sqlalchemy as sa
from alembic import op

revision = "20261126_1300"
down_revision = "20261126_1200"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("samples", sa.Column("step_reward", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("samples", "step_reward")
