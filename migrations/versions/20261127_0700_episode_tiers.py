"""Episodes have a service tier. Expand only."""

import sqlalchemy as sa
from alembic import op

revision = "20261127_0700"
down_revision = "20261126_1630"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("episodes", sa.Column("service_tier", sa.String(16), nullable=True))


def downgrade() -> None:
    op.drop_column("episodes", "service_tier")
