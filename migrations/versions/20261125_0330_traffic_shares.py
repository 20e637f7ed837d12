"""Policies that answer a share of another's traffic."""

import sqlalchemy as sa
from alembic import op

revision = "20261125_0330"
down_revision = "20261125_0320"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("policies", sa.Column("traffic_from_id", sa.String(48), nullable=True))
    op.add_column("policies", sa.Column("traffic_share", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("policies", "traffic_share")
    op.drop_column("policies", "traffic_from_id")
