"""Episodes keep the reason of the report also where a limit has ended them before. Expand only."""

import sqlalchemy as sa
from alembic import op

revision = "20261126_1610"
down_revision = "20261126_1600"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("episodes", sa.Column("reported_reason", sa.String(16), nullable=True))


def downgrade() -> None:
    op.drop_column("episodes", "reported_reason")
