"""Samples of compared episodes have the return of their turn beside the reward of the episode. Expand only."""

import sqlalchemy as sa
from alembic import op

revision = "20261126_1200"
down_revision = "20261126_1100"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("samples", sa.Column("step_return", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("samples", "step_return")
