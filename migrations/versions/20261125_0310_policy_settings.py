"""A policy's own settings of the sections algorithm, trainer and release."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "20261125_0310"
down_revision = "20261125_0300"
branch_labels = None
depends_on = None


def upgrade() -> None:
    kind = sa.JSON().with_variant(JSONB(), "postgresql")
    op.add_column("policies", sa.Column("settings", kind, nullable=True))


def downgrade() -> None:
    op.drop_column("policies", "settings")
