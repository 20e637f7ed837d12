"""Imports of datasets in several transactions. After a downgrade, what an import left has its id as its name."""

import sqlalchemy as sa
from alembic import op

revision = "20261124_1110"
down_revision = "20261124_1100"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("datasets", sa.Column("importing_until", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("datasets", "importing_until")
