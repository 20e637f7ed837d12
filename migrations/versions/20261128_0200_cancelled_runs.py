"""When a planned run was cancelled. Expand only."""

import sqlalchemy as sa
from alembic import op

revision = "20261128_0200"
down_revision = "20261128_0100"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("planned_runs", sa.Column("cancelled_at", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("planned_runs", "cancelled_at")
