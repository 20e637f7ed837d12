"""Episodes say which versions answer their chats. Expand only; null is what earlier releases did."""

import sqlalchemy as sa
from alembic import op

revision = "20261126_1430"
down_revision = "20261126_1400"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("episodes", sa.Column("version_rule", sa.String(16), nullable=True))
    op.add_column("episodes", sa.Column("max_staleness", sa.Integer(), nullable=True))


def downgrade() -> None:
    op.drop_column("episodes", "max_staleness")
    op.drop_column("episodes", "version_rule")
