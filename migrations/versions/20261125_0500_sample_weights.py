"""Samples have a weight: the confidence in their reward, which multiplies the loss."""

import sqlalchemy as sa
from alembic import op

revision = "20261125_0500"
down_revision = "20261125_0400"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("samples", sa.Column("weight", sa.Float(), nullable=False, server_default="1"))


def downgrade() -> None:
    op.drop_column("samples", "weight")
